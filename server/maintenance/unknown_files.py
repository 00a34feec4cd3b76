"""Files that no row of the index names: moved to DIR/quarantine, never deleted.

A process that crashes between two steps leaves one; so does an operator who puts an index back that
is older than the files. What the index misses was taken from them before (adoption.py), and
`fsck --rebuild` takes what is left: it reads quarantined files like all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
import structlog

from server.index.db import Database
from server.index.tables import FILES, deleted_files, shards, snapshots
from server.ingest.bulk_insert import pending_shards
from server.ingest.index_rows import find_known
from server.ingest.segments import SegmentDamaged, open_segment
from server.storage.shards import ShardDamaged, read_footer, shard_file
from server.storage.store import QUARANTINE, Store

log = structlog.get_logger("stepwell.unknown_files")
SHARD_FOLDERS = ("shards/fifo", "shards/protected")
FOLDERS = (*SHARD_FOLDERS, *(table.name for table in (snapshots, *FILES)))


@dataclass(frozen=True, slots=True)
class UnknownFile:
    folder: str
    name: str


def unknown_files(db: Database, store: Store) -> list[UnknownFile]:
    """All files without a row, but for those of a running import, which its own start removes."""
    # Files first, index second: a file that is committed in between is then known.
    files = {folder: store.names(folder) for folder in FOLDERS}
    importing = pending_shards(store)
    with db.read() as connection:
        s = shards.c
        rows = connection.execute(sa.select(s.partition, s.id).where(s.state != "deleted"))
        there = {shard_file(*row) for row in rows}
        for table in (snapshots, *FILES):
            there |= {(table.name, r[0]) for r in connection.execute(sa.select(table.c.file))}
        there |= {(row.folder, row.name) for row in connection.execute(sa.select(deleted_files))}
    return [
        UnknownFile(folder, name)
        for folder, names in files.items()
        for name in names
        if (folder, name) not in there and name.removesuffix(".parquet") not in importing
    ]


class UnknownFileSweeper:
    """Quarantines unknown files once they have been unknown for long enough.

    The sweeper counts the uptime since it first found one: a file's own time is from a wall clock
    that may jump, and a new file whose transaction has not committed must not look old.
    """

    def __init__(self, db: Database, store: Store):
        self._db, self._store = db, store
        self._met: dict[UnknownFile, float] = {}

    def round(self, older_than: float) -> int:
        """Returns the number moved. With 0.0, all: only while nothing else runs."""
        now, count = self._db.uptime(), 0
        found = unknown_files(self._db, self._store)
        self._met = {file: self._met.get(file, now) for file in found}
        for file in found:
            if now - self._met[file] >= older_than:
                self._store.quarantine(file.folder, file.name)
                log.warning(
                    "the index does not know a file; it is kept in quarantine, see stepwell fsck",
                    file=f"{file.folder}/{file.name}",
                )
                count += 1
        return count


def unknown_data(db: Database, store: Store) -> list[str]:
    """Files in quarantine, as folder/name, that may hold what the index does not know; not second
    copies of trajectories, nor snapshots, which trainers make again."""
    found = []
    for file in quarantined_files(store):
        if file.folder == snapshots.name:
            continue
        ids = ids_of(store, file)
        with db.read() as connection:
            if not ids or len(find_known(connection, ids)) < len(set(ids)):
                found.append(f"{file.folder}/{file.name}")
    return found


def ids_of(store: Store, file: UnknownFile) -> list[str]:
    """The trajectories that a shard or a segment in quarantine holds; none for other and unreadable
    files."""
    place = f"{QUARANTINE}/{file.folder}"
    try:
        if file.name.endswith(".seg"):
            records = open_segment(store, file.name, place).all_records()
            return [record.entry.id for record in records if "entry" in record.head]
        if file.folder in SHARD_FOLDERS:
            return [entry.id for entry in read_footer(store.source(place, file.name)).entries]
    except (ShardDamaged, SegmentDamaged, OSError):
        pass
    return []


def quarantined_files(store: Store) -> list[UnknownFile]:
    """What is in quarantine."""
    folders = (*FOLDERS, "segments")
    return [UnknownFile(f, name) for f in folders for name in store.quarantined(f)]
