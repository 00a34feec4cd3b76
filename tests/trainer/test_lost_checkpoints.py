"""A run that others have seen something of never begins again unasked."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepwell.errors import from_problem
from tests.trainer.small_runs import small_clone
from trainer import checkpoint, publish
from trainer.checkpoint import CheckpointError, newest
from trainer.config import DataConfig, ScheduleConfig, TrainConfig
from trainer.errors import TrainerError
from trainer.loop import RunInfo, train


@pytest.fixture
def service(fake):
    return fake(None, [[9, 4, 6], [5]])


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    """Policies every 4 updates, and no checkpoint but those that come with them."""
    schedule = ScheduleConfig(
        log_every=1, checkpoint_every=0, keep_checkpoints=99, publish_every=4, drain_timeout=5
    )
    return small_clone(
        tmp_path, "seen", data=DataConfig(batch=4, window=4), updates=10, schedule=schedule
    )


def policies(home: Path) -> list[int]:
    return sorted(int(path.stem) for path in (home / "policies").glob("*.safetensors"))


def kept(home: Path) -> int:
    found = newest(home / "checkpoints")
    return 0 if found is None else int(found.state["update"])


class Killed(BaseException):
    """Stands for a death at a failpoint."""


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "name",
    [
        *("checkpoint.before_rename", "checkpoint.after_rename", "checkpoint.after_rotation"),
        *("policy.after_put", "policy.after_copy"),
    ],
)
@pytest.mark.parametrize("hit", [1, 2, 3])
def test_a_policy_is_never_ahead_of_the_checkpoint(service, config, monkeypatch, name, hit):
    """Wherever it dies: what is published can be gone on from, and then nothing is missing."""
    home, hits = config.output / "seen", []

    def die(point: str) -> None:
        if point == name:
            hits.append(point)
            if len(hits) == hit:
                raise Killed

    for module in (checkpoint, publish):
        monkeypatch.setattr(module, "failpoint", die)
    with pytest.raises(Killed):
        train(config, service, RunInfo(), lambda _: None)
    assert len(hits) == hit
    assert max([*policies(home), *service.published], default=0) <= kept(home)
    first = dict(service.published)
    assert train(config, service, RunInfo(), lambda _: None) == "finished"
    assert sorted(service.published) == [4, 8, 10] == policies(home)
    assert all(service.published[version] == data for version, data in first.items())


@pytest.mark.parametrize("lost", ["all", "damaged", "with the policies"])
def test_a_run_with_policies_and_no_checkpoint_is_refused_by_name(service, config, lost):
    """What is published stays what it is; how to go on is said."""
    train(config, service, RunInfo(), lambda _: None)
    home = config.output / "seen"
    if lost == "damaged":
        for path in home.glob("checkpoints/*"):
            path.write_bytes(b"")
    else:
        shutil.rmtree(home / "checkpoints")
    if lost == "with the policies":
        shutil.rmtree(home / "policies")
    published, said = dict(service.published), []
    with pytest.raises(CheckpointError, match="run seen has .*the newest seen/10.*--resume never"):
        train(config, service, RunInfo(), said.append)
    assert service.published == published
    other = config.replace(run="another")
    assert train(other, service, RunInfo(), said.append) == "finished"
    anew = config.replace(resume="never")
    assert train(anew, service, RunInfo(), said.append) == "finished"


def test_checkpoints_none_of_which_is_whole_are_not_passed_over_in_silence(service, config):
    """Also where nothing was published: hours of work may lie in what a person can mend."""
    quiet = config.replace(schedule=config.schedule.replace(publish_every=0), updates=4)
    train(quiet, service, RunInfo(), lambda _: None)
    home = config.output / "seen"
    shutil.rmtree(home / "policies")
    service.published.clear()
    for path in home.glob("checkpoints/*"):
        path.write_text("{}")
    with pytest.raises(CheckpointError, match="1 checkpoint that is not whole"):
        train(quiet, service, RunInfo(), lambda _: None)


def test_a_run_that_nobody_has_seen_begins_again(service, config):
    """Killed before its first checkpoint and policy, the same command is enough."""
    quiet = config.replace(updates=3)
    train(quiet, service, RunInfo(), lambda _: None)
    shutil.rmtree(config.output / "seen" / "checkpoints")
    shutil.rmtree(config.output / "seen" / "policies")
    service.published.clear()
    assert train(quiet, service, RunInfo(), lambda _: None) == "finished"
    assert sorted(service.published) == [3]


def test_a_name_that_is_taken_says_which_flags_resume_it(service, config, monkeypatch):
    """Somebody else's run, or one whose output lies elsewhere."""
    problem = {"status": 409, "title": "Conflict", "code": "conflict", "detail": "exists"}

    def taken(*_: object, **__: object) -> None:
        raise from_problem(problem)

    monkeypatch.setattr(service, "create_run", taken)
    another = SimpleNamespace(config={"claim": "another's"})
    monkeypatch.setattr(service, "run", lambda _: another, raising=False)
    words = "already a run 'seen'.*--resume auto.*--output.*--run NAME"
    with pytest.raises(TrainerError, match=words):
        train(config, service, RunInfo(), lambda _: None)
