"""Fitted Q evaluation against exact values of small Markov decision processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from trainer.offline_evaluation import fitted_q
from trainer.offline_evaluation.fitted_q import Transitions, estimate_value

GAMMA = 0.9
WIDE = (-1e6, 1e6)
Steps = Sequence[tuple[int, int, float, bool, int]]


def data_of(
    trajectories: Sequence[Steps], policy: Sequence[int], n_actions: int, n_states: int
) -> Transitions:
    """One-hot transitions of trajectories of (state, action, reward, terminated, next state)."""
    rows = [(i, *step) for i, steps in enumerate(trajectories) for step in steps]
    ids, s, a, r, done, after = (torch.tensor(column) for column in zip(*rows, strict=True))
    state, action = torch.eye(n_states), torch.eye(n_actions)
    chosen = torch.tensor(policy)
    first = torch.tensor([steps[0][0] for steps in trajectories])
    return Transitions(
        trajectory=ids,
        state=state[s],
        action=action[a],
        reward=r.to(torch.float32),
        terminated=done,
        next_state=state[after],
        next_action=action[chosen[after]],
        initial_trajectory=torch.arange(len(trajectories)),
        initial_state=state[first],
        initial_action=action[chosen[first]],
    )


class Grid:
    """4 x 4 cells; actions right, left, down, up; reward 1 and the end in the lower right corner;
    with probability `slip` another action happens."""

    SIZE, ACTIONS = 4, 4
    STATES = SIZE * SIZE

    def __init__(self, slip: float = 0.0):
        self.slip = slip

    def move(self, s: int, a: int) -> int:
        row, column = divmod(s, self.SIZE)
        dr, dc = ((0, 1), (0, -1), (1, 0), (-1, 0))[a]
        row, column = np.clip((row + dr, column + dc), 0, self.SIZE - 1)
        return int(row * self.SIZE + column)

    def random(self, episodes: int, limit: int, seed: int) -> list[Steps]:
        """Episodes of random actions from random cells."""
        rng = np.random.default_rng(seed)
        found: list[Steps] = []
        for _ in range(episodes):
            s, steps = int(rng.integers(self.STATES - 1)), []
            while len(steps) < limit:
                a = int(rng.integers(self.ACTIONS))
                happens = int(rng.integers(self.ACTIONS)) if rng.random() < self.slip else a
                after = self.move(s, happens)
                done = after == self.STATES - 1
                steps.append((s, a, float(done), done, after))
                if done:
                    break
                s = after
            found.append(steps)
        return found

    def value(self, policy: Sequence[int], starts: Sequence[int]) -> float:
        """The exact value by repeated evaluation of the Bellman equation."""
        v = np.zeros(self.STATES)
        for _ in range(500):
            for s in range(self.STATES - 1):
                total = 0.0
                for a in range(self.ACTIONS):
                    p = self.slip / self.ACTIONS + (1.0 - self.slip) * (a == policy[s])
                    after = self.move(s, a)
                    done = after == self.STATES - 1
                    total += p * (float(done) + GAMMA * (0.0 if done else v[after]))
                v[s] = total
        return float(v[list(starts)].mean())


GOOD = [2 if s % 4 == 3 else 0 for s in range(16)]
HALF = [2] * 16  # down: arrives from the right column only
BAD = [1] * 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted_q, "FEATURES", 128)
    monkeypatch.setattr(fitted_q, "RESAMPLES", 40)


@pytest.mark.parametrize("slip", [0.0, 0.3])
def test_values_and_ranks_are_those_of_the_exact_solution(slip: float) -> None:
    grid = Grid(slip)
    trajectories = grid.random(400, 20, seed=1)
    starts = [steps[0][0] for steps in trajectories]
    found, exact = [], []
    for policy in (GOOD, HALF, BAD):
        data = data_of(trajectories, policy, grid.ACTIONS, grid.STATES)
        estimate = estimate_value(data, GAMMA, (0.0, 1.0))
        assert estimate.low <= estimate.value <= estimate.high
        found.append(estimate.value)
        exact.append(grid.value(policy, starts))
    assert found == pytest.approx(exact, abs=0.04)
    assert np.argsort(found).tolist() == np.argsort(exact).tolist()


@pytest.mark.parametrize("unit", [1e-3, 1e4])
def test_the_unit_of_rewards_does_not_matter(unit: float) -> None:
    def estimate(unit: float) -> float:
        steps = [[(s, a, r * unit, done, n) for s, a, r, done, n in t] for t in trajectories]
        return estimate_value(data_of(steps, GOOD, 4, 16), GAMMA, (0.0, unit)).value

    trajectories = Grid().random(100, 20, seed=0)
    assert estimate(unit) == pytest.approx(unit * estimate(1.0), rel=1e-3)


@pytest.mark.parametrize("unit", [1e-8, 1e6])
def test_the_unit_of_observations_does_not_matter(unit: float) -> None:
    data = data_of(Grid().random(100, 20, seed=0), HALF, 4, 16)
    scaled = replace(
        data,
        **{name: getattr(data, name) * unit for name in ("state", "next_state", "initial_state")},
    )
    expected = estimate_value(data, GAMMA, (0.0, 1.0)).value
    assert estimate_value(scaled, GAMMA, (0.0, 1.0)).value == pytest.approx(expected, rel=1e-3)


def test_a_termination_has_no_next_value_and_a_truncation_has_one() -> None:
    """One state, reward 1: worth 1 if the step terminates, else 1 / (1 - gamma)."""
    for terminated, expected in ((True, 1.0), (False, 10.0)):
        steps = [[(0, i % 2, 1.0, terminated, 0)] for i in range(50)]
        data = data_of(steps, [0], n_actions=2, n_states=1)
        assert estimate_value(data, GAMMA, WIDE).value == pytest.approx(expected, rel=0.01)


def test_values_of_initial_states_are_within_the_possible_returns() -> None:
    steps = [[(0, 0, 1.0, False, 0)] for _ in range(50)]
    estimate = estimate_value(data_of(steps, [0], 2, 1), GAMMA, (0.0, 4.0))
    assert estimate.value == estimate.high == pytest.approx(4.0)


def test_the_interval_contains_the_true_value_as_often_as_it_says() -> None:
    """A bandit with noisy rewards of mean 2: 95 % of the intervals, here at least 17 of 20."""
    covered, width = 0, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        steps = [[(0, i % 2, 2.0 + rng.normal(), True, 0)] for i in range(60)]
        estimate = estimate_value(data_of(steps, [0], 2, 1), GAMMA, WIDE, seed=seed)
        covered += estimate.low <= 2.0 <= estimate.high
        width.append(estimate.high - estimate.low)
    assert covered >= 17
    assert np.mean(width) == pytest.approx(2 * 1.96 / 30**0.5, rel=0.4)  # 30 steps of this action


def test_repeated_regression_converges_where_the_smallest_ridge_would_diverge() -> None:
    """Tsitsiklis and Van Roy: values that grow from one state to the next (1, 2) diverge."""
    gram, cross = torch.tensor([[1.0, 0.0], [0.0, 5.0]]), torch.tensor([[0.0, 0.0], [0.0, 9.0]])
    ridge = fitted_q._contracting_ridge(gram, cross, 1, GAMMA)
    step = torch.linalg.solve(gram.double() + ridge, cross.double())
    assert torch.linalg.eigvals(step).abs().max() <= 0.95
    assert ridge[1, 1] > fitted_q.RIDGE / fitted_q.FEATURES


def test_equal_data_and_seed_give_equal_estimates_and_progress_ends_at_1() -> None:
    data = data_of(Grid().random(30, 10, seed=0), GOOD, 4, 16)
    shares: list[float] = []
    call: Callable[[float], None] = shares.append
    first = estimate_value(data, GAMMA, (0.0, 1.0), on_progress=call)
    assert first == estimate_value(data, GAMMA, (0.0, 1.0))
    assert shares == sorted(shares) and shares[-1] == 1.0
    single = estimate_value(data_of(Grid().random(1, 10, seed=0), GOOD, 4, 16), GAMMA, WIDE)
    assert (single.low, single.high) == WIDE  # one trajectory shows nothing of others
    empty = torch.zeros(0)
    with pytest.raises(ValueError, match="at least one transition"):
        estimate_value(Transitions(*[empty] * 10), GAMMA, WIDE)
