"""Checkpoints: whole or not there, exactly what was saved, the newest whole one first."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amago_model import AgentConfig
from amago_model.agent import Agent, make_agent
from amago_model.config import Spaces
from stepwell.testing import make_spec
from trainer import checkpoint
from trainer.checkpoint import (
    CheckpointError,
    load_agent,
    newest,
    oldest_update,
    read,
    restore,
    save,
)
from trainer.errors import TrainerError

FILES = ("agent.safetensors", "optimizer.safetensors", "state.json")


class Small(nn.Module):
    """Shared memory, a buffer, a parameter that is not trained, a transposed one."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 2)
        self.fixed = nn.Parameter(torch.randn(4), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.register_buffer("count", torch.tensor([7 + seed]))
        self.register_buffer("view", self.count.view(1))


def stepped(model: nn.Module, steps: int = 2) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for step in range(steps):
        for number, parameter in enumerate(trained):
            parameter.grad = torch.full_like(parameter, 0.1 + step + number)
        optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path) -> tuple[Path, Small, torch.optim.AdamW]:
    model = Small()
    optimizer = stepped(model)
    path = save(tmp_path, 5, model, optimizer, {"views": [1], "update": 99}, keep=2)
    return path, model, optimizer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_a_folder_of_four_files(saved, tmp_path):
    path, model, optimizer = saved
    assert path == tmp_path / "update-000000005" and names(tmp_path) == [path.name]
    assert names(path) == sorted([*FILES, "manifest.json"])
    manifest = json.loads((path / "manifest.json").read_text())
    digests = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in FILES}
    assert manifest == {"format": 3, "update": 5, "sha256": digests}
    assert json.loads((path / "state.json").read_text()) == {"views": [1], "update": 5}
    found = read(path)
    assert found.path == path and found.state == {"views": [1], "update": 5}
    assert found.agent.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in found.agent.items())
    trained = ("linear.weight", "linear.bias", "turned")
    assert set(found.optimizer) == {
        f"{n}|{w}" for n in trained for w in ("exp_avg", "exp_avg_sq", "step")
    }


def test_restored_is_as_saved_and_trains_on_alike(saved):
    path, model, optimizer = saved
    other = Small(seed=1)
    wrong = stepped(other, 5)
    restore(read(path), other, wrong)
    for one, two in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert one[0] == two[0] and torch.equal(one[1], two[1])
    for key, parameter in model.named_parameters():
        mine = optimizer.state.get(parameter, {})
        theirs = wrong.state.get(dict(other.named_parameters())[key], {})
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[what], theirs[what]) for what in mine)
        assert all(value.device == parameter.device for value in theirs.values())
    assert set(wrong.state) == {p for p in other.parameters() if p.requires_grad}
    for parts in ((model, optimizer), (other, wrong)):
        for parameter in parts[0].parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        parts[1].step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_saving_does_not_tie_the_file_to_the_model(saved):
    """What was read back is not the living tensor."""
    path, model, _ = saved
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[key]) for key, value in read(path).agent.items())


def test_only_the_newest_are_kept_and_by_number(tmp_path):
    """Whatever order they came in; a second one of the same update is the newer."""
    model = Small()
    optimizer = stepped(model)
    for update in (9, 10, 100, 2):
        save(tmp_path, update, model, optimizer, {}, keep=3)
    assert names(tmp_path) == [f"update-{u:09d}" for u in (9, 10, 100)]
    assert oldest_update(tmp_path) == 9 and newest(tmp_path).state["update"] == 100
    again = [save(tmp_path, 100, model, optimizer, {"n": n}, keep=3).name for n in range(2)]
    assert again == ["update-000000100.1", "update-000000100.2"]
    assert names(tmp_path) == ["update-000000100", *again] and newest(tmp_path).state["n"] == 1
    save(tmp_path, 101, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["update-000000101"] and oldest_update(tmp_path) == 101


def test_of_an_empty_folder_there_is_none(tmp_path):
    assert newest(tmp_path) is None and oldest_update(tmp_path) is None
    assert newest(tmp_path / "none") is None and oldest_update(tmp_path / "none") is None
    (tmp_path / "update-odd").mkdir()
    assert oldest_update(tmp_path) is None
    (tmp_path / "update-000000007.2").mkdir()
    assert oldest_update(tmp_path) == 7


def damage(path: Path, name: str) -> None:
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)


