"""Detects damaged files before wrong bytes are served, and quarantines them.

    every read       block by block against the checksums in the index (server/storage/checksums.py)
    a block differs  → the whole file against its sha256 → differs or missing → `quarantined`
    the scrub        → reads every file periodically (maintenance/scrub.py)
    the next start   → a quarantined file that was restored is `live` again

Trajectories in a quarantined shard are still listed, but left out of SQL `steps` and new snapshots,
and those responses name the shard. Policies, videos and snapshots have no such state: reading a
damaged one is an error that names the file. Annotations can be made again: a damaged file of them
is given up.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.annotation_rows import drop_annotations
from server.index.db import Database
from server.index.sql_tables import EXCLUDED
from server.index.tables import annotation_files, segments, shards, trajectories
from server.problems import ProblemError, not_found
from server.storage.checksums import Corrupt, Source
from server.storage.shards import shard_file
from server.storage.store import Store, Stored
from stepwell.failpoints import failpoint
from stepwell.messages import Excluded

log = structlog.get_logger("stepwell.integrity")
Step = Callable[[int, int, int], None]
_KEPT = ("live", "retired")


class IntegrityChecker:
    """The expected content of each stored file, and which files are damaged. Thread-safe."""

    def __init__(self, db: Database, store: Store):
        self._db, self._store = db, store
        self._lock = threading.Lock()
        self.quarantined: set[str] = set()
        """Ids of quarantined shards, for /readyz."""
        self.damaged_files: set[str] = set()
        """Other damaged files, as folder/name."""
        self.restore_quarantined()
        self._find_damaged_segments()

    # --- the expected content of files ------------------------------------------------------------

    def shard(self, shard_id: str) -> tuple[Source, str]:
        """A shard's file and its sha256. Raises 404, 410 `damaged`, `snapshot_expired`."""
        s = shards.c
        with self._db.read() as connection:
            row = connection.execute(
                sa.select(s.partition, s.state, s.bytes, s.checksums, s.sha256).where(
                    s.id == shard_id
                )
            ).one_or_none()
        if row is None:
            raise not_found("shard", shard_id[:64])
        if row.state == "quarantined":
            raise damaged_shard(shard_id)
        if row.state not in _KEPT:
            raise gone(shard_id)
        file = shard_file(row.partition, shard_id)
        return self._store.source(*file, row.bytes, row.checksums), row.sha256

    # --- after a failed read ----------------------------------------------------------------------

    def recheck_shard(self, shard_id: str) -> bool:
        """Verify a shard after a failed read. Returns True if it is damaged."""
        with self._lock:  # many readers of one file may fail together: hash it once
            s = shards.c
            with self._db.read() as connection:
                row = connection.execute(sa.select(shards).where(s.id == shard_id)).one_or_none()
            if row is None or row.state not in (*_KEPT, "quarantined"):
                return False
            return row.state == "quarantined" or not self._verify_shard(row)

    def recheck_files(self, files: Sequence[str]) -> None:
        """Verify files (relative to the data directory) that SQL workers could not read."""
        for file in files:
            folder, _, name = file.rpartition("/")
            if folder.startswith("shards/"):
                self.recheck_shard(name.removesuffix(".parquet"))
            elif folder == "annotations":
                self._recheck_annotation(name)

    def _recheck_annotation(self, name: str) -> None:
        with self._lock, self._db.read() as connection:
            query = sa.select(annotation_files.c.pk).where(annotation_files.c.file == name)
            pk = connection.execute(query).scalar()
        if pk is not None:
            self.verify_file(annotation_files, pk)

    def verify_shard(self, pk: int, step: Step | None = None) -> bool:
        """Read a whole shard and store the time; False if it is damaged (then quarantined)."""
        with self._db.read() as connection:
            row = connection.execute(sa.select(shards).where(shards.c.pk == pk)).one_or_none()
        return row is None or row.state not in _KEPT or self._verify_shard(row, step)

    def _verify_shard(self, row: Any, step: Step | None = None) -> bool:
        found = self._examined(*shard_file(row.partition, row.id), step)
        if found is not None and found.sha256 == row.sha256:
            if found.checksums != row.checksums:
                log.info("checksums of a shard recomputed", shard=row.id)
            self._keep(shards, row.pk, found)
            return True
        return not self._quarantine(row.id)

    def _quarantine(self, shard_id: str) -> bool:
        """Returns False for a shard that was deleted in the meantime, which is not damage."""
        s = shards.c
        failpoint("quarantine.before_commit")
        with self._db.write() as connection:
            hit = connection.execute(
                sa.update(shards)
                .where(s.id == shard_id, s.state.in_(_KEPT))
                .values(state="quarantined")
            ).rowcount
        failpoint("quarantine.after_commit")
        if hit:
            self.quarantined.add(shard_id)
            log.error("a shard is damaged and is now quarantined", shard=shard_id)
        return bool(hit)

    def _give_up(self, row: Any) -> None:
        """Without its rows, the trajectories of a file of annotations can be annotated again."""
        failpoint("quarantine.before_commit")
        with self._db.write() as connection:
            drop_annotations(connection, annotation_files.c.pk == row.pk)
        failpoint("quarantine.after_commit")
        log.error(
            "annotations are damaged and given up; annotate again: stepwell annotate",
            name=row.name,
            trajectories=row.trajectories,
        )

    def damaged_file(self, where: str) -> ProblemError:
        """The error for a damaged file, which is named in the log and in /readyz."""
        if where not in self.damaged_files:
            self.damaged_files.add(where)
            log.error("a stored file is damaged", file=where)
        return ProblemError(
            410,
            "damaged",
            f"{where} is damaged: restore the file from a backup, or create it again",
            expected="the bytes that were written",
        )

    def verify_file(self, table: sa.Table, pk: int, step: Step | None = None) -> bool:
        """Read the whole file of a row of `tables.FILES` and store the time; False if it is
        damaged."""
        t = table.c
        with self._db.read() as connection:
            row = connection.execute(sa.select(table).where(t.pk == pk)).one_or_none()
        if row is None:
            return True
        where = f"{table.name}/{row.file}"
        found = self._examined(table.name, row.file, step)
        if found is None or found.sha256 != row.sha256:
            with self._db.read() as connection:  # it may have been deleted or replaced
                still = connection.execute(sa.select(t.file).where(t.pk == pk)).scalar()
            if still == row.file:
                self.damaged_file(where)
                if table is annotation_files:
                    self._give_up(row)
                return False
            return True
        self.damaged_files.discard(where)
        self._keep(table, pk, found)
        return True

    def _keep(self, table: sa.Table, pk: int, found: Stored) -> None:
        with self._db.write() as connection:
            connection.execute(
                sa.update(table)  # a key may belong to another file by now
                .where(table.c.pk == pk, table.c.sha256 == found.sha256)
                .values(checksums=found.checksums, verified_at=time.time())
            )

    def _examined(self, folder: str, name: str, step: Step | None = None) -> Stored | None:
        """What the file holds; None if it is missing or its disk cannot read it back.

        Raises OSError where the file may be good and only cannot be read now.
        """
        try:
            return self._store.examine(folder, name, step)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise

    # --- on startup -------------------------------------------------------------------------------

    def restore_quarantined(self) -> None:
        """Quarantined shards whose files were restored are `live` again."""
        s = shards.c
        with self._db.read() as connection:
            rows = connection.execute(
                sa.select(s.pk, s.id, s.partition, s.sha256).where(s.state == "quarantined")
            ).all()
        for row in rows:
            found = self._examined(*shard_file(row.partition, row.id))
            if found is None or found.sha256 != row.sha256:
                self.quarantined.add(row.id)
                continue
            with self._db.write() as connection:
                connection.execute(
                    sa.update(shards)
                    .where(s.pk == row.pk)
                    .values(
                        state="live",
                        retired_uptime=None,
                        checksums=found.checksums,
                        verified_at=time.time(),
                    )
                )
            self.quarantined.discard(row.id)
            log.info("a shard was restored", shard=row.id)

    def _find_damaged_segments(self) -> None:
        t = trajectories.c
        with self._db.read() as connection:
            names = connection.execute(
                sa.select(segments.c.name).where(
                    segments.c.state == "damaged",
                    sa.exists().where(t.segment_pk == segments.c.pk, t.state == "spooled"),
                )
            ).scalars()
            self.damaged_files |= {f"segments/{name}" for name in names}


def excluded(connection: Connection) -> list[Excluded]:
    """Damaged files of all datasets, with the number of living trajectories in each."""
    rows = connection.execute(sa.text(EXCLUDED))
    return [Excluded(dataset=row[0], file=row[1], trajectories=row[2]) for row in rows]


def damaged_shard(shard_id: str) -> ProblemError:
    return ProblemError(
        410,
        "damaged",
        f"shard {shard_id} is damaged and quarantined; make a new snapshot to continue without it,"
        " and restore the file from a backup (stepwell fsck names it)",
        expected="the bytes that were written",
    )


def gone(shard_id: str) -> ProblemError:
    return ProblemError(
        410,
        "snapshot_expired",
        f"shard {shard_id} was deleted: no lease held it; make a new snapshot, or read the manifest"
        " again",
    )


def checked(source: Source) -> bytes:
    """The whole content of a small file. Raises `Corrupt`, also if it is missing or unreadable."""
    try:
        return source.read()
    except FileNotFoundError:
        raise Corrupt(source.path, "missing") from None
    except OSError as error:
        if error.errno == errno.EIO:
            raise Corrupt(source.path, str(error)) from None
        raise
