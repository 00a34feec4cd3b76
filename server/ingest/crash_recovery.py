"""Crash recovery on startup: make index and segments agree.

consumed segment, file still there      delete the file: its data is in shards
torn tail                               cut it off: it was never acknowledged
whole record without an index row       index it: a retry gets `duplicate`
segment without an index row            to quarantine, unless a record of it was indexed
remaining segments                      queue them for sealing

maintenance/adoption.py runs before: whatever the index misses and a segment holds has a row here.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import SERVICE, Database, count_audit, next_change_id
from server.index.dialect import json_value
from server.index.tables import datasets, segments, trajectories
from server.ingest.evict import evict_over_capacity
from server.ingest.index_rows import find_known, insert_rows, insert_segment, reserve_seqs, row_of
from server.ingest.seal import delete_consumed
from server.ingest.segments import (
    MAGIC,
    Record,
    Segment,
    SegmentDamaged,
    SegmentFile,
    open_segment,
)
from server.storage.store import Store

log = structlog.get_logger("stepwell.crash_recovery")


def recover_segments(db: Database, store: Store) -> list[Segment]:
    """Returns the segments that hold unsealed trajectories, oldest first."""
    with db.read() as connection:
        rows = connection.execute(
            sa.select(segments.c.pk, segments.c.name, segments.c.state).order_by(segments.c.pk)
        ).all()
    files = set(store.names("segments"))
    delete_consumed(db, store)
    for row in rows:
        if row.state != "consumed" and row.name not in files:
            # The order of fsyncs excludes this: the file was removed by hand.
            log.error(
                "a segment is missing; put it back with the service stopped. stepwell fsck"
                " names the trajectories in it",
                segment=row.name,
            )
            _mark_damaged(db, row.pk)
    known_pks = {row.name: row.pk for row in rows}
    skip = {row.name for row in rows if row.state != "open"}
    left: list[Segment] = []
    for name in sorted(files - skip):
        segment = _recover_segment(db, store, name, known_pks.get(name))
        if segment is not None:
            left.append(segment)
    return left


def _mark_damaged(db: Database, pk: int) -> None:
    with db.write() as connection:
        connection.execute(sa.update(segments).where(segments.c.pk == pk).values(state="damaged"))


def _recover_segment(db: Database, store: Store, name: str, pk: int | None) -> Segment | None:
    if store.size("segments", name) <= len(MAGIC):
        store.delete("segments", name)  # it holds nothing
        if pk is not None:
            _mark_damaged(db, pk)
        return None
    last = None
    if pk is not None:
        with db.read() as connection:
            last = connection.execute(
                sa.select(sa.func.max(trajectories.c.segment_offset)).where(
                    trajectories.c.segment_pk == pk
                )
            ).scalar()
    try:
        file = open_segment(store, name)
    except SegmentDamaged as error:
        # Kept: fsck names it with all its trajectories. The other segments are recovered.
        log.error(
            "a segment cannot be read and is kept: check the disk, restore the file from a"
            " backup if possible; stepwell fsck names the trajectories in it",
            segment=name,
            error=str(error),
        )
        if pk is None:
            store.quarantine("segments", name)
        else:
            _mark_damaged(db, pk)
        return None
    tail, end = _read_tail(file, len(MAGIC) if last is None else last)
    torn = file.size - end
    with db.write() as connection:
        pk, added = _index_missing_rows(connection, name, pk, tail)
    del tail, file
    if torn and (last is None or end > last):
        store.truncate("segments", name, end)
    if added or torn:
        log.info("recovered", segment=name, reindexed=added, torn_bytes=torn)
    if pk is None:
        store.quarantine("segments", name)
        log.warning("a segment holds nothing that the index misses", quarantine=f"segments/{name}")
        return None
    return Segment(name, pk=pk, records=1)


def _read_tail(file: SegmentFile, start: int) -> tuple[list[Record], int]:
    """The records from `start` on, and the end of the last whole one.

    What is damaged between whole records is passed over: only the last write can be torn.
    """
    found: list[Record] = []
    end = start
    for record in file.all_records(start):
        end = record.end
        if "entry" in record.head:
            found.append(record)
    return found, end


def _index_missing_rows(
    connection: Connection, name: str, pk: int | None, tail: list[Record]
) -> tuple[int | None, int]:
    """Index whole records that have no row; returns the segment's key and their number."""
    found = find_known(connection, [record.entry.id for record in tail])
    d = datasets.c
    named = {
        row.name: row
        for row in connection.execute(
            sa.select(d.pk, d.name, d.created_at, json_value(d.spec, "env").label("env"))
        )
    }
    missing: dict[str, list[Record]] = {}
    for record in tail:
        dataset = named.get(record.dataset)
        # Older than the dataset: it belongs to an earlier, deleted dataset of the same name.
        if dataset is None or record.entry.created_at < dataset.created_at:
            continue
        if record.entry.id not in found:
            missing.setdefault(record.dataset, []).append(record)
    if not missing:
        return pk, 0
    now = time.time()
    if pk is None:
        pk = insert_segment(connection, name, now)
    change_id = next_change_id(connection)
    for dataset_name, records in missing.items():
        unique = {record.entry.id: record for record in records}
        key = named[dataset_name].pk
        first = reserve_seqs(connection, key, len(unique), now)
        assert first is not None
        insert_rows(
            connection,
            [
                row_of(record.entry, key, seq, change_id, named[dataset_name].env or "")
                | {"state": "spooled", "segment_pk": pk, "segment_offset": record.offset}
                for seq, record in enumerate(unique.values(), first)
            ],
        )
        # Who sent them is not in the records.
        counted = {"trajectories": len(unique)}
        count_audit(connection, SERVICE, "trajectories.recover", dataset_name, **counted)
        evict_over_capacity(connection, key, change_id)
    return pk, sum(map(len, missing.values()))
