"""Damaged shards: found out before anybody is handed wrong bytes, and taken out of circulation.

    first use in this process → sha256 of the file against the index → remembered as sound
                                 differs or missing → state `quarantined`, an error in the log
    next start                 → a quarantined file that was restored is `live` again

What lies in a quarantined shard is still listed, but left out of SQL `steps` and new snapshots.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import sqlalchemy as sa
import structlog

from server.index.db import Database
from server.index.tables import shards
from server.problems import ProblemError
from server.storage.store import Store

log = structlog.get_logger("stepwell.damage")


class Inspector:
    """Verifies shard files, each once per process. Thread-safe."""

    def __init__(self, db: Database, store: Store):
        self._db, self._store = db, store
        self._lock = threading.Lock()
        self._sound: set[str] = set()
        self.quarantined: set[str] = set()
        """Ids of shards out of circulation, for /readyz."""
        self._take_back()

    def check(self, shard_id: str, partition: str, sha256: str) -> Path:
        """The file, whose content is what was written. Raises 410 `damaged`, `snapshot_expired`."""
        path = self._store.path(f"shards/{partition}", f"{shard_id}.parquet")
        if shard_id in self._sound:
            return path
        # One at a time: twenty readers of a new snapshot must not hash the same file twenty times.
        with self._lock:
            if shard_id not in self._sound:
                if not _is_sound(path, sha256):
                    raise damaged(shard_id) if self._quarantine(shard_id) else gone(shard_id)
                self._sound.add(shard_id)
        return path

    def _quarantine(self, shard_id: str) -> bool:
        """False for one that was deleted meanwhile: that is no damage."""
        s = shards.c
        with self._db.write() as connection:
            hit = connection.execute(
                sa.update(shards)
                .where(s.id == shard_id, s.state.in_(("live", "retired")))
                .values(state="quarantined")
            ).rowcount
        if hit:
            self.quarantined.add(shard_id)
            log.error("a shard is damaged and was taken out of circulation", shard=shard_id)
        return bool(hit)

    def suspect(self, shard_id: str) -> bool:
        """Something could not be read from it: look at the whole file. True if it is damaged."""
        s = shards.c
        with self._db.read() as connection:
            row = connection.execute(
                sa.select(s.partition, s.sha256).where(
                    s.id == shard_id, s.state.in_(("live", "retired"))
                )
            ).one_or_none()
        if row is None:
            return False
        path = self._store.path(f"shards/{row.partition}", f"{shard_id}.parquet")
        with self._lock:
            self._sound.discard(shard_id)
            return not _is_sound(path, row.sha256) and self._quarantine(shard_id)

    def _take_back(self) -> None:
        s = shards.c
        with self._db.read() as connection:
            rows = connection.execute(
                sa.select(s.id, s.partition, s.sha256).where(s.state == "quarantined")
            ).all()
        for shard_id, partition, sha256 in rows:
            path = self._store.path(f"shards/{partition}", f"{shard_id}.parquet")
            if not _is_sound(path, sha256):
                self.quarantined.add(shard_id)
                continue
            with self._db.write() as connection:
                connection.execute(
                    sa.update(shards)
                    .where(s.id == shard_id)
                    .values(state="live", retired_uptime=None)
                )
            log.info("a shard was restored", shard=shard_id)


def damaged(shard_id: str) -> ProblemError:
    return ProblemError(
        410,
        "damaged",
        f"shard {shard_id} is damaged and was taken out of circulation; make a new snapshot to go"
        " on without it, and restore the file from a backup (stepwell fsck names it)",
        expected="the bytes that were written",
    )


def gone(shard_id: str) -> ProblemError:
    return ProblemError(
        410,
        "snapshot_expired",
        f"shard {shard_id} is gone: no lease held it; make a new snapshot, or read the manifest"
        " again",
    )


def _is_sound(path: Path, sha256: str) -> bool:
    """Raises OSError where the file may be good and only cannot be read now."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False
