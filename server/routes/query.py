"""SQL over HTTP: POST /v1/query and GET /v1/query/schema. server/sql decides which SQL may run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial

import orjson
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from server.service import Caller, ServiceDep
from server.sql.catalog import describe
from server.sql.pool import Result
from stepwell.messages import ARROW, Query, QueryResult, QuerySchema

router = APIRouter(prefix="/v1/query", tags=["sql"])
_PIECE = 128 << 10
_REFUSALS = 8
"""Threads beyond those that queries may hold, to respond with 429."""


@router.post("", response_model=QueryResult)
async def run_query(body: Query, request: Request, service: ServiceDep, caller: Caller) -> Response:
    """Run one SELECT. JSON by default, an Arrow IPC stream when `Accept` names it."""
    received = time.monotonic()
    arrow = ARROW in request.headers.get("accept", "")
    ask = partial(
        service.sql.query,
        body.sql,
        body.params,
        dataset=body.dataset,
        limit=body.limit,
        timeout=body.timeout,
        form="arrow" if arrow else "json",
        user=_user(request, caller),
        received=received,
    )
    # A separate limiter: waiting queries must not use the threads of other routes.
    state = request.app.state
    if not hasattr(state, "sql_threads"):
        state.sql_threads = CapacityLimiter(service.sql.most_at_once + _REFUSALS)
    result = await to_thread.run_sync(ask, limiter=state.sql_threads)
    return _respond(result, arrow)


@router.get("/schema")
def query_schema(service: ServiceDep) -> QuerySchema:
    """The tables and columns of the SQL surface."""
    return describe(service.mirror.state("steps"))


def _user(request: Request, who: str) -> str:
    """The unit of fair sharing: a token, or an address where callers share a token or have none."""
    if who in ("local", "operator"):
        return f"{who}@{request.client.host if request.client else ''}"
    return who


def _respond(result: Result, arrow: bool) -> Response:
    """The response as the worker wrote it: held once, and only until it is sent."""
    head = tail = b""
    if not arrow:
        columns = orjson.dumps([column.model_dump() for column in result.columns])
        summary = {
            "truncated": result.truncated,
            "elapsed_ms": round(result.elapsed_ms, 3),
            "excluded": [one.model_dump() for one in result.excluded],
        }
        head, tail = b'{"columns":' + columns + b',"rows":', b"," + orjson.dumps(summary)[1:]
    return StreamingResponse(
        _pieces(head, result, tail),
        media_type=ARROW if arrow else "application/json",
        headers={"Content-Length": str(len(head) + len(result.payload) + len(tail))},
    )


async def _pieces(head: bytes, result: Result, tail: bytes) -> AsyncIterator[bytes]:
    payload = memoryview(result.payload)
    yield head
    for place in range(0, len(payload), _PIECE):
        yield bytes(payload[place : place + _PIECE])
    yield tail
