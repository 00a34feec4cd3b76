"""Policies over HTTP: bytes in, bytes out, ETags; the work is in server/policies.py."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Header, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from server import policies
from server.body_memory import STREAM_CHUNK
from server.problems import ProblemError
from server.routes.files import StoredFile
from server.service import Cursor, Limit, ServiceDep, raw_body
from stepwell.messages import Alias, Page, Policy, PutAlias

router = APIRouter(prefix="/v1/runs/{name}", tags=["policies"])

BYTES = "application/octet-stream"

Version = Annotated[int, Path(ge=0, le=policies.MAX_NUMBER)]
_ETAGS = re.compile(r'(?:W/)?"([^"]*)"')


@router.put(
    "/policies/{version}",
    status_code=201,
    responses={200: {"model": Policy}},
    openapi_extra=raw_body(BYTES),
)
async def put_policy(
    service: ServiceDep,
    name: str,
    version: Version,
    request: Request,
    response: Response,
    metadata: Annotated[str | None, Header(alias="X-Stepwell-Metadata")] = None,
) -> Policy:
    """Publish (201). The same bytes again: 200. Other bytes under that version: 409."""
    kind = request.headers.get("content-type", BYTES).partition(";")[0].strip().lower()
    if kind != BYTES:
        raise ProblemError(
            415, "unsupported_media_type", "a policy is raw bytes", expected=BYTES, got=kind
        )
    metadata_document = policies.parse_metadata(metadata)
    writer = await run_in_threadpool(policies.open_writer, service.db, service.store, name)
    with writer:
        waiting = bytearray()
        async for chunk in request.stream():
            waiting += chunk
            if len(waiting) >= STREAM_CHUNK:
                await run_in_threadpool(writer.write, bytes(waiting))
                waiting.clear()
        await run_in_threadpool(writer.write, bytes(waiting))
        policy, new = await run_in_threadpool(
            policies.publish,
            service.db,
            service.store,
            service.integrity,
            name,
            version,
            writer,
            metadata_document,
        )
    if not new:
        response.status_code = 200
    return policy


@router.get("/policies")
def list_policies(
    service: ServiceDep, name: str, limit: Limit = 100, cursor: Cursor = None
) -> Page[Policy]:
    """Greatest version first."""
    return policies.page(service.db, name, limit=limit, before=cursor)


@router.get(
    "/policies/{which}",
    response_class=StoredFile,
    responses={200: {"content": {BYTES: {}}}, 304: {"description": "you have it already"}},
)
@router.head("/policies/{which}", response_class=StoredFile, include_in_schema=False)
def get_policy(
    service: ServiceDep,
    name: str,
    which: str,
    request: Request,
    known: Annotated[str | None, Header(alias="If-None-Match")] = None,
) -> Response:
    """The bytes of a version or an alias (`latest`, `best`, …). The ETag is the sha256."""
    found = policies.locate(service.db, service.store, name, which)
    policy = found.policy
    headers = {
        "etag": f'"{policy.sha256}"',
        "X-Stepwell-Version": str(policy.version),
        # A version never changes; where an alias points does.
        "Cache-Control": "immutable, max-age=31536000" if which.isdecimal() else "no-cache",
    }
    if known is not None and (known.strip() == "*" or policy.sha256 in _ETAGS.findall(known)):
        return Response(status_code=304, headers=headers)

    def unreadable() -> ProblemError:
        return service.integrity.damaged_file(found.where)

    return StoredFile(request, found.source, headers=headers, media_type=BYTES, damaged=unreadable)


@router.put("/aliases/{alias}")
def put_alias(service: ServiceDep, name: str, alias: Alias, body: PutAlias) -> Policy:
    """Point an alias at a version. `latest` is automatic and cannot be set."""
    return policies.set_alias(service.db, name, alias, body.version)
