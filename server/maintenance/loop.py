"""The maintenance thread: retention, compaction, unknown files, and leaving read-only mode."""

from __future__ import annotations

import contextlib
import time

import sqlalchemy as sa
import structlog

from server.auth import TokenStore
from server.index.db import Database
from server.index.deleted_files import delete_given_up
from server.index.dialect import DAMAGE, disk_problem, quick_check, raw_of, reason
from server.index.table_reader import first_wrong_row
from server.ingest.pipeline import Ingest
from server.ingest.seal import delete_consumed
from server.integrity import IntegrityChecker
from server.maintenance.compaction import compact
from server.maintenance.described_files import describe_undescribed
from server.maintenance.shard_deletion import (
    apply_retention,
    delete_marked,
    drop_dead_annotations,
    has_deadlines,
)
from server.maintenance.unknown_files import UnknownFileSweeper, unknown_data
from server.problems import ProblemError
from server.settings import Settings
from server.storage.store import Store
from stepwell._background import BackgroundLoop

log = structlog.get_logger("stepwell.maintenance")
SWEEP_EVERY = 600.0
UNKNOWN_AGE = 3600.0
"""Seconds after which an unknown file is quarantined."""
LOOK_EVERY = 86_400.0
"""Seconds between two looks at all rows of the index."""
SAVE_UPTIME_EVERY = 10.0
"""Seconds of uptime that a crash may lose while a deadline is pending."""


class MaintenanceLoop:
    """One round every `maintenance_interval` seconds; an error in one round does not stop it."""

    def __init__(
        self,
        settings: Settings,
        db: Database,
        store: Store,
        ingest: Ingest,
        integrity: IntegrityChecker,
        tokens: TokenStore,
    ):
        self._settings, self._db, self._store = settings, db, store
        self._ingest, self._integrity, self._tokens = ingest, integrity, tokens
        self._index_trouble = ""
        self.aside: list[str] = []
        """Files in quarantine that hold what the index does not know, for /readyz."""
        self._swept = time.monotonic()
        self._look_at = time.monotonic()
        interval = settings.maintenance_interval
        self._loop = BackgroundLoop(
            "maintenance", self._work, every=interval, longest_wait=interval, report=self._say
        )
        self._sweeper = UnknownFileSweeper(db, store)
        if not db.lost:
            delete_marked(db, store)
            delete_given_up(db, store)
            # No other thread runs yet, so no unknown file belongs to a running transaction.
            self._sweeper.round(older_than=0.0)
        self._look_at_quarantine()

    def start(self) -> None:
        if self._settings.maintenance_interval > 0:
            self._loop.start()

    def close(self) -> None:
        self._loop.stop()

    @property
    def trouble(self) -> str:
        """Why the index or the last round failed, for /readyz."""
        return self._index_trouble or self._loop.trouble

    def _work(self) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at_index()
            describe_undescribed(self._db, self._store)
            self._look_at = time.monotonic() + LOOK_EVERY
        else:
            self.round()

    def _say(self, name: str, error: BaseException) -> None:
        """Log the failure once, not in every round: a full disk fails again."""
        del name
        if disk_problem(error, "") is None:
            log.error(
                "maintenance failed with an internal error and is retried; please report it",
                exc_info=error,
            )
        else:
            log.error(
                "maintenance failed and is retried: free disk space",
                error=str(error)[:300],
            )

    def _look_at_quarantine(self) -> None:
        self.aside = unknown_data(self._db, self._store)
        if self.aside:
            log.warning("files in quarantine hold what the index does not know", files=self.aside)

    def _look_at_index(self) -> None:
        """A damaged page is noticed when it is read, a damaged row by the next start, both
        perhaps in a year: look now."""
        try:
            with self._db.read() as connection:
                raw = raw_of(connection)
                found = quick_check(raw) or first_wrong_row(raw)
        except DAMAGE as error:
            found = reason(error)
        if found:
            self._index_trouble = (
                f"the index is damaged ({found}): restart the service, which leaves out what is"
                " lost, or stop it and run stepwell fsck --rebuild --data DIR"
            )[:400]
            log.error("the index is damaged: restart the service, or rebuild it", found=found)

    def round(self) -> None:
        """Run everything that is due now."""
        if self._ingest.committer.trouble is not None:
            with contextlib.suppress(ProblemError):
                self._ingest.committer.check_disk()
        now = self._db.uptime()
        if self._db.write_failed:
            with contextlib.suppress(sa.exc.OperationalError):  # deletions may free disk space
                self._db.save_uptime()
        elif now - self._db.saved_uptime >= SAVE_UPTIME_EVERY and has_deadlines(self._db):
            self._db.save_uptime()
        self._tokens.save_last_used()
        if self._db.lost:
            return  # a lost row may be what says that a file is needed
        apply_retention(self._settings, self._db, self._store, now)
        delete_consumed(self._db, self._store)
        delete_given_up(self._db, self._store)
        wall = self._db.clock.wall()
        compact(self._settings, self._db, self._store, self._ingest, self._integrity, wall)
        if time.monotonic() - self._swept >= SWEEP_EVERY:
            self._swept = time.monotonic()
            if self._sweeper.round(UNKNOWN_AGE):
                self._look_at_quarantine()
            drop_dead_annotations(self._db, self._store)
