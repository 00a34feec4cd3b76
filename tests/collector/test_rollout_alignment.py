"""Every row lands where it belongs: exact strips for each autoreset mode and number of envs."""

import itertools
from collections.abc import Callable
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from collector.episode_recorder import EpisodeSummary
from collector.interface import BrokenEnv, interface_of
from collector.rollout import Rollout
from stepwell.spaces import Box, EnvSpec
from stepwell.trajectory import Trajectory, TrajectoryMetadata
from tests.collector.fake_env import FakeEnv
from tests.collector.scripted_actor import ScriptedActor

LENGTHS = (3, 1, 4, 2)
MODES = ["plain", AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]


def make_envs(mode: object, n: int, make: Callable[[], FakeEnv]) -> list[FakeEnv] | SyncVectorEnv:
    if mode == "plain":
        return [make() for _ in range(n)]
    assert isinstance(mode, AutoresetMode)
    return SyncVectorEnv([make] * n, autoreset_mode=mode)


def play(
    envs: list[FakeEnv] | VectorEnv,  # type: ignore[type-arg]
    episodes: int,
    *,
    make_env: Callable[[], FakeEnv] = FakeEnv,
    max_steps: int = 10_000,
    limit: int = 1_000,
) -> tuple[list[tuple[int, Trajectory]], list[EpisodeSummary]]:
    """All episodes: the action at time t of an episode is its first observation's number + t."""
    kept: list[tuple[int, Trajectory]] = []
    interface = interface_of(envs[0] if isinstance(envs, list) else envs, "Fake-v0")
    actor = ScriptedActor(
        interface, "script", lambda obs, t: np.int64((obs["observation"][0] + t) % 5)
    )
    rollout = Rollout(
        envs,  # type: ignore[arg-type]
        actor,
        interface,
        make_env=make_env,
        seeds=iter(range(100, 100 + episodes)),
        sink=lambda trajectory, index: kept.append((index, trajectory)),
        metadata=TrajectoryMetadata(env="Fake-v0", collector="c0"),
        max_steps=max_steps,
    )
    ended: list[EpisodeSummary] = []
    for _ in range(limit):
        if rollout.done:
            break
        ended += rollout.step()
    assert rollout.done
    return kept, ended


def assert_strip(trajectory: Trajectory, number: int, length: int) -> None:
    """The whole of FakeEnv's episode `number`, row by row."""
    t = np.arange(length + 1)
    obs = np.stack([np.full_like(t, number), t, np.full_like(t, length)], axis=1)
    np.testing.assert_array_equal(trajectory.obs["observation"], obs.astype(np.float32))
    np.testing.assert_array_equal(trajectory.actions["action"], (number + t[:-1]) % 5)
    np.testing.assert_array_equal(trajectory.rewards, 1000 * number + t[:-1])
    assert trajectory.terminated is (number % 2 == 0)
    assert trajectory.truncated is (number % 2 == 1)
    assert trajectory.final_obs_valid
    assert trajectory.metadata.success is (True if number % 2 == 0 else None)
    assert trajectory.metadata.metrics == {"episode": number, "t": length}
    assert trajectory.metadata.policy == "script"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_strips_are_exact(mode: object, n: int) -> None:
    """Final observations, ends and metrics are the episode's own, in every autoreset mode."""
    # SAME_STEP loses the final observation of an environment with one buffer: see below.
    kind = partial(FakeEnv, LENGTHS, copies=mode is AutoresetMode.SAME_STEP)
    kept, ended = play(make_envs(mode, n, kind), 9)
    assert len(kept) == len(ended) == 9
    assert sorted(index for index, _ in kept) == list(range(9))
    # Each environment counts its own episodes: all come in order, none left out.
    by_env: dict[int, list[Trajectory]] = {}
    for episode, (_, trajectory) in zip(ended, kept, strict=True):
        by_env.setdefault(episode.env_index, []).append(trajectory)
    for trajectories in by_env.values():
        for number, trajectory in enumerate(trajectories):
            assert_strip(trajectory, number, LENGTHS[number % len(LENGTHS)])
    for episode, (_, trajectory) in zip(ended, kept, strict=True):
        assert episode.total_reward == trajectory.total_reward
        assert episode.length == len(trajectory)
        assert episode.complete


