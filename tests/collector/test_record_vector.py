"""record() of a vector environment: the episodes of each sub-environment, in any autoreset mode."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import TransformReward
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from collector.record import record
from stepwell import Client, InvalidTrajectory
from tests.collector.fake_env import FakeEnv

LENGTHS = ((3, 1), (2, 4))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_each_sub_environment_has_its_episodes(
    client: Client, name: str, tmp_path: Path, mode: AutoresetMode
) -> None:
    made = [partial(FakeEnv, lengths, copies=True) for lengths in LENGTHS]
    vector = SyncVectorEnv(made, autoreset_mode=mode)
    env = record(vector, name, client, policy="script", env_id="Fake-v0", outbox=tmp_path)
    env.reset(seed=7)
    over = np.zeros(2, np.bool_)
    for time in range(8):
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over})
        _, _, terminated, truncated, _ = env.step(np.array([time % 5, (time + 1) % 5]))
        over = terminated | truncated
    env.close()
    env.close()  # does nothing
    client.flush(name)
    found = client.trajectories(name, order="seq", limit=100).items
    for number, lengths in enumerate(LENGTHS):
        # FakeEnv's reward is 1000 times the number of the episode, plus the time.
        mine = []
        for info in found:
            steps = client.steps(info.id)
            if steps.obs["observation"][0, 2] == lengths[int(steps.obs["observation"][0, 0]) % 2]:
                mine.append((info, steps))
        whole = [(i, s) for i, s in mine if "interrupted" not in i.tags]
        assert [i.length for i, _ in whole] == [lengths[k % 2] for k in range(len(whole))]
        for episode, (info, steps) in enumerate(whole):
            assert steps.obs["observation"][:, 0].tolist() == [episode] * (info.length + 1)
            assert steps.obs["observation"][:, 1].tolist() == list(range(info.length + 1))
            assert steps.rewards.tolist() == [1000 * episode + t for t in range(info.length)]
            assert (info.terminated, info.truncated) == (episode % 2 == 0, episode % 2 == 1)
            assert info.seed == (7 + number if episode == 0 else None)
        assert len(mine) - len(whole) <= 1  # the one that ran when it was closed
    assert {i.policy for i in found} == {"script"}


def test_a_failure_keeps_all_running_episodes(client: Client, name: str, tmp_path: Path) -> None:
    """What is played of them after it is not recorded, which is said once."""
    made = [partial(FakeEnv, (9,)), partial(FakeEnv, (9,), broken_at=(0, 2))]
    vector = SyncVectorEnv(made)
    env = record(vector, name, client, env_id="Fake-v0", outbox=tmp_path)
    env.reset()
    with pytest.raises(RuntimeError, match="asked to fail"):
        for _ in range(4):
            env.step(np.zeros(2, np.int64))
    vector.envs[1].broken_at = None  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="not recorded until the next reset") as caught:
        for _ in range(2):
            env.step(np.zeros(2, np.int64))
    assert len(caught) == 1 and caught[0].filename == __file__
    env.close()
    found = client.trajectories(name, limit=100).items
    assert [(i.length, i.truncated, i.tags) for i in found] == [(2, True, ["broken"])] * 2


class OneBuffer(gymnasium.Env):  # type: ignore[type-arg]
    """Writes each position into the same array; the goal never changes. Episodes of three steps."""

    observation_space = spaces.Dict(
        position=spaces.Box(-10, 10, (2,), np.float32), goal=spaces.Box(0, 1, (1,), np.float32)
    )
    action_space = spaces.Discrete(2)

    def __init__(self, copies: bool) -> None:
        self._position, self._copies, self._time = np.zeros(2, np.float32), copies, 0

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self._time = 0
        return self._observed(), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self._time += 1
        return self._observed(), 1.0, self._time == 3, False, {}

    def _observed(self):  # type: ignore[no-untyped-def]
        self._position[:] = self._time
        position = self._position.copy() if self._copies else self._position
        return {"position": position, "goal": np.ones(1, np.float32)}


@pytest.mark.parametrize("copies", [True, False])
def test_a_final_observation_that_was_overwritten_in_part_is_unknown(
    client: Client, name: str, tmp_path: Path, copies: bool
) -> None:
    vector = SyncVectorEnv([partial(OneBuffer, copies)], autoreset_mode=AutoresetMode.SAME_STEP)
    env = record(vector, name, client, env_id="Buffer-v0", outbox=tmp_path)
    env.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            env.step(np.zeros(1, np.int64))
    env.close()
    said = [str(w.message) for w in caught if "final observation" in str(w.message)]
    assert len(said) == (0 if copies else 1)
    client.flush(name)
    for info in client.trajectories(name, order="seq").items[:2]:
        steps = client.steps(info.id)
        assert steps.final_obs_valid is copies
        if copies:
            assert steps.obs["position"][-1].tolist() == [3, 3]


class FixedStart(gymnasium.Env):  # type: ignore[type-arg]
    """Episodes begin at 0 and go along `path`. `parts`: in a dict, beside a number."""

    action_space = spaces.Discrete(2)

    def __init__(self, path: Sequence[float], *, copies: bool, parts: bool) -> None:
        box = spaces.Box(-9, 9, (2,), np.float32)
        self.observation_space = spaces.Dict(at=box, count=box) if parts else box
        self._at, self._path, self._time = np.zeros(2, np.float32), path, 0
        self._count = 0
        self._copies, self._parts = copies, parts

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self._time = 0
        return self._observed(0.0), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self._time += 1
        over = self._time == len(self._path)
        return self._observed(self._path[self._time - 1]), 1.0, over, False, {}

    def _observed(self, value: float):  # type: ignore[no-untyped-def]
        self._at[:] = value
        self._count += 1
        at = self._at.copy() if self._copies else self._at
        return {"at": at, "count": np.full(2, self._count % 9, np.float32)} if self._parts else at


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize(
    ("path", "copies"), [([5.0], False), ([5.0], True), ([3.0, 0.0], False), ([3.0, 0.0], True)]
)
def test_a_final_observation_is_unknown_where_the_reset_wrote_into_its_memory(
    client: Client, name: str, tmp_path: Path, path: list[float], copies: bool, parts: bool
) -> None:
    """Not by its values: it may be that of the start, and so may be the one before it."""
    made = partial(FixedStart, path, copies=copies, parts=parts)
    vector = SyncVectorEnv([made] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env = record(vector, name, client, env_id="Fixed-v0", outbox=tmp_path)
    env.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in path:
            env.step(np.zeros(2, np.int64))
    env.close()
    said = [w for w in caught if "has overwritten it in its reset" in str(w.message)]
    assert len(said) == (0 if copies else 1)
    client.flush(name)
    for info in client.trajectories(name, order="seq").items:
        steps = client.steps(info.id)
        assert steps.final_obs_valid is copies
        if copies:
            assert steps.obs["at" if parts else "observation"][-1].tolist() == [path[-1]] * 2


def test_without_the_final_observation_in_the_infos_it_is_unknown(
    client: Client, name: str, tmp_path: Path
) -> None:
    class Forgets(VectorWrapper):
        def step(self, actions):  # type: ignore[no-untyped-def]
            *returned, infos = super().step(actions)
            return (*returned, {k: v for k, v in infos.items() if "final_obs" not in k})

    vector = SyncVectorEnv([partial(OneBuffer, True)], autoreset_mode=AutoresetMode.SAME_STEP)
    env = record(Forgets(vector), name, client, env_id="Buffer-v0", outbox=tmp_path)
    env.reset()
    with pytest.warns(UserWarning, match="it is not in the infos"):
        for _ in range(4):
            env.step(np.zeros(1, np.int64))
    env.close()
    client.flush(name)
    assert not client.steps(client.trajectories(name, order="seq").items[0].id).final_obs_valid


class Batched(VectorEnv):  # type: ignore[type-arg]
    """Two environments as batched simulators are: episodes of three steps, the infos of each step
    as arrays. They may be stepped beyond an end."""

    num_envs = 2
    single_observation_space = spaces.Box(-9, 9, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-9, 9, (2, 1), np.float32)
    action_space = spaces.MultiDiscrete([2, 2])

    def __init__(self, mode: AutoresetMode):
        self.metadata = {"autoreset_mode": mode}

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]  # noqa: ARG002
        self.t = 0
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):  # type: ignore[no-untyped-def]  # noqa: ARG002
        self.t += 1
        over = np.full(2, self.t % 3 == 0)
        obs, infos = np.full((2, 1), self.t), {"fuel": np.full(2, 10.0 * self.t), "success": over}
        if over[0] and self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            infos |= {"final_obs": obs, "_final_obs": over}
            self.t, obs = 0, np.zeros((2, 1))
        return obs.astype(np.float32), np.ones(2), over, np.zeros(2, np.bool_), infos


def test_infos_of_an_end_without_final_info_are_not_those_of_the_next_episode(
    client: Client, name: str, tmp_path: Path
) -> None:
    inner = Batched(AutoresetMode.SAME_STEP)
    env = record(inner, name, client, env_id="Batched-v0", infos=["fuel"], outbox=tmp_path)
    env.reset()
    with pytest.warns(UserWarning, match="has no info.'final_info'.*as those of the end") as caught:
        for _ in range(6):
            env.step(np.zeros(2, np.int64))
    env.close()
    assert len(caught) == 1
    client.flush(name)
    found = client.trajectories(name).items
    assert [(i.length, i.success) for i in found] == [(3, True)] * 4
    for info in found:
        np.testing.assert_equal(client.steps(info.id).infos["fuel"], [np.nan, 10, 20, 30])


def test_steps_after_an_end_without_a_reset_are_said_once(
    client: Client, name: str, tmp_path: Path
) -> None:
    inner = Batched(AutoresetMode.DISABLED)
    env = record(inner, name, client, env_id="Batched-v0", outbox=tmp_path)
    env.reset()
    with pytest.warns(UserWarning, match="not recorded until the next reset") as caught:
        for _ in range(9):
            env.step(np.zeros(2, np.int64))
    env.close()
    assert len(caught) == 1
    client.flush(name)
    assert [i.length for i in client.trajectories(name).items] == [3, 3]


class Undeclared(Batched):
    """It returns, and takes, a member that its spaces do not declare."""

    single_observation_space = spaces.Dict(a=Batched.single_observation_space)  # type: ignore[assignment]
    single_action_space = spaces.Dict(a=Batched.single_action_space)  # type: ignore[assignment]
    observation_space = spaces.Dict(a=Batched.observation_space)  # type: ignore[assignment]
    action_space = spaces.Dict(a=Batched.action_space)  # type: ignore[assignment]

    def reset(self, **options):  # type: ignore[no-untyped-def]
        obs, infos = super().reset(**options)
        return {"a": obs, "goal": obs}, infos

    def step(self, actions):  # type: ignore[no-untyped-def]
        obs, *rest = super().step(actions)
        return {"a": obs, "goal": obs}, *rest


def test_members_that_a_space_does_not_declare_are_said_once(
    client: Client, name: str, tmp_path: Path
) -> None:
    inner = Undeclared(AutoresetMode.DISABLED)
    env = record(inner, name, client, env_id="Batched-v0", outbox=tmp_path)
    with pytest.warns(UserWarning, match="have members that their space") as caught:
        env.reset()
        for _ in range(3):
            env.step({"a": np.zeros(2, np.int64), "b": np.zeros(2, np.int64)})
    env.close()
    assert [str(w.message).split()[0] for w in caught] == ["observations", "actions"]
    client.flush(name)
    assert [i.length for i in client.trajectories(name).items] == [3, 3]


def test_statistics_of_an_end_are_not_those_of_the_next_episode(
    client: Client, name: str, tmp_path: Path
) -> None:
    made = [partial(FakeEnv, (3, 1), copies=True)]
    vector = SyncVectorEnv(made, autoreset_mode=AutoresetMode.SAME_STEP)
    inner = RecordEpisodeStatistics(vector)
    env = record(inner, name, client, env_id="Fake-v0", outbox=tmp_path)
    env.reset()
    for _ in range(7):
        env.step(np.zeros(1, np.int64))
    env.close()
    client.flush(name)
    found = client.trajectories(name, order="seq").items
    assert [i.metrics.get("episode_length") for i in found] == [3, 1, 3]


def test_episodes_have_the_name_of_the_environments_inside(
    client: Client, name: str, tmp_path: Path
) -> None:
    vector = SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 2)
    env = record(vector, name, client, outbox=tmp_path)
    with pytest.warns(UserWarning) as caught:
        env.reset(seed=2**63)
    assert [str(warning.message) for warning in caught] == [
        "seeds of more than 63 bits are not stored with their episodes: 9223372036854775808, "
        "9223372036854775809"
    ]
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="more than 63 bits"):
        env.reset(seed=2**63 - 1)  # one seed fits, the next does not
    for _ in range(40):
        env.step(env.action_space.sample())
    env.close()
    client.flush(name)
    found = client.trajectories(name, order="seq", limit=100).items
    assert {info.env for info in found} == {"CartPole-v1"}
    assert client.spec(name).env == "CartPole-v1"
    assert {info.seed for info in found} <= {2**63 - 1, None}


def half_rewards() -> gymnasium.Env:
    """An environment whose spec cannot be pickled."""
    return TransformReward(gymnasium.make("CartPole-v1"), lambda reward: reward / 2)


def test_environments_in_other_processes_say_their_id(
    client: Client, name: str, tmp_path: Path
) -> None:
    env = record(AsyncVectorEnv([half_rewards] * 2), name, client, outbox=tmp_path)
    env.reset()
    env.step(env.action_space.sample())
    env.close()
    assert client.spec(name).env == "CartPole-v1"
    own = AsyncVectorEnv([partial(OneBuffer, True)] * 2)
    with pytest.warns(UserWarning, match="those of 'AsyncVectorEnv', because"):
        env = record(own, f"{name}-own", client, outbox=tmp_path / "own")
    env.close()


@pytest.mark.parametrize("actions", [np.zeros(1, np.int64), np.zeros(3, np.int64)])
def test_actions_for_another_number_of_environments_are_refused(
    client: Client, name: str, tmp_path: Path, actions: np.ndarray
) -> None:
    vector = SyncVectorEnv([partial(OneBuffer, True)] * 2)
    env = record(vector, name, client, env_id="Buffer-v0", outbox=tmp_path)
    env.reset()
    says = f"expected actions for 2 environments.*got actions for {len(actions)}"
    with pytest.raises(InvalidTrajectory, match=says):
        env.step(actions)
    env.close()


def test_infos_of_a_vector_environment_that_are_none_harm_nothing(
    client: Client, name: str, tmp_path: Path
) -> None:
    class Lists(VectorWrapper):
        def step(self, actions):  # type: ignore[no-untyped-def]
            *returned, _ = super().step(actions)
            return (*returned, ["no dict"])

    vector = Lists(SyncVectorEnv([partial(OneBuffer, True)]))
    env = record(vector, name, client, env_id="Buffer-v0", outbox=tmp_path)
    env.reset()
    for _ in range(3):
        env.step(np.zeros(1, np.int64))
    env.close()
    client.flush(name)
    (info,) = client.trajectories(name).items
    assert info.length == 3 and info.tags == []
