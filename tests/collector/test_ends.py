"""Ends of episodes as environments return them: recorded as bools, or refused at the step."""

import contextlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from rich.console import Console

from collector.builtin.attempts import Attempts
from collector.collect import collect
from collector.config import CollectConfig
from collector.evaluate import evaluate_policy
from collector.interface import BrokenEnv, interface_of
from collector.policy_actor import RandomActor
from collector.record import record
from collector.rollout import Rollout
from stepwell import Client, InvalidTrajectory
from tests.collector.fake_env import FakeEnv
from tests.conftest import ServiceProcess
from tests.flag_values import FALSE, NEITHER, NOTHING, TRUE

RUNNING = {**FALSE, **NOTHING}
NAMES = ("terminated", "truncated")


class Ends(gymnasium.Env[Any, Any]):
    """Two steps; `ends` are the flags of the last, `running` that of all others."""

    metadata = {"render_modes": []}

    def __init__(self, ends: tuple[Any, Any] = (True, False), running: Any = False, n: int = 2):
        self.observation_space = spaces.Box(-9, 9, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.ends, self.running, self.n, self.t = ends, running, n, 0
        self.render_mode = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        self.t += 1
        flags = self.ends if self.t == self.n else (self.running, self.running)
        return np.full(1, self.t, np.float32), 1.0, *flags, {}


def of(name: str, value: Any) -> tuple[Any, Any]:
    """(terminated, truncated): one of them is `value`."""
    return (value, False) if name == "terminated" else (False, value)


def stored(client: Client, dataset: str) -> list[tuple[int, bool, bool, list[str]]]:
    client.flush(dataset)
    found = client.trajectories(dataset, order="seq", limit=200).items
    return [(t.length, t.terminated, t.truncated, t.tags) for t in found]


@pytest.mark.parametrize("flag", NAMES)
def test_every_true_is_recorded(client: Client, name: str, tmp_path: Path, flag: str) -> None:
    """An episode of each, in one recording."""
    inner = Ends()
    env = record(inner, name, client, env_id="Ends-v0", outbox=tmp_path)
    for value in TRUE.values():
        inner.ends = of(flag, value)
        env.reset()
        env.step(0)
        returned = env.step(1)
        assert returned[2 + NAMES.index(flag)] is value  # as the environment returned it
    env.close()
    ends = (2, flag == "terminated", flag == "truncated", [])
    assert stored(client, name) == [ends] * len(TRUE)


def test_every_false_goes_on(client: Client, name: str, tmp_path: Path) -> None:
    inner = Ends(n=3)
    env = record(inner, name, client, env_id="Ends-v0", outbox=tmp_path)
    for value in RUNNING.values():
        inner.running = value
        env.reset()
        for _ in range(3):
            env.step(0)
    env.close()
    assert stored(client, name) == [(3, True, False, [])] * len(RUNNING)


@pytest.mark.parametrize("flag", NAMES)
def test_another_flag_is_refused_in_the_step(
    client: Client, name: str, tmp_path: Path, flag: str
) -> None:
    """By name, and the steps before it are kept."""
    inner = Ends(n=3)
    env = record(inner, name, client, env_id="Ends-v0", outbox=tmp_path)
    for value in NEITHER.values():
        inner.ends = of(flag, value)
        env.reset()
        env.step(0)
        env.step(0)
        with pytest.raises(BrokenEnv, match=f"^{flag}; expected a bool, .*; got .*must return one"):
            env.step(0)
    env.close()
    assert stored(client, name) == [(2, False, True, ["broken"])] * len(NEITHER)


@pytest.mark.parametrize("value", [np.bool_(True), np.array([True]), 1], ids=str)
def test_gymnasiums_own_checker_lets_it_pass(
    client: Client, name: str, tmp_path: Path, value: Any
) -> None:
    """So a recorded environment made by gymnasium.make, with all its wrappers, may return it."""
    gymnasium.register("CheckedEnds-v0", Ends, kwargs={"ends": (value, 0), "running": None})
    made = gymnasium.make("CheckedEnds-v0", max_episode_steps=9)
    del gymnasium.registry["CheckedEnds-v0"]
    env = record(made, name, client, outbox=tmp_path)
    with pytest.warns(UserWarning, match="signal to be a boolean"):
        env.reset()
        env.step(0)
        env.step(0)
    env.close()
    assert stored(client, name) == [(2, True, False, [])]


# --- vector environments --------------------------------------------------------------------------


class VectorEnds(VectorEnv[Any, Any, Any]):
    """Two environments that go on, until `ends` says otherwise: (terminated, truncated)."""

    num_envs = 2

    def __init__(self, mode: AutoresetMode) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-9, 9, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-9, 9, (2, 1), np.float32)
        self.action_space = spaces.MultiDiscrete([2, 2])
        self.ends: tuple[Any, Any] = (np.zeros(2, np.bool_), np.zeros(2, np.bool_))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:  # noqa: ARG002
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> Any:  # noqa: ARG002
        infos: dict[str, Any] = {}
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            infos["final_obs"] = [np.full(1, 2, np.float32)] * 2  # not that of the reset
        return np.ones((2, 1), np.float32), np.ones(2), *self.ends, infos


