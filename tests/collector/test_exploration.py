"""Exploration deviates exactly as often and as far as it says."""

from typing import Any

import numpy as np
import pytest

from collector.env_spaces import Arrays
from collector.exploration import (
    BilevelConfig,
    CustomConfig,
    EpsilonGreedy,
    Exploration,
    ExplorationError,
    GreedyConfig,
    RepeatConfig,
    RepeatedActions,
    StickyConfig,
    WindowConfig,
    explore,
    make_exploration,
    register_exploration,
)
from collector.interface import interface_of
from collector.policy_actor import ActorInputs
from collector.rollout import Rollout
from stepwell.errors import InvalidSpace
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Space
from tests.collector.fake_env import FakeEnv
from tests.collector.scripted_actor import ScriptedActor

N = 20_000


def noisy(
    config: GreedyConfig | BilevelConfig,
    space: Space,
    action: np.ndarray,
    clock: int = 0,
    t: int = 0,
):
    """Actions of N slots after exploration, at episode step t."""
    spec = EnvSpec.of(Box((1,)), space)
    inputs = ActorInputs.zeros(spec, N)
    inputs.time_idx[:] = t
    exploration = EpsilonGreedy(config, spec, N, seed=1, clock=lambda: clock)
    for slot in range(N):
        exploration.reset(slot)
    actions = np.broadcast_to(action, (N, *space.shape)).astype(space.dtype)
    return exploration.apply({"action": actions}, inputs)["action"]


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.3, 1.0])
def test_the_rate_of_random_actions_is_epsilon(epsilon: float) -> None:
    """A uniform number decides (a normal one would give ≥ 50%); drawn actions are uniform."""
    config = GreedyConfig(start=epsilon, end=epsilon, randomize=False)
    got = noisy(config, Discrete(4, start=10), np.int64(12))
    assert got.dtype == np.int64
    # A random action equals the policy's one time in four.
    changed = np.mean(got != 12)
    assert changed == pytest.approx(0.75 * epsilon, abs=4 * np.sqrt(0.25 / N))
    if epsilon == 1.0:
        counts = np.bincount(got - 10, minlength=4) / N
        np.testing.assert_allclose(counts, 0.25, atol=0.02)


@pytest.mark.parametrize("space", [MultiDiscrete((3, 5)), MultiBinary(6)])
def test_vectors_of_choices_are_replaced_whole(space: Space) -> None:
    """A slot either keeps the policy's whole vector or gets a legal random one."""
    config = GreedyConfig(start=0.5, end=0.5, randomize=False)
    before = np.zeros(space.shape, space.dtype)
    got = noisy(config, space, before)
    zero = 1 / 15 if isinstance(space, MultiDiscrete) else 1 / 64
    kept = np.mean((got == 0).all(axis=1))
    assert kept == pytest.approx(0.5 + 0.5 * zero, abs=0.02)
    limits = np.array([3, 5]) if isinstance(space, MultiDiscrete) else 2
    assert got.dtype == np.dtype(space.dtype) and (got >= 0).all() and (got < limits).all()


def test_continuous_noise_has_epsilon_as_standard_deviation_of_the_half_range() -> None:
    """Range -4 … 8: epsilon 0.1 is 0.6 in the environment's units; clipped at the bounds."""
    config = GreedyConfig(start=0.1, end=0.1, randomize=False)
    space = Box((2,), low=(-4.0, 0.0), high=(8.0, 1.0))
    got = noisy(config, space, np.array([2.0, 1.0]))
    assert got.dtype == np.float32
    assert np.std(got[:, 0]) == pytest.approx(0.6, rel=0.03)
    assert np.mean(got[:, 0]) == pytest.approx(2.0, abs=0.02)
    # At the bound half of the noise is cut off, and none leaves the box.
    assert np.mean(got[:, 1] == 1.0) == pytest.approx(0.5, abs=0.02)
    assert got[:, 1].max() <= 1.0


def test_amagos_schedule() -> None:
    """1.0 falls linearly to 0.05 over a million steps and stays."""
    config = GreedyConfig(randomize=False)
    t, u = np.zeros(1, np.int64), np.ones(1)
    levels = [config.level(clock, t, u)[0] for clock in (0, 500_000, 1_000_000, 9_000_000)]
    np.testing.assert_allclose(levels, [1.0, 0.525, 0.05, 0.05])


def test_bilevel_falls_within_the_episode_and_not_beyond_its_end_level() -> None:
    """From the begin level to the late level over `horizon`; later than that it stays there."""
    config = BilevelConfig(horizon=100, randomize=False)
    t = np.array([0, 50, 100, 400])
    np.testing.assert_allclose(config.level(0, t, np.ones(4)), [1.0, 0.9, 0.8, 0.8])
    np.testing.assert_allclose(config.level(10**7, t, np.ones(4)), [0.05, 0.03, 0.01, 0.01])


