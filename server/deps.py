"""The service as one object, and how a route gets hold of it.

`Service` is complete when constructed: the data directory is locked, migrated and recovered. Routes
take a `ServiceDep` and call one function of one of its parts.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import Depends, Request

from server import auth, jobs
from server.auth import TokenBook
from server.bodies import Budget
from server.imports import importer
from server.imports.importer import Imports
from server.index import mirror
from server.index.db import Database, IndexUnusable, upgrade
from server.index.mirror import Mirror
from server.ingest.damage import Inspector
from server.ingest.pipeline import Ingest
from server.jobs import Jobs
from server.settings import Settings
from server.snapshots import Snapshots
from server.sql import pool
from server.sql.pool import SqlPool
from server.storage.store import DirectoryLock, Store
from server.telemetry import Telemetry
from server.upkeep import scrub
from server.upkeep.keeper import Keeper


class Service:
    """Everything that one server process holds. Routes reach it as `ServiceDep`."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.telemetry = Telemetry()
        self.bodies = Budget(settings.body_memory, self.telemetry)
        self._lock = DirectoryLock(settings.data)
        try:
            self.store = Store(settings.data)
            self.store.clear_tmp()
            _refuse_lost_index(settings)
            upgrade(settings.index_file)
            self.db = Database(settings.index_file)
            self.ingest = Ingest(settings, self.db, self.store, self.telemetry)
            self.inspector = Inspector(self.db, self.store)
            self.snapshots = Snapshots(
                self.db,
                self.store,
                self.ingest.flush,
                lambda: self.sql,
                lambda: self.mirror,
                self.inspector,
            )
            self.keeper = Keeper(settings, self.db, self.store, self.ingest, self.inspector)
            self.scrub = scrub.build(self)
            self.mirror: Mirror = mirror.build(self)
            self.sql: SqlPool = pool.build(self)
            self.jobs: Jobs = jobs.build(self)
            self.imports: Imports = importer.build(self)
            self.auth: TokenBook = auth.build(self)
        except BaseException:
            self._lock.release()
            raise

    def start(self) -> None:
        """Start what has threads or processes of its own."""
        for part in (
            self.ingest,
            self.keeper,
            self.scrub,
            self.mirror,
            self.sql,
            self.snapshots.at_hand,
        ):
            part.start()

    def close(self) -> None:
        """Stop in reverse; the ingest, last, seals what was acknowledged."""
        with contextlib.ExitStack() as stack:  # one that fails must not keep the rest from it
            for close in (self._lock.release, self.db.close, self.ingest.close, self.keeper.close):
                stack.callback(close)
            for part in (
                self.mirror,
                self.sql,
                self.snapshots.at_hand,
                self.jobs,
                self.auth,
                self.scrub,
            ):
                stack.callback(part.close)


def _refuse_lost_index(settings: Settings) -> None:
    """An empty index over a directory full of data would take everything for rubbish."""
    shards = settings.data / "shards"
    if not settings.index_file.exists() and any(shards.glob("*/*.parquet")):
        raise IndexUnusable(
            f"{settings.index_file} is missing, but {shards} holds data; restore it from a backup,"
            f" or rebuild it from the files: stepwell fsck --rebuild --data {settings.data}"
        )


def get_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


def may(request: Request, *scopes: str) -> bool:
    """Whether the caller has one of the scopes."""
    principal = getattr(request.state, "principal", None)
    return principal is None or any(principal.may(scope) for scope in scopes)


def who(request: Request) -> str:
    """The caller's name for the audit log: a token's id, "operator" or "local"."""
    principal = getattr(request.state, "principal", None)
    return "local" if principal is None else str(principal.who)
