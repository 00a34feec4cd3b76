"""The application: routes, middleware, and one format for all errors. Made by `create_app`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import sqlalchemy as sa
import structlog
from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answer_memory import AnswerMemoryMiddleware
from server.auth import AuthMiddleware
from server.body_memory import BodyMemoryMiddleware
from server.index import lost_rows
from server.index.db import TICK_EVERY, Database
from server.index.dialect import disk_problem
from server.ingest.commit import READ_ONLY
from server.problems import ProblemError, index_damaged, title_of
from server.request_limits import WRITES, RequestLimits
from server.request_pacing import RequestPacing
from server.routes import (
    annotation,
    audit,
    consumers,
    datasets,
    evaluations,
    health,
    imports,
    ingest,
    jobs,
    launches,
    policies,
    query,
    run_metrics,
    runs,
    saved_queries,
    shards,
    snapshots,
    tokens,
    trajectories,
    versions,
    videos,
    workers,
)
from server.service import Service, refuse_unknown_parameters
from server.settings import Settings
from stepwell import __version__
from stepwell.errors import InvalidData
from stepwell.messages import PROBLEM, reason_of

ROUTES = (
    health,
    datasets,
    versions,
    annotation,
    consumers,
    ingest,
    imports,
    jobs,
    trajectories,
    query,
    saved_queries,
    snapshots,
    shards,
    runs,
    run_metrics,
    policies,
    evaluations,
    videos,
    workers,
    launches,
    tokens,
    audit,
)

BEARER = HTTPBearer(scheme_name="token", auto_error=False)
ERROR = {
    "description": "What was expected, what came, what to do (RFC 9457)",
    "content": {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
log = structlog.get_logger("stepwell.app")
QUERY_PATH = "/v1/query"
"""A POST that only reads."""
UNREADABLE = (
    "it could not be read; nothing was changed or lost. SQL needs disk space for its copy of the"
    " index: send the request again when the disk works and has space"
)
DISK_SAID_EVERY = 60.0
"""Seconds between two log lines about a disk that refuses writes."""


def create_app(settings: Settings, service: Service | None = None) -> FastAPI:
    """The application over `settings.data`.

    Startup opens the data directory, unless the caller passes an opened `service`; shutdown closes
    it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        opened = service if service is not None else await run_in_threadpool(Service, settings)
        app.state.service = opened
        counting = asyncio.create_task(_count_uptime(opened.db))
        try:
            opened.start()
            yield
        finally:
            counting.cancel()
            await run_in_threadpool(opened.close)

    app = FastAPI(
        title="Stepwell dataset service",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # The second dependency is for /openapi.json only: AuthMiddleware has checked the token.
        dependencies=[Depends(refuse_unknown_parameters), Security(BEARER)],
        responses={"default": ERROR},
    )
    app.state.settings = settings
    for resource in ROUTES:
        app.include_router(resource.router)
    for kind in (
        *(ProblemError, InvalidData, RequestValidationError, HTTPException, ClientDisconnect),
        *(OSError, sa.exc.DBAPIError),
    ):
        app.add_exception_handler(kind, _on_error)
    # The last one added runs first: Host and Origin are checked before tokens are read, and a
    # request without a valid token reserves no memory.
    app.add_middleware(AnswerMemoryMiddleware)
    app.add_middleware(BodyMemoryMiddleware, settings=settings)
    app.add_middleware(AuthMiddleware)
    app.add_middleware(RequestLimits, settings=settings)
    app.add_middleware(UncaughtErrors)
    app.add_middleware(RequestPacing)
    return app


async def _count_uptime(db: Database) -> None:
    """Count the time in which this event loop, which answers the requests, runs."""
    while True:
        db.tick()
        await asyncio.sleep(TICK_EVERY)


async def _on_error(request: Request, error: Exception) -> Response:
    return _problem_of(request, error).response()


