"""`--infos` keeps numbers of an environment's info, beside the observation they came with."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from rich.console import Console

from collector.collect import collect
from collector.config import CollectConfig
from collector.envs import make
from collector.interface import interface_of
from collector.record import record
from collector.registered_run import open_dataset
from collector.vector_env import _info_of
from stepwell import Client
from stepwell.errors import InvalidSpace, InvalidTrajectory, NotFound
from stepwell.spaces import Box
from tests.collector.fake_env import FakeEnv
from tests.conftest import ServiceProcess
from trainer.data import stream

LENGTHS = (3, 1, 4)


class Telling(FakeEnv):
    """Steps of odd number are good; `reset` says nothing of the kind."""

    def __init__(self) -> None:
        super().__init__(LENGTHS)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        said = {"good": np.bool_(int(reward) % 2), "words": "none of which is a number"}
        return obs, reward, terminated, truncated, {**info, **said}


gymnasium.register("stepwell-test/Telling-v0", Telling)


def test_what_a_step_said_of_itself_masks_that_step(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """From the command's settings to the batch of a learner, through the real service."""
    collect(
        CollectConfig(
            env="stepwell-test/Telling-v0",
            dataset=name,
            random=True,
            episodes=6,
            envs=2,
            infos=("good",),
            url=service.url,
            token=service.token,
            outbox=tmp_path / "outbox",
        )
    )
    client.flush(name)
    select = f"SELECT id FROM trajectories WHERE dataset = '{name}'"
    options = {"window": 3, "batch": 8, "batches": 4, "client": client, "cache": tmp_path / "c"}
    seen = 0
    for batch in stream(select, padding="both", actor_mask="good", **options):
        there, odd = batch.mask, batch.reward.long() % 2 == 1
        assert bool((batch.actor_mask == odd)[there].all())
        seen += int(odd[there].sum())
    assert seen


def test_a_recording_keeps_them_too(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    env = record(Telling(), name, client, infos=["good"], outbox=tmp_path / "outbox")
    env.reset()
    for action in (0, 1, 2):
        env.step(np.int64(action))
    env.close()
    (row,) = client.trajectories(name).items
    np.testing.assert_equal(client.steps(row.id).infos["good"], [np.nan, 0.0, 1.0, 0.0])


NEVER = (
    "no step had the infos typo, which are NaN in every row; the environment's are good, "
    "log/episode, log/t, words"
)


@pytest.mark.parametrize("vector", [True, False])
def test_an_info_that_never_comes_is_said(
    client: Client, name: str, tmp_path: Path, vector: bool
) -> None:
    inner = SyncVectorEnv([Telling, Telling]) if vector else Telling()
    env = record(inner, name, client, env_id="T-v0", infos=["good", "typo"], outbox=tmp_path)
    env.reset()
    env.step(np.array([1, 1]) if vector else np.int64(1))
    with pytest.warns(UserWarning) as caught:
        env.close()
    assert [str(warning.message) for warning in caught] == [NEVER]


def collected(service: ServiceProcess, name: str, outbox: Path, **settings: Any) -> list[str]:
    """The notes of a collector in two copies of Telling."""
    text = io.StringIO()
    config = CollectConfig(
        env="stepwell-test/Telling-v0",
        dataset=name,
        random=True,
        episodes=2,
        envs=2,
        url=service.url,
        outbox=outbox,
        **settings,
    )
    collect(config, console=Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    return [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]


def test_a_collector_says_which_infos_never_came(
    service: ServiceProcess, client: Client, name: str, tmp_path: Path
) -> None:
    said = NEVER.replace("are good", "are good, is_success")
    assert collected(service, name, tmp_path / "1", infos=("good", "typo")) == [said]
    assert collected(service, name, tmp_path / "2") == [said], "the dataset has them"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        *[(value, 2.0) for value in (2, 2.0, np.array([2.0]), np.array([[2]]), np.float32(2), [2])],
        *[(value, 1.0) for value in (True, np.bool_(True), np.array([True]))],
        *[(value, np.nan) for value in (None, np.nan, np.array([np.nan]))],
        (-np.inf, -np.inf),
    ],
    ids=str,
)
def test_a_number_is_kept_without_a_word(value: Any, stored: float) -> None:
    row, said = encoded(value)
    assert row.dtype == np.float32 and row.shape == () and not said
    np.testing.assert_equal(float(row), stored)


