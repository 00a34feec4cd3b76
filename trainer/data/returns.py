"""The discounted returns that a snapshot's trajectories show: what values are possible.

The return of step t is r[t] + gamma r[t+1] + … to the end of its trajectory. A termination ends it.
A trajectory that ends otherwise goes on with its mean reward for ever, as TD targets bootstrap
there. A policy that is better than the data can exceed these returns, but not by a multiple.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.columns import MappedColumns
from trainer.data.sampler import Ints
from trainer.data.snapshot import Manifest

MAX_STEPS = 4_000_000
"""Steps whose returns are computed; of more data, evenly chosen trajectories."""
NEGLIGIBLE = 1e-12
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DataReturns:
    """Discounted returns over the steps of the data, in the environment's units."""

    low: float
    high: float
    std: float
    """Standard deviation over all steps."""
    at_extremes: float
    """Share of steps whose return is `low` or `high`: near 1 in a bandit with two rewards."""
    usual: tuple[float, float]
    """The returns without the lowest and the highest 5%."""

    @property
    def spread(self) -> float:
        """The scale by which a value is far outside the data: high - low, and at least half of the
        larger magnitude (returns of experts hardly differ)."""
        return max(self.high - self.low, 0.5 * max(abs(self.low), abs(self.high)), 1e-9)


def data_returns(
    manifest: Manifest, rewards: MappedColumns, gamma: float, max_steps: int = MAX_STEPS
) -> DataReturns:
    """The discounted returns of a snapshot; `rewards` is its column of rewards."""
    stride = max(1, -(-manifest.steps // max_steps))
    chosen = np.arange(0, len(manifest), stride)
    reward = np.concatenate([rewards.trajectory(int(i)) for i in chosen]).astype(np.float64)
    length = manifest.length[chosen]
    found = returns_to_go(reward, length, gamma, manifest.terminated[chosen])
    low, high = float(found.min()), float(found.max())
    near = 1e-6 * max(abs(low), abs(high))
    extreme = (found <= low + near) | (found >= high - near)
    p5, p95 = np.quantile(found, (0.05, 0.95))
    at_extremes = float(extreme.mean())
    return DataReturns(low, high, float(found.std()), at_extremes, (float(p5), float(p95)))


def margin_of_returns(low: float, high: float, *, certain: bool) -> float:
    """How far values may lie outside the returns of the data: a better policy exceeds them, and
    unless most are `certain`, truncations hide what comes after."""
    return (0.1 if certain else 0.5) * (high - low)


def returns_to_go(
    reward: Floats, length: Ints, gamma: float, terminated: NDArray[np.bool_]
) -> Floats:
    """The discounted return of every step.

    Args:
        reward: [M] rewards of consecutive trajectories.
        length: [n] their lengths, which sum to M.
        gamma: the discount, below 1.
        terminated: [n] whether they end in a termination; others go on with their mean reward.

    Returns:
        [M]. Computed by doubling: y[t] + gamma^k y[t + k] for k = 1, 2, 4, … covers 2k rewards.
    """
    end = np.cumsum(length)
    mean = np.add.reduceat(reward, end - length) / length
    after = np.where(terminated, 0.0, mean / (1.0 - gamma))
    y = reward.astype(np.float64)
    y[end - 1] += gamma * after
    left = np.repeat(end, length) - np.arange(len(y)) - 1  # steps after this one
    k, factor = 1, gamma
    while k < int(length.max()) and factor > NEGLIGIBLE:
        y[:-k] = y[:-k] + factor * np.where(left[:-k] >= k, y[k:], 0.0)
        k, factor = 2 * k, factor * factor
    return y
