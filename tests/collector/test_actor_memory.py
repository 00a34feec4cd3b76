"""Actors: memory per slot, fixed-width computation, policies that change only between episodes."""

import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from collector.envs import make
from collector.episode_recorder import EpisodeSummary
from collector.interface import Interface, interface_of
from collector.policy_actor import ActorError, ActorInputs, LoadedPolicy, PolicyActor, RandomActor
from collector.rollout import Rollout
from stepwell.trajectory import Trajectory
from tests.collector.fake_env import FakeEnv


class Counting:
    """A policy whose memory counts its own calls, so that a reset is visible in the action."""

    def __init__(self, offset: int = 0):
        self.offset = offset
        self.calls = 0

    def initial_hidden(self, n: int, device: Any = "cpu") -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int64)

    def reset_hidden(self, hidden: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        return torch.where(done, 0, hidden)

    def act(
        self,
        obs: dict[str, torch.Tensor],
        prev_action: torch.Tensor,
        prev_reward: torch.Tensor,
        time_idx: torch.Tensor,
        hidden: torch.Tensor,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        t = obs["observation"][:, 1].to(torch.int64)
        playing = obs["observation"][:, 2] > 0  # rows that only fill up a chunk hold zeros
        assert bool((time_idx == t)[playing].all()), "time_idx is the episode's own"
        return self.offset + hidden % 5, hidden + 1


def fake_interface(env: Any, name: str = "Fake-v0") -> Interface:
    return interface_of(env, name)


@pytest.mark.parametrize("width", [None, 2, 8])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_memory_is_reset_in_the_slot_that_begins_and_in_no_other(n: int, width: int | None) -> None:
    """Episodes of different lengths end at different times; each counts from 0."""
    interface, policy = fake_interface(FakeEnv((3, 1, 4))), LoadedPolicy("p/1", Counting())
    kept: list[Trajectory] = []
    rollout = Rollout(
        [FakeEnv((3, 1, 4, 2)[: i + 1]) for i in range(n)],
        PolicyActor(lambda: policy, interface, n, width=width),
        interface,
        make_env=FakeEnv,
        seeds=iter(range(12)),
        sink=lambda t, _: kept.append(t),
    )
    while not rollout.done:
        rollout.step()
    assert len(kept) == 12
    for trajectory in kept:
        np.testing.assert_array_equal(trajectory.actions["action"], np.arange(len(trajectory)) % 5)


class Judge(gymnasium.Env):  # type: ignore[type-arg]
    """Four steps; refuses any action that is not in its space."""

    def __init__(self, action_space: spaces.Space):  # type: ignore[type-arg]
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), action_space
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return np.full(2, self.t / 4, np.float32), 1.0, self.t == 4, False, {}


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])], ids=str)
def test_switches_and_several_choices_are_played_recorded_and_remembered(space: Any) -> None:
    """The environment accepts every action, and the trajectory holds them in its own dtype."""
    interface = fake_interface(Judge(space))
    torch.manual_seed(0)
    policy = ActingPolicy(AgentConfig(), Spaces.of_spec(interface.spec.to_json())).eval()
    interface.check_policy(policy.spaces, "p/1")
    kept: list[Trajectory] = []
    rollout = Rollout(
        [Judge(space), Judge(space)],
        PolicyActor(lambda: LoadedPolicy("p/1", policy), interface, 2),
        interface,
        make_env=lambda: Judge(space),
        seeds=iter(range(5)),
        sink=lambda t, _: kept.append(t),
    )
    while not rollout.done:
        rollout.step()
    actions = np.concatenate([t.actions["action"] for t in kept])
    assert actions.shape == (20, *space.shape) and len(np.unique(actions, axis=0)) > 1
    assert actions.dtype == interface.spec.actions["action"].dtype


