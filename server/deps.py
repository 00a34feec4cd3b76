"""The service as one object, and how a route gets hold of it.

`Service` is complete when constructed: the data directory is locked, migrated and recovered. Routes
take a `ServiceDep` and call one function of one of its parts.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

from fastapi import Depends, Request

from server.index.db import Database, IndexUnusable, upgrade
from server.ingest.pipeline import Ingest
from server.settings import Settings
from server.snapshots import Snapshots
from server.storage.store import DirectoryLock, Store
from server.telemetry import Telemetry
from server.upkeep.keeper import Keeper

# (attribute, module): each module's `build(service) -> object` makes that part; if the object has
# start() and close(), they are called in this order and in reverse.
PARTS = (
    ("mirror", "server.index.mirror"),
    ("sql", "server.sql.pool"),
    ("jobs", "server.jobs"),
    ("imports", "server.imports.importer"),
    ("auth", "server.auth"),
)


class Service:
    """Everything that one server process holds. Routes reach it as `ServiceDep`."""

    mirror: Any = None
    sql: Any = None
    jobs: Any = None
    imports: Any = None
    auth: Any = None

    def __init__(self, settings: Settings):
        self.settings = settings
        self.telemetry = Telemetry()
        self._lock = DirectoryLock(settings.data)
        try:
            self.store = Store(settings.data)
            self.store.clear_tmp()
            _refuse_lost_index(settings)
            upgrade(settings.index_file)
            self.db = Database(settings.index_file)
            self.ingest = Ingest(settings, self.db, self.store, self.telemetry)
            self.snapshots = Snapshots(self.db, self.store, self.ingest.flush, lambda: self.sql)
            self.keeper = Keeper(settings, self.db, self.store, self.ingest)
            self._build_parts()
        except BaseException:
            self._lock.release()
            raise

    def _build_parts(self) -> None:
        for attribute, module in PARTS:
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
                continue
            if hasattr(found, "build"):
                setattr(self, attribute, found.build(self))

    def start(self) -> None:
        self.ingest.start()
        self.keeper.start()
        for attribute, _ in PARTS:
            part = getattr(self, attribute)
            if hasattr(part, "start"):
                part.start()

    def close(self) -> None:
        for attribute, _ in reversed(PARTS):
            part = getattr(self, attribute)
            if hasattr(part, "close"):
                part.close()
        self.keeper.close()
        self.ingest.close()
        self.db.close()
        self._lock.release()


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


def who(request: Request) -> str:
    """The caller's name for the audit log: a token's id, "operator" or "local"."""
    principal = getattr(request.state, "principal", None)
    return "local" if principal is None else str(principal.who)
