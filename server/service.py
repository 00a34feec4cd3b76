"""The service as one object, and how a route gets it.

A constructed `Service` has locked, migrated and recovered the data directory. Routes take a
`ServiceDep` and call one function of one of its parts.
"""

from __future__ import annotations

import contextlib
import difflib
from typing import Annotated, Any

import structlog
from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant

from server.annotations import Annotations
from server.answer_memory import Answers
from server.auth import TokenStore
from server.imports.importer import Imports
from server.imports.jobs import Jobs
from server.index.db import Database, upgrade
from server.index.index_file import refuse_wrong_index
from server.index.mirror import Mirror
from server.index.schema_copy import keep_schema
from server.ingest.pipeline import Ingest
from server.integrity import IntegrityChecker
from server.maintenance.adoption import adopt_missing
from server.maintenance.clean_stop import mark_clean
from server.maintenance.index_repair import repair_index
from server.maintenance.loop import MaintenanceLoop
from server.maintenance.scrub import Scrubber
from server.memory_budget import MemoryBudget
from server.problems import ProblemError
from server.registry.stored_files import StoredFiles
from server.rights import LOCAL, Access, Right
from server.settings import Settings
from server.snapshots.snapshots import Snapshots
from server.sql.pool import SqlPool
from server.storage.index_mark import MarkFile
from server.storage.store import DirectoryLock, Store
from server.telemetry import Telemetry
from server.versions.versions import Versions
from stepwell import messages

log = structlog.get_logger("stepwell.service")


class Service:
    """All state of one server process. Routes get it as `ServiceDep`."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.telemetry = Telemetry()
        self.body_memory = MemoryBudget(settings.body_memory, self.telemetry)
        self.answers = Answers(settings.answer_memory, self.telemetry)
        self._lock = DirectoryLock(settings.data)
        self._marked = False
        try:
            refuse_wrong_index(settings.data, settings.index_file)
            self.store = Store(settings.data)
            self.store.clear_tmp()
            repair_index(settings.index_file, self.store)
            upgrade(settings.index_file)
            keep_schema(settings.index_file)
            self.db = Database(settings.index_file, mark=MarkFile(settings.data))
            self.telemetry.lost_rows.set(len(self.db.lost.rows))
            missing = adopt_missing(self.db, self.store)
            self.ingest = Ingest(settings, self.db, self.store, self.telemetry)
            self.integrity = IntegrityChecker(self.db, self.store)
            self.integrity.damaged_files.update(missing.files)
            self.stored_files = StoredFiles(self.db, self.store, self.integrity)
            self.mirror = Mirror(
                settings.index_file, settings.data / "mirror", self.db, settings.mirror_interval
            )
            self.sql = SqlPool(settings, self.mirror, self._on_damage, self.db.lost)
            self.snapshots = Snapshots(
                self.db, self.store, self.ingest.flush, self.sql, self.mirror, self.integrity
            )
            self.versions = Versions(self.db, self.store, self.ingest.flush, self.sql)
            self.annotations = Annotations(self.db, self.store)
            self.auth = TokenStore(self.db, settings)
            self.maintenance = MaintenanceLoop(
                settings, self.db, self.store, self.ingest, self.integrity, self.auth
            )
            self.scrub = Scrubber(settings, self.db, self.integrity, self.telemetry)
            self.jobs = Jobs(self.db)
            self.imports = Imports(settings, self.db, self.store, self.ingest.registry, self.jobs)
        except BaseException:
            self._lock.close()
            raise

    def _on_damage(self, files: list[str]) -> None:
        """Handle files that a query found damaged: their bytes differ from their checksums."""
        log.error("a query found damaged files", files=files)
        self.integrity.recheck_files(files)
        self.mirror.discard(files)

    def _mark_clean(self) -> None:
        """Once: after the first close the file is no longer this service's."""
        if not self._marked:
            self._marked = True
            mark_clean(self.settings.index_file)

    def start(self) -> None:
        """Start the parts that run threads or processes."""
        for part in (
            self.ingest,
            self.maintenance,
            self.scrub,
            self.mirror,
            self.sql,
            self.snapshots.cache,
        ):
            part.start()

    def close(self) -> None:
        """Stop the parts in reverse order; the ingest, last, seals what was acknowledged."""
        with contextlib.ExitStack() as stack:  # a part that fails must not keep others from closing
            for close in (
                self._lock.close,
                self._mark_clean,
                self.db.close,
                self.ingest.close,
                self.maintenance.close,
            ):
                stack.callback(close)
            for part in (
                self.mirror,
                self.sql,
                self.snapshots.cache,
                self.jobs,
                self.auth,
                self.scrub,
            ):
                stack.callback(part.close)


# Dependencies are coroutines: FastAPI runs every other one in a thread.


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _access(request: Request) -> Access:
    state = request.state
    right = getattr(state, "right", None) or Right(request.method, request.url.path)
    return Access(getattr(state, "principal", LOCAL), right)


async def caller(request: Request) -> str:
    """The caller for the audit log: a token's id, "operator" or "local"."""
    return (await _access(request)).who


ServiceDep = Annotated[Service, Depends(_service)]
AccessDep = Annotated[Access, Depends(_access)]
"""For routes whose right depends on the object."""
Caller = Annotated[str, Depends(caller)]

Limit = messages.PageLimit
Cursor = messages.Cursor


def raw_body(*media_types: str) -> dict[str, Any]:
    """`openapi_extra` of a route that reads the raw body."""
    content = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in media_types}
    return {"requestBody": {"required": True, "content": content}}


async def refuse_unknown_parameters(request: Request) -> None:
    """A dependency of the whole application. Raises `ProblemError` 422 `validation_error`."""
    route = request.scope.get("route")
    dependant = getattr(route, "dependant", None)
    if not request.query_params or dependant is None:
        return
    known = _names(dependant)
    for name in request.query_params:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise ProblemError(
            422,
            "validation_error",
            f"query.{name[:64]}: there is no such parameter"
            + (f"; did you mean {near[0]}?" if near else ""),
            expected=sorted(known),
            got=name[:64],
        )


def _names(dependant: Dependant) -> set[str]:
    names: set[str] = set()
    for field in dependant.query_params:
        kind = field.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, messages.Request):
            names |= set(kind.model_fields)
        else:
            names.add(field.alias)
    for inner in dependant.dependencies:
        names |= _names(inner)
    return names
