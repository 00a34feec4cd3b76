"""Bulk insert: thousands of trajectories become visible in one transaction, all or none.

    pending marker → shard file (temp, fsync, rename), its rows staged      once per shard
      → one transaction: dataset if new, shards, rows, totals, eviction → markers removed

The marker (uploads/<shard>.pending) is durable before its shard exists: after a crash, the next
start knows which files were never committed and removes them (`sweep_pending`). Nothing is written
to segments: the source file is the durable copy until the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import Database, next_change_id, write_audit
from server.index.tables import datasets, shards
from server.ingest.dataset_registry import RegisteredDataset
from server.ingest.evict import evict_over_capacity
from server.ingest.index_rows import find_known, insert_rows, reserve_seqs, row_of
from server.ingest.seal import insert_shard_row, new_shard, shard_row
from server.ingest.staged_rows import StagedRows
from server.ingest.validate import ValidTrajectory, entry_of
from server.problems import ProblemError
from server.settings import Settings
from server.storage.shards import shard_file
from server.storage.store import Store, new_name
from stepwell.codec import to_batch
from stepwell.failpoints import failpoint

FOLDER, SUFFIX = "uploads", ".pending"
MOST_IN_SHARD = 16_384
"""Trajectories that wait in memory for their shard; each takes about 3 kB beside its arrays."""


@dataclass(slots=True)
class BulkResult:
    """Counts of a bulk insert."""

    stored: int = 0
    steps: int = 0
    duplicates: int = 0
    """Already stored with the same content."""
    evicted: int = 0
    """Stored and evicted earlier; not stored again."""


@dataclass(slots=True)
class BulkInsert:
    """One import. Call `add` in order, then `commit` or `abandon`. Not thread-safe."""

    settings: Settings
    db: Database
    store: Store
    dataset: RegisteredDataset
    """Its pk is 0 until the dataset exists."""
    partition: str
    count: int
    """Upper bound of the trajectories to add: this many sequence numbers are reserved."""
    who: str = "local"
    """Whose import it is, for the audit log."""
    _next: int = 0
    _group: list[ValidTrajectory] = field(default_factory=list)
    _bytes: int = 0
    _shards: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the index; those of their trajectories are staged, a block for each shard."""
    _staged: StagedRows = field(init=False)
    _marks: list[str] = field(default_factory=list)
    _result: BulkResult = field(default_factory=BulkResult)

    def __post_init__(self) -> None:
        self._next = 1
        if self.dataset.pk:
            with self.db.write() as connection:
                first = reserve_seqs(connection, self.dataset.pk, self.count, time.time())
            if first is None:
                raise _changed(self.dataset.name)
            self._next = first
        self._staged = StagedRows(self.store.scratch_path("rows"))

    def add(self, items: list[ValidTrajectory]) -> None:
        """Write new trajectories into shards; skips those already stored. Raises 409."""
        with self.db.read() as connection:
            before = find_known(connection, [item.trajectory.id for item in items])
        for item in items:
            there = before.get(item.trajectory.id)
            if there is None:
                self._group.append(item)
                self._bytes += item.trajectory.nbytes
                full = self._bytes >= self.settings.shard_bytes
                if full or len(self._group) == MOST_IN_SHARD:
                    self._write()
            elif there.digest != item.digest:
                raise ProblemError(
                    409,
                    "conflict",
                    "this file was imported before with other options (as env, action,"
                    " keep_last_step) or another version of the importer; import it into another"
                    " dataset",
                    expected=f"content of sha256 {there.digest}",
                    got=item.digest,
                )
            elif there.evicted:
                self._result.evicted += 1
            else:
                self._result.duplicates += 1

    def commit(self, create: Callable[[Connection], int] | None) -> BulkResult:
        """Make everything visible. `create` creates the dataset in the same transaction."""
        if self._group:
            self._write()
        now = time.time()
        with self.db.write() as connection:
            pk = self._dataset_pk(connection, create)
            self._insert(connection, pk, now)
            failpoint("import.before_commit")
        failpoint("import.after_commit")
        self._staged.remove()
        self._forget_marks()
        return self._result

    def abandon(self) -> None:
        """Remove what was written; has no effect after a commit."""
        self._staged.remove()
        for shard_id in self._marks:
            _undo(self.db, self.store, shard_id)
        self._marks = []

    def _dataset_pk(
        self, connection: Connection, create: Callable[[Connection], int] | None
    ) -> int:
        row = connection.execute(
            sa.select(datasets.c.pk, datasets.c.spec_digest).where(
                datasets.c.name == self.dataset.name
            )
        ).one_or_none()
        if self.dataset.pk:
            if row is None or row.pk != self.dataset.pk:
                raise _changed(self.dataset.name)
            return self.dataset.pk
        # A dataset of this name was created in the meantime: the sequence numbers would collide.
        if row is not None or create is None:
            raise _changed(self.dataset.name)
        pk = create(connection)
        reserve_seqs(connection, pk, self.count, time.time())
        return pk

    def _insert(self, connection: Connection, pk: int, now: float) -> None:
        change_id = next_change_id(connection)
        for shard, rows in zip(self._shards, self._staged.blocks(), strict=True):
            if find_known(connection, [row["id"] for row in rows]):
                raise ProblemError(
                    409,
                    "conflict",
                    "the same file was imported at the same time; see that import's job instead",
                )
            shard_pk = insert_shard_row(connection, shard, pk, now)
            common = {"dataset_pk": pk, "shard_pk": shard_pk, "change_id": change_id}
            insert_rows(connection, [row | common for row in rows])
        counted = {"trajectories": self._result.stored, "steps": self._result.steps}
        write_audit(connection, self.who, "trajectories.import", self.dataset.name, **counted)
        evict_over_capacity(connection, pk, change_id)

    def _write(self) -> None:
        """Write the collected trajectories as one durable shard, not yet in the index."""
        check_room(self.settings, self.store)
        group, self._group, self._bytes = self._group, [], 0
        shard_id = new_name("sh")
        self.store.put(FOLDER, shard_id + SUFFIX, f"shards/{self.partition}".encode())
        self._marks.append(shard_id)
        now = time.time()
        entries = []
        row = 0
        for seq, item in enumerate(group, self._next):
            entries.append(entry_of(item, self.partition, now, seq=seq, row_start=row))
            row += entries[-1].rows
        self._next += len(group)
        batches = (self._batch(item) for item in group)
        shard = new_shard(self.store, self.dataset, entries, batches, [], None, shard_id)
        env = self.dataset.spec.env
        self._staged.add(
            [
                row_of(entry, 0, entry.seq, 0, env)
                | {"state": "sealed", "traj_idx": number, "row_start": entry.row_start}
                for number, entry in enumerate(shard.entries)
            ]
        )
        self._shards.append(shard_row(shard_id, self.partition, shard.file, shard.entries))
        self._result.stored += len(group)
        self._result.steps += sum(entry.rows - 1 for entry in entries)

    def _batch(self, item: ValidTrajectory) -> pa.RecordBatch:
        if item.message is not None:  # as we would write it
            return pa.ipc.read_record_batch(pa.py_buffer(item.message), self.dataset.schema)
        return to_batch(item.trajectory, self.dataset.spec, self.dataset.schema)

    def _forget_marks(self) -> None:
        for shard_id in self._marks:
            self.store.delete(FOLDER, shard_id + SUFFIX)
        self._marks = []


