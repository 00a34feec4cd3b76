"""Snapshots over HTTP, implemented in server/snapshots/snapshots.py."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Annotated

import orjson
import pyarrow as pa
from fastapi import APIRouter, Query, Request, Response

from server.answer_memory import Answer
from server.service import Caller, Limit, ServiceDep
from stepwell.manifest import id_bytes, id_texts
from stepwell.messages import ARROW, CreateSnapshot, Lease, Page, PutLease, Snapshot

router = APIRouter(prefix="/v1/snapshots", tags=["snapshots"])
BLOCK_MEMORY = 3 << 20
"""Memory of writing one block of a manifest, at most 8192 rows. The blocks themselves are those of
the cache."""
JSON_ROWS = 512
"""Rows of a manifest that are written as JSON at once."""


@router.post("", status_code=201)
def create_snapshot(service: ServiceDep, body: CreateSnapshot, caller: Caller) -> Snapshot:
    """Freeze a selection; the snapshot has a first lease of 120 s for `holder`.

    With `since`, an unchanged selection returns that snapshot again.
    """
    return service.snapshots.create(body, caller)


@router.get("")
def list_snapshots(
    service: ServiceDep,
    limit: Limit = 100,
    cursor: str | None = None,
) -> Page[Snapshot]:
    """Newest first."""
    return service.snapshots.page(limit=limit, cursor=cursor)


@router.get("/{snapshot_id}")
def get_snapshot(service: ServiceDep, snapshot_id: str) -> Snapshot:
    return service.snapshots.get(snapshot_id)


@router.get(
    "/{snapshot_id}/manifest",
    responses={200: {"content": {ARROW: {}, "application/json": {}}}},
)
def get_manifest(
    service: ServiceDep, snapshot_id: str, request: Request, since: str | None = None
) -> Response:
    """One row per trajectory with its location. Arrow; JSON on request.

    `since`, an earlier snapshot: only the blocks of rows that differ (docs/reference/http.md).
    """
    table = service.snapshots.manifest(snapshot_id, since)
    as_json = "application/json" in request.headers.get("accept", "")
    return Answer(
        service.answers,
        BLOCK_MEMORY,
        lambda: _json(table) if as_json else _stream(table),
        media_type="application/json" if as_json else ARROW,
    )


def _stream(table: pa.Table) -> Iterator[bytes]:
    """An Arrow stream, one block at a time."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
    yield sink.getvalue()


def _json(table: pa.Table) -> Iterator[bytes]:
    """{snapshot, …, columns, rows}, some rows at a time."""
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    metadata |= {
        name: orjson.loads(metadata[name]) for name in ("shares", "gone") if name in metadata
    }
    columns = [
        {"name": f.name, "type": "string" if _is_name(f.type) else str(f.type)}
        for f in table.schema
    ]
    yield orjson.dumps({**metadata, "columns": columns})[:-1] + b',"rows":['
    first = True
    for batch in table.to_batches(max_chunksize=JSON_ROWS):
        values = [
            id_texts(id_bytes(column)) if field.name == "id" else column.to_pylist()
            for field, column in zip(batch.schema, batch.columns, strict=True)
        ]
        yield b"" if first else b","
        first = False
        yield orjson.dumps(list(zip(*values, strict=True)))[1:-1]
    yield b"]}"


def _is_name(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind) or pa.types.is_fixed_size_binary(kind))


@router.put("/{snapshot_id}/lease")
def put_lease(service: ServiceDep, snapshot_id: str, body: PutLease, caller: Caller) -> Lease:
    """Keep the snapshot's data from deletion; renew before it expires. 410 if it is too late."""
    return service.snapshots.lease(snapshot_id, body, caller)


@router.delete("/{snapshot_id}/lease", status_code=204)
def delete_lease(
    service: ServiceDep, snapshot_id: str, caller: Caller, holder: Annotated[str, Query()] = ""
) -> None:
    service.snapshots.release(snapshot_id, holder, caller)