MANY: list[tuple[Any, Any]] = [
    (np.array([False, True]), None),
    ([False, True], [False, False]),
    ((0, 1), np.zeros(2)),
    (np.array([0.0, 1.0], np.float32), np.zeros(2, np.int64)),
    (np.array([[False], [True]]), np.zeros((2, 1), np.bool_)),
    (np.array([None, np.bool_(True)], object), [None, None]),
]


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("ends", MANY, ids=range(len(MANY)))
def test_flags_of_a_vector_environment(
    client: Client, name: str, tmp_path: Path, mode: AutoresetMode, ends: tuple[Any, Any]
) -> None:
    inner = VectorEnds(mode)
    env = record(inner, name, client, env_id="Ends-v0", outbox=tmp_path)
    env.reset()
    env.step(np.zeros(2, np.int64))
    inner.ends = ends
    env.step(np.zeros(2, np.int64))
    env.close()
    assert sorted(stored(client, name), key=str) == [
        (2, False, True, ["interrupted"]),
        (2, True, False, []),
    ]


@pytest.mark.parametrize("flag", NAMES)
@pytest.mark.parametrize(
    "value",
    [[0, 2], [0.0, 0.5], ["no", "yes"], True, [True], np.zeros(3, np.bool_), [[0, 1], [0, 1]]],
    ids=str,
)
def test_other_flags_of_a_vector_environment_are_refused_in_the_step(
    client: Client, name: str, tmp_path: Path, flag: str, value: Any
) -> None:
    inner = VectorEnds(AutoresetMode.NEXT_STEP)
    env = record(inner, name, client, env_id="Ends-v0", outbox=tmp_path)
    env.reset()
    env.step(np.zeros(2, np.int64))
    inner.ends = of(flag, value) if flag == "terminated" else ([False, False], value)
    if flag == "terminated":
        inner.ends = (value, [False, False])
    with pytest.raises(BrokenEnv, match=rf"^{flag}; expected .* an array of 2 bools$"):
        env.step(np.zeros(2, np.int64))
    env.close()
    assert stored(client, name) == [(1, False, True, ["broken"])] * 2


# --- collectors and evaluations -------------------------------------------------------------------


def play(env: Ends, seeds: Sequence[int]) -> tuple[Rollout, list[Any]]:
    kept: list[Any] = []
    interface = interface_of(env, "Ends-v0")
    rollout = Rollout(
        [env],
        RandomActor(interface, 1),
        interface,
        make_env=lambda: env,
        seeds=iter(seeds),
        sink=lambda trajectory, _: kept.append(trajectory),
    )
    while not rollout.done:
        rollout.step()
    return rollout, kept


@pytest.mark.parametrize("flag", NAMES)
@pytest.mark.parametrize("value", TRUE.values(), ids=TRUE)
def test_a_collector_takes_every_true(flag: str, value: Any) -> None:
    for running in RUNNING.values():
        _, (one,) = play(Ends(of(flag, value), running), [1])
        assert (one.terminated, one.truncated) == (flag == "terminated", flag == "truncated")
        assert len(one) == 2


