"""Shards over HTTP: immutable files, with Range and their sha256 as ETag."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.integrity import damaged_shard, gone
from server.problems import ProblemError
from server.routes.files import StoredFile, matches
from server.service import ServiceDep

router = APIRouter(prefix="/v1/shards", tags=["shards"])
PARQUET = "application/vnd.apache.parquet"


@router.head("/{shard_id}", include_in_schema=False)
@router.get("/{shard_id}", responses={200: {"content": {PARQUET: {}}}})
def get_shard(service: ServiceDep, shard_id: str, request: Request) -> Response:
    """The Parquet file. 410 if it was deleted after its trajectories were evicted or moved, or if
    its bytes differ from those that were written (`damaged`)."""
    source, sha256 = service.integrity.shard(shard_id)
    etag = f'"{sha256}"'
    headers = {"etag": etag, "cache-control": "private, max-age=31536000, immutable"}
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)

    def unreadable() -> ProblemError:
        bad = service.integrity.recheck_shard(shard_id)
        return damaged_shard(shard_id) if bad else gone(shard_id)

    return StoredFile(
        request, service, source, headers=headers, media_type=PARQUET, damaged=unreadable
    )
