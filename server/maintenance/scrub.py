"""The scrub reads every stored file periodically to find damage before the file is needed.

Least recently verified first, `scrub_rate` bytes a second, in small steps whatever the file's size.
The progress is `verified_at` in the index: after a restart the scrub continues from there (a file
that was partly read is read again).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import sqlalchemy as sa
import structlog

from server.index.db import Database
from server.index.tables import FILES, shards
from server.integrity import IntegrityChecker
from server.settings import Settings
from server.storage.checksums import STEP
from server.telemetry import Telemetry
from stepwell._background import BackgroundLoop

log = structlog.get_logger("stepwell.scrub")
LOOK_EVERY = 60.0
"""Seconds between checks for files that are due."""
DAY = 86_400.0


class _Stopped(Exception):
    """The service stops; the file is read again later."""


class Scrubber:
    """One thread. `run_once` verifies everything due at once, for tests and manual use."""

    def __init__(
        self, settings: Settings, db: Database, integrity: IntegrityChecker, telemetry: Telemetry
    ):
        self._settings, self._db = settings, db
        self._integrity, self._telemetry = integrity, telemetry
        self._stop = threading.Event()
        self._loop = BackgroundLoop("scrub", self._work, every=LOOK_EVERY, report=_report)

    def start(self) -> None:
        if self._settings.scrub_rate > 0:
            self._loop.start()

    def close(self) -> None:
        self._stop.set()
        self._loop.stop()

    @property
    def trouble(self) -> str:
        return self._loop.trouble

    def measure(self) -> None:
        """Update the gauges."""
        now = time.time()
        with self._db.read() as connection:
            oldest = [
                connection.execute(
                    sa.select(sa.func.min(table.c.verified_at)).where(where)
                ).scalar()
                for table, where in _TABLES
            ]
        ages = [now - at for at in oldest if at is not None]
        self._telemetry.scrub_oldest.set(max(0.0, *ages) if ages else 0.0)
        self._telemetry.quarantined.set(len(self._integrity.quarantined))

    def run_once(self, now: float) -> int:
        """Verify every file that is due at `now`; returns their number."""
        count = 0
        while not self._stop.is_set() and (due := self._due(now)) is not None:
            table, pk = due
            began = time.monotonic()
            if table is shards:
                sound = self._integrity.verify_shard(pk, self._step)
            else:
                sound = self._integrity.verify_file(table, pk, self._step)
            self._telemetry.scrub_files.labels("sound" if sound else "damaged").inc()
            if not sound and table is not shards:
                self._put_off(table, pk, now)
            # A small file costs a commit, so it counts as a full step.
            self._pause(STEP / self._rate - (time.monotonic() - began))
            count += 1
        return count

    @property
    def _rate(self) -> float:
        return float(self._settings.scrub_rate or 1 << 40)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # On Linux this applies to this thread only, and to the priority of its reads too.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with contextlib.suppress(_Stopped):
            self.run_once(time.time())

    def _due(self, now: float) -> tuple[sa.Table, int] | None:
        before = now - self._settings.scrub_days * DAY
        found: list[tuple[float, sa.Table, int]] = []
        with self._db.read() as connection:
            for table, where in _TABLES:
                at = table.c.verified_at
                row = connection.execute(
                    sa.select(table.c.pk, at)
                    # A time in the future comes from a clock that was wrong.
                    .where(where, sa.or_(at.is_(None), at <= before, at > now + DAY))
                    .order_by(at)
                    .limit(1)
                ).first()
                if row is not None:
                    found.append((row.verified_at or 0.0, table, row.pk))
        return min(found, key=lambda one: one[0])[1:] if found else None

    def _put_off(self, table: sa.Table, pk: int, now: float) -> None:
        """Postpone a damaged file, which stays in place, so that the next one is read."""
        with self._db.write() as connection:
            connection.execute(sa.update(table).where(table.c.pk == pk).values(verified_at=now))

    def _step(self, descriptor: int, offset: int, count: int) -> None:
        if hasattr(os, "posix_fadvise"):
            # The disk may be what is wrong: the next part is read from it, not from the page cache,
            # and these pages do not stay in memory.
            os.posix_fadvise(descriptor, offset, count + STEP, os.POSIX_FADV_DONTNEED)
        self._telemetry.scrub_bytes.inc(count)
        self._pause(count / self._rate)
        if self._stop.is_set():
            raise _Stopped

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._stop.wait(seconds)


_TABLES = (
    (shards, shards.c.state.in_(("live", "retired"))),
    *((table, sa.true()) for table in FILES),
)


def _report(_name: str, error: BaseException) -> None:
    log.error("the scrub failed and is retried", exc_info=error)