def test_each_episode_has_its_own_seed() -> None:
    """Seed i is drawn for episode i, and stored with it."""
    envs = [FakeEnv(LENGTHS) for _ in range(3)]
    kept, ended = play(envs, 7)
    assert {index: t.metadata.seed for index, t in kept} == {i: 100 + i for i in range(7)}
    assert sorted(s for env in envs for s in env.seeds if s is not None) == list(range(100, 107))
    assert {e.index: e.seed for e in ended} == {i: 100 + i for i in range(7)}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
def test_a_seed_that_was_not_used_is_not_recorded(mode: AutoresetMode) -> None:
    """Environments that reset themselves: only the first episode of each has a known seed."""
    kept, _ = play(make_envs(mode, 2, lambda: FakeEnv(LENGTHS)), 6)
    seeds = [t.metadata.seed for _, t in sorted(kept, key=lambda pair: pair[0])]
    assert seeds == [100, 101, None, None, None, None]


def test_a_vector_environment_without_autoreset_is_reset_with_our_seeds() -> None:
    """DISABLED: every episode has its own seed, and the environment was reset with it."""
    vector = make_envs(AutoresetMode.DISABLED, 3, lambda: FakeEnv(LENGTHS))
    kept, _ = play(vector, 7)
    assert {index: t.metadata.seed for index, t in kept} == {i: 100 + i for i in range(7)}
    used = [s for env in vector.envs for s in env.seeds if s is not None]  # type: ignore[union-attr]
    assert sorted(used) == list(range(100, 107))


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_idle_sub_environments_get_legal_actions(mode: AutoresetMode) -> None:
    """A vector environment steps all; what has no episode left is stepped, and not recorded."""

    class FromTwo(FakeEnv):
        def __init__(self) -> None:
            super().__init__((1, 6), copies=True)
            self.action_space = gymnasium.spaces.Discrete(5, start=2)

    vector = SyncVectorEnv([FromTwo] * 3, autoreset_mode=mode)
    kept: list[Trajectory] = []
    interface = interface_of(vector, "Fake-v0")
    rollout = Rollout(
        vector,
        ScriptedActor(interface, "s", lambda obs, t: np.int64(2)),
        interface,
        seeds=iter(range(4)),
        sink=lambda t, i: kept.append(t),
    )
    while not rollout.done:
        rollout.step()
    assert [len(t) for t in kept] == [1, 1, 1, 6]
    assert rollout.steps == 9


def test_ignored_actions_of_next_step_are_not_recorded() -> None:
    """NEXT_STEP ignores one action per episode; the executed ones are recorded."""
    env = FakeEnv(LENGTHS)
    kept, _ = play(make_envs(AutoresetMode.NEXT_STEP, 1, lambda: env), 4)
    recorded = np.concatenate([t.actions["action"] for _, t in kept]).tolist()
    assert recorded == env.actions


def test_processes_of_an_async_vector_environment_give_the_same_strips() -> None:
    """AsyncVectorEnv resets in its workers and ships infos by another way: same result."""
    vector = AsyncVectorEnv(
        [lambda: FakeEnv(LENGTHS, copies=True)] * 2,
        autoreset_mode=AutoresetMode.SAME_STEP,
        context="fork",
    )
    try:
        kept, ended = play(vector, 6)
    finally:
        vector.close()
    numbers: dict[int, int] = {}
    for episode, (_, trajectory) in zip(ended, kept, strict=True):
        number = numbers.get(episode.env_index, 0)
        assert_strip(trajectory, number, LENGTHS[number % 4])
        numbers[episode.env_index] = number + 1
    assert len(kept) == 6


def test_a_final_observation_that_same_step_overwrote_is_marked_unknown() -> None:
    """Gymnasium hands out a reference that the reset has written over: never stored as the end."""
    kept, _ = play(make_envs(AutoresetMode.SAME_STEP, 1, lambda: FakeEnv(LENGTHS)), 3)
    for number, (_, trajectory) in enumerate(kept):
        length = LENGTHS[number]
        assert not trajectory.final_obs_valid
        times = [*range(length), length - 1]
        np.testing.assert_array_equal(trajectory.obs["observation"][:, 1], times)
        np.testing.assert_array_equal(trajectory.obs["observation"][:, 0], number)


