"""Sealing: a closed segment becomes immutable shards, in the background.

    write DIR/tmp → fsync → rename → fsync dir     per dataset and partition
      → one transaction: shards in, trajectories moved, segment consumed → unlink the segment

A crash at any point is harmless: before the commit the segment still holds everything and the new
file is one that no row names; after it the next start deletes the segment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import Database, next_change_id
from server.index.dialect import disk_problem
from server.index.tables import datasets, segments, shards, trajectories
from server.ingest.commit import Committer
from server.ingest.dataset_registry import DatasetRegistry, RegisteredDataset
from server.ingest.index_rows import chunks, make_tombstones
from server.ingest.segments import Segment, SegmentDamaged, SegmentFile, open_segment
from server.problems import ProblemError
from server.storage.shards import Entry, shard_file, write_shard
from server.storage.store import Store, Stored, new_name
from server.telemetry import Telemetry
from stepwell._background import BackgroundLoop
from stepwell.failpoints import failpoint

log = structlog.get_logger("stepwell.seal")
TICK = 0.2
RETRY = 1.0
"""Seconds between attempts after a failure."""


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard file that is on disk, not yet in the index."""

    id: str
    dataset_pk: int
    partition: str
    file: Stored
    entries: list[Entry]
    pks: list[int]
    """Index keys of the trajectories, in the order of `entries`."""


