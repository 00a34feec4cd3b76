"""The trajectories to export: a leased snapshot, read shard by shard."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData
from stepwell.shard_rows import read_shard
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory, new_id
from stepwell.version_card import cite

TTL, RENEW_AFTER = 600.0, 60.0


@dataclass(slots=True)
class Losses:
    """What a format could not hold, for the person who exports."""

    always: list[str] = field(default_factory=list)
    """Losses that concern all trajectories."""
    counts: Counter[str] = field(default_factory=Counter)
    """Losses that concern some trajectories, with their number."""

    def lines(self) -> list[str]:
        some = [
            f"{what} ({pluralize(n, 'trajectory', 'trajectories')})"
            for what, n in sorted(self.counts.items())
        ]
        return [*self.always, *some]


@dataclass(frozen=True, slots=True)
class Selection:
    """A frozen selection of one dataset."""

    dataset: str
    spec: EnvSpec
    snapshot: str
    holder: str
    shards: dict[str, list[int]]
    """By shard: traj_idx of the selected trajectories."""
    lengths: dict[tuple[str, int], int]
    final_obs: bool
    """Whether any trajectory's final observation is known."""
    losses: Losses
    licence: str = ""
    citation: str = ""
    """BibTeX; both of the version that is exported."""

    @property
    def trajectories(self) -> int:
        return len(self.lengths)

    @property
    def steps(self) -> int:
        return sum(self.lengths.values())


def select(client: Client, dataset: str, where: str | None, purpose: str) -> Selection:
    """Freeze the selection and lease it. Raises `BadRequest` for a wrong `where` or none found."""
    condition = f"({where}\n)" if where else None
    if purpose == "eval":
        condition = f"purpose = 'eval' AND {condition}" if condition else "purpose = 'eval'"
    holder = f"export-{new_id()}"
    snapshot = client.create_snapshot(
        dataset=dataset, where=condition, include_eval=purpose != "train", holder=holder
    )
    client.lease(snapshot.id, holder, TTL)
    table = client.manifest(snapshot.id)
    shards: dict[str, list[int]] = {}
    lengths: dict[tuple[str, int], int] = {}
    columns = (table[name].to_pylist() for name in ("shard", "traj_idx", "length"))
    for shard, index, length in zip(*columns, strict=True):
        shards.setdefault(shard, []).append(index)
        lengths[shard, index] = length
    losses = Losses()
    for one in snapshot.excluded:
        lost = pluralize(one.trajectories, "trajectory", "trajectories")
        losses.always.append(f"{lost} of the damaged file {one.file}; see: stepwell fsck")
    licence = citation = ""
    if "@" in dataset:
        version = client.version(dataset)
        licence, citation = version.licence, cite(version)
    return Selection(
        dataset,
        EnvSpec.from_json(snapshot.spec),
        snapshot.id,
        holder,
        shards,
        lengths,
        bool(np.any(table["final_obs_valid"].to_numpy())),
        losses,
        licence,
        citation,
    )


def read(client: Client, chosen: Selection) -> Generator[Trajectory]:
    """The trajectories, one shard on disk and one row group in memory at a time."""
    renewed = time.monotonic()
    try:
        with TemporaryDirectory(prefix="stepwell-export-") as folder:
            for name, numbers in chosen.shards.items():
                path = client.download_shard(name, Path(folder) / "shard.parquet")
                for trajectory in read_shard(path, numbers):
                    yield trajectory
                    if time.monotonic() - renewed > RENEW_AFTER:
                        client.lease(chosen.snapshot, chosen.holder, TTL)
                        renewed = time.monotonic()
    finally:
        client.release(chosen.snapshot, chosen.holder)


def only_key(chosen: Selection, target: str) -> tuple[str, str]:
    """The one observation and the one action. Raises `InvalidData` if there are several."""
    spec = chosen.spec
    for what, names in (("observation", spec.observations), ("action", spec.actions)):
        if len(names) > 1:
            raise InvalidData(
                f"{target} holds one {what} array; {chosen.dataset} has several",
                expected="--format minari, lerobot or parquet, which hold named arrays",
                got=", ".join(names),
            )
    return next(iter(spec.observations)), next(iter(spec.actions))


def refuse_unknown_actions(trajectory: Trajectory, target: str) -> None:
    """A reader would take the placeholders of unknown actions for actions."""
    known = trajectory.action_known
    if known is not None and not bool(known.all()):
        raise InvalidData(
            f"trajectory {trajectory.id} has unknown actions, which {target} cannot mark",
            expected="--format parquet, or a --where that leaves such trajectories out",
            got=pluralize(int((~known).sum()), "unknown action"),
        )


def count_metadata(trajectory: Trajectory, chosen: Selection, kept: tuple[str, ...] = ()) -> None:
    """Count the metadata that a format without a place for them loses."""
    for name, value in trajectory.metadata.to_json().items():
        if name not in kept and (name, value) != ("env", chosen.spec.env):
            chosen.losses.counts[name] += 1