@pytest.mark.parametrize("flag", NAMES)
@pytest.mark.parametrize("value", NEITHER.values(), ids=NEITHER)
def test_a_collector_refuses_another_flag_by_name(flag: str, value: Any) -> None:
    rollout, (one,) = play(Ends(of(flag, value)), [1])
    assert rollout.broken.total == 1 and f"{flag}; expected a bool" in rollout.broken.last
    assert len(one) == 1 and one.metadata.tags == ("broken",)


def test_an_evaluation_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collector.evaluate.make", lambda *_: Ends((np.array([1.0]), None)))
    result = evaluate_policy(RandomActor, "Ends-v0", [1, 2])
    assert result.returns == [2.0, 2.0]
    monkeypatch.setattr("collector.evaluate.make", lambda *_: Ends((2, None)))
    with pytest.raises(BrokenEnv, match="terminated; expected a bool"):
        evaluate_policy(RandomActor, "Ends-v0", [1, 2])


@pytest.mark.parametrize("value", TRUE.values(), ids=TRUE)
def test_several_attempts_end_by_every_true(value: Any) -> None:
    env = Attempts(Ends((value, None), running=None), 2)
    env.reset(seed=1)
    ends = [env.step(0)[2] for _ in range(5)]  # the third step only begins the second attempt
    assert ends == [False, False, False, False, True]
    env = Attempts(Ends((2, None)), 2)
    env.reset(seed=1)
    env.step(0)
    with pytest.raises(InvalidTrajectory, match="terminated; expected a bool"):
        env.step(0)


# --- actions that the dataset cannot hold --------------------------------------------------------


class Moves(Ends):
    """Takes any action; `space` is what it declares."""

    def __init__(self, space: Any) -> None:
        super().__init__(n=9)
        self.action_space = space


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Box(-1, 1, (2,)), np.array([0.5, -1.0]), np.array([0.5, -1.5])),
        (spaces.Box(-1, 1, (1,)), np.array([0.5]), np.array([np.nan])),
        (spaces.Discrete(3, start=1), 3, 0),
        (spaces.Discrete(3), np.array([2]), 0.5),
        (spaces.MultiDiscrete([3, 2], start=[4, -7]), [4, -6], [0, 1]),
        (spaces.Dict({"a": spaces.MultiBinary(2)}), {"a": [0, 1]}, {"a": [0, 2]}),
    ],
    ids=str,
)
def test_an_action_outside_is_refused_before_the_step(
    client: Client, name: str, tmp_path: Path, space: Any, good: Any, bad: Any
) -> None:
    """And the episode goes on: it was refused at its end, and lost as a whole."""
    inner = Moves(space)
    env = record(inner, name, client, env_id="Moves-v0", outbox=tmp_path)
    env.reset()
    env.step(good)
    with pytest.raises(InvalidTrajectory, match=r"^actions\[.*clip or round it first"):
        env.step(bad)
    assert inner.t == 1
    env.step(good)
    env.close()
    assert stored(client, name) == [(2, False, True, ["interrupted"])]


def test_actions_of_a_vector_environment_that_only_resets_may_be_anything(
    client: Client, name: str, tmp_path: Path
) -> None:
    inner = VectorEnds(AutoresetMode.NEXT_STEP)
    env = record(inner, name, client, env_id="Ends-v0", outbox=tmp_path)
    env.reset()
    inner.ends = ([True, False], [False, False])
    env.step(np.zeros(2, np.int64))
    inner.ends = ([False, False], None)
    env.step(np.array([7, 1]))
    with pytest.raises(InvalidTrajectory, match=r"actions\[action\]"):
        env.step(np.array([7, 1]))
    env.close()
    assert sorted(stored(client, name)) == [(1, True, False, []), (2, False, True, ["interrupted"])]


# --- success, and float64 in place of float32 ----------------------------------------------------


