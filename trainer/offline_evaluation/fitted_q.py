"""Fitted Q evaluation: the value of a policy from recorded data, without an environment.

    Q   <- least squares over the data of  r + gamma (1 - terminated) Q(s', pi(s')),  repeated
    estimate = mean over the initial states of Q(s, pi(s)), within the possible returns

(Le et al. 2019; for choosing among policies: Paine et al. 2020.) Q is linear in random ReLU
features of state and action (Rahimi & Recht 2007), so the limit of the repetition is the solution
of one linear system (LSTD-Q: Lagoudakis & Parr 2003): nothing is tuned and nothing is left
unconverged. The limit exists if the repetition is a contraction; the ridge penalty is raised until
it is. The interval is from a bootstrap over trajectories (Hao et al. 2021). It shows how much the
estimate depends on which trajectories were recorded, not the error of Q where the policy's actions
are unlike the data's.

Letters: N transitions, M initial states, D state width, A action width, K features, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FEATURES = 512
RESAMPLES = 100
MAX_BLOCKS = 64
"""The bootstrap resamples this many blocks of trajectories, or single ones if there are fewer."""
RIDGE, RIDGE_FACTOR = 3e-3, 3.0
"""The smallest penalty, relative to the mean square of a feature, and its steps."""
MAX_INPUT = 5.0
"""Standardised inputs are within this, so that a state far from the data is not extrapolated."""
MIN_ACTION_STD = 0.3
"""Actions of data without exploration are not magnified beyond this (of -1 … 1)."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Transitions:
    """The data's transitions, with the policy's actions in their next and in the initial states."""

    trajectory: Tensor  # [N] int64
    state: Tensor  # [N, D]
    action: Tensor  # [N, A], encoded, as all actions
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: no value follows; a truncation is none
    next_state: Tensor  # [N, D]
    next_action: Tensor  # [N, A], of the policy
    initial_trajectory: Tensor  # [M] int64
    initial_state: Tensor  # [M, D]
    initial_action: Tensor  # [M, A], of the policy


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected discounted return from the data's initial states, in the environment's units."""

    value: float
    low: float
    high: float
    """Bounds of the 95 % bootstrap interval; with a single trajectory, which shows nothing of
    others, those of the possible returns."""


class _Features:
    """phi(s, a) [*, K + 1]: a constant, and random ReLU features of standardised inputs."""

    def __init__(self, data: Transitions, generator: torch.Generator):
        inputs = torch.cat((data.state, data.action), dim=1)
        std, mean = torch.std_mean(inputs, dim=0, correction=0)
        # Constant inputs have no features; rounding makes them differ by this much.
        varies = std > 1e-6 * inputs.abs().amax(dim=0)
        std[data.state.shape[1] :].clamp_(min=MIN_ACTION_STD)
        self.mean, self.scale = mean, torch.where(varies, 1.0 / std, 0.0)
        fan_in = max(1, int(varies.sum()))
        shape = (inputs.shape[1], FEATURES)
        self.weight = torch.randn(shape, generator=generator) * (2.0 / fan_in**0.5)
        self.bias = torch.randn(FEATURES, generator=generator) * 2.0

    def __call__(self, state: Tensor, action: Tensor) -> Tensor:
        x = (torch.cat((state, action), dim=1) - self.mean) * self.scale
        x = torch.addmm(self.bias, x.clamp(-MAX_INPUT, MAX_INPUT), self.weight).relu()
        return torch.cat((x.new_ones(len(x), 1), x / FEATURES**0.5), dim=1)


@torch.no_grad()
def estimate_value(
    data: Transitions,
    gamma: float,
    bounds: tuple[float, float],
    *,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Estimate:
    """Estimate the value of the policy whose actions `data` has. Deterministic for a seed, so
    policies evaluated on the same data have the same features and resamples.

    Args:
        gamma: discount, in [0, 1).
        bounds: smallest and largest possible discounted return.
        on_progress: called with the share that is done.

    Raises:
        ValueError: there is no transition or no initial state.
    """
    if not len(data.reward) or not len(data.initial_state):
        raise ValueError("an estimate needs at least one transition and one initial state")
    features = _Features(data, torch.Generator().manual_seed(seed))
    ids, trajectory = torch.unique(
        torch.cat((data.trajectory, data.initial_trajectory)), return_inverse=True
    )
    rng = np.random.default_rng(seed)
    n_blocks = min(MAX_BLOCKS, len(ids))
    block = torch.from_numpy(rng.permutation(len(ids)) % n_blocks)[trajectory]
    of_transition, of_initial = block.split((len(data.reward), len(data.initial_state)))
    discount = gamma * (~data.terminated).to(torch.float32)
    scale = max(float(data.reward.abs().max()), 1e-30)  # makes rewards of any unit alike

    # Per block: the Gram matrix, phi(s, a)^T gamma phi(s', pi(s')), and phi(s, a)^T r.
    gram = torch.zeros(n_blocks, FEATURES + 1, FEATURES + 1)
    cross, target = torch.zeros_like(gram), torch.zeros(n_blocks, FEATURES + 1)
    for index in range(n_blocks):
        rows = (of_transition == index).nonzero().squeeze(1)
        phi = features(data.state[rows], data.action[rows])
        following = features(data.next_state[rows], data.next_action[rows])
        gram[index] = phi.T @ phi
        cross[index] = phi.T @ (following * discount[rows, None])
        target[index] = phi.T @ (data.reward[rows] / scale)
        on_progress(0.5 * (index + 1) / n_blocks)
    initial = features(data.initial_state, data.initial_action)

    ridge = _contracting_ridge(gram.sum(0), cross.sum(0), len(data.reward), gamma)
    remainder = gram.sub_(cross).flatten(1)  # phi^T (phi - gamma phi')
    low, high = bounds

    def value(count: Tensor) -> float:
        """The estimate with each block `count` [n_blocks] times; NaN without an initial state."""
        system = (count @ remainder).unflatten(0, (FEATURES + 1, FEATURES + 1))
        weights = torch.linalg.solve(system.double() + ridge, (count @ target).double())
        q = (initial.double() @ weights * scale).clamp(low, high)
        times = count[of_initial]
        return float((q * times).sum() / times.sum())

    everything = value(torch.ones(n_blocks))
    if n_blocks == 1:
        on_progress(1.0)
        return Estimate(everything, low, high)
    drawn = rng.multinomial(n_blocks, np.full(n_blocks, 1.0 / n_blocks), RESAMPLES)
    values = []
    for done, count in enumerate(torch.from_numpy(drawn).to(torch.float32)):
        values.append(value(count))
        on_progress(0.5 + 0.5 * (done + 1) / RESAMPLES)
    tail = (1.0 - CONFIDENCE) / 2.0
    lower, upper = np.nanquantile(values, (tail, 1.0 - tail))
    return Estimate(everything, min(float(lower), everything), max(float(upper), everything))


def _contracting_ridge(gram: Tensor, cross: Tensor, n: int, gamma: float) -> Tensor:
    """The smallest ridge penalty [K + 1, K + 1] with which repeated regression converges, at least
    at half the rate of the exact Bellman operator."""
    gram, cross = gram.double(), cross.double()
    ridge = RIDGE
    while True:
        penalty = torch.full((len(gram),), ridge * n / FEATURES, dtype=torch.float64)
        penalty[0] = 1e-8 * n  # the constant
        matrix = torch.diag(penalty)
        step = torch.linalg.solve(gram + matrix, cross)
        if float(torch.linalg.eigvals(step).abs().max()) <= (1.0 + gamma) / 2.0:
            return matrix
        ridge *= RIDGE_FACTOR
