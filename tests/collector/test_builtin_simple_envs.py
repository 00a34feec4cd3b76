"""Gridworld and Bandit: gymnasium accepts them, the best policy is known, misuse is refused."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from collector.builtin import BANDIT_ID, GRIDWORLD_ID
from collector.builtin.bandit import best_action, best_arm
from collector.builtin.gridworld import DOWN, LEFT, RIGHT, UP
from stepwell.errors import InvalidData

ENVS = [
    (GRIDWORLD_ID, {}),
    (GRIDWORLD_ID, {"size": 3, "limit": 4}),
    (BANDIT_ID, {}),
    (BANDIT_ID, {"continuous": True}),
]


@pytest.mark.parametrize(("env_id", "kwargs"), ENVS)
def test_gymnasiums_checker_has_no_objection(env_id: str, kwargs: dict[str, Any]) -> None:
    """check_env passes without a warning (a warning is an error in the tests)."""
    check_env(gymnasium.make(env_id, **kwargs).unwrapped)


@pytest.mark.parametrize(("env_id", "kwargs"), ENVS)
def test_a_step_after_the_end_is_an_error(env_id: str, kwargs: dict[str, Any]) -> None:
    """An action outside the space and a step after the end are errors."""
    env = gymnasium.make(env_id, disable_env_checker=True, **kwargs).unwrapped
    with pytest.raises(ResetNeeded):
        env.step(env.action_space.sample())
    env.reset(seed=0)
    with pytest.raises(InvalidAction):
        env.step(np.full(3, 9.0, np.float32))
    over = False
    while not over:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        over = terminated or truncated
    with pytest.raises(ResetNeeded):
        env.step(env.action_space.sample())


@pytest.mark.parametrize("size", [2, 7])
def test_gridworld_shortest_path_earns_one(size: int) -> None:
    """Right to the last column, then down: reward 1 after the Manhattan distance to the corner."""
    env = gymnasium.make(GRIDWORLD_ID, size=size)
    starts = set()
    for seed in range(200):
        obs, _ = env.reset(seed=seed)
        cell = np.rint((obs + 1) / 2 * (size - 1)).astype(int)
        starts.add(tuple(cell.tolist()))
        for left in range(int(2 * (size - 1) - cell.sum()) - 1, -1, -1):
            obs, reward, terminated, truncated, info = env.step(RIGHT if obs[1] < 1 else DOWN)
            assert (reward, terminated, truncated) == (float(left == 0), left == 0, False)
        assert info == {"log/success": 1.0}
    assert len(starts) == size**2 - 1 or size == 7
    assert (size - 1, size - 1) not in starts


def test_gridworld_walls_and_the_limit() -> None:
    """A move into the wall stays; the episode is truncated after `limit` steps."""
    env = gymnasium.make(GRIDWORLD_ID, size=3, limit=5)
    env.reset(seed=0)
    ends = [env.step(action) for action in (UP, UP, LEFT, LEFT, UP)]
    assert ends[-1][0].tolist() == [-1.0, -1.0]
    assert [truncated for _, _, _, truncated, _ in ends] == [False] * 4 + [True]
    assert ends[-1][4] == {"log/success": 0.0}
    with pytest.raises(InvalidData, match="^limit; expected at least 4"):
        gymnasium.make(GRIDWORLD_ID, size=3, limit=3)


def _bandit_mean(continuous: bool, policy: Any) -> float:
    env = gymnasium.make(BANDIT_ID, continuous=continuous, disable_env_checker=True)
    rng = np.random.default_rng(0)
    return float(np.mean([env.step(policy(env.reset(seed=s)[0], rng))[1] for s in range(3000)]))


def test_bandit_best_policies_have_the_documented_means() -> None:
    """Best arm 0.8 and best action 1.0; random arms 0.32, random actions about 0.2."""
    assert _bandit_mean(False, lambda x, _: best_arm(x)) == pytest.approx(0.8, abs=0.03)
    assert _bandit_mean(False, lambda x, rng: rng.integers(5)) == pytest.approx(0.32, abs=0.03)
    assert _bandit_mean(True, lambda x, _: best_action(x)) == pytest.approx(1.0, abs=0.03)

    def uniform(_: Any, rng: np.random.Generator) -> Any:
        return rng.uniform(-1, 1, 2).astype(np.float32)

    assert _bandit_mean(True, uniform) == pytest.approx(0.2, abs=0.06)


def test_every_arm_is_the_best_for_some_context() -> None:
    """Each of the five arms is the best in at least 10% of the contexts."""
    contexts = np.random.default_rng(0).uniform(-1, 1, (2000, 4)).astype(np.float32)
    assert np.bincount([best_arm(x) for x in contexts], minlength=5).min() > 200