def check_room(settings: Settings, store: Store) -> None:
    """Raise 507 before the disk is full: posts and the index need the remaining space."""
    free = store.free()
    if free < settings.min_free:
        raise ProblemError(
            507,
            "storage_full",
            "the disk is nearly full; nothing was stored: free disk space and upload again",
            expected=f"at least {settings.min_free} bytes free",
            got=free,
        )


def sweep_pending(db: Database, store: Store) -> int:
    """On startup: remove shards that an import wrote and never committed. Returns their number."""
    return sum(_undo(db, store, shard_id) for shard_id in pending_shards(store))


def pending_shards(store: Store) -> set[str]:
    """Ids of shards that an import has written, or is writing, and has not committed."""
    return {name.removesuffix(SUFFIX) for name in store.names(FOLDER) if name.endswith(SUFFIX)}


def _undo(db: Database, store: Store, shard_id: str) -> bool:
    """Remove a marked shard unless the index contains it, then its marker."""
    with db.read() as connection:
        there = connection.execute(sa.select(shards.c.pk).where(shards.c.id == shard_id)).first()
    removed = there is None and any(
        store.delete(*shard_file(partition, shard_id)) for partition in ("fifo", "protected")
    )
    store.delete(FOLDER, shard_id + SUFFIX)
    return removed


def _changed(name: str) -> ProblemError:
    return ProblemError(
        409,
        "conflict",
        f"dataset {name!r} was created or deleted during the import; nothing was stored: try again",
    )
