"""Return-conditioned policies act on what is left of their target, in every environment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
import torch

from amago_model import ActingPolicy, AgentConfig, Spaces, save_policy
from collector.interface import interface_of
from collector.main import evaluate as main
from collector.policy_actor import LoadedPolicy, PolicyActor
from collector.rollout import Rollout
from stepwell._settings import override
from stepwell.trajectory import Trajectory
from tests.collector.fake_env import FakeEnv

SMALL = {
    "timestep_encoder.d_hidden": 8,
    "timestep_encoder.d_output": 8,
    "trajectory_encoder.kind": "gru",
    "trajectory_encoder.d_hidden": 8,
    "losses.dpg_weight": 0.0,
    "losses.filter.kind": "behavior_cloning",
    "critic": False,
}
AIMING = {"return_conditioning": True, "return_conditioning.target_return": 50.0}


def policy_of(spaces: Spaces, **changes: object) -> ActingPolicy:
    torch.manual_seed(0)
    return ActingPolicy(override(AgentConfig(), SMALL | changes), spaces).eval()


@pytest.mark.parametrize("width", [None, 2])
def test_each_episode_starts_at_the_target_and_counts_its_own_rewards(width: int | None) -> None:
    """Episodes of different lengths side by side, after each other, and while a newer policy with
    another target takes over."""
    interface = interface_of(FakeEnv(), "Fake-v0")
    spaces = Spaces.of_spec(interface.spec.to_json())
    targets = {"p/1": 50.0, "p/2": 1000.0}
    seen: dict[str, list[tuple[list[int], list[float]]]] = {name: [] for name in targets}
    loaded = {}
    for name, target in targets.items():
        changes = AIMING | {"return_conditioning.target_return": target}
        policy = policy_of(spaces, **changes)

        def act(*args: object, of: str = name, plain: object = policy.act, **options: object):  # type: ignore[no-untyped-def]
            action, hidden = plain(*args, **options)  # type: ignore[operator]
            seen[of].append((args[3].tolist(), hidden[1].tolist()))  # type: ignore[attr-defined]
            return action, hidden

        policy.act = act  # type: ignore[method-assign, assignment]
        loaded[name] = LoadedPolicy(name, policy)
    steps = itertools.count()
    kept: list[Trajectory] = []
    rollout = Rollout(
        [FakeEnv((3, 1, 4)), FakeEnv((2,)), FakeEnv((5, 1))],
        PolicyActor(lambda: loaded["p/1" if next(steps) < 6 else "p/2"], interface, 3, width=width),
        interface,
        make_env=FakeEnv,
        seeds=iter(range(12)),
        sink=lambda t, _: kept.append(t),
    )
    while not rollout.done:
        rollout.step()
    assert {t.metadata.policy for t in kept} == set(targets)
    for trajectory in kept:
        left, wanted = targets[trajectory.metadata.policy], []
        for reward in trajectory.rewards.tolist():
            wanted.append(left)
            left -= reward
        shown = seen[trajectory.metadata.policy]
        for t, value in enumerate(wanted):
            rows = [pair for times, values in shown for pair in zip(times, values, strict=True)]
            assert (t, value) in rows


@pytest.fixture
def env_id() -> Iterator[str]:
    gymnasium.register("AimFake-v0", FakeEnv, disable_env_checker=True)
    yield "AimFake-v0"
    del gymnasium.registry["AimFake-v0"]


def test_evaluate_takes_another_target(  # type: ignore[no-untyped-def]
    tmp_path, capsys, monkeypatch, env_id: str
) -> None:
    """And says so where a policy has none."""
    interface = interface_of(FakeEnv(), "Fake-v0")
    spaces = Spaces.of_spec(interface.spec.to_json())
    for name, changes in (("aiming", AIMING), ("plain", {})):
        (tmp_path / name).write_bytes(save_policy(policy_of(spaces, **changes)))
    plain, targets = ActingPolicy.act, set()

    def act(self: ActingPolicy, *args: Any, **options: Any) -> Any:
        targets.add(self.target_return)
        return plain(self, *args, **options)

    monkeypatch.setattr(ActingPolicy, "act", act)
    words = ["--env", env_id, "--no-upload", "--episodes", "2"]
    assert main([*words, "--file", str(tmp_path / "aiming")]) == 0
    words += ["--target-return", "7"]
    assert main([*words, "--file", str(tmp_path / "aiming")]) == 0
    assert targets == {50.0, 7.0}
    capsys.readouterr()
    assert main([*words, "--file", str(tmp_path / "plain")]) == 2
    assert "plain is not return-conditioned" in capsys.readouterr().err
    assert main([*words, "--random"]) == 2
    assert "target_return: has no effect with --random" in capsys.readouterr().err
