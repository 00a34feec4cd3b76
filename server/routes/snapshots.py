"""Snapshots over HTTP; the work is in server/snapshots.py."""

from __future__ import annotations

from typing import Annotated

import orjson
import pyarrow as pa
from fastapi import APIRouter, Query, Request, Response

from server.deps import ServiceDep
from stepwell.messages import ARROW, CreateSnapshot, Lease, PutLease, Snapshot, SnapshotPage

router = APIRouter(prefix="/v1/snapshots", tags=["snapshots"])


@router.post("", status_code=201)
def create_snapshot(service: ServiceDep, body: CreateSnapshot) -> Snapshot:
    """Freeze a selection; comes with a first lease of 120 s for `holder`."""
    return service.snapshots.create(body)


@router.get("")
def list_snapshots(
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> SnapshotPage:
    """Newest first."""
    return service.snapshots.page(limit=limit, cursor=cursor)


@router.get("/{snapshot_id}")
def get_snapshot(service: ServiceDep, snapshot_id: str) -> Snapshot:
    return service.snapshots.get(snapshot_id)


@router.get(
    "/{snapshot_id}/manifest",
    responses={200: {"content": {ARROW: {}, "application/json": {}}}},
)
def get_manifest(service: ServiceDep, snapshot_id: str, request: Request) -> Response:
    """One row per trajectory: where it lies. Arrow; JSON if asked for."""
    table = service.snapshots.manifest(snapshot_id)
    if "application/json" in request.headers.get("accept", ""):
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        columns = [{"name": f.name, "type": str(f.type)} for f in table.schema]
        rows = [list(row) for row in zip(*(c.to_pylist() for c in table.columns), strict=True)]
        body = {**metadata, "shares": orjson.loads(metadata["shares"])}
        return Response(
            orjson.dumps({**body, "columns": columns, "rows": rows}),
            media_type="application/json",
        )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Response(memoryview(sink.getvalue()), media_type=ARROW)


@router.put("/{snapshot_id}/lease")
def put_lease(service: ServiceDep, snapshot_id: str, body: PutLease) -> Lease:
    """A promise to keep what the snapshot needs; repeat it before it expires. 410: too late."""
    return service.snapshots.lease(snapshot_id, body)


@router.delete("/{snapshot_id}/lease", status_code=204)
def delete_lease(
    service: ServiceDep, snapshot_id: str, holder: Annotated[str, Query()] = ""
) -> None:
    service.snapshots.release(snapshot_id, holder)