def test_each_episode_draws_its_own_share() -> None:
    """randomize: epsilon is uniform below the level, constant within and new for each episode."""
    spec = EnvSpec.of(Box((1,)), Discrete(2))
    config = GreedyConfig(start=0.8, end=0.8)
    exploration = EpsilonGreedy(config, spec, 1, seed=0, clock=lambda: 0)
    inputs = ActorInputs.zeros(spec, 1)
    shares = []
    for _ in range(2000):
        exploration.reset(0)
        inputs.time_idx[:] = 0
        first = exploration.level(inputs)[0]
        inputs.time_idx[:] = 77
        assert exploration.level(inputs)[0] == first
        shares.append(first)
    assert max(shares) < 0.8 and np.mean(shares) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize(
    ("action", "randomize", "quiet"),
    [(Discrete(2), True, 0.25), (Discrete(2), False, 0.25), (Box((1,), low=-1, high=1), True, 0.0)],
)
def test_quiet_episodes_explore_nothing(action: Space, randomize: bool, quiet: float) -> None:
    """A quarter of the episodes; where actions are continuous, none is without noise."""
    config = GreedyConfig(start=0.8, end=0.8, randomize=randomize, quiet_episodes=0.25)
    spec = EnvSpec.of(Box((1,)), action)
    exploration = EpsilonGreedy(config, spec, N, seed=0, clock=lambda: 0)
    for slot in range(N):
        exploration.reset(slot)
    found = exploration.level(ActorInputs.zeros(spec, N))
    assert np.mean(found == 0.0) == pytest.approx(quiet, abs=0.02)
    assert np.mean(found[found > 0]) == pytest.approx(0.4 if randomize else 0.8, abs=0.02)


def test_no_range_no_noise() -> None:
    """Noise relative to an infinite range would be NaN: refused at the start, with the way out."""
    spec = EnvSpec.of(Box((1,)), Box((1,)))
    with pytest.raises(InvalidSpace, match="RescaleAction"):
        make_exploration(GreedyConfig(), spec, 1, seed=0, clock=lambda: 0)


@pytest.mark.parametrize(
    ("field", "wrong"), [("start", 1.5), ("late_end", -0.1), ("steps", 0), ("horizon", 0)]
)
def test_a_setting_that_cannot_be_is_refused_by_name(field: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"BilevelConfig.{field}"):
        BilevelConfig(**{"horizon": 10, field: wrong})  # type: ignore[arg-type]


def test_the_executed_action_is_recorded_at_the_promised_rate() -> None:
    """Through a whole rollout: deviations are epsilon often, and environment and record agree."""
    env, kept = FakeEnv((2000,), actions=4), []
    interface = interface_of(env, "Fake-v0")
    config = GreedyConfig(start=0.2, end=0.2, randomize=False)
    rollout = Rollout(
        [env],
        ScriptedActor(interface, "always 3", lambda obs, t: 3),
        interface,
        make_env=FakeEnv,
        seeds=iter(range(5)),
        sink=lambda trajectory, _: kept.append(trajectory),
        exploration=make_exploration(config, interface.spec, 1, seed=0, clock=lambda: 0),
    )
    while not rollout.done:
        rollout.step()
    recorded = np.concatenate([t.actions["action"] for t in kept])
    assert recorded.tolist() == env.actions and len(recorded) == 10_000
    assert np.mean(recorded != 3) == pytest.approx(0.75 * 0.2, abs=0.015)


def test_a_window_has_an_epsilon_of_its_own() -> None:
    """Both ends belong to it; it is not annealed, the rest is."""
    config = WindowConfig(first=1, last=3, inside=0.125, steps=100, end=0.0, randomize=False)
    t = np.array([0, 1, 3, 4])
    np.testing.assert_allclose(config.level(0, t, np.ones(4)), [1.0, 0.125, 0.125, 1.0])
    np.testing.assert_allclose(config.level(50, t, np.ones(4)), [0.5, 0.125, 0.125, 0.5])
    with pytest.raises(ValueError, match="last: expected at least first, 5, got 4"):
        WindowConfig(first=5, last=4)