def encoded(value: Any, space: Box | None = None) -> tuple[Any, list[str]]:
    """Of an info with this value: what is stored, and what is said. It comes twice."""
    said: list[str] = []
    interface = replace(interface_of(Telling(), "T-v0", infos=["x"]), note=said.append)
    if space is not None:
        wide = replace(interface.spec, infos={"x": space})
        interface = interface.for_dataset(wide, "d")
    interface.encode_info({"x": value})
    return interface.encode_info({"x": value})["x"], said


PLACE = " (a dataset created with infos={'x': Box((2,))} in its spec stores it)"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("3", "got '3' (str); stored as NaN"),
        (b"3", "got b'3' (bytes); stored as NaN"),
        (np.zeros(2), "got array([0., 0.]) (float64 [2]); stored as NaN" + PLACE),
        ([1, 2], "got [1, 2] (list); stored as NaN" + PLACE),
        ([], "got [] (list); stored as NaN"),
        ([1, [2, 3]], "got [1, [2, 3]] (list); stored as NaN"),
        ({"r": 1}, "got {'r': 1} (dict); stored as NaN"),
        (1j, "got 1j (complex); stored as NaN"),
        (np.datetime64("2024"), "datetime64); stored as NaN"),
        pytest.param(10**400, "(int); stored as NaN", id="10^400"),
    ],
    ids=str,
)
def test_what_is_no_number_is_nan_and_said_once(value: Any, says: str) -> None:
    row, said = encoded(value)
    assert np.isnan(row) and row.dtype == np.float32
    (text,) = said
    assert text.startswith("infos/x: expected one number, got ") and text.endswith(says)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(2**24 + 1, "int64"), (2**70 + 1, "object"), (0.1, "float64"), (1e300, "float64")],
)
def test_an_info_that_loses_digits_is_said_once(value: float, kind: str) -> None:
    row, said = encoded(value)
    assert said == [f"infos/x: {kind} stored as float32, which rounds them"]
    with np.errstate(over="ignore"):
        assert row == np.float64(value).astype(np.float32)


def test_an_array_goes_where_the_dataset_has_a_place_for_it() -> None:
    row, said = encoded([[1, 2, 3]], Box((3,)))
    assert row.tolist() == [1, 2, 3] and not said
    for value in (np.zeros((3, 2)), np.zeros(6), 1.0):
        row, said = encoded(value, Box((2, 3)))
        assert row.shape == (2, 3) and np.isnan(row).all()
        assert said[0].startswith("infos/x: expected numbers of shape [2, 3], got ")


def test_a_mask_of_legal_actions_is_stored_in_a_dataset_with_a_place_for_it(
    client: Client, name: str, tmp_path: Path
) -> None:
    taxi = make("Taxi-v4")
    env = record(taxi, name, client, infos=["action_mask"], outbox=tmp_path / "1")
    with pytest.warns(UserWarning, match=r"infos=\{'action_mask': Box\(\(6,\)\)\} in its spec"):
        env.reset()
    env.close()
    made = replace(interface_of(taxi, "Taxi-v4").spec, infos={"action_mask": Box((6,))})
    client.create_dataset(f"{name}-wide", made)
    env = record(taxi, f"{name}-wide", client, infos=["action_mask"], outbox=tmp_path / "2")
    _, first = env.reset()
    *_, second = env.step(0)
    env.close()
    (episode,) = client.trajectories(f"{name}-wide").items
    stored = client.steps(episode.id).infos["action_mask"]
    np.testing.assert_array_equal(stored, [first["action_mask"], second["action_mask"]])


class Changing(FakeEnv):
    """An info that changes its type in an episode; infos that are none."""

    VALUES = (1, 2.5, True, "4", None, np.array([6]), np.array([7, 8]), 9)

    def __init__(self) -> None:
        super().__init__((len(self.VALUES),))

    def step(self, action: Any) -> Any:
        *returned, _ = super().step(action)
        infos: Any = {"x": self.VALUES[self.t - 1]}
        return *returned, [infos] if self.t == 8 else infos