def test_a_vector_environment_that_hides_its_mode_is_refused() -> None:
    """Where an episode ends must not be guessed."""
    vector = SyncVectorEnv([FakeEnv])
    del vector.metadata["autoreset_mode"]
    with pytest.raises(BrokenEnv, match="autoreset_mode"):
        play(vector, 1)


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
@pytest.mark.parametrize("what", ["broken_at", "nan_at", "broken_resets"])
def test_a_vector_environment_that_fails_says_so(mode: AutoresetMode, what: str) -> None:
    """Which of its sub-environments failed is unknown, so none can be replaced."""
    at = (0,) if what == "broken_resets" else (0, 1)
    vector = make_envs(mode, 2, lambda: FakeEnv(LENGTHS, **{what: at}))  # type: ignore[arg-type]
    with pytest.raises(BrokenEnv, match="NaN" if what == "nan_at" else "Fake-v0: .*asked to fail"):
        play(vector, 2)


@pytest.mark.parametrize("n", [1, 2])
def test_long_episodes_become_pieces_that_fit_together(n: int) -> None:
    """7 cut at 3 is 3, 3, 1; 6 is 3, 3 and no empty rest; the end is the last piece's."""
    kept, ended = play([FakeEnv((7, 6, 3)) for _ in range(n)], 3 * n, max_steps=3)
    assert [e.length for e in sorted(ended, key=lambda e: e.index)] == [
        length for length in (7, 6, 3) for _ in range(n)
    ]
    for index, group in itertools.groupby(sorted(kept, key=lambda p: p[0]), key=lambda p: p[0]):
        pieces = [t for _, t in group]
        episode = next(e for e in ended if e.index == index)
        expected = {7: [3, 3, 1], 6: [3, 3], 3: [3]}[episode.length]
        assert [len(p) for p in pieces] == expected
        assert [p.metadata.first_step for p in pieces] == [3 * i for i in range(len(pieces))]
        assert all(not p.terminated and not p.truncated for p in pieces[:-1])
        assert pieces[-1].terminated or pieces[-1].truncated
        assert (pieces[0].metadata.episode_id == "") is (len(pieces) == 1)
        assert len({p.metadata.episode_id for p in pieces}) == 1
        for a, b in itertools.pairwise(pieces):
            np.testing.assert_array_equal(a.obs["observation"][-1], b.obs["observation"][0])
        assert sum(p.total_reward for p in pieces) == episode.total_reward
        assert all(p.metadata.metrics == {} for p in pieces[:-1])
        assert pieces[-1].metadata.metrics["t"] == episode.length


@pytest.mark.parametrize("nan", [False, True], ids=["raises", "answers NaN"])
def test_a_broken_environment_ends_its_episode_and_no_other(nan: bool) -> None:
    """Flagged, truncated before the failure, rebuilt; the neighbour plays on undisturbed."""
    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        first = not made
        at = (1, 2) if first else None
        env = FakeEnv((4,), broken_at=None if nan else at, nan_at=at if nan else None)
        made.append(env)
        return env

    kept, ended = play([make(), make()], 6, make_env=make)
    broken = [e for e in ended if not e.complete]
    assert [(e.env_index, e.length, e.tags) for e in broken] == [(0, 2, ("broken",))]
    (trajectory,) = [t for _, t in kept if t.metadata.tags]
    assert trajectory.metadata.tags == ("broken",)
    assert trajectory.truncated and not trajectory.terminated
    np.testing.assert_array_equal(trajectory.obs["observation"][:, 1], [0, 1, 2])
    assert len(made) == 3 and made[0].closed
    assert len(ended) == 6


def test_a_reset_that_fails_is_tried_in_a_fresh_environment() -> None:
    """Nothing was recorded yet, so nothing is stored; the next seed is played."""
    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv((2,), broken_resets=() if made else (1,)))
        return made[-1]

    kept, ended = play([make()], 4, make_env=make)
    assert [t.metadata.seed for _, t in kept] == [100, 102, 103]
    assert all(e.complete for e in ended) and len(made) == 2


def test_an_environment_that_always_fails_is_given_up_with_its_last_error() -> None:
    """No endless loop of rebuilding."""

    def make() -> FakeEnv:
        return FakeEnv(broken_at=(0, 0))

    with pytest.raises(BrokenEnv, match="10 times in a row.*asked to fail"):
        play([make()], 1000, make_env=make)


