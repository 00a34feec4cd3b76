"""The environments we ship: gymnasium accepts them, memory solves them, nothing else does."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from collector.builtin import RECALL_ID, TMAZE_PASSIVE_ID
from stepwell.errors import InvalidData

RIGHT, UP, LEFT, DOWN = range(4)


def play(env: gymnasium.Env[Any, Any], seed: int, policy: Any) -> tuple[float, int]:
    """One episode of `policy(all observations so far) -> action`; its return and length."""
    obs, _ = env.reset(seed=seed)
    seen, total = [obs], 0.0
    while True:
        obs, reward, terminated, truncated, _ = env.step(policy(seen))
        seen.append(obs)
        total += float(reward)
        assert not truncated
        if terminated:
            return total, len(seen) - 1


@pytest.mark.parametrize("env_id", [TMAZE_PASSIVE_ID, RECALL_ID])
def test_gymnasium_has_nothing_to_object_to(env_id: str) -> None:
    """check_env passes, and its advice (a warning, so an error here) is empty."""
    check_env(gymnasium.make(env_id).unwrapped)


@pytest.mark.parametrize("env_id", [TMAZE_PASSIVE_ID, RECALL_ID])
def test_all_chance_comes_from_the_seed(env_id: str) -> None:
    """Same seed, same cue; over the seeds every cue occurs."""
    one, other = gymnasium.make(env_id), gymnasium.make(env_id)
    cues = set()
    for seed in range(40):
        first, _ = one.reset(seed=seed)
        again, _ = other.reset(seed=seed)
        np.testing.assert_array_equal(first, again)
        cues.add(tuple(first.tolist()))
    assert len(cues) == (2 if env_id == TMAZE_PASSIVE_ID else 4)


@pytest.mark.parametrize("corridor_length", [1, 20, 100])
def test_tmaze_remembering_the_cue_earns_exactly_one(corridor_length: int) -> None:
    """Right to the junction, then to the side of the cue: return 1.0 in corridor_length + 1."""
    env = gymnasium.make(TMAZE_PASSIVE_ID, corridor_length=corridor_length)

    def remember(seen: list[Any]) -> int:
        return RIGHT if seen[-1][0] == 0 else (UP if seen[0][1] > 0 else DOWN)

    for seed in range(10):
        assert play(env, seed, remember) == (1.0, corridor_length + 1)


@pytest.mark.parametrize("turn", [UP, DOWN])
def test_tmaze_without_memory_earns_a_half(turn: int) -> None:
    """What a memoryless agent sees at the junction is the same for both cues."""
    env = gymnasium.make(TMAZE_PASSIVE_ID, corridor_length=5)

    def forget(seen: list[Any]) -> int:
        np.testing.assert_array_equal(seen[-1], [1.0, 0.0] if seen[-1][0] else [0.0, seen[-1][1]])
        return RIGHT if seen[-1][0] == 0 else turn

    returns = [play(env, seed, forget)[0] for seed in range(400)]
    assert set(returns) == {0.0, 1.0}
    assert np.mean(returns) == pytest.approx(0.5, abs=0.08)


def test_tmaze_one_wrong_step_costs_the_penalty_and_the_goal() -> None:
    """Into the wall at t = 0: -1/H, the junction is reached one step late, no turn is left."""
    env = gymnasium.make(TMAZE_PASSIVE_ID, corridor_length=4)
    obs, _ = env.reset(seed=0)
    assert abs(obs[1]) == 1.0
    rewards, seen = [], []
    for action in (UP, RIGHT, RIGHT, RIGHT, RIGHT):
        obs, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        seen.append(obs.tolist())
    assert rewards == [-0.25, 0.0, 0.0, 0.0, 0.0]
    # The cue is not shown again although the agent is still where it began.
    assert seen == [[0.0, 0.0]] * 4 + [[1.0, 0.0]]
    assert (terminated, truncated, info["log/success"]) == (True, False, 0.0)


def test_tmaze_walking_back_to_the_start_does_not_show_the_cue_again() -> None:
    """Passive means shown once; the walk back costs a penalty of the caller's choice."""
    env = gymnasium.make(TMAZE_PASSIVE_ID, corridor_length=4, penalty=-0.5)
    env.reset(seed=0)
    env.step(RIGHT)
    obs, reward, *_ = env.step(LEFT)
    assert (obs.tolist(), reward) == ([0.0, 0.0], -0.5)


@pytest.mark.parametrize(("symbols", "delay"), [(2, 0), (4, 8), (7, 30)])
def test_recall_remembering_earns_exactly_one(symbols: int, delay: int) -> None:
    """The cue's index answered at the query: 1.0 in delay + 2 steps, whatever came before."""
    env = gymnasium.make(RECALL_ID, symbols=symbols, delay=delay)

    def remember(seen: list[Any]) -> int:
        return int(np.argmax(seen[0][:symbols])) if seen[-1][-1] == 1 else symbols - 1

    for seed in range(10):
        assert play(env, seed, remember) == (1.0, delay + 2)


def test_recall_shows_cue_then_blanks_then_the_query() -> None:
    """The observations are as drawn in recall.py: the query tells nothing of the cue."""
    env = gymnasium.make(RECALL_ID, symbols=3, delay=2)
    obs, _ = env.reset(seed=1)
    assert (obs[:3].sum(), obs[3], obs[4]) == (1.0, 1.0, 0.0)
    seen = [env.step(0)[0].tolist() for _ in range(3)]
    assert seen == [[0.0] * 5, [0.0] * 5, [0.0] * 4 + [1.0]]


def test_recall_without_memory_earns_one_in_n() -> None:
    """Any fixed answer is right in a quarter of the episodes when there are four symbols."""
    env = gymnasium.make(RECALL_ID, symbols=4, delay=1)
    returns = [play(env, seed, lambda seen: 2)[0] for seed in range(600)]
    assert np.mean(returns) == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize("env_id", [TMAZE_PASSIVE_ID, RECALL_ID])
def test_misuse_is_refused_by_name(env_id: str) -> None:
    """An action outside the space and a step after the end are errors, not silent rewards."""
    env = gymnasium.make(env_id, disable_env_checker=True)
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match="expected a member of Discrete"):
        env.step(9)
    play(env, 0, lambda seen: 0)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(0)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "name"),
    [
        (TMAZE_PASSIVE_ID, {"corridor_length": 0}, "corridor_length"),
        (RECALL_ID, {"symbols": 1}, "symbols"),
        (RECALL_ID, {"delay": -1}, "delay"),
    ],
)
def test_impossible_sizes_are_refused_by_name(
    env_id: str, kwargs: dict[str, int], name: str
) -> None:
    """The message names the argument to change."""
    with pytest.raises(InvalidData, match=f"^{name}; expected"):
        gymnasium.make(env_id, **kwargs)