def test_an_info_may_change_its_type_in_an_episode(
    client: Client, name: str, tmp_path: Path
) -> None:
    env = record(Changing(), name, client, env_id="C-v0", infos=["x"], outbox=tmp_path)
    env.reset()
    with pytest.warns(UserWarning, match="infos/x: expected one number, got '4'") as caught:
        for _ in Changing.VALUES:
            env.step(np.int64(0))
        env.close()
    assert len(caught) == 1
    (episode,) = client.trajectories(name).items
    nan = np.nan
    np.testing.assert_array_equal(
        client.steps(episode.id).infos["x"], [nan, 1, 2.5, 1, nan, nan, 6, nan, nan]
    )


def test_an_info_of_a_vector_environment_is_each_environments_own() -> None:
    """Only where there is an entry for each; two that gymnasium mixes up are left out."""
    infos = {
        "x": np.array([1.0, 2.0]),
        "_x": np.array([True, False]),
        "_alone": np.array([3, 4]),
        "__alone": np.array([True, True]),
        "three": np.array([5, 6, 7]),
        "both": np.array([8, 9]),
        "_both": np.array([True, False]),
        "__both": np.array([True, True]),
        "deep": {"y": np.array([10, 11]), "_y": np.array([False, True])},
    }
    first, second = (_info_of(infos, i, 2) for i in range(2))
    assert first.pop("three") is infos["three"] and second.pop("three") is infos["three"]
    assert first == {"x": 1.0, "_alone": 3, "deep": {}}
    assert second == {"_alone": 4, "deep": {"y": 11}}


@pytest.mark.parametrize("what", ["tags", "infos"])
def test_a_text_in_place_of_a_list_is_refused(client: Client, name: str, what: str) -> None:
    """It would be a list of its letters."""
    names: Any = {what: "good"}
    with pytest.raises(InvalidTrajectory, match=rf"{what}; expected a list: {what}=\['good'\]"):
        record(Telling(), name, client, env_id="T-v0", **names)
    with pytest.raises(NotFound):
        client.dataset(name)


# --- names of elements ----------------------------------------------------------------------------


def test_elements_that_only_the_dataset_names_are_said(
    service: ServiceProcess, client: Client, name: str, tmp_path: Path
) -> None:
    spec = interface_of(Telling(), "Telling-v0").spec
    client.create_dataset(
        name, replace(spec, names={"observation/observation": ("pos", "vel", "acc")})
    )
    says = (
        "observation/observation has no names of its elements in this environment: taken as pos, "
        "vel, acc, the dataset's"
    )
    assert collected(service, name, tmp_path / "1") == [says]
    with pytest.warns(UserWarning) as caught:
        env = record(Telling(), name, client, env_id="T-v0", outbox=tmp_path / "2")
        env.reset()
        env.step(np.int64(1))
        env.close()
    assert [str(warning.message) for warning in caught] == [says]
    with pytest.warns(UserWarning) as caught:
        client.add(name, obs=np.zeros((2, 3)), actions=[0], rewards=[0.0], terminated=True)
    (warning,) = caught
    assert str(warning.message) == says.replace("this environment", "these arrays")
    assert warning.filename == __file__


def test_a_dataset_without_a_place_for_them_is_refused(client: Client, name: str) -> None:
    client.create_dataset(name, interface_of(Telling(), "Telling-v0").spec)
    with pytest.raises(InvalidSpace, match=r"no place for the infos \['good'\]"):
        open_dataset(client, name, interface_of(Telling(), "Telling-v0", infos=["good"]))


@pytest.mark.parametrize("declared", [True, False])
def test_what_the_environment_declares_is_a_tag_of_the_dataset(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    """metadata["partially_observable"] = True makes a trainer use memory (training.md)."""
    monkeypatch.setattr(Telling, "metadata", {"partially_observable": declared})
    open_dataset(client, name, interface_of(Telling(), "Telling-v0"))
    assert client.dataset(name).tags == (["partially-observable"] if declared else [])
