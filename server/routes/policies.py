"""Policies: published weights, addressed as run/version, immutable.

    PUT  body → file → one index row → 201 (files.py)
         the same bytes again → 200; other bytes under that version → 409

The service does not parse the bytes; the program that loads them does. `latest` is the greatest
version, computed and never stored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from server.problems import ProblemError
from server.registry import policies
from server.registry.policies import MAX_NUMBER
from server.routes.files import StoredFile, matches, receive, require_media_type
from server.service import AccessDep, Caller, Cursor, Limit, ServiceDep, raw_body
from stepwell.messages import Alias, Document, Page, Policy, PutAlias

router = APIRouter(prefix="/v1/runs/{name}", tags=["policies"])
_DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(Document)
BYTES = "application/octet-stream"

Version = Annotated[int, Path(ge=0, le=MAX_NUMBER)]


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
    caller: Caller,
    metadata: Annotated[str | None, Header(alias="X-Stepwell-Metadata")] = None,
) -> Policy:
    """Publish (201). The same bytes again: 200. Other bytes for that version: 409."""
    require_media_type(request, "a policy is sent as bytes", BYTES, "")
    metadata_document = _parse_metadata(metadata)
    writer = await run_in_threadpool(policies.open_writer, service.stored_files, name)
    with writer:
        await receive(request, writer)
        policy, new = await run_in_threadpool(
            policies.publish,
            service.stored_files,
            name,
            version,
            writer,
            metadata_document,
            caller,
        )
    if not new:
        response.status_code = 200
    return policy


def _parse_metadata(header: str | None) -> dict[str, Any]:
    """The X-Stepwell-Metadata header: a JSON object, of which `step` becomes a column."""
    if not header:
        return {}
    try:
        found = _DOCUMENT.validate_python(json.loads(header), strict=True)
    except RecursionError:
        raise _bad_metadata("nested too deeply") from None
    except ValueError as error:  # pydantic's ValidationError is one too
        raise _bad_metadata(f"{header[:80]} ({str(error).splitlines()[-1]})") from None
    step = found.get("step")
    if step is not None and not (type(step) is int and 0 <= step <= MAX_NUMBER):
        raise _bad_metadata(f"step {step!r}")
    return found


@router.get("/policies")
def list_policies(
    service: ServiceDep, name: str, access: AccessDep, limit: Limit = 100, cursor: Cursor = None
) -> Page[Policy]:
    """Sorted by version, greatest first."""
    return policies.page(service.db, name, access, limit, cursor)


@router.get(
    "/policies/{which}",
    response_class=StoredFile,
    responses={200: {"content": {BYTES: {}}}, 304: {"description": "not modified"}},
)
@router.head("/policies/{which}", response_class=StoredFile, include_in_schema=False)
def get_policy(
    service: ServiceDep,
    name: str,
    which: str,
    request: Request,
    access: AccessDep,
    known: Annotated[str | None, Header(alias="If-None-Match")] = None,
) -> Response:
    """The bytes of a version or an alias (`latest`, `best`, …). The ETag is the sha256."""
    row = policies.get(service.db, name, which, access)
    headers = {
        "etag": f'"{row["sha256"]}"',
        "X-Stepwell-Version": str(row["version"]),
        # A version is immutable; an alias is not.
        "Cache-Control": "immutable, max-age=31536000" if which.isdecimal() else "no-cache",
    }
    if matches(known, headers["etag"]):
        return Response(status_code=304, headers=headers)

    def unreadable() -> ProblemError:
        return service.integrity.damaged_file(f"policies/{row['file']}")

    source = service.store.source("policies", row["file"], row["bytes"], row["checksums"])
    return StoredFile(
        request, service, source, headers=headers, media_type=BYTES, damaged=unreadable
    )


@router.put("/aliases/{alias}")
def put_alias(
    service: ServiceDep, name: str, alias: Alias, body: PutAlias, caller: Caller
) -> Policy:
    """Set an alias to a version. `latest` is automatic and cannot be set."""
    return policies.set_alias(service.db, name, alias, body, caller)


def _bad_metadata(got: str) -> ProblemError:
    return ProblemError(
        422,
        "validation_error",
        "the X-Stepwell-Metadata header is invalid",
        expected='a JSON object in ASCII, for instance {"step": 1000}',
        got=got[:200],
    )
