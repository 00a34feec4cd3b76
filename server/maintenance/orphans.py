"""Orphans: files that the index does not contain, left by a process that crashed between two steps.

A shard is an orphan only if the index contains every trajectory in it (stored elsewhere, or
evicted). A shard with unknown trajectories may be the only copy of the data after the index was
lost: it is never swept, fsck names it, and `fsck --rebuild` indexes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
import structlog

from server.checksums import Source
from server.index.db import Database
from server.index.tables import FILES, shards, snapshots
from server.ingest.bulk_insert import FOLDER, SUFFIX
from server.ingest.index_rows import find_known
from server.storage.shards import ShardDamaged, read_footer
from server.storage.store import Store

log = structlog.get_logger("stepwell.orphans")


@dataclass(frozen=True, slots=True)
class Orphan:
    folder: str
    name: str
    bytes: int
    removable: bool
    """The index contains all its data."""
    importing: bool = False
    """Written by an import that has not committed: the importer removes it on startup."""


def orphans(db: Database, store: Store) -> list[Orphan]:
    """All files without an index row, those that a sweep may delete and those that it must not."""
    # Files first, index second: a file that is committed in between is then known, not an orphan.
    files = {folder: store.names(folder) for folder in ("shards/fifo", "shards/protected")}
    importing = {n.removesuffix(SUFFIX) for n in store.names(FOLDER) if n.endswith(SUFFIX)}
    tables = (snapshots, *FILES)
    files |= {table.name: store.names(table.name) for table in tables}
    with db.read() as connection:
        s = shards.c
        rows = connection.execute(sa.select(s.partition, s.id).where(s.state != "deleted"))
        there = {(f"shards/{row[0]}", f"{row[1]}.parquet") for row in rows}
        for table in tables:
            there |= {(table.name, r[0]) for r in connection.execute(sa.select(table.c.file))}
    found: list[Orphan] = []
    for folder, names in files.items():
        for name in names:
            path = store.path(folder, name)
            if (folder, name) in there:
                continue
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                continue
            if name.removesuffix(".parquet") in importing:
                found.append(Orphan(folder, name, size, True, importing=True))
                continue
            removable = not folder.startswith("shards/") or _all_known(db, path)
            found.append(Orphan(folder, name, size, removable))
    return found


class OrphanSweeper:
    """Deletes orphans once they have been orphans for long enough.

    The sweeper counts the uptime since it first found one: a file's own time is from a wall clock
    that may jump, and a new file whose transaction has not committed must not look old, also not
    after the process was stopped between the two.
    """

    def __init__(self, db: Database, store: Store):
        self._db, self._store = db, store
        self._met: dict[tuple[str, str], float] = {}

    def round(self, older_than: float) -> int:
        """Returns the number deleted. With 0.0, all: only while nothing else runs."""
        now, count = self._db.uptime(), 0
        found = [o for o in orphans(self._db, self._store) if o.removable and not o.importing]
        self._met = {(o.folder, o.name): self._met.get((o.folder, o.name), now) for o in found}
        for orphan in found:
            if now - self._met[orphan.folder, orphan.name] >= older_than:
                self._store.delete(orphan.folder, orphan.name)
                log.info("orphan removed", folder=orphan.folder, name=orphan.name)
                count += 1
        return count


def _all_known(db: Database, path: Path) -> bool:
    try:
        ids = [entry.id for entry in read_footer(Source(path)).entries]
    except ShardDamaged:
        return False
    with db.read() as connection:
        return len(find_known(connection, ids)) == len(ids)
