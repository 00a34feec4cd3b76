"""Environments for meta-RL and memory: each is solved by a script that knows the task's rules."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from collector.builtin import (
    CARTPOLE_VELOCITY_ID,
    CHEETAH_VELOCITY_ID,
    DARK_KEY_DOOR_ID,
    META_FROZEN_LAKE_ID,
    PACKAGE_DELIVERY_ID,
    TMAZE_ACTIVE_ID,
)
from collector.builtin.generate_cartpole import expert_push
from collector.builtin.meta_frozen_lake import MOVES as LAKE_MOVES
from collector.builtin.package_delivery import DELIVER, FIRST_ROAD, FORWARD, ROADS, STAY
from collector.builtin.tmaze import DOWN, LEFT, RIGHT, UP
from stepwell.errors import InvalidData

ENVS = [
    (TMAZE_ACTIVE_ID, {}),
    (META_FROZEN_LAKE_ID, {}),
    (META_FROZEN_LAKE_ID, {"size": 3, "hard": True, "slip": 0.2, "recover": True}),
    (DARK_KEY_DOOR_ID, {}),
    (DARK_KEY_DOOR_ID, {"dark": False, "shuffle": True}),
    (PACKAGE_DELIVERY_ID, {}),
]


def unwrapped(env_id: str, **kwargs: Any) -> Any:
    return gymnasium.make(env_id, disable_env_checker=True, **kwargs).unwrapped


@pytest.mark.parametrize(("env_id", "kwargs"), ENVS)
def test_gymnasium_has_nothing_to_object_to(env_id: str, kwargs: dict[str, Any]) -> None:
    check_env(unwrapped(env_id, **kwargs))


@pytest.mark.parametrize(("env_id", "kwargs"), ENVS)
def test_random_play_ends_and_misuse_is_refused(env_id: str, kwargs: dict[str, Any]) -> None:
    """Observations stay in their space; the same seed gives the same episode."""
    env = unwrapped(env_id, **kwargs)
    with pytest.raises(ResetNeeded):
        env.step(np.int64(0))
    episodes = []
    for _ in range(2):
        rng = np.random.default_rng(1)
        obs, _ = env.reset(seed=3)
        seen, over = [obs], False
        while not over:
            obs, reward, over, truncated, _ = env.step(np.int64(rng.integers(env.action_space.n)))
            assert env.observation_space.contains(obs) and not truncated
            seen.append(np.append(obs, reward))
        episodes.append(np.concatenate(seen))
    np.testing.assert_array_equal(*episodes)
    with pytest.raises(ResetNeeded):
        env.step(np.int64(0))
    env.reset()
    with pytest.raises(InvalidAction):
        env.step(np.int64(99))


@pytest.mark.parametrize(
    ("env_id", "kwargs", "what"),
    [
        (META_FROZEN_LAKE_ID, {"size": 1}, "size"),
        (META_FROZEN_LAKE_ID, {"slip": 1.0}, "slip"),
        (DARK_KEY_DOOR_ID, {"key": (9, 0)}, "key"),
        (DARK_KEY_DOOR_ID, {"horizon": 0}, "horizon"),
        (PACKAGE_DELIVERY_ID, {"length": 5, "forks": 5}, "forks"),
        (CHEETAH_VELOCITY_ID, {"low": 4.0}, "low"),
    ],
)
def test_wrong_arguments_are_named(env_id: str, kwargs: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidData, match=f"^{what}"):
        gymnasium.make(env_id, **kwargs)


@pytest.mark.parametrize("corridor_length", [1, 10])
def test_tmaze_active_the_cue_is_fetched_first(corridor_length: int) -> None:
    """Left, right through the corridor, and to the cue's side: return 1 in exactly H + 3 steps."""
    env = unwrapped(TMAZE_ACTIVE_ID, corridor_length=corridor_length)
    for seed in range(8):
        obs, _ = env.reset(seed=seed)
        assert obs.tolist() == [0.0, 0.0]
        obs, reward, *_ = env.step(np.int64(LEFT))
        cue, total = obs[1], reward
        assert abs(cue) == 1.0
        for _ in range(corridor_length + 1):
            obs, reward, over, *_ = env.step(np.int64(RIGHT))
            total += reward
            assert not over and obs[1] == 0.0
        assert obs[0] == 1.0
        _, reward, over, _, info = env.step(np.int64(UP if cue > 0 else DOWN))
        assert (total + reward, over, info["log/success"]) == (1.0, True, 1.0)