def _problem_of(request: Request, error: Exception) -> ProblemError:
    match error:
        case ProblemError():
            lost = request.app.state.service.db.lost
            if lost and error.code == "not_found" and lost.hides(request.url.path):
                return index_damaged(lost.sentence())
            return error
        case InvalidData():
            return ProblemError(
                422, "invalid_data", str(error), expected=error.expected, got=error.got
            )
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return _unrouted(request, error)
        case ClientDisconnect():  # in the middle of its body: not an internal error
            log.debug("client disconnected", method=request.method, path=request.url.path[:200])
            return ProblemError(400, "bad_request", "the request body is incomplete")
    return _disk_refusal(request, error)


def _invalid(error: RequestValidationError) -> ProblemError:
    errors: list[dict[str, Any]] = [
        {
            "where": ".".join(str(part) for part in item["loc"]),
            "message": reason_of(item),
            "got": repr(item.get("input"))[:200],
        }
        for item in error.errors()[:20]
    ]
    first = errors[0]
    detail = f"{first['where']}: {first['message']}"
    return ProblemError(422, "validation_error", detail, got=first["got"], errors=errors)


def _unrouted(request: Request, error: HTTPException) -> ProblemError:
    codes = {404: "not_found", 405: "method_not_allowed", 400: "bad_request"}
    detail = str(error.detail)
    if error.status_code == 404:
        detail = f"there is no route {request.method} {request.url.path[:200]}"
    return ProblemError(
        error.status_code,
        codes.get(error.status_code, title_of(error.status_code).lower().replace(" ", "_")),
        detail,
        headers=dict(error.headers or {}),
    )


def _disk_refusal(request: Request, error: Exception) -> ProblemError:
    """A failed read or write: 507 or 503 for a disk error, else an internal error."""
    stores = request.method in WRITES and request.url.path.rstrip("/") != QUERY_PATH
    problem = disk_problem(error, READ_ONLY if stores else UNREADABLE)
    if problem is None and "malformed" in str(getattr(error, "orig", "")):
        problem = index_damaged(
            "the index is damaged; restart the service, which leaves out what is lost, or stop it"
            " and run: stepwell fsck --rebuild --data DIR"
        )
    if problem is None:
        return _defect(request.method, request.url.path, error)
    now = time.monotonic()
    if now - getattr(request.app.state, "disk_said", -DISK_SAID_EVERY) >= DISK_SAID_EVERY:
        request.app.state.disk_said = now
        log.error(
            "disk error: free disk space, or repair the disk (stepwell fsck)",
            path=request.url.path[:200],
            error=str(error)[:300],
        )
    return problem


def _defect(method: str, path: str, error: Exception) -> ProblemError:
    log.error(
        "internal error of the service; please report it with these lines",
        method=method,
        path=path[:200],
        exc_info=error,
    )
    return ProblemError(500, "internal_error", "internal error of the service; see its log")


def _say_what_is_lost(scope: Scope, start: Message) -> None:
    """A header on every answer to those who may read: lists have no other place for it."""
    service = getattr(scope["app"].state, "service", None) if "app" in scope else None
    if service is not None and service.db.lost and scope.get("state", {}).get("principal"):
        start["headers"] = [
            *start["headers"],
            (lost_rows.HEADER.lower().encode(), service.db.lost.header().encode()),
        ]


class UncaughtErrors:
    """Pure ASGI, outside of all that may fail: logs exceptions that no handler caught, once, and
    responds with 500.

    Not an exception handler: Starlette raises the exception again after such a handler, and uvicorn
    logs the same traceback a second time.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watching_send(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start" and message["status"] < 400:
                _say_what_is_lost(scope, message)
            await send(message)

        try:
            await self.app(scope, receive, watching_send)
            return
        except asyncio.CancelledError:  # the shutdown timeout has passed
            problem = ProblemError(
                503,
                "shutting_down",
                "the service is shutting down; send the request again when it has restarted",
                headers={"Retry-After": "5", "Connection": "close"},
            )
        except Exception as error:
            problem = _defect(scope["method"], scope["path"], error)
        if not started:
            await problem.response()(scope, receive, send)