HARM = {
    **{f"{n} flipped": (lambda p, n=n: damage(p, n), f"{n} is damaged") for n in FILES},
    **{f"{n} gone": (lambda p, n=n: (p / n).unlink(), "cannot be read") for n in FILES},
    **{f"{n} cut": (lambda p, n=n: (p / n).write_bytes(b""), "is damaged") for n in FILES},
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "cannot be read"),
    "odd manifest": (lambda p: (p / "manifest.json").write_text("{"), "cannot be read"),
    "list": (lambda p: (p / "manifest.json").write_text("[]"), "cannot be read"),
    "no digests": (lambda p: (p / "manifest.json").write_text('{"format": 3}'), "cannot be read"),
    "odd digests": (
        lambda p: (p / "manifest.json").write_text('{"format": 3, "sha256": 3}'),
        "cannot be read",
    ),
    "newer": (
        lambda p: (p / "manifest.json").write_text('{"format": 4}'),
        "expected format 3, got 4",
    ),
    "older": (
        lambda p: (p / "manifest.json").write_text('{"format": 1}'),
        "expected format 3, got 1",
    ),
    "no format": (lambda p: (p / "manifest.json").write_text("{}"), "got None"),
    "a file": (lambda p: (shutil.rmtree(p), p.write_text("")), "cannot be read"),
}


