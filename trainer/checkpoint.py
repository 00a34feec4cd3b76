"""A trainer's private resume state, in files that are written atomically.

    checkpoints/update-000000500.safetensors
        agent|<name>               weights, target networks, statistics of inputs and returns
        optimizer|<parameter>|…    exp_avg, exp_avg_sq, step
        metadata                   format; state as JSON: clocks, snapshot views, config, spaces,
                                   versions; sha256 of all of it

Nothing is pickled. Sample order, noise and the step size are functions of (seed, update), so no
generator state is stored.

`load_agent` restores the complete agent, as it was in training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor, nn

from amago_model.agent import Agent, make_agent
from amago_model.config import AgentConfig, Spaces
from amago_model.errors import ConfigError, SpaceError
from stepwell._files import whole_file
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import NotFound
from stepwell.failpoints import failpoint
from trainer.distributed import World
from trainer.errors import TrainerError

log = logging.getLogger(__name__)
FORMAT = "4"
"""Formats 1 to 3 were folders of several files."""


class CheckpointError(TrainerError):
    """A checkpoint that is damaged, of another format, or of another agent."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose digest has been checked."""

    path: Path
    agent: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def save(
    folder: Path,
    update: int,
    agent: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint taken after `update` updates, then delete all but the newest `keep`.

    It replaces a checkpoint of the same update from an earlier attempt. Raises `CheckpointError`
    if the disk is full or broken; existing checkpoints are then unchanged.
    """
    target = folder / f"update-{update:09d}.safetensors"
    tensors = {f"agent|{name}": value for name, value in agent.state_dict().items()}
    for name, parameter in agent.named_parameters():
        for what, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer|{name}|{what}"] = value
    # Copied: safetensors refuses tensors that share memory.
    tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    text = json.dumps({**state, "update": update})
    metadata = {"format": FORMAT, "state": text, "sha256": _digest(tensors, text)}
    data = safetensors.save(tensors, metadata)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file:
            file.write(data)
            failpoint("checkpoint.before_rename")
        failpoint("checkpoint.after_rename")
        for old in checkpoint_files(folder)[keep:]:
            old.unlink()
        failpoint("checkpoint.after_rotation")
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {target}: {error}; make room there. The checkpoints "
            "before it still stand: run the same command again to go on from the newest"
        ) from error
    return target


def find(mode: str, home: Path, world: World, echo: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that a run in folder `home` resumes from, the same on every rank; None to
    start from scratch.

    `mode` is the setting `resume`. Raises `CheckpointError` if the run must resume and cannot.
    """
    folder = home / "checkpoints"
    if mode == "never":
        # Moved, because they may have more updates: a later --resume auto would resume from them.
        if world.is_main and checkpoint_files(folder):
            number = 1
            while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
                number += 1
            os.replace(folder, aside)
            echo(f"warning: --resume never: the earlier checkpoints are in {aside} now")
        world.barrier()
        return None
    found = newest(folder) if world.is_main else None
    name = world.broadcast(found.path.name if found else "")
    if not name:
        if mode == "must":
            raise CheckpointError(f"no whole checkpoint in {folder}; train with --resume auto")
        return None
    return found or read(folder / name)


def refuse_second_start(run: str, home: Path, client: Client) -> None:
    """Raise `CheckpointError` for a run that has checkpoints or policies and cannot be resumed."""
    lost = len(checkpoint_files(home / "checkpoints"))
    versions = [int(p.stem) for p in (home / "policies").glob("*.safetensors") if p.stem.isdigit()]
    if not versions and (home / "run.json").exists():  # the run exists at the service
        with contextlib.suppress(NotFound):
            versions = [policy.version for policy in client.policies(run)]
    versions = [version for version in versions if version]  # 0: no update is lost with it
    if not versions and not lost:
        return
    damaged = pluralize(lost, "checkpoint that is", "checkpoints that are")
    what = [f"{damaged} not whole"] if lost else []
    what += [f"published policies, the newest {run}/{max(versions)}"] if versions else []
    raise CheckpointError(
        f"run {run} has {' and '.join(what)}, but no whole checkpoint in "
        f"{home / 'checkpoints'}: it would begin again under the same name. Train under another "
        "--run; or with --resume never, which begins anew and leaves what is published as it is"
    )


def newest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None. Damaged ones are logged and skipped."""
    for path in checkpoint_files(folder):
        try:
            return read(path)
        except CheckpointError as error:
            log.warning("%s; trying an older one", error)
    return None


def oldest_update(folder: Path) -> int | None:
    """The number of updates of the oldest checkpoint; None if there is none."""
    names = [path.stem.removeprefix("update-") for path in checkpoint_files(folder)]
    return min((int(name) for name in names if name.isdigit()), default=None)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises `CheckpointError` if it is damaged or incomplete."""
    if path.is_dir():
        raise CheckpointError(
            f"checkpoint {path}: expected a file, got a folder: of an earlier version, with which "
            "to go on; or train under another --run"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(
                    f"checkpoint {path}: expected format {FORMAT}, got {metadata.get('format')}: "
                    "of another version, with which to go on; or train under another --run"
                )
            # Copied, because rotation deletes the mapped file while the run uses the tensors.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if _digest(tensors, metadata["state"]) != metadata["sha256"]:
            raise CheckpointError(f"checkpoint {path} is damaged")
        parts: dict[str, dict[str, Tensor]] = {"agent": {}, "optimizer": {}}
        for name, value in tensors.items():
            part, _, rest = name.partition("|")
            parts[part][rest] = value
        return Checkpoint(path, **parts, state=json.loads(metadata["state"]))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from None


def restore(checkpoint: Checkpoint, agent: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the state. Raises `CheckpointError` if the agent has another structure."""
    _load_agent(checkpoint, agent, "; train under another --run, or with --resume never")
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoint.optimizer.items():
        name, _, what = key.rpartition("|")
        by_name.setdefault(name, {})[what] = value
    optimizer.state.clear()
    for name, parameter in agent.named_parameters():
        if name not in by_name:
            continue
        # All state is on the parameter's device, `step` too, because the optimiser is fused.
        optimizer.state[parameter] = {
            what: value.to(parameter.device) for what, value in by_name[name].items()
        }


def load_agent(path: Path | str) -> Agent:
    """Load the complete agent of a run from a checkpoint, in evaluation mode, on the CPU.

        agent = load_agent("runs/first")
        values = get_values(agent, batch)

    Args:
        path: a run's folder, for its newest complete checkpoint; or a checkpoint file.

    Raises:
        CheckpointError: there is no complete checkpoint, or this version cannot read it.
        UnregisteredError: the agent has a custom module; import the module that registers it.
    """
    path = Path(path)
    found = read(path) if path.is_file() else newest(path / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"no whole checkpoint in {path / 'checkpoints'}; give a run's folder, such as "
            "runs/first, or one checkpoint"
        )
    try:
        config = AgentConfig.from_dict(found.state["config"]["agent"])
        spaces = Spaces.from_dict(found.state["spaces"])
    except (KeyError, TypeError, ConfigError, SpaceError) as error:
        raise CheckpointError(
            f"checkpoint {found.path} does not say what its agent is: {error!r}. It was written by "
            "another version: resume its run with this one, for an update or more"
        ) from None
    agent = make_agent(config, spaces)
    _load_agent(found, agent, "")
    return agent.eval()


def _load_agent(checkpoint: Checkpoint, agent: nn.Module, what_to_do: str) -> None:
    try:
        agent.load_state_dict(checkpoint.agent)
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is of another agent{what_to_do}. {error}"
        ) from None


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """The sha256 of all tensors' names, dtypes, shapes and bytes, and of `text`."""
    digest = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {[*value.shape]}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checkpoint_files(folder: Path) -> list[Path]:
    """Checkpoint files, newest first. Unfinished files are hidden and not included."""
    return sorted(folder.glob("update-*"), reverse=True)
