"""Checkpoints: whole or not there, exactly what was saved, the newest whole one first."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save as save_tensors
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


def test_a_checkpoint_is_one_file(saved, tmp_path):
    path, model, optimizer = saved
    assert path == tmp_path / "update-000000005.safetensors" and names(tmp_path) == [path.name]
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
    """Whatever order they came in; a second one of the same update replaces the first."""
    model = Small()
    optimizer = stepped(model)
    for update in (9, 10, 100, 2):
        save(tmp_path, update, model, optimizer, {}, keep=3)
    assert names(tmp_path) == [f"update-{u:09d}.safetensors" for u in (9, 10, 100)]
    assert oldest_update(tmp_path) == 9 and newest(tmp_path).state["update"] == 100
    for n in range(2):
        save(tmp_path, 100, model, optimizer, {"n": n}, keep=3)
        assert oldest_update(tmp_path) == 9 and newest(tmp_path).state["n"] == n
    save(tmp_path, 101, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["update-000000101.safetensors"] and oldest_update(tmp_path) == 101


def test_of_an_empty_folder_there_is_none(tmp_path):
    assert newest(tmp_path) is None and oldest_update(tmp_path) is None
    assert newest(tmp_path / "none") is None and oldest_update(tmp_path / "none") is None
    (tmp_path / "update-odd").touch()
    assert oldest_update(tmp_path) is None
    (tmp_path / "update-000000007.safetensors").touch()
    assert oldest_update(tmp_path) == 7


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def rewritten(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    """The same tensors, beside other metadata."""
    found = read(path)
    tensors = {f"agent|{k}": v for k, v in found.agent.items()}
    tensors |= {f"optimizer|{k}": v for k, v in found.optimizer.items()}
    text = json.dumps(found.state)
    metadata = {"format": "4", "state": text, "sha256": checkpoint._digest(tensors, text)}
    change(metadata)
    path.write_bytes(save_tensors(tensors, metadata))


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARM = {
    "the last byte flipped": (lambda p: damage(p, -1), "is damaged"),
    "a name flipped": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"linear.bias|step", b"linear.bias|stop")),
        "is damaged",
    ),
    "a bit of the state flipped": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"kept", b"lept")),
        "is damaged",
    ),
    "a length flipped": (lambda p: damage(p, 0), "cannot be read"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "cannot be read"),
    "empty": (lambda p: p.write_bytes(b""), "cannot be read"),
    "something else": (lambda p: p.write_bytes(b"\xff odd"), "cannot be read"),
    "no metadata": (lambda p: rewritten(p, dict.clear), "got None"),
    "no digest": (lambda p: rewritten(p, lambda m: m.pop("sha256")), "cannot be read"),
    "newer": (lambda p: rewritten(p, lambda m: m.update(format="5")), "expected format 4, got 5"),
    "a folder": (replaced_by_a_folder, "expected a file, got a folder: of an earlier version"),
}


@pytest.mark.parametrize(("harm", "why"), HARM.values(), ids=HARM)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(tmp_path, caplog, harm, why):
    model = Small()
    optimizer = stepped(model)
    for update in (3, 4):
        save(tmp_path, update, model, optimizer, {"word": "kept"}, keep=2)
    bad = tmp_path / "update-000000004.safetensors"
    harm(bad)
    with pytest.raises(CheckpointError, match=f"checkpoint {bad}.*{why}") as told:
        read(bad)
    assert str(told.value).count("checkpoint ") == 1
    assert newest(tmp_path).state["update"] == 3
    assert str(bad) in caplog.text and "trying an older one" in caplog.text
    (tmp_path / "update-000000003.safetensors").unlink()
    assert newest(tmp_path) is None


def test_a_checkpoint_of_another_model_is_refused_with_what_to_do(saved):
    path, _, optimizer = saved
    with pytest.raises(
        CheckpointError, match="another agent; train under another --run.*--resume never"
    ):
        restore(read(path), nn.Linear(3, 2), optimizer)


class Dead(BaseException):
    """Stands for a death."""


POINTS = ("before_rename", "after_rename", "after_rotation")


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
    update = 1 if point == "before_rename" else 2
    assert newest(tmp_path).state["update"] == update
    left = {"after_rename": 2, "after_rotation": 1}.get(point, 1)
    assert len(list(tmp_path.glob("update-*"))) == left
    monkeypatch.undo()
    save(tmp_path, 3, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["update-000000003.safetensors"]


def test_everything_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The file, then its name, then the folder of names; then the old one goes."""
    done: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink

    def note_fsync(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def note_replace(old, new) -> None:
        done.append(f"rename {Path(old).name} {Path(new).name}")
        replace(old, new)

    def note_unlink(path: Path, **options: bool) -> None:
        done.append(f"delete {path.name}")
        unlink(path, **options)

    model = Small()
    optimizer = stepped(model)
    save(tmp_path, 1, model, optimizer, {}, keep=1)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(Path, "unlink", note_unlink)
    save(tmp_path, 2, model, optimizer, {}, keep=1)
    target = "update-000000002.safetensors"
    part = re.escape(f".{target}.") + r"\w{8}\.part"
    wanted = [f"fsync {part}", f"rename {part} {target}", f"fsync {tmp_path.name}"]
    wanted.append("delete update-000000001.safetensors")
    assert len(done) == 4
    assert all(re.fullmatch(line, found) for line, found in zip(wanted, done, strict=True)), done


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
    with pytest.raises(CheckpointError, match="000000004.* is of another agent. "):
        load_agent(tmp_path)


def test_a_folder_without_any_is_refused_with_an_example(tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint in .*runs/first"):
        load_agent(tmp_path)