def resigned(path: Path, name: str, data: bytes) -> None:
    """Other bytes with the right digest, as a defect of ours would write them."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(data).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("harm", "why"), HARM.values(), ids=HARM)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(tmp_path, caplog, harm, why):
    model = Small()
    optimizer = stepped(model)
    for update in (3, 4):
        save(tmp_path, update, model, optimizer, {}, keep=2)
    bad = tmp_path / "update-000000004"
    harm(bad)
    with pytest.raises(CheckpointError, match=f"checkpoint {bad}.*{why}") as told:
        read(bad)
    assert str(told.value).count("checkpoint ") == 1
    assert newest(tmp_path).state["update"] == 3
    assert str(bad) in caplog.text and "trying an older one" in caplog.text
    shutil.rmtree(tmp_path / "update-000000003")
    assert newest(tmp_path) is None


@pytest.mark.parametrize("name", FILES)
def test_bytes_that_are_no_such_file_are_a_damaged_checkpoint(saved, name):
    path, _, _ = saved
    resigned(path, name, b"\xff odd")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(path)


def test_a_checkpoint_of_another_model_is_refused_with_what_to_do(saved):
    path, _, optimizer = saved
    with pytest.raises(CheckpointError, match="another agent; train under another --run"):
        restore(read(path), nn.Linear(3, 2), optimizer)


class Dead(BaseException):
    """Stands for a death."""


POINTS = ("after_create", "after_tensors", "before_rename", "after_rename", "after_rotation")


@pytest.mark.parametrize("point", POINTS)
def test_dying_anywhere_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, point):
    """And what is left over goes with the next save."""
    model = Small()
    optimizer = stepped(model)
    save(tmp_path, 1, model, optimizer, {}, keep=1)

    def die(name: str) -> None:
        passed.append(name)
        if name == f"checkpoint.{point}":
            raise Dead

    passed: list[str] = []
    monkeypatch.setattr(checkpoint, "failpoint", die)
    with pytest.raises(Dead):
        save(tmp_path, 2, model, optimizer, {}, keep=1)
    assert passed == [f"checkpoint.{p}" for p in POINTS[: POINTS.index(point) + 1]]
    update = 1 if POINTS.index(point) < 3 else 2
    assert newest(tmp_path).state["update"] == update
    left = {"after_rename": 2, "after_rotation": 1}.get(point, 1)
    assert len(list(tmp_path.glob("update-*"))) == left
    monkeypatch.undo()
    save(tmp_path, 3, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["update-000000003"]


def test_everything_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Each file, then their folder, then the name, then the folder of names."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    opened = {}
    real_open = os.open

    def note_open(path, *args, **options):
        fd = real_open(path, *args, **options)
        opened[fd] = Path(path).name
        return fd

    def note_fsync(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def note_replace(old, new) -> None:
        done.append(f"rename {Path(old).name} {Path(new).name}")
        replace(old, new)

    model = Small()
    optimizer = stepped(model)
    save(tmp_path, 1, model, optimizer, {}, keep=1)
    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    save(tmp_path, 2, model, optimizer, {}, keep=1)
    target, part = "update-000000002", ".update-000000002.part"
    files = [re.fullmatch(r"fsync \.(.*)\.\w+\.part", line) for line in done[:-4]]
    assert [found[1] for found in files if found] == [*FILES, "manifest.json"]
    assert done[-4:] == [
        *(f"fsync {part}", f"rename {part} {target}", f"fsync {tmp_path.name}"),
        "rename update-000000001 .update-000000001.old",
    ]


def test_a_full_disk_is_said_and_leaves_what_there_was(saved, tmp_path, monkeypatch):
    _, model, optimizer = saved

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "whole_file", full)
    with pytest.raises(CheckpointError, match="cannot write .*update-000000006.*make room") as told:
        save(tmp_path, 6, model, optimizer, {}, keep=1)
    assert isinstance(told.value, TrainerError) and isinstance(told.value.__cause__, OSError)
    assert newest(tmp_path).state["update"] == 5


def test_never_resuming_moves_checkpoints_to_the_next_free_name(saved, tmp_path):
    path, model, optimizer = saved
    folder, said = tmp_path / "checkpoints", []
    world = SimpleNamespace(is_main=True, barrier=lambda: None)
    assert checkpoint.find("never", tmp_path, world, said.append) is None
    folder.mkdir()
    assert checkpoint.find("never", tmp_path, world, said.append) is None
    assert folder.exists() and not said
    for number in (1, 2, 3):
        save(folder, number, model, optimizer, {}, keep=1)
        assert checkpoint.find("never", tmp_path, world, said.append) is None
        assert said.pop().endswith(f"are in {tmp_path / f'checkpoints-{number}'} now")
        assert not folder.exists() and newest(tmp_path / f"checkpoints-{number}") is not None


# ------------------------------------------------------------------------------------ whole agents


@pytest.fixture(scope="module")
def agent() -> Agent:
    config = AgentConfig.from_dict({"trajectory_encoder": {"kind": "identity"}})
    torch.manual_seed(3)
    return make_agent(config, Spaces.of_spec(make_spec().to_json()))


def save_agent(folder: Path, agent: Agent, **state: object) -> Path:
    optimizer = torch.optim.AdamW(agent.trainable_parameters())
    config = {"agent": agent.config.to_dict()}
    full = {"config": config, "spaces": agent.spaces.to_dict(), **state}
    return save(folder / "checkpoints", 4, agent, optimizer, full, keep=1)


def test_an_agent_comes_back_whole_by_either_path(agent, tmp_path):
    path = save_agent(tmp_path, agent)
    for where in (tmp_path, str(tmp_path), path, str(path)):
        found = load_agent(where)
        assert not found.training and found.config == agent.config
        pairs = zip(found.state_dict().values(), agent.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "state",
    [
        *({"spaces": None}, {"spaces": {}}, {"config": {}}, {"config": None}),
        *({"config": {"agent": {"odd": 1}}}, {"config": {"agent": 3}}),
    ],
)
def test_one_that_does_not_say_what_it_is_is_refused(agent, tmp_path, state):
    save_agent(tmp_path, agent, **state)
    with pytest.raises(CheckpointError, match=r"does not say what its agent is.*resume its run"):
        load_agent(tmp_path)


def test_one_of_other_weights_is_refused(agent, tmp_path):
    model = Small()
    state = {"config": {"agent": agent.config.to_dict()}, "spaces": agent.spaces.to_dict()}
    save(tmp_path / "checkpoints", 4, model, stepped(model), state, keep=1)
    with pytest.raises(CheckpointError, match=r"update-000000004 is of another agent\. "):
        load_agent(tmp_path)


def test_a_folder_without_any_is_refused_with_an_example(tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint in .*runs/first"):
        load_agent(tmp_path)