class Sealer:
    """A thread that seals segments into shards. `lock` is held while locations change."""

    def __init__(
        self,
        db: Database,
        store: Store,
        registry: DatasetRegistry,
        committer: Committer,
        telemetry: Telemetry,
    ):
        self._db, self._store = db, store
        self._registry, self._committer, self._telemetry = registry, committer, telemetry
        self._waiting: list[Segment] = []
        self._changed = threading.Condition()
        self._stop = False
        self.lock = threading.Lock()
        self.failure = ""
        """Why the last attempt failed; for /readyz."""
        self.loop = BackgroundLoop("sealer", self._round, every=0.0, longest_wait=RETRY)
        self.damaged: set[str] = set()
        """Segments with unreadable records, as segments/name; for /readyz."""

    def start(self) -> None:
        self.loop.start()

    def close(self) -> None:
        """Seal all segments, then stop."""
        with self._changed:
            self._stop = True
            self._changed.notify()
        self.loop.join()

    def add(self, segment: Segment) -> None:
        """Queue a closed segment (recovery queues those that it finds)."""
        with self._changed:
            self._waiting.append(segment)
            self._changed.notify()

    def flush(self, timeout: float = 120.0) -> list[tuple[int, int]]:
        """Seal everything acknowledged so far; returns (dataset pk, trajectories) of each shard."""
        self._take(force=True)
        with self._changed:
            mine = list(self._waiting)
            self._changed.notify()
        moved: list[tuple[int, int]] = []
        deadline = time.monotonic() + timeout
        for segment in mine:
            if not segment.sealed.wait(max(0.0, deadline - time.monotonic())):
                raise ProblemError(
                    503,
                    "not_sealed",
                    "sealing takes longer than expected; the data is durable, try again later",
                    headers={"Retry-After": "5"},
                )
            if segment.failure is not None:
                raise _seal_problem(segment.failure)
            moved += segment.moved
        return moved

    def _round(self) -> None:
        with self._changed:
            if not self._waiting and not self._stop:
                self._changed.wait(TICK)
            stop = self._stop
        try:
            self._take(force=stop)
            with self._changed:
                todo = list(self._waiting)
            for segment in todo:
                self._attempt(segment)
        finally:
            if stop:
                self.loop.stop()
        if self.failure and not stop:
            time.sleep(RETRY)

    def _take(self, *, force: bool) -> None:
        """Collect segments that are full, idle or old; with `force`, the current one too."""
        # Under both locks: a closed segment is in `_waiting` before another flush reads it.
        with self._committer.lock, self._changed:
            self._waiting += self._committer.take_closed(force=force)

    def _attempt(self, segment: Segment) -> None:
        try:
            with self._telemetry.seal_seconds.time(), self.lock:
                segment.moved = self._seal(segment)
        except Exception as error:
            # The segment keeps everything; it stays queued and is retried every second.
            failure = f"{segment.name}: {error}"
            if failure != self.failure:  # logged once, not at every attempt
                disk = disk_problem(error, "") is not None
                log.error(
                    "sealing failed and is retried; no data is lost: free disk space"
                    if disk
                    else "sealing failed with an internal error and is retried; no data is lost;"
                    " please report it with these lines",
                    segment=segment.name,
                    error=str(error)[:200],
                    exc_info=None if disk else error,
                )
            self.failure = failure
            segment.failure = error
            segment.sealed.set()
            with self._changed:
                self._waiting.remove(segment)
                if not self._stop:
                    self._waiting.append(replace(segment, sealed=threading.Event(), failure=None))
            return
        self.failure = ""
        with self._changed:
            self._waiting.remove(segment)
        segment.sealed.set()

    # --- one segment, in order of execution -----------------------------------------------------

    def _seal(self, segment: Segment) -> list[tuple[int, int]]:
        if segment.pk is None:  # nothing in it was acknowledged
            # A failed commit may still take effect after a crash, but not after a later commit.
            with self._db.write() as connection:
                next_change_id(connection)
            self._store.delete("segments", segment.name)
            return []
        t = trajectories.c
        with self._db.read() as connection:
            rows = connection.execute(
                sa.select(
                    t.pk, t.id, t.dataset_pk, t.seq, t.partition, t.segment_offset, datasets.c.name
                )
                .outerjoin(datasets, datasets.c.pk == t.dataset_pk)
                .where(t.segment_pk == segment.pk, t.state == "spooled")
                .order_by(t.dataset_pk, t.partition, t.seq)
            ).all()
        # Of a dataset whose row is lost: they wait in their segment for a rebuild.
        stranded = [row.id for row in rows if row.name is None]
        rows = [row for row in rows if row.name is not None]
        failpoint("seal.before_tmp")
        made: list[NewShard] = []
        damaged: list[str] = stranded
        try:
            file = open_segment(self._store, segment.name) if rows else None
        except (SegmentDamaged, FileNotFoundError):
            # The segment is kept: flushing everything else must not wait for it indefinitely.
            file, damaged = None, [*stranded, *(row.id for row in rows)]
        if file is not None:
            for _, members in groupby(rows, key=lambda row: (row.dataset_pk, row.partition)):
                shard = self._write(file, list(members), damaged)
                if shard is not None:
                    made.append(shard)
        with self._db.write() as connection:
            self._move(connection, segment, made, damaged)
            failpoint("seal.before_commit")
        failpoint("seal.after_commit")
        if damaged:
            self.damaged.add(f"segments/{segment.name}")
            log.error(
                "acknowledged trajectories cannot be read from their segment, which is kept: check"
                " the disk, restore the file from a backup if possible",
                segment=segment.name,
                trajectories=damaged,
            )
        else:
            delete_consumed(self._db, self._store)
        return [(shard.dataset_pk, len(shard.entries)) for shard in made]

    def _write(self, file: SegmentFile, rows: Sequence[Any], damaged: list[str]) -> NewShard | None:
        """One shard of one dataset and partition."""
        dataset = self._registry.get(rows[0].name)
        records, entries, pks = [], [], []
        for row in rows:
            try:
                record = file.record(row.segment_offset)
            except SegmentDamaged:
                damaged.append(row.id)
                continue
            records.append(record)
            entries.append(record.entry.having(seq=row.seq, partition=row.partition))
            pks.append(row.pk)
        if not entries:
            return None
        batches = (record.batch(dataset.schema) for record in records)
        return new_shard(self._store, dataset, entries, batches, pks)

    def _move(
        self, connection: Connection, segment: Segment, made: list[NewShard], damaged: list[str]
    ) -> None:
        change_id = next_change_id(connection)
        for shard in made:
            insert_shard(connection, shard, change_id)
        # Evicted before they were sealed: only the tombstone remains.
        t = trajectories.c
        evicted = sa.and_(t.segment_pk == segment.pk, t.state == "evicted")
        make_tombstones(connection, evicted, self._db.uptime(), change_id)
        connection.execute(
            sa.update(segments)
            .where(segments.c.pk == segment.pk)
            .values(state="damaged" if damaged else "consumed")
        )


