"""Several attempts at one task in one episode: the wrapper, and what is recorded of it."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from collector.builtin import ATTEMPTS_ID
from collector.builtin.attempts import Attempts
from collector.envs import make
from collector.evaluate import evaluate_policy
from collector.interface import interface_of
from collector.policy_actor import RandomActor
from stepwell.errors import InvalidData


class Doors(gymnasium.Env[Any, Any]):
    """One of four doors, chosen by the seed, has a reward; the episode ends after three steps, or
    with the reward. It counts its resets, and keeps their options."""

    observation_space = spaces.Discrete(4)
    action_space = spaces.Discrete(4)

    def __init__(self, named: bool = False) -> None:
        self.resets: list[tuple[int | None, Any]] = []
        self.named = named

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.resets.append((seed, options))
        self.door = int(self.np_random.integers(4))
        self.time = 0
        return 0, {"env_name": f"door {self.door % 2}"} if self.named else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        right = int(action) == self.door
        return self.time, float(right), right, not right and self.time == 3, {"is_success": right}


gymnasium.register("Doors-v0", Doors, disable_env_checker=True)
gymnasium.register("NamedDoors-v0", lambda: Doors(named=True), disable_env_checker=True)


def row(obs: dict[str, Any]) -> tuple[int, list[float]]:
    return int(obs["observation"]), obs["attempt"].tolist()


def test_an_attempt_ends_and_the_next_step_begins_another() -> None:
    doors = Doors()
    env = Attempts(doors, 2)
    obs, _ = env.reset(seed=5, options={"level": 1})
    wrong = (doors.door + 1) % 4
    assert row(obs) == (0, [1, 0, 0])
    for time in (1, 2):
        obs, reward, terminated, truncated, info = env.step(wrong)
        assert row(obs) == (time, [0, 0, 0]) and not (reward or terminated or truncated)
        assert not any(key.startswith("log/") for key in info)
    obs, reward, terminated, truncated, info = env.step(wrong)
    assert row(obs) == (3, [0, 1, 0]) and not (terminated or truncated)
    assert info["log/return_0"] == 0.0 and info["log/success_0"] == 0.0
    # The action of this step is ignored: it would have been the right one.
    obs, reward, terminated, truncated, info = env.step(doors.door)
    assert row(obs) == (0, [1, 0, 0.5]) and reward == 0.0 and not (terminated or truncated)
    obs, reward, terminated, truncated, info = env.step(doors.door)
    assert row(obs) == (1, [0, 1, 0.5]) and reward == 1.0
    assert terminated and not truncated
    assert info["log/return_1"] == 1.0 and info["log/success_1"] == 1.0
    with pytest.raises(ResetNeeded):
        env.step(0)
    assert doors.resets == [(5, {"level": 1, "attempt": 0}), (5, {"level": 1, "attempt": 1})]
    env.reset()  # a new task: another seed, drawn from the generator that seed 5 left
    assert doors.resets[2][0] not in (None, 5)


def test_a_time_limit_of_the_last_attempt_is_the_end() -> None:
    """Nothing can be gained afterwards, so nothing is bootstrapped."""
    doors = Doors()
    env = Attempts(doors, 2)
    env.reset(seed=0)
    wrong, ends = (doors.door + 1) % 4, []
    for _ in range(7):
        _, _, terminated, truncated, _ = env.step(wrong)
        ends.append((terminated, truncated))
    assert ends == [(False, False)] * 6 + [(True, False)]


def test_slips_differ_between_attempts() -> None:
    """The start and the task repeat; what is random afterwards does not, but follows the seed."""

    def walks(seed: int) -> list[list[int]]:
        env = make(ATTEMPTS_ID, {"env": "FrozenLake-v1", "attempts": 6, "is_slippery": True})
        obs, _ = env.reset(seed=seed)
        found, over = [[int(obs["observation"])]], False
        while not over:
            obs, _, over, _, _ = env.step(2)
            if obs["attempt"][0]:
                found.append([])
            found[-1].append(int(obs["observation"]))
        env.close()
        return found

    first = walks(1)
    assert len(first) == 6 and len({tuple(walk) for walk in first}) > 1
    assert walks(1) == first


def test_dicts_keep_their_keys_and_misuse_is_an_error() -> None:
    env = make(ATTEMPTS_ID, {"env": "CartPole-v1", "attempts": 3})
    obs, _ = env.reset(seed=1)
    while env.observation_space.contains(obs):
        obs, _, terminated, _, _ = env.step(env.action_space.sample())
        if terminated:
            break
    assert terminated  # every observation was in its space
    interface = interface_of(env, ATTEMPTS_ID)
    assert sorted(interface.spec.observations) == ["attempt", "observation"]
    assert interface.partially_observable
    env.close()
    for wrong in (1, 2.5, True):
        with pytest.raises(InvalidData, match="attempts; expected an integer, at least 2"):
            Attempts(Doors(), wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidData, match="without an observation 'attempt'"):
        Attempts(Attempts(Doors(), 2), 2)


def test_the_return_of_each_attempt_is_a_metric_of_the_evaluation() -> None:
    kwargs = {"env": "Doors-v0", "attempts": 3}
    result = evaluate_policy(RandomActor, ATTEMPTS_ID, range(40), env_kwargs=kwargs, envs=3)
    names = [f"return_{i}" for i in range(3)]
    assert [name for name in result.metrics if name in names] == names
    assert sum(result.metrics[name] for name in names) == pytest.approx(result.mean)
    for i in range(3):
        each = [t.metadata.metrics[f"return_{i}"] for t in result.trajectories]
        assert result.metrics[f"return_{i}"] == pytest.approx(np.mean(each))
    assert result.tasks == {}
    assert "log/return_2" in {str(cell) for cell in result.table().columns[0].cells}


def test_tasks_have_a_score_each() -> None:
    """info["env_name"] is the environment of the trajectory."""
    result = evaluate_policy(RandomActor, "NamedDoors-v0", range(30), envs=2)
    assert sorted(result.tasks) == ["door 0", "door 1"]
    for task, score in result.tasks.items():
        mine = [t for t in result.trajectories if t.metadata.env == task]
        assert score["episodes"] == len(mine) > 0
        assert score["mean"] == pytest.approx(np.mean([t.total_reward for t in mine]))
        assert score["ci_low"] <= score["mean"] <= score["ci_high"]
    assert sum(score["episodes"] for score in result.tasks.values()) == 30
