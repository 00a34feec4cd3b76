"""Manifests as files: written once, complete or as the changes since another snapshot's.

    snapshots/<a>.arrow    all blocks                       base: none
    snapshots/<b>.arrow    blocks that differ from a's      base: a
    snapshots/<c>.arrow    blocks that differ from b's      base: b

So a thousand snapshots of a growing dataset need the space of a few. A file is an Arrow stream with
compressed buffers, one batch per block. It is read, not memory-mapped: mapped pages could change
after their checksums were verified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.dialect import among
from server.index.tables import shards, snapshots, trajectories
from server.ingest.index_rows import chunks
from server.integrity import checked
from server.snapshots.selection import Block, Blocks
from server.storage.checksums import Source
from server.storage.store import Store, Stored
from stepwell.manifest import (
    GONE_KEY,
    SCHEMA,
    SINCE_KEY,
    Key,
    blocks,
    gone,
    id_texts,
    is_changes,
    table_of,
)

LONGEST_CHAIN = 100
"""Most files per snapshot. Beyond it, or when the changes exceed half of the rows, the whole
manifest is written."""


def write(store: Store, name: str, table: pa.Table) -> Stored:
    """Write a manifest, or changes, into the store."""
    with store.new("snapshots", name) as writer:
        # No sha256 here: the blocks have their own digests.
        writer.fill(lambda path: _write(path, table), digest=False)
        return writer.commit()


def _write(path: Path, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")  # less than half the bytes
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema, options=options) as stream,
    ):
        for batch in table.to_batches():
            stream.write_batch(batch)


def whole(found: Blocks, metadata: Mapping[bytes, bytes]) -> pa.Table:
    return table_of((block.batch for block in found.values()), metadata)


def changed(
    found: Blocks, removed: Sequence[Key], since: str, metadata: Mapping[bytes, bytes]
) -> pa.Table:
    """The changes from snapshot `since`."""
    changes = {SINCE_KEY: since.encode(), GONE_KEY: json.dumps(removed).encode()}
    return whole(found, {**metadata, **changes})


def load(store: Store, connection: Connection, row: Any) -> Blocks:
    """The blocks of a snapshot (an index row). Raises ValueError and `Corrupt`, as `read` does."""
    n = snapshots.c
    files, base = [(row["file"], row["checksums"])], row["base_pk"]
    while base is not None:
        below = connection.execute(
            sa.select(n.file, n.base_pk, n.checksums).where(n.pk == base)
        ).first()
        if below is None:
            raise ValueError(f"{files[-1][0]} holds changes of a snapshot that was deleted")
        files.append((below.file, below.checksums))
        base = below.base_pk
    merged: dict[Key, Block] = {}
    for name, checksums in reversed(files):
        table = read(store.source("snapshots", name, checksums=checksums))
        if is_changes(table):
            for key in gone(table):
                merged.pop(key, None)
        merged |= {key: Block(batch) for key, batch in blocks(table).items()}
    return dict(sorted(merged.items()))


def read(source: Source) -> pa.Table:
    """Read one file. Raises `Corrupt` if it is missing or damaged, ValueError if it is invalid."""
    content = checked(source)
    return pa.ipc.open_stream(pa.py_buffer(content)).read_all()


def relocated(connection: Connection, blocks: Blocks) -> tuple[Blocks, int]:
    """The blocks with current locations; and the number of trajectories that no longer exist."""
    names = frozenset[str]().union(*(block.shards for block in blocks.values()))
    found = connection.execute(sa.select(shards.c.id).where(existing(names)))
    there = frozenset(found.scalars())
    moved, missing = dict(blocks), 0
    t = trajectories.c
    statement = sa.select(t.id, shards.c.id, t.traj_idx, t.row_start).join(
        shards, shards.c.pk == t.shard_pk
    )
    for key, block in blocks.items():
        if block.shards <= there:
            continue
        batch = block.batch
        shard = np.asarray(batch["shard"].cast(pa.string()).to_numpy(zero_copy_only=False))
        traj_idx, row_start = (np.array(batch[name]) for name in ("traj_idx", "row_start"))
        lost = np.flatnonzero(~np.isin(shard, sorted(there)))
        ids = id_texts(np.frombuffer(batch["id"].take(pa.array(lost)).buffers()[1], np.uint8))
        at = dict(zip(ids, lost.tolist(), strict=True))
        for some in chunks(ids, 5000):
            rows = connection.execute(
                statement.where(among(t.id, some), shards.c.state.in_(("live", "retired")))
            )
            for identity, name, number, first_row in rows:
                row = at.pop(identity)
                shard[row], traj_idx[row], row_start[row] = name, number, first_row
        missing += len(at)
        fresh = {
            "shard": pa.array(shard, pa.string()).dictionary_encode(),
            "traj_idx": pa.array(traj_idx, pa.int32()),
            "row_start": pa.array(row_start, pa.int64()),
        }
        arrays = [fresh.get(name, batch[name]) for name in SCHEMA.names]
        moved[key] = Block(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return moved, missing


def existing(names: frozenset[str]) -> Any:
    """The rows of those of the shards whose files exist."""
    s = shards.c
    return sa.and_(among(s.id, sorted(names)), s.state.in_(("live", "retired")))
