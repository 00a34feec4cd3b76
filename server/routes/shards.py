"""Shards over HTTP: immutable files, with Range and an ETag that is their sha256."""

from __future__ import annotations

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response

from server.index.tables import shards
from server.integrity import damaged_shard, gone
from server.problems import ProblemError, not_found
from server.routes.files import StoredFile
from server.service import ServiceDep

router = APIRouter(prefix="/v1/shards", tags=["shards"])
PARQUET = "application/vnd.apache.parquet"


@router.head("/{shard_id}", include_in_schema=False)
@router.get("/{shard_id}", responses={200: {"content": {PARQUET: {}}}})
def get_shard(service: ServiceDep, shard_id: str, request: Request) -> Response:
    """The Parquet file. 410 when it was deleted after its trajectories were evicted or moved, or
    when its bytes are no longer those that were written (`damaged`)."""
    s = shards.c
    with service.db.read() as connection:
        row = connection.execute(
            sa.select(s.id, s.state, s.sha256).where(s.id == shard_id)
        ).one_or_none()
    if row is None:
        raise not_found("shard", shard_id[:64])
    if row.state in ("deleting", "deleted"):
        raise gone(row.id)
    if row.state == "quarantined":
        raise damaged_shard(row.id)
    etag = f'"{row.sha256}"'
    headers = {"etag": etag, "cache-control": "private, max-age=31536000, immutable"}
    asked = request.headers.get("if-none-match", "")
    if asked == "*" or etag in (tag.strip().removeprefix("W/") for tag in asked.split(",")):
        return Response(status_code=304, headers=headers)

    def unreadable() -> ProblemError:
        bad = service.integrity.recheck_shard(row.id)
        return damaged_shard(row.id) if bad else gone(row.id)

    source = service.integrity.shard(row.id)
    return StoredFile(request, source, headers=headers, media_type=PARQUET, damaged=unreadable)