def delete_consumed(db: Database, store: Store) -> None:
    """Delete the files of segments whose data are in shards, unless a backup is running."""
    with db.read() as connection:
        consumed = sa.select(segments.c.pk, segments.c.name).where(segments.c.state == "consumed")
        rows = connection.execute(consumed).all()
    for row in rows:
        with store.deleting() as allowed:
            if not allowed:
                return
            store.delete("segments", row.name)
        failpoint("seal.after_unlink")
        with db.write() as connection:
            connection.execute(sa.delete(segments).where(segments.c.pk == row.pk))


def new_shard(
    store: Store,
    dataset: RegisteredDataset,
    entries: list[Entry],
    batches: Any,
    pks: list[int],
    points: tuple[str, str] | None = ("seal.after_tmp_fsync", "seal.after_rename"),
    shard_id: str = "",
) -> NewShard:
    """Write one durable shard file of `entries` (one dataset, one partition). Raises OSError."""
    shard_id = shard_id or new_name("sh")
    partition = entries[0].partition
    with store.new(*shard_file(partition, shard_id), points=points) as writer:
        placed: list[Entry] = []
        writer.fill(
            lambda path: placed.extend(
                write_shard(
                    path,
                    dataset.name,
                    dataset.spec,
                    entries,
                    batches,
                )
            )
        )
        file = writer.commit()
    return NewShard(shard_id, dataset.pk, partition, file, placed, pks)


def insert_shard(connection: Connection, shard: NewShard, change_id: int) -> int:
    """Insert a shard into the index and move its trajectories to it; returns its key.

    A trajectory that was evicted in the meantime stays evicted; a deleted one stays deleted.
    """
    row = shard_row(shard.id, shard.partition, shard.file, shard.entries)
    shard_pk = insert_shard_row(connection, row, shard.dataset_pk, time.time())
    locations = [
        {"key": pk, "number": i, "row": entry.row_start}
        for i, (pk, entry) in enumerate(zip(shard.pks, shard.entries, strict=True))
    ]
    move_to_shard(connection, shard_pk, locations, change_id)
    return shard_pk


def move_to_shard(
    connection: Connection, shard_pk: int, locations: Sequence[dict[str, int]], change_id: int
) -> None:
    """Point trajectories to a shard. `locations`: `key`, and `number` and first `row` in it."""
    t = trajectories.c
    statement = (
        sa.update(trajectories)
        .where(t.pk == sa.bindparam("key"))
        .values(
            state=sa.case((t.state == "evicted", "evicted"), else_="sealed"),
            shard_pk=shard_pk,
            traj_idx=sa.bindparam("number"),
            row_start=sa.bindparam("row"),
            segment_pk=None,
            segment_offset=None,
            change_id=change_id,
        )
    )
    for some in chunks(locations):
        connection.execute(statement, list(some))


def insert_shard_row(
    connection: Connection, row: dict[str, Any], dataset_pk: int | None, created_at: float
) -> int:
    """Returns the shard's key."""
    statement = sa.insert(shards).values(**row, dataset_pk=dataset_pk, created_at=created_at)
    return int(connection.execute(statement.returning(shards.c.pk)).scalar_one())


def shard_row(
    shard_id: str, partition: str, file: Stored, entries: Sequence[Entry]
) -> dict[str, Any]:
    """The columns of the shard's row that its file gives."""
    seqs = [entry.seq for entry in entries]
    return {
        "id": shard_id,
        "partition": partition,
        "state": "live",
        "sha256": file.sha256,
        "bytes": file.bytes,
        "checksums": file.checksums,
        "verified_at": time.time(),
        "rows": sum(entry.rows for entry in entries),
        "trajectories": len(entries),
        "seq_min": min(seqs),
        "seq_max": max(seqs),
    }


def _seal_problem(error: BaseException) -> ProblemError:
    if isinstance(error, OSError):
        return ProblemError(
            507,
            "storage_full",
            "the data is durable but could not be sealed; sealing is retried",
            got=str(error.strerror or error)[:200],
            headers={"Retry-After": "5"},
        )
    return ProblemError(500, "internal_error", "the data is durable but could not be sealed")