def test_tmaze_active_skipping_the_cue_is_a_gamble() -> None:
    env = unwrapped(TMAZE_ACTIVE_ID, corridor_length=3)
    returns = []
    for seed in range(200):
        env.reset(seed=seed)
        returns.append(sum(env.step(np.int64(a))[1] for a in (LEFT, *[RIGHT] * 4, UP)))
    assert np.mean(returns) == pytest.approx(0.5, abs=0.1)


def _path(grid: Any, start: tuple[int, int] = (0, 0)) -> list[int]:
    """Actions of a shortest path to the goal of a lake's map."""
    came: dict[tuple[int, int], Any] = {start: None}
    queue = [start]
    for place in queue:
        if grid[place] == "G":
            actions: list[int] = []
            while came[place] is not None:
                place, action = came[place]
                actions.append(action)
            return actions[::-1]
        for action, (dx, dy) in enumerate(LAKE_MOVES):
            to = (place[0] + dx, place[1] + dy)
            inside = all(0 <= c < len(grid) for c in to)
            if inside and to not in came and grid[to] != "H":
                came[to] = (place, action)
                queue.append(to)
    raise AssertionError("no path")


def test_lake_who_knows_the_map_succeeds_in_every_attempt() -> None:
    env = unwrapped(META_FROZEN_LAKE_ID, size=5, attempts=4)
    maps = set()
    for seed in range(6):
        env.reset(seed=seed)
        maps.add(env.map.tobytes())
        total, infos = 0.0, {}
        for attempt in range(4):
            path = _path(env.map)
            for step, action in enumerate(path):
                obs, reward, over, _, info = env.step(np.int64(action))
                total += reward
                infos |= info
                assert obs[2] == float(step == len(path) - 1)  # the next attempt begins
            assert obs[3] == pytest.approx((attempt + 1) / 4) and obs[:2].tolist() == [0.0, 0.0]
        assert total == 4.0 and over
        assert infos == {f"log/success_{k}": 1.0 for k in range(4)}
    assert len(maps) > 3


def test_lake_holes_and_the_limit_end_an_attempt() -> None:
    """A hole leads back without a reward, or, to recover, costs 0.1 and leaves the agent there."""
    for recover in (False, True):
        env = unwrapped(META_FROZEN_LAKE_ID, size=2, attempts=2, limit=3, recover=recover)
        env.reset(seed=0)
        env.map[:] = [["S", "H"], ["F", "G"]]
        env._begin_attempt()
        obs, reward, over, *_ = env.step(np.int64(3))
        if recover:
            assert (reward, obs.tolist()) == (-0.1, [0.0, 0.0, 0.0, 0.0])
        else:
            assert (reward, obs.tolist(), over) == (0.0, [0.0, 0.0, 1.0, 0.5], False)
        for _ in range(2):  # the limit of 3 steps ends an attempt, counted from its begin
            obs, *_ = env.step(np.int64(0))
        assert obs.tolist() == ([0.0, 0.0, 1.0, 0.5] if recover else [0.0, 0.0, 0.0, 0.5])


def test_lake_hard_cracks_and_blurs() -> None:
    """Standing still is never fatal; leaving a cell may make it a hole; the map itself stays."""
    env = unwrapped(META_FROZEN_LAKE_ID, size=4, attempts=1, limit=10_000, hard=True, recover=True)
    env.reset(seed=5)
    before = env.map.copy()
    seen = {tuple(env.step(np.int64(0))[0][:2].tolist()) for _ in range(200)}
    assert len(seen) > 1 and (env._x, env._y) == (0, 0)
    rng = np.random.default_rng(0)
    for _ in range(300):
        if env._attempt == 1:
            break
        env.step(np.int64(rng.integers(5)))
    np.testing.assert_array_equal(before, env.map)


