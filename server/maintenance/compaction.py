"""Compaction: merges small or half-dead shards into fewer ones, without a change for readers.

Rewritten: a shard of format 1 whose footer is too large for queries; one of which at least half of
the rows are dead; a run of small shards, adjacent by seq. The new file is complete and durable
before one transaction swaps the locations; the old shards are retired, and kept while a lease or a
reader without one may need them (shard_deletion.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import Database, next_change_id
from server.index.tables import datasets, shards, trajectories
from server.ingest.pipeline import Ingest
from server.ingest.seal import insert_shard, new_shard
from server.integrity import IntegrityChecker
from server.settings import Settings
from server.storage.checksums import Source
from server.storage.shards import (
    Entry,
    ShardDamaged,
    read_batches,
    read_footer,
    shard_file,
    table_in_footer,
)
from server.storage.store import Store
from stepwell.failpoints import failpoint

log = structlog.get_logger("stepwell.compaction")
COMPACT_BELOW = 16 << 20
"""Adjacent shards with fewer bytes are merged."""
RUN = 4
"""Small shards are merged when this many are adjacent: each byte is then rewritten a logarithmic
number of times."""
POINTS = ("compact.after_tmp_fsync", "compact.after_rename")


@dataclass(frozen=True, slots=True)
class _Shard:
    pk: int
    id: str
    dataset: str
    partition: str
    bytes: int
    rows: int
    living: int
    """Rows of living trajectories."""


def compact(
    settings: Settings,
    db: Database,
    store: Store,
    ingest: Ingest,
    integrity: IntegrityChecker,
    now: float,
) -> int:
    """Rewrite the most urgent group, if any; returns the number of shards it replaced."""
    for group in _groups(settings, db, store, now):
        if store.free() < settings.min_free + 2 * sum(shard.bytes for shard in group):
            continue  # compaction must not fill a disk that is nearly full
        try:
            # While this is held, neither sealing nor the deletion of a dataset moves data.
            with ingest.sealer.lock:
                _rewrite(db, store, ingest, group)
        except ShardDamaged as error:
            log.info("a shard cannot be read", error=str(error))  # the check below logs the cause
            for shard in group:
                integrity.recheck_shard(shard.id)
            continue
        log.info("compacted", shards=len(group), dataset=group[0].dataset)
        return len(group)
    return 0


def _groups(settings: Settings, db: Database, store: Store, now: float) -> Iterator[list[_Shard]]:
    s, t = shards.c, trajectories.c
    with db.read() as connection:
        # Counts the evicted, whose rows are removed in time; the living may be millions.
        dead = dict(
            connection.execute(
                sa.select(t.shard_pk, sa.func.sum(t.length + 1))
                .where(sa.text("state = 'evicted'"))
                .group_by(t.shard_pk)
            ).all()
        )
        rows = connection.execute(
            sa.select(s.pk, s.id, datasets.c.name, s.partition, s.bytes, s.rows)
            .join(datasets, datasets.c.pk == s.dataset_pk)
            # A time in the future (the clock was set back) counts as old enough.
            .where(s.state == "live", ~s.created_at.between(now - settings.compact_after, now))
            .order_by(datasets.c.name, s.partition, s.seq_min)
        ).all()
        replaced = connection.execute(
            sa.select(sa.func.sum(s.bytes)).where(s.state.in_(("retired", "deleting")))
        ).scalar()
    found = [_Shard(*row, living=row.rows - dead.get(row.pk, 0)) for row in rows]
    # Perhaps all shards are of format 1, and leases keep those that are replaced: as much room as
    # these take is left free.
    room = store.free() - (replaced or 0) - settings.min_free
    for shard in found:
        source = store.source(*shard_file(shard.partition, shard.id))
        if shard.living and 2 * shard.bytes < room and table_in_footer(source):
            yield [shard]
    for shard in found:
        if 0 < shard.living <= shard.rows // 2:
            yield [shard]
    for _, side_by_side in groupby(found, key=lambda shard: (shard.dataset, shard.partition)):
        run: list[_Shard] = []
        for shard in side_by_side:
            full = sum(one.bytes for one in run) + shard.bytes > settings.shard_bytes
            if shard.bytes >= COMPACT_BELOW or full:
                if len(run) >= RUN:
                    yield run
                run = []
            if shard.bytes < COMPACT_BELOW and shard.living:
                run.append(shard)
        if len(run) >= RUN:
            yield run


def _rewrite(
    db: Database,
    store: Store,
    ingest: Ingest,
    group: Sequence[_Shard],
) -> None:
    dataset = ingest.registry.get(group[0].dataset)
    t = trajectories.c
    pks = {shard.pk: shard for shard in group}
    with db.read() as connection:
        rows = connection.execute(
            sa.select(t.pk, t.id, t.seq, t.partition, t.shard_pk, t.traj_idx)
            .where(t.shard_pk.in_(pks), t.state != "evicted")
            .order_by(t.partition, t.shard_pk, t.traj_idx)
        ).all()
        sources = _sources(connection, store, group)
    failpoint("compact.before_tmp")
    made = []
    order = {pk: place for place, pk in enumerate(pks)}
    for _, members in groupby(rows, key=lambda row: row.partition):
        chosen = sorted(members, key=lambda row: (order[row.shard_pk], row.traj_idx))
        entries = list(_entries(sources, chosen))
        batches = _batches(sources, chosen)
        keys = [row.pk for row in chosen]
        made.append(new_shard(store, dataset, entries, batches, keys, POINTS))
    with db.write() as connection:
        change_id = next_change_id(connection)
        for shard in made:
            insert_shard(connection, shard, change_id)
        connection.execute(
            sa.update(shards)
            .where(shards.c.pk.in_(pks), shards.c.state == "live")
            .values(state="retired", retired_uptime=db.uptime())
        )
        failpoint("compact.before_commit")
    failpoint("compact.after_commit")


def _entries(sources: dict[int, Source], rows: Sequence[Any]) -> Iterator[Entry]:
    """Entries from the old shards, with the current seq and partition."""
    footers = {pk: read_footer(source) for pk, source in sources.items()}
    for row in rows:
        entry = footers[row.shard_pk].entries[row.traj_idx]
        if entry.id != row.id:
            name = sources[row.shard_pk].name
            raise ShardDamaged(f"{name}: trajectory {row.traj_idx} has another id")
        yield replace(entry, seq=row.seq, partition=row.partition)


def _batches(sources: dict[int, Source], rows: Sequence[Any]) -> Iterator[pa.RecordBatch]:
    """The rows of the chosen trajectories in order: each shard is read once, from the start."""
    for pk, members in groupby(rows, key=lambda row: row.shard_pk):
        wanted = {row.traj_idx for row in members}
        for index, (_, batch) in enumerate(read_batches(sources[pk])):
            if index in wanted:
                yield batch


def _sources(connection: Connection, store: Store, group: Sequence[_Shard]) -> dict[int, Source]:
    s = shards.c
    rows = connection.execute(
        sa.select(s.pk, s.checksums).where(s.pk.in_(shard.pk for shard in group))
    )
    checksums = {row.pk: row.checksums for row in rows}
    return {
        shard.pk: store.source(
            *shard_file(shard.partition, shard.id), shard.bytes, checksums[shard.pk]
        )
        for shard in group
    }
