"""Trajectories held back from training: which they are, and that their losses disturb nothing."""

from __future__ import annotations

import re
import uuid

import numpy as np
import pytest
import torch

from stepwell.testing import make_spec, make_trajectory
from tests.trainer.small_runs import curves, loader_of, manifest_of
from trainer.config import DataConfig, TrainConfig
from trainer.data.cache import Cache
from trainer.data.fields import fields_of
from trainer.data.loader import Loader, open_view
from trainer.data.sampler import WindowSampler
from trainer.data.validation import hold_back, validation_interval, validation_sampler
from trainer.errors import SettingError
from trainer.loop import RunInfo, train
from trainer.options import resolve
from trainer.recipes import recipe

from .test_learner import learner_of

SPEC = make_spec()


def serving(fake, count: int, first: int = 0):
    """A service with `count` trajectories of few steps, whose ids are the same each time."""
    service = fake(SPEC)
    service.add_shard([trajectory(number) for number in range(first, first + count)])
    return service


def trajectory(number: int):
    id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, str(number)))
    return make_trajectory(SPEC, length=3 + number % 7, seed=number, id=id_)


def mixed(sources: int) -> TrainConfig:
    return TrainConfig(sources=({"select": "fake", "share": 1 / sources},) * sources)


def ids(manifest) -> set[str]:
    return set() if manifest is None else set(manifest.trajectory_ids(range(len(manifest))))


# --- which trajectories ---------------------------------------------------------------------------


def test_a_share_is_held_back_and_stays_when_data_grows(fake, tmp_path):
    service = serving(fake, 300)
    before = manifest_of(service, tmp_path)
    trained, held = hold_back(before, 0.1)
    assert ids(trained) | ids(held) == ids(before) and not ids(trained) & ids(held)
    assert 15 <= len(held) <= 45 and held.steps + trained.steps == before.steps
    assert len({before.digest, trained.digest, held.digest}) == 3
    service.add_shard([trajectory(number) for number in range(300, 500)])
    more_trained, more_held = hold_back(manifest_of(service, tmp_path), 0.1)
    assert ids(held) < ids(more_held) and ids(trained) < ids(more_trained)
    assert ids(held) < ids(hold_back(before, 0.2)[1])


def test_ids_that_begin_with_a_time_are_held_back_as_evenly(fake, tmp_path):
    service = fake(SPEC)
    made = [str(uuid.UUID(int=(7 << 76) | (2 << 62) | (1_000_000 + i) << 80)) for i in range(400)]
    service.add_shard([make_trajectory(SPEC, length=1, seed=0, id=id_) for id_ in made])
    _, held = hold_back(manifest_of(service, tmp_path), 0.25)
    assert 70 <= len(held) <= 130


def test_little_data_is_all_trained_on(fake, tmp_path):
    few = manifest_of(serving(fake, 19), tmp_path)
    assert hold_back(few, 0.5) == (few, None)
    # In a mixture this holds for each source, for trajectories in other sources, too.
    mixture = manifest_of(serving(fake, 59), tmp_path, mixed(3))
    trained, held = hold_back(mixture, 0.5)
    small = np.flatnonzero(np.bincount(mixture.component) < 20)
    assert small.tolist() == [2] and set(held.component.tolist()) == {0, 1}
    assert np.bincount(trained.component)[2] == 19


def test_of_enough_trajectories_at_least_one_is_held_back_and_none_that_was_trained_on(
    fake, tmp_path
):
    """However small the share is. A trajectory that is added may take the place of the first."""
    service = serving(fake, 20, first=280)
    before = manifest_of(service, tmp_path)
    trained, held = hold_back(before, 0.001)
    assert len(ids(held)) == 1 and ids(trained) | ids(held) == ids(before) and len(trained) == 19
    assert ids(held) <= ids(hold_back(before, 0.5)[1])
    assert hold_back(before, 0.0) == (before, None)
    for more in range(300, 360, 10):
        service.add_shard([trajectory(number) for number in range(more, more + 10)])
        grown, its = hold_back(manifest_of(service, tmp_path), 0.001)
        assert len(ids(its)) == 1 and not ids(its) & ids(trained)
        trained = grown
    assert ids(its) != ids(held)  # else the loop would show nothing
    _, held = hold_back(manifest_of(serving(fake, 40), tmp_path / "two", mixed(2)), 0.001)
    assert len(ids(held)) == 1


def test_validation_windows_are_the_same_for_each_seed_and_of_held_back_data(fake, tmp_path):
    service = serving(fake, 100)
    manifest = manifest_of(service, tmp_path)
    cache, fields = Cache(tmp_path / "cache", 1e9, service), fields_of(SPEC)
    cache.ensure(manifest, fields)
    data = DataConfig(batch=8, window=4, validation=0.2, ramp_updates=0, epochs=True)
    trained, held = hold_back(manifest, 0.2)

    def loaded(part, sampler, steps):
        loader = Loader([open_view(cache, fields, sampler)], data)
        return {name.split("@")[0] for step in range(steps) for name in loader.load(step).ids}

    assert loaded(trained, WindowSampler(trained, data, 0), 40) == ids(trained)
    assert loaded(held, validation_sampler(held, data), 2) <= ids(held)


# --- losses without consequences ------------------------------------------------------------------