def test_key_and_door_again_and_again() -> None:
    """Shortest ways between known cells: two rewards per attempt, until the horizon."""
    env = unwrapped(DARK_KEY_DOOR_ID, size=5, horizon=200, shuffle=True)
    for seed in range(4):
        env.reset(seed=seed)
        total, over, ignored = 0.0, False, 0
        while not over:
            target = env.door if env._has_key else env.key
            pending = env._over
            step = tuple(int(np.sign(t - p)) for t, p in zip(target, env._place, strict=True))
            step = (step[0], 0) if step[0] else step
            obs, reward, over, _, info = env.step(np.int64(env.moves.index(step)))
            if pending:
                ignored += 1
                assert reward == 0.0 and obs[2] == 0.0 and obs[3] == 0.0
            total += reward
        assert info["log/doors"] == ignored or info["log/doors"] == ignored + 1
        assert total in (2 * info["log/doors"], 2 * info["log/doors"] + 1) and total >= 20


def test_key_door_light_shows_both_and_a_slow_attempt_ends() -> None:
    env = unwrapped(
        DARK_KEY_DOOR_ID, size=3, limit=2, dark=False, start=(0, 0), key=(2, 2), door=(1, 0)
    )
    obs, _ = env.reset(seed=0)
    expected = [0, 0, 0, 0, 1 / 3, 0, 2 / 3, 2 / 3]
    np.testing.assert_allclose(obs, expected, rtol=1e-6)
    env.step(np.int64(3))
    obs, *_ = env.step(np.int64(3))
    assert obs[3] == 1.0  # at its limit
    obs, *_ = env.step(np.int64(3))
    np.testing.assert_allclose(obs, expected, rtol=1e-6)


def test_packages_who_remembers_the_forks_delivers_all() -> None:
    env = unwrapped(PACKAGE_DELIVERY_ID, length=12, forks=2, packages=3, limit=180)
    for seed in range(6):
        obs, _ = env.reset(seed=seed)
        known: dict[int, int] = {}
        total, over = 0.0, False
        while not over:
            place = round(float(obs[0]) * 12)
            if obs[2]:
                road = known.setdefault(place, 0)
                obs, reward, over, *_ = env.step(np.int64(FIRST_ROAD + road))
                if round(float(obs[0]) * 12) != place + 1:
                    known[place] = (road + 1) % ROADS
            else:
                action = DELIVER if place == 12 else FORWARD
                obs, reward, over, _, info = env.step(np.int64(action))
            total += reward
        assert total == 3.0 == info["log/delivered"]


def test_packages_are_lost_elsewhere() -> None:
    env = unwrapped(PACKAGE_DELIVERY_ID, packages=2)
    env.reset(seed=0)
    obs, reward, over, *_ = env.step(np.int64(DELIVER))
    assert (reward, obs[1], over) == (0.0, 0.5, False)
    env.step(np.int64(STAY))
    assert env.step(np.int64(DELIVER))[2]


def test_cartpole_velocity_needs_the_sum_of_what_was_seen() -> None:
    """Positions by integration over the episode keep the pole up far longer than velocities."""
    lengths = []
    for integrate in (True, False):
        env = gymnasium.make(CARTPOLE_VELOCITY_ID)
        obs, _ = env.reset(seed=2)
        place, steps, over = np.zeros(2), 0, False
        while not over:
            state = (place[0], obs[0], place[1], obs[1]) if integrate else (0, obs[0], 0, obs[1])
            obs, _, terminated, truncated, _ = env.step(expert_push(state))
            place = place + 0.02 * obs
            steps, over = steps + 1, terminated or truncated
        lengths.append(steps)
    assert lengths[0] > 2 * lengths[1] or lengths[0] == 500


def test_cheetah_reward_tells_the_hidden_velocity() -> None:
    """Standing still is punished by the target; the target differs between episodes only."""
    env = gymnasium.make(CHEETAH_VELOCITY_ID)
    targets = set()
    for seed in range(3):
        env.reset(seed=seed)
        target = env.get_wrapper_attr("target")
        assert 0.0 <= target <= 3.0
        _, reward, terminated, truncated, info = env.step(np.ones(6, np.float32))
        error = abs(info["x_velocity"] - target)
        assert reward == pytest.approx(-error - 0.05 * 6)
        assert not (terminated or truncated)
        targets.add(target)
    assert len(targets) == 3
    again = gymnasium.make(CHEETAH_VELOCITY_ID)
    again.reset(seed=2)
    assert again.get_wrapper_attr("target") == target