@pytest.mark.parametrize("space", [Discrete(9), Box((2,)), MultiBinary(3)])
def test_sticky_actions_repeat_the_last_one(space: Space) -> None:
    """With probability epsilon, as a whole, and not in the first step. A range is not needed."""
    config = StickyConfig(start=0.3, end=0.3, randomize=False)
    spec = EnvSpec.of(Box((1,)), space)
    inputs = ActorInputs.zeros(spec, N)
    inputs.prev_action["action"][...] = 1
    exploration = make_exploration(config, spec, N, seed=1, clock=lambda: 0)
    assert exploration is not None
    actions = {"action": np.zeros((N, *space.shape), space.dtype)}
    assert not exploration.apply(actions, inputs)["action"].any()
    inputs.time_idx[:] = 1
    got = exploration.apply(actions, inputs)["action"].reshape(N, -1)
    assert (got == got[:, :1]).all() and set(np.unique(got)) == {0, 1}
    assert got[:, 0].mean() == pytest.approx(0.3, abs=0.015)


@pytest.mark.parametrize("space", [Discrete(9), Box((2,), low=-1, high=1), MultiBinary(3)])
def test_repeated_actions_last_for_several_steps(space: Space) -> None:
    """For epsilon of all steps, as a whole; an episode's end ends them."""
    n = 300
    config = RepeatConfig(start=0.4, end=0.4, longest=8, randomize=False)
    spec = EnvSpec.of(Box((1,)), space)
    exploration = make_exploration(config, spec, n, seed=1, clock=lambda: 0)
    assert isinstance(exploration, RepeatedActions)
    inputs = ActorInputs.zeros(spec, n)
    # What the policy does is no random action: it is outside the space.
    own = {"action": np.full((n, *space.shape), 100, space.dtype)}
    if isinstance(space, Box):
        exploration._noisy = lambda _space, action, _epsilon: action  # type: ignore[method-assign]
    shape = (400, n, *space.shape)
    taken = np.stack([exploration.apply(own, inputs)["action"] for _ in range(shape[0])])
    random = (taken != 100).reshape(400, n, -1)
    assert (random == random[..., :1]).all()
    random = random[..., 0]
    assert random[100:].mean() == pytest.approx(0.4, abs=0.03)
    again = (taken[1:] == taken[:-1]).reshape(399, n, -1).all(-1)
    # Of two random steps in succession most are one action: a mean of 3 steps, at most 8.
    assert again[random[1:] & random[:-1]].mean() > 0.5
    for env in range(20):
        runs = "".join("1" if x else "0" for x in again[:, env] & random[1:, env]).split("0")
        assert max(map(len, runs)) <= (24 if isinstance(space, Discrete) else 16)
    held = taken[-1]
    for env in range(n):
        exploration.reset(env)
    begun = exploration.apply(own, inputs)["action"]
    went_on = (begun == held).reshape(n, -1).all(-1) & random[-1]
    assert went_on.sum() < 0.2 * random[-1].sum()


def test_a_plug_in_brings_its_own() -> None:
    """By name, with settings of its own; what does not exist is named."""

    @register_exploration("always")
    class Always(Exploration):
        def __init__(self, *args: Any, action: int = 0, **more: Any) -> None:
            super().__init__(*args, **more)
            self.action = action

        def apply(self, actions: Arrays, inputs: ActorInputs) -> Arrays:
            return {key: np.full_like(a, self.action + self.clock()) for key, a in actions.items()}

    spec = EnvSpec.of(Box((1,)), Discrete(9))

    def made(*settings: str, name: str = "always") -> Exploration:
        config = CustomConfig(name=name, settings=settings)
        exploration = make_exploration(config, spec, 2, seed=0, clock=lambda: 4)
        assert exploration is not None
        return exploration

    inputs = ActorInputs.zeros(spec, 2)
    actions = {"action": np.zeros(2, np.int64)}
    assert made("action=3").apply(actions, inputs)["action"].tolist() == [7, 7]
    assert made().apply(actions, inputs)["action"].tolist() == [4, 4]
    with pytest.raises(ExplorationError, match="never: expected one of .*always.*--plugin"):
        made(name="never")
    with pytest.raises(ExplorationError, match="speed"):
        made("speed=3")
    with pytest.raises(ExplorationError, match="no subclass of Exploration"):
        register_exploration("wrong")(int)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda a: {}, "KeyError"),
        (lambda a: {"action": a["action"] + 0.7}, "expected int64"),
        (lambda a: {"action": a["action"][:1]}, r"expected int64 \(2,\), got int64 \(1,\)"),
    ],
)
def test_what_a_plug_in_answers_is_checked(answer: Any, says: str) -> None:
    """It is named, and no action is cut to an integer."""

    class Mine(Exploration):
        def apply(self, actions: Arrays, inputs: ActorInputs) -> Arrays:
            return answer(actions)  # type: ignore[no-any-return]

    spec = EnvSpec.of(Box((1,)), Discrete(9))
    mine = Mine(spec, 2, seed=0, clock=lambda: 0)
    with pytest.raises(ExplorationError, match=f"exploration Mine: .*{says}"):
        explore(mine, {"action": np.zeros(2, np.int64)}, ActorInputs.zeros(spec, 2))