@pytest.mark.parametrize("filtering", [False, True])
def test_validating_changes_nothing_and_is_a_mean_over_all_batches(fake, tmp_path, filtering):
    data = DataConfig(batch=6, window=5, padding="both")
    loader = loader_of(serving(fake, 60), tmp_path, data)
    batches = [loader.load(step).batch for step in range(3)]
    config = recipe("pendulum_stitch" if filtering else "bc")
    losses = config.agent.losses.replace(
        filter=config.agent.losses.filter.replace(batch_norm=True)
        if filtering
        else config.agent.losses.filter
    )
    config = config.replace(agent=config.agent.replace(losses=losses))
    learner = learner_of(config, SPEC)
    learner.update(0, batches[0])
    before = {name: value.clone() for name, value in learner.agent.state_dict().items()}
    state = torch.get_rng_state()
    first, again = learner.validate(batches), learner.validate(batches)
    assert first == again and "total" in {name.removeprefix("loss/") for name in first}
    assert all(torch.equal(before[name], x) for name, x in learner.agent.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and learner.agent.training
    if not filtering:
        each = [learner.validate([batch])["loss/bc"] for batch in batches]
        counts = [float(learner.agent.loss_counts(batch)["bc"]) for batch in batches]
        assert len(set(counts)) > 1
        assert first["loss/bc"] == pytest.approx(np.average(each, weights=counts), rel=1e-5)


def trained(service, folder, run: str, *words: str) -> list[str]:
    said: list[str] = []
    config = resolve(
        [
            *("offline", "--derive=off", "--dataset=fake", f"--run={run}", "--updates=12"),
            "--device=cpu",
            *("--data.batch=8", "--data.window=6", "--schedule.log-every=1"),
            *("--schedule.drain-timeout=5", "--agent.actor.d-hidden=16"),
            *("--agent.critic.d-hidden=16", "--schedule.validate-every=4"),
            *(f"--output={folder}", f"--data.cache={folder / 'cache'}", *words),
        ]
    ).config
    train(config, service, RunInfo(), said.append)
    return said


def test_a_run_validates_and_learns_the_same_without_it(fake, tmp_path):
    """How often it validates, and where it is stopped and resumed, changes no other number."""
    service = serving(fake, 80)
    said = trained(service, tmp_path, "whole")
    counts = [int(line.split()[0]) for line in said if line.split()[1:2] == ["trajectories,"]]
    counts += [int(line.split()[0]) for line in said if "are held back" in line]
    assert sum(counts) == 80 and len(counts) == 2 and counts[1] > 0
    whole = curves(tmp_path, "whole")
    assert list(whole["validation/loss/critic"]) == [4, 8, 12]
    assert whole["validation/loss/bc"].keys() == whole["validation/loss/critic"].keys()
    assert service.metrics["validation/loss/critic", 12] == whole["validation/loss/critic"][12]
    trained(service, tmp_path, "rarely", "--schedule.validate-every=12")
    rarely = curves(tmp_path, "rarely")
    assert list(rarely["validation/loss/critic"]) == [12]
    trained(service, tmp_path, "parts", "--updates=6", "--optimizer.decay=none")
    trained(service, tmp_path, "parts", "--updates=12", "--optimizer.decay=none")
    trained(service, tmp_path, "at_once", "--optimizer.decay=none")
    parts, at_once = curves(tmp_path, "parts"), curves(tmp_path, "at_once")
    for key in ("loss/total", "loss/critic", "data/sample_checksum", "optimizer/gradient_norm"):
        assert whole[key] == rarely[key] and parts[key] == at_once[key], key
    assert parts["validation/loss/critic"][12] == at_once["validation/loss/critic"][12]
    trained(service, tmp_path, "none", "--data.validation=0", "--schedule.validate-every=0")
    none = curves(tmp_path, "none")
    assert none["data/sample_checksum"] != whole["data/sample_checksum"]
    assert not any(key.startswith("validation") for key in none)


def test_a_run_on_little_data_says_that_nothing_is_held_back(fake, tmp_path):
    said = trained(serving(fake, 12), tmp_path, "few")
    assert "0 more trajectories are held back for validation (of fewer than 20 nothing is)" in said
    assert "validation/loss/critic" not in curves(tmp_path, "few")


def test_what_a_run_on_one_trajectory_says_is_in_the_singular(fake, tmp_path):
    service = fake(SPEC)
    service.add_shard([make_trajectory(SPEC, length=1, seed=0)])
    said = trained(service, tmp_path, "one", "--updates=1", "--schedule.validate-every=1")
    assert any(line.startswith("1 trajectory, 1 step, 1 shard of snapshot ") for line in said)
    assert (tmp_path / "one" / "run.log").read_text().endswith("finished after 1 update\n")
    assert not [
        line for line in said if re.search(r"(^|\s)1 (trajectorie|step|update|shard)s\b", line)
    ]


def test_a_run_on_a_few_more_holds_one_back(fake, tmp_path):
    said = trained(serving(fake, 20), tmp_path, "enough", "--data.validation=0.001")
    assert "1 more trajectory is held back for validation" in said
    assert "validation/loss/critic" in curves(tmp_path, "enough")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--schedule.validate-every=75"], "multiple of schedule.log_every=50"),
        (["--schedule.validate-every=50", "--data.validation=0"], "schedule.validate_every"),
    ],
)
def test_settings_that_contradict_validation_are_refused(words, named):
    with pytest.raises(SettingError, match=named):
        resolve(["offline", *words])


def test_validation_costs_little_whatever_is_logged():
    schedule = recipe("offline").schedule
    found = {n: validation_interval(schedule.replace(log_every=n)) for n in (0, 1, 10, 50)}
    assert found == {0: 0, 1: 25, 10: 30, 50: 50}