@pytest.mark.parametrize(
    ("value", "success"),
    [
        *[(value, True) for value in TRUE.values()],
        *[(value, False) for value in FALSE.values()],
        *[(value, None) for value in (None, 0.5, "no", "true", 2, float("nan"), {})],
        (np.array([False, True]), True),  # the last of several
    ],
    ids=str,
)
def test_the_success_that_an_environment_reports(value: Any, success: bool | None) -> None:
    class Reports(Ends):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"success": value}

    _, (one,) = play(Reports(), [1])
    assert one.metadata.success is success


class Fine(Ends):
    """Observations and rewards with more digits than float32 has."""

    def __init__(self, fine: float = 0.1) -> None:
        super().__init__(n=3)
        self.observation_space = spaces.Box(-9, 9, (1,), np.float64)
        self.action_space = spaces.Box(-1, 1, (1,), np.float64)
        self.fine = fine

    def reset(self, **_: Any) -> Any:
        super().reset()
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        _, _, *rest = super().step(action)
        return np.full(1, self.t * self.fine), self.fine, *rest


def test_recorded_values_that_lose_digits_warn_once(
    client: Client, name: str, tmp_path: Path
) -> None:
    env = record(Fine(), name, client, env_id="Fine-v0", outbox=tmp_path)
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            env.reset()
            for _ in range(3):
                env.step(np.array([0.1]))
        env.close()
    assert [str(warning.message) for warning in caught] == [
        f"{what}: float64 stored as float32, which rounds them"
        for what in ("actions", "rewards", "observations")
    ]


def test_recorded_values_that_keep_all_digits_do_not_warn(
    client: Client, name: str, tmp_path: Path
) -> None:
    """Warnings are errors in tests."""
    env = record(Fine(0.5), name, client, env_id="Fine-v0", outbox=tmp_path)
    env.reset()
    env.step([0.5])
    env.close()
    assert stored(client, name) == [(1, False, True, ["interrupted"])]


def test_a_collector_says_once_what_loses_digits(service: ServiceProcess, name: str) -> None:
    gymnasium.register("Fine-v0", Fine)
    text = io.StringIO()
    config = CollectConfig(
        env="Fine-v0", dataset=name, random=True, episodes=2, envs=2, url=service.url
    )
    collect(config, console=Console(file=text, width=200))
    del gymnasium.registry["Fine-v0"]
    notes = [line for line in text.getvalue().splitlines() if line.startswith("note: ")]
    assert notes == [
        f"note: {what}: float64 stored as float32, which rounds them"
        for what in ("rewards", "observations")  # the actions are rounded before they are executed
    ]


def test_an_environment_that_resets_itself_is_recorded_to_its_last_episode(
    client: Client, name: str, tmp_path: Path
) -> None:
    env = record(
        gymnasium.wrappers.Autoreset(FakeEnv((3,))), name, client, env_id="Fake-v0", outbox=tmp_path
    )
    env.reset(seed=3)
    ends = 0
    for _ in range(40):
        *_, terminated, truncated, _ = env.step(np.int64(0))
        ends += terminated or truncated
    env.close()
    client.flush(name)
    found = client.trajectories(name, order="seq", limit=100).items
    whole = [info for info in found if "interrupted" not in info.tags]
    assert ends > 2 and len(whole) == ends
    assert len({info.length for info in whole}) == 1, "the reset is no transition"
    assert [info.seed for info in whole] == [3, *[None] * (ends - 1)]


def test_such_an_environment_goes_on_after_an_episode_that_broke(
    client: Client, name: str, tmp_path: Path
) -> None:
    class Nan(FakeEnv):
        """The second step of the second episode returns NaN."""

        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            bad = obs[0] == 1 and obs[1] == 2
            return obs * np.float32(np.nan) if bad else obs, *rest

    inner = gymnasium.wrappers.Autoreset(Nan((3,)))
    env = record(inner, name, client, env_id="Fake-v0", outbox=tmp_path)
    env.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(16):
            with contextlib.suppress(BrokenEnv):
                env.step(np.int64(0))
    env.close()
    client.flush(name)
    found = client.trajectories(name, order="seq", limit=100).items
    assert [(info.length, info.tags) for info in found] == [
        *((3, []), (1, ["broken"]), (3, []), (3, [])),
    ]