def test_interrupting_keeps_what_was_played() -> None:
    """A stopped collector hands over its unfinished episodes as truncated ones with a tag."""
    kept: list[Trajectory] = []
    interface = interface_of(FakeEnv(), "Fake-v0")
    rollout = Rollout(
        [FakeEnv((50,)), FakeEnv((50,))],
        ScriptedActor(interface, "s", lambda obs, t: 0),
        interface,
        make_env=FakeEnv,
        seeds=itertools.repeat(None),
        sink=lambda t, i: kept.append(t),
    )
    for _ in range(5):
        rollout.step()
    ended = rollout.interrupt()
    assert [(len(t), t.truncated, t.metadata.tags) for t in kept] == [
        (5, True, ("interrupted",)),
        (5, True, ("interrupted",)),
    ]
    assert [e.complete for e in ended] == [False, False] and rollout.done


def test_both_flags_at_once_mean_that_the_task_ended() -> None:
    """A time limit in the very step that solved the task cut nothing short."""

    class Both(FakeEnv):
        def step(self, action):  # type: ignore[no-untyped-def]
            obs, reward, terminated, truncated, info = super().step(action)
            over = terminated or truncated
            return obs, reward, over, over, info

    kept, _ = play([Both((2,))], 2)
    assert [(t.terminated, t.truncated) for _, t in kept] == [(True, False)] * 2


def test_the_recorded_action_is_the_executed_one() -> None:
    """An action beyond the bounds is clipped before it is executed and recorded."""
    executed: list[float] = []

    class Wide(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)
        action_space = gymnasium.spaces.Box(-0.5, 0.5, (1,), np.float32)

        def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
            return np.zeros(1), {}

        def step(self, action):  # type: ignore[no-untyped-def]
            assert self.action_space.contains(action)
            executed.append(float(action[0]))
            return np.zeros(1), 0.0, len(executed) == 3, False, {}

    interface = interface_of(Wide(), "Wide-v0")
    kept: list[Trajectory] = []
    rollout = Rollout(
        [Wide()],
        ScriptedActor(interface, "s", lambda obs, t: np.array([t - 1.0], np.float32)),
        interface,
        make_env=Wide,
        seeds=iter([0]),
        sink=lambda t, i: kept.append(t),
    )
    while not rollout.done:
        rollout.step()
    assert executed == [-0.5, 0.0, 0.5]
    np.testing.assert_array_equal(kept[0].actions["action"][:, 0], np.float32(executed))
    assert kept[0].obs["observation"].dtype == np.float32


def test_infos_of_an_imported_dataset_are_kept_where_reported_and_nan_where_not() -> None:
    """A dataset made from a file may want a simulator's state that this environment never tells."""
    interface = interface_of(FakeEnv(), "Fake-v0")
    spec = EnvSpec.of(
        interface.spec.observations,
        interface.spec.actions,
        infos={"log/t": Box(()), "qpos": Box((2,), "float64")},
    )
    kept: list[Trajectory] = []
    fitted = interface.for_dataset(spec, "d")
    rollout = Rollout(
        [FakeEnv((5,))],
        ScriptedActor(fitted, "s", lambda obs, t: 0),
        fitted,
        make_env=FakeEnv,
        seeds=iter([0]),
        sink=lambda t, _: kept.append(t),
        max_steps=3,
    )
    while not rollout.done:
        rollout.step()
    for trajectory in kept:
        trajectory.check(fitted.spec)
        assert np.isnan(trajectory.infos["qpos"]).all()
    np.testing.assert_array_equal(kept[0].infos["log/t"], [np.nan, 1, 2, 3])
    np.testing.assert_array_equal(kept[1].infos["log/t"], [3, 4, 5])


@pytest.mark.parametrize(
    "info",
    [{1: 2, ("a",): 3}, None, [("log/x", 1)], {"log/x": 10**400, "log/y": object()}],
    ids=["keys that are no words", "none", "a list", "values that are no numbers"],
)
def test_an_info_that_is_no_info_harms_nobody(info: object) -> None:
    """Strangers report the strangest things; what was played is kept all the same."""

    class Odd(FakeEnv):
        def reset(self, **options):  # type: ignore[no-untyped-def]
            return super().reset(**options)[0], info

        def step(self, action):  # type: ignore[no-untyped-def]
            return (*super().step(action)[:4], info)

    kept, ended = play([Odd(LENGTHS)], 3)
    assert [e.complete for e in ended] == [True] * 3
    assert all(t.metadata.metrics == {} for _, t in kept)
