"""Shards as the service writes them, as earlier versions did, and as the service reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from server.storage.checksums import Source
from server.storage.shards import Entry, write_shard
from server.storage.steps import arrow_parts, shard_steps
from stepwell.codec import decode, to_batch
from stepwell.schema import FORMAT_KEY, arrow_schema
from stepwell.shard_rows import TRAJECTORIES_KEY, trajectory_table
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory


def write_trajectories(
    path: Path, spec: EnvSpec, sent: Sequence[Trajectory], less: int = 0, **options: int
) -> list[Entry]:
    """A shard of these, with the rows of the last `less` missing."""
    entries = [
        Entry(
            header=t.header(),
            digest=t.digest,
            seq=number,
            partition="fifo",
            total_reward=t.total_reward,
            bytes=t.nbytes,
            created_at=1.0,
        )
        for number, t in enumerate(sent, 1)
    ]
    batches = (to_batch(t, spec, arrow_schema(spec)) for t in sent[: len(sent) - less])
    return write_shard(path, "d", spec, entries, batches, **options)


def read_trajectory(source: Source, traj_idx: int) -> Trajectory:
    with shard_steps(source, traj_idx) as steps:
        (found,) = decode(b"".join(arrow_parts(steps)))[1]
    return found


def table_of(shard: Path) -> bytes:
    """The table of trajectories, as JSON."""
    with shard.open("rb") as file:
        return trajectory_table(file, pq.read_metadata(shard).metadata)


def write_format_1(
    shard: Path, to: Path, change: Mapping[bytes, bytes | None] | None = None, group: int = 20_000
) -> None:
    """Write the rows again, with their table of trajectories in the footer, and with `change`."""
    rows = pq.read_table(shard)
    said = {
        **pq.read_metadata(shard).metadata,
        FORMAT_KEY: b"1",
        TRAJECTORIES_KEY: table_of(shard),
        **(change or {}),
    }
    kept = {key: value for key, value in said.items() if value is not None}
    kept.pop(b"ARROW:schema", None)
    pq.write_table(rows.replace_schema_metadata(kept), to, row_group_size=group)


def write_shard_of_format_1(path: Path, *about: Any) -> list[Entry]:
    """In place of `write_shard`."""
    placed = write_shard(path, *about)
    write_format_1(path, path)
    return placed
