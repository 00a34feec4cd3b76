"""`--infos` keeps numbers of an environment's info, beside the observation they came with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from collector.collect import collect
from collector.config import CollectConfig
from collector.envs import interface_of
from collector.episode_recorder import info_row
from collector.record import record
from collector.registered_run import open_dataset
from stepwell import Client
from stepwell.errors import InvalidSpace
from tests.collector.fake_env import FakeEnv
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


def test_an_info_that_never_comes_is_said(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    env = record(Telling(), name, client, infos=["good", "typo"], outbox=tmp_path / "outbox")
    env.reset()
    env.step(np.int64(1))
    with pytest.warns(UserWarning, match="no step had the infos typo, .*environment's are .*good"):
        env.close()


def test_an_array_of_one_is_a_number() -> None:
    spec = interface_of(Telling(), "Telling-v0", infos=["good"]).spec
    for value in (2.0, np.array([2.0]), np.array([[2]]), np.float32(2)):
        assert info_row(spec, {"good": value})["good"] == 2.0
    for value in ("2 m", np.zeros(2), None):
        assert np.isnan(info_row(spec, {"good": value})["good"])


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