def test_a_new_policy_takes_over_only_where_an_episode_begins() -> None:
    """One episode, one policy: the label and the actions agree, row by row."""
    interface = fake_interface(FakeEnv((6, 3), actions=100))
    policies = [LoadedPolicy(f"run/{v}", Counting(offset=10 * v)) for v in range(1, 8)]
    now = itertools.count()
    current = [policies[0]]
    kept: list[Trajectory] = []
    rollout = Rollout(
        [FakeEnv((6, 3), actions=100), FakeEnv((4,), actions=100)],
        PolicyActor(lambda: current[0], interface, 2),
        interface,
        make_env=FakeEnv,
        seeds=iter(range(10)),
        sink=lambda t, _: kept.append(t),
    )
    while not rollout.done:
        # Published at every third step: in the middle of most episodes.
        current[0] = policies[min(next(now) // 3, 6)]
        rollout.step()
    authors = {t.metadata.policy for t in kept}
    assert len(authors) >= 4, "the test must see several policies"
    for trajectory in kept:
        version = int(trajectory.metadata.policy.split("/")[1])
        expected = 10 * version + np.arange(len(trajectory)) % 5
        np.testing.assert_array_equal(trajectory.actions["action"], expected)


def test_an_episode_without_end_is_played_by_new_policies_from_piece_to_piece() -> None:
    """A continuing task: one policy per piece, memory from its begin, cuts that are staggered."""
    lengths, piece = (100_000,), 12
    policies = [LoadedPolicy(f"run/{v}", Counting(offset=10 * v)) for v in range(1, 8)]
    now = itertools.count()
    current = [policies[0]]
    kept: list[list[Trajectory]] = [[], [], []]
    interface = fake_interface(FakeEnv(lengths, actions=100))
    rollout = Rollout(
        [FakeEnv(lengths, actions=100) for _ in kept],
        PolicyActor(lambda: current[0], interface, 3),
        interface,
        make_env=FakeEnv,
        seeds=iter(range(3)),
        sink=lambda t, index: kept[index].append(t),
        max_steps=piece,
        policy_lag=lambda policy_id: current[0].version - int(policy_id.split("/")[1]),
    )
    for _ in range(60):
        current[0] = policies[min(next(now) // 7, 6)]
        rollout.step()
    for pieces in kept:
        assert len({t.metadata.policy for t in pieces}) >= 4
        assert len({t.metadata.episode_id for t in pieces}) == 1
        begins = [t.metadata.first_step for t in pieces]
        assert begins == [sum(map(len, pieces[:i])) for i in range(len(pieces))]
        counted: dict[str, int] = {}
        for trajectory in pieces:
            name = trajectory.metadata.policy
            seen = counted.get(name, 0)  # the same policy goes on where it was
            expected = 10 * int(name.split("/")[1]) + (seen + np.arange(len(trajectory))) % 5
            np.testing.assert_array_equal(trajectory.actions["action"], expected)
            counted[name] = seen + len(trajectory)
            assert trajectory.metadata.metrics["policy_lag"] in (0, 1, 2)
    ends = [pieces[1].metadata.first_step + len(pieces[1]) for pieces in kept]
    assert len(set(ends)) == 3 and all(piece + piece / 2 <= end <= 2 * piece for end in ends)


def test_a_policy_that_nobody_plays_any_more_is_not_computed() -> None:
    interface = fake_interface(FakeEnv((2,)))
    old, new = LoadedPolicy("r/1", Counting()), LoadedPolicy("r/2", Counting())
    current = [old]
    actor = PolicyActor(lambda: current[0], interface, 1)
    rollout = Rollout(
        [FakeEnv((2,))],
        actor,
        interface,
        make_env=FakeEnv,
        seeds=itertools.repeat(None),
        sink=lambda t, _: None,
    )
    rollout.step(), rollout.step()
    current[0] = new
    for _ in range(6):
        rollout.step()
    assert (old.policy.calls, new.policy.calls) == (2, 6)  # type: ignore[attr-defined]


def test_previous_action_and_reward_are_what_was_done() -> None:
    """Row t sees the action and reward of t - 1, as the trainer will show them."""
    interface = fake_interface(FakeEnv((5,)))
    seen_rows: list[tuple[int, int, float]] = []

    class Looking(Counting):
        def act(self, obs, prev_action, prev_reward, time_idx, hidden, **kw):  # type: ignore[no-untyped-def]
            seen_rows.append((int(time_idx[0]), int(prev_action[0]), float(prev_reward[0])))
            return super().act(obs, prev_action, prev_reward, time_idx, hidden, **kw)

    kept: list[Trajectory] = []
    policy = LoadedPolicy("p/1", Looking())
    rollout = Rollout(
        [FakeEnv((5,))],
        PolicyActor(lambda: policy, interface, 1),
        interface,
        make_env=FakeEnv,
        seeds=iter([0]),
        sink=lambda t, _: kept.append(t),
    )
    while not rollout.done:
        rollout.step()
    (trajectory,) = kept
    assert [t for t, _, _ in seen_rows] == [0, 1, 2, 3, 4]
    for t, action, reward in seen_rows[1:]:
        assert action == trajectory.actions["action"][t - 1]
        assert reward == trajectory.rewards[t - 1]


def small_policy(interface: Interface, kind: str) -> ActingPolicy:
    torch.manual_seed(3)
    config = AgentConfig.from_dict(
        {
            "timestep_encoder": {"kind": "any", "d_hidden": 32, "d_output": 32},
            "trajectory_encoder": {"kind": kind, "d_model": 32, "d_ff": 64},
        }
    )
    return ActingPolicy(config, Spaces.of_spec(interface.spec.to_json())).eval()


@pytest.mark.parametrize("kind", ["feed_forward", "transformer"])
def test_with_a_fixed_width_an_episode_does_not_depend_on_its_neighbours(kind: str) -> None:
    """Real networks, real physics: bit-equal trajectories for 1, 3 and 9 environments."""
    env = make("Pendulum-v1", {"max_episode_steps": 40})
    interface = interface_of(env, "Pendulum-v1")
    policy = LoadedPolicy("p/1", small_policy(interface, kind))

    def play(n: int) -> dict[int, Trajectory]:
        kept: dict[int, Trajectory] = {}
        rollout = Rollout(
            [make("Pendulum-v1", {"max_episode_steps": 40}) for _ in range(n)],
            PolicyActor(lambda: policy, interface, n, sample=False, width=8),
            interface,
            make_env=lambda: env,
            seeds=iter(range(9)),
            sink=lambda t, index: kept.__setitem__(index, t),
        )
        while not rollout.done:
            rollout.step()
        return kept

    one, three, nine = play(1), play(3), play(9)
    for index in range(9):
        for other in (three, nine):
            for key in ("observation",):
                assert one[index].obs[key].tobytes() == other[index].obs[key].tobytes()
            assert (
                one[index].actions["action"].tobytes() == other[index].actions["action"].tobytes()
            )
    assert len({t.total_reward for t in one.values()}) == 9


def test_nan_from_a_policy_names_the_policy() -> None:
    """The environment never sees it."""
    interface = interface_of(make("Pendulum-v1"), "Pendulum-v1")

    class Poisoned(Counting):
        def act(self, obs, prev_action, prev_reward, time_idx, hidden, **kw):  # type: ignore[no-untyped-def]
            return torch.full_like(prev_action, torch.nan), hidden

    actor = PolicyActor(lambda: LoadedPolicy("demo/7", Poisoned()), interface, 1)
    actor.reset(0, None)
    inputs = ActorInputs.zeros(interface.spec, 1)
    inputs.playing[:] = True
    with pytest.raises(ActorError, match="demo/7 answered NaN"):
        actor.act(inputs)


def test_chance_belongs_to_the_episode() -> None:
    """A random episode follows from its seed, whoever plays beside it, and fills the box."""
    interface = interface_of(make("Pendulum-v1"), "Pendulum-v1")

    def play(n: int) -> dict[int, Trajectory]:
        kept: dict[int, Trajectory] = {}
        rollout = Rollout(
            [make("Pendulum-v1") for _ in range(n)],
            RandomActor(interface, n),
            interface,
            make_env=lambda: make("Pendulum-v1"),
            seeds=iter(range(4)),
            sink=lambda t, index: kept.__setitem__(index, t),
        )
        ended: list[EpisodeSummary] = []
        while not rollout.done:
            ended += rollout.step()
        return kept

    one, four = play(1), play(4)
    assert all(
        one[i].actions["action"].tobytes() == four[i].actions["action"].tobytes() for i in range(4)
    )
    drawn = np.concatenate([t.actions["action"] for t in one.values()])
    assert drawn.min() < -1.9 and drawn.max() > 1.9 and abs(drawn.mean()) < 0.2
    assert one[0].metadata.policy == "random"