def test_steps_without_a_reset_are_said_once(client: Client, name: str, tmp_path: Path) -> None:
    env = record(Fine(0.5), name, client, env_id="Fine-v0", outbox=tmp_path)
    env.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            env.step(np.array([0.5]))
    env.close()
    assert len([w for w in caught if "until the next reset" in str(w.message)]) == 1


def test_a_seed_that_cannot_be_stored_loses_no_episode(
    client: Client, name: str, tmp_path: Path
) -> None:
    env = record(FakeEnv((3,)), name, client, env_id="Fake-v0", outbox=tmp_path)
    with pytest.warns(UserWarning, match="more than 63 bits"):
        env.reset(seed=2**63 + 5)
    over = False
    while not over:
        *_, terminated, truncated, _ = env.step(np.int64(0))
        over = terminated or truncated
    env.close()
    client.flush(name)
    (info,) = client.trajectories(name).items
    assert info.seed is None and info.tags == []


MASKED = np.ma.array([1.0, 0.0], mask=[False, True])


def test_masked_elements_are_refused() -> None:
    """Numpy would take what is beneath the mask."""
    for space in (spaces.Box(-9, 9, (2,)), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2)):
        env = Ends()
        env.observation_space = env.action_space = space  # type: ignore[assignment]
        interface = interface_of(env, "Ends-v0", infos=["fuel"])
        for given in (MASKED, [1.0, np.ma.masked]):
            with pytest.raises(BrokenEnv, match="no masked elements"):
                interface.encode_observation(given)
            with pytest.raises(InvalidTrajectory, match="no masked elements"):
                interface.encode_action(given)
    with pytest.raises(BrokenEnv, match="the reward is masked"):
        interface.encode_reward(np.ma.masked)
    for ends in ((np.ma.masked, False), (False, np.ma.array([True], mask=[True]))):
        with pytest.raises(BrokenEnv, match="no masked elements"):
            interface.encode_end(*ends)
    with pytest.raises(BrokenEnv, match="no masked elements"):
        interface.encode_ends("truncated", MASKED, 2)
    assert np.isnan(interface.encode_info({"fuel": np.ma.masked})["fuel"])


def test_masked_metrics_and_successes_are_none() -> None:
    class Reports(Ends):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return *rest, {"log/a": np.ma.masked, "log/b": 2, "success": np.ma.masked}

    _, (one,) = play(Reports(), [1])
    assert (dict(one.metadata.metrics), one.metadata.success) == ({"b": 2.0}, None)


@pytest.mark.parametrize("reward", ["1", b"1", np.complex64(1), 10**400], ids=type)
def test_a_reward_that_is_no_number_is_refused(reward: Any) -> None:
    with pytest.raises(BrokenEnv, match="the reward is .*; one number is needed"):
        interface_of(Ends(), "Ends-v0").encode_reward(reward)


def test_texts_are_no_observation_and_no_action() -> None:
    """numpy would make numbers of them."""
    interface = interface_of(Fine(), "Fine-v0")
    with pytest.raises(BrokenEnv, match="observation 'observation' .*'1'.* is no number"):
        interface.encode_observation(["1"])
    with pytest.raises(InvalidTrajectory, match=r"actions\[action\].*'1'.* is no number"):
        interface.encode_action(["1"])


@pytest.mark.parametrize(
    "reward", [2**24 + 1, np.int64(2**24 + 1), np.array([2**24 + 1]), 2**64 + 1]
)
def test_an_integer_reward_that_loses_digits_is_said(reward: Any) -> None:
    said: list[str] = []
    replace(interface_of(Ends(), "Ends-v0"), note=said.append).encode_reward(reward)
    kind = "object" if isinstance(reward, int) and reward > 2**63 else "int64"
    assert said == [f"rewards: {kind} stored as float32, which rounds them"]
