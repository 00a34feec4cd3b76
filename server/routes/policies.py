"""Policies: published weights, addressed as run/version, immutable.

    PUT  body → file → one index row → 201 (files.py)
         the same bytes again → 200; other bytes under that version → 409

The service does not parse the bytes; the program that loads them does. `latest` is the greatest
version, computed and never stored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Header, Path, Request, Response
from pydantic import TypeAdapter
from sqlalchemy.engine import Connection, RowMapping
from starlette.concurrency import run_in_threadpool

from server.index.db import find_pk, first_rows, write_audit
from server.index.lost_rows import refuse_if_lost
from server.index.tables import policies, policy_aliases, runs
from server.maintenance.described_files import policy_description
from server.problems import ProblemError, index_damaged
from server.routes.files import StoredFile, insert_row, matches, media_type_of, receive
from server.routes.runs import find_run
from server.service import AccessDep, Caller, Cursor, Limit, Service, ServiceDep, raw_body
from server.storage.store import Stored, Writer, new_name
from stepwell.messages import Alias, Document, Page, Policy, PutAlias

router = APIRouter(prefix="/v1/runs/{name}", tags=["policies"])
LATEST = "latest"
_DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(Document)
MAX_NUMBER = 2**53
"""Largest version or step: integers that every JSON reader represents exactly."""
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
    if (kind := media_type_of(request)) not in (BYTES, ""):
        raise ProblemError(
            415, "unsupported_media_type", "a policy is sent as bytes", expected=BYTES, got=kind
        )
    metadata_document = _parse_metadata(metadata)
    writer = await run_in_threadpool(_open_writer, service, name)
    with writer:
        await receive(request, writer)
        policy, new = await run_in_threadpool(
            _publish, service, name, version, writer, metadata_document, caller
        )
    if not new:
        response.status_code = 200
    return policy


def _open_writer(service: Service, run: str) -> Writer:
    """The file for the body of a PUT; raises 404 before reading it if the run does not exist."""
    with service.db.read() as c:
        find_pk(c, runs, run)
    return service.store.new("policies", new_name("pol", ".bin"))


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


def _publish(
    service: Service, run: str, version: int, writer: Writer, metadata: dict[str, Any], who: str
) -> tuple[Policy, bool]:
    """Publish a written body as run/version; returns whether it is new.

    Raises 422 for an empty body, 409 if the version holds other bytes.
    """

    def insert(c: Connection, stored: Stored) -> tuple[int, Policy, bool]:
        return _insert(c, run, version, stored, metadata, who)

    with service.db.read() as c:
        description = policy_description(c, run, version, metadata, time.time())
    points = ("policy.after_rename", "policy.after_replace")
    return insert_row(service, policies, writer, insert, description=description, points=points)


def _insert(
    c: Connection, run: str, version: int, stored: Stored, metadata: dict[str, Any], who: str
) -> tuple[int, Policy, bool]:
    """(pk, policy, whether it is new)"""
    if stored.bytes == 0:
        raise ProblemError(
            422, "invalid_policy", "the body is empty", expected="the bytes of a policy file"
        )
    run_pk = find_pk(c, runs, run)
    found = _row(c, run_pk, version)
    if found is not None and found["sha256"] != stored.sha256:
        raise ProblemError(
            409,
            "conflict",
            f"policy {run}/{version} exists with other content; policies are immutable, publish"
            " a new version",
            expected=f"sha256 {found['sha256']}",
            got=f"sha256 {stored.sha256}",
        )
    if found is None:
        refuse_if_lost(c, policies, f"{run}/{version}")
        c.execute(
            sa.insert(policies).values(
                run_pk=run_pk,
                version=version,
                sha256=stored.sha256,
                file=stored.name,
                bytes=stored.bytes,
                checksums=stored.checksums,
                verified_at=time.time(),
                step=metadata.get("step"),
                metadata=metadata,
                created_at=time.time(),
            )
        )
        about = {"sha256": stored.sha256, "bytes": stored.bytes}
        write_audit(c, who, "policy.publish", f"{run}/{version}", **about)
    row = _row(c, run_pk, version)
    assert row is not None, "just written in this transaction"
    return row["pk"], _policies(c, run, run_pk, [row])[0], found is None


@router.get("/policies")
def list_policies(
    service: ServiceDep, name: str, access: AccessDep, limit: Limit = 100, cursor: Cursor = None
) -> Page[Policy]:
    """Sorted by version, greatest first."""
    with service.db.read() as c:
        run_pk = find_run(c, name, access)
        query = sa.select(policies).where(policies.c.run_pk == run_pk)
        if cursor is not None:
            query = query.where(policies.c.version < cursor)
        rows, last = first_rows(c, query.order_by(policies.c.version.desc()), limit)
        items = _policies(c, name, run_pk, rows)
    for item in items:
        if LATEST in item.aliases and any(
            _may_be_newer(lost.name, item) for lost in service.db.lost.of("policies")
        ):
            item.aliases.remove(LATEST)
    return Page[Policy](items=items, next=None if last is None else str(last["version"]))


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
    with service.db.read() as c:
        run_pk = find_run(c, name, access)
        row = _which(c, run_pk, which)
        if not which.isdecimal() and service.db.lost.of("policies", "policy_aliases"):
            # The one it means may be among the lost.
            raise index_damaged(service.db.lost.sentence())
        if row is None:
            raise _absent(c, name, run_pk, which)
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
    # An existing alias moves; nothing is copied.
    if alias == LATEST:
        raise ProblemError(
            409, "conflict", "'latest' is always the greatest version and cannot be set"
        )
    with service.db.write() as c:
        run_pk = find_pk(c, runs, name)
        row = _row(c, run_pk, body.version)
        if row is None:
            raise _absent(c, name, run_pk, str(body.version))
        where = sa.and_(policy_aliases.c.run_pk == run_pk, policy_aliases.c.alias == alias)
        c.execute(sa.delete(policy_aliases).where(where))
        c.execute(sa.insert(policy_aliases).values(run_pk=run_pk, alias=alias, policy_pk=row["pk"]))
        write_audit(c, caller, "policy.alias", f"{name}/{alias}", version=body.version)
        return _policies(c, name, run_pk, [row])[0]


def _which(c: Connection, run_pk: int, which: str) -> RowMapping | None:
    if which.isascii() and which.isdecimal():
        # Longer than any stored version: Python limits the length of integers that it parses.
        return _row(c, run_pk, int(which)) if len(which) <= len(str(MAX_NUMBER)) else None
    query = sa.select(policies).where(policies.c.run_pk == run_pk)
    if which == LATEST:
        query = query.order_by(policies.c.version.desc()).limit(1)
    else:
        query = query.join(policy_aliases, policy_aliases.c.policy_pk == policies.c.pk).where(
            policy_aliases.c.run_pk == run_pk, policy_aliases.c.alias == which
        )
    return c.execute(query).mappings().first()


def _row(c: Connection, run_pk: int, version: int) -> RowMapping | None:
    query = sa.select(policies).where(policies.c.run_pk == run_pk, policies.c.version == version)
    return c.execute(query).mappings().first()


def _policies(c: Connection, run: str, run_pk: int, rows: Sequence[RowMapping]) -> list[Policy]:
    names: dict[int, list[str]] = {}
    query = sa.select(policy_aliases.c.policy_pk, policy_aliases.c.alias)
    query = query.where(policy_aliases.c.run_pk == run_pk).order_by(policy_aliases.c.alias)
    for policy_pk, alias in c.execute(query):
        names.setdefault(policy_pk, []).append(alias)
    newest = c.execute(
        sa.select(sa.func.max(policies.c.version)).where(policies.c.run_pk == run_pk)
    ).scalar()
    return [
        Policy(
            **row,
            run=run,
            aliases=([LATEST] if row["version"] == newest else []) + names.get(row["pk"], []),
        )
        for row in rows
    ]


def _may_be_newer(lost: str, policy: Policy) -> bool:
    """Whether a lost policy of that name may be a later one of the same run."""
    run, _, version = lost.rpartition("/")
    if run not in (policy.run, ""):
        return False
    return not version.isdecimal() or int(version) > policy.version


def _absent(c: Connection, run: str, run_pk: int, which: str) -> ProblemError:
    newest = c.execute(
        sa.select(sa.func.max(policies.c.version)).where(policies.c.run_pk == run_pk)
    ).scalar()
    hint = "none has been published yet" if newest is None else f"the latest version is {newest}"
    return ProblemError(404, "not_found", f"run {run!r} has no policy {which!r}; {hint}")


def _bad_metadata(got: str) -> ProblemError:
    return ProblemError(
        422,
        "validation_error",
        "the X-Stepwell-Metadata header is invalid",
        expected='a JSON object in ASCII, for instance {"step": 1000}',
        got=got[:200],
    )
