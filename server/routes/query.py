"""SQL over HTTP: POST /v1/query and GET /v1/query/schema. What may run is decided in server/sql."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from server.deps import ServiceDep
from server.sql.catalog import describe
from stepwell.messages import ARROW, Query, QueryResult, QuerySchema

router = APIRouter(prefix="/v1/query", tags=["sql"])


@router.post("", response_model=QueryResult)
def run_query(body: Query, request: Request, service: ServiceDep) -> Response:
    """Run one SELECT. JSON by default, an Arrow IPC stream when `Accept` names it."""
    arrow = ARROW in request.headers.get("accept", "")
    principal = getattr(request.state, "principal", None)
    result = service.sql.query(
        body.sql,
        body.params,
        dataset=body.dataset,
        limit=body.limit,
        timeout=body.timeout,
        form="arrow" if arrow else "json",
        user=principal.who if principal is not None else "",
    )
    if arrow:
        return Response(result.payload, media_type=ARROW)
    # The worker wrote the rows as JSON; they pass through as they are.
    head = orjson.dumps([column.model_dump() for column in result.columns])
    tail = orjson.dumps({"truncated": result.truncated, "elapsed_ms": round(result.elapsed_ms, 3)})
    content = b'{"columns":' + head + b',"rows":' + result.payload + b"," + tail[1:]
    return Response(content, media_type="application/json")


@router.get("/schema")
def query_schema(service: ServiceDep) -> QuerySchema:
    """The tables and columns that SQL sees."""
    return describe(service.mirror.state("steps").specs)
