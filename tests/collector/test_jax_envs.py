"""gymnax and XLand-MiniGrid, where they are installed; what is said where they are not."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from collector.envs import EnvError, make, make_native
from collector.interface import interface_of
from collector.policy_actor import RandomActor
from collector.rollout import Rollout

GYMNAX = {"name": "CartPole-v1", "max_steps_in_episode": 5}
XLAND = {"name": "MiniGrid-Empty-5x5", "max_steps": 5}


def play(env_id: str, args: dict[str, Any], action: int) -> tuple[list[Any], bool, bool]:
    env = make(env_id, args)
    interface = interface_of(env, env_id)
    found = [interface.encode_observation(env.reset(seed=0)[0])]
    terminated = truncated = False
    while not (terminated or truncated):
        obs, _, terminated, truncated, _ = env.step(np.int64(action))
        found.append(interface.encode_observation(obs))
    return found, terminated, truncated


@pytest.mark.parametrize(("name", "args"), [("Gymnax", GYMNAX), ("XLandMiniGrid", XLAND)])
def test_a_package_that_is_absent_is_named(name: str, args: dict[str, Any]) -> None:
    if find_spec("jax") is not None:
        pytest.skip("jax is installed")
    with pytest.raises(EnvError, match=r"stepwell\[jax\]"):
        make(f"stepwell/{name}-v0", args)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "args"), [("Gymnax", GYMNAX), ("XLandMiniGrid", XLAND)])
def test_they_are_what_gymnasium_expects(name: str, args: dict[str, Any]) -> None:
    pytest.importorskip("gymnax" if name == "Gymnax" else "xminigrid")
    check_env(make(f"stepwell/{name}-v0", args).unwrapped, skip_render_check=True)


@pytest.mark.filterwarnings("ignore")
def test_gymnaxs_time_limit_truncates() -> None:
    pytest.importorskip("gymnax")
    seen, terminated, truncated = play("stepwell/Gymnax-v0", GYMNAX, 0)
    assert len(seen) == 6 and truncated and not terminated
    longer = {**GYMNAX, "max_steps_in_episode": 500}
    seen, terminated, truncated = play("stepwell/Gymnax-v0", longer, 0)
    assert terminated and not truncated
    # The last observation is that of the fall, not of the next start.
    assert abs(seen[-1]["observation"][2]) > 0.2


@pytest.mark.filterwarnings("ignore")
def test_gymnax_batched_plays_whole_episodes() -> None:
    """Ends and limits as one by one, each environment reset when it ends; a seed repeats all."""
    pytest.importorskip("gymnax")
    args = {"name": "CartPole-v1", "max_steps_in_episode": 30}

    def collected() -> list[Any]:
        kept: list[Any] = []
        env = make_native("stepwell/Gymnax-v0", args, 5)
        interface = interface_of(env, "stepwell/Gymnax-v0")
        rollout = Rollout(
            env,
            RandomActor(interface, 5),
            interface,
            seeds=iter(range(40)),
            sink=lambda trajectory, _: kept.append(trajectory),
        )
        while not rollout.done:
            rollout.step()
        return kept

    first, again = collected(), collected()
    assert len(first) == 40 and {len(t) for t in first} == {len(t) for t in again}
    for trajectory in first:
        last = trajectory.obs["observation"][-1]
        fell = abs(last[0]) > 2.4 or abs(last[2]) > 12 * np.pi / 180
        assert trajectory.terminated == fell and trajectory.truncated == (not fell)
        assert trajectory.terminated or len(trajectory) == 30
        assert np.abs(trajectory.obs["observation"][0]).max() <= 0.05, "it begins at a start"


@pytest.mark.filterwarnings("ignore")
def test_xlands_goal_terminates_and_its_limit_truncates() -> None:
    pytest.importorskip("xminigrid")
    seen, terminated, truncated = play("stepwell/XLandMiniGrid-v0", XLAND, 1)
    assert len(seen) == 6 and truncated and not terminated
    assert seen[0]["view"].shape == (7, 7, 2) and seen[0]["goal"].any()
    env = make("stepwell/XLandMiniGrid-v0", {"name": "MiniGrid-Empty-5x5"})
    env.reset(seed=0)
    outcomes = [env.step(np.int64(action))[1:4] for action in (0, 0, 1, 0, 0)]
    assert outcomes[-1][1:] == (True, False) and outcomes[-1][0] > 0
