"""Posting trajectories. This module reads the body; server/ingest does everything else."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from server.body_memory import read_whole_body
from server.routes.datasets import create_first
from server.routes.files import require_media_type
from server.service import AccessDep, ServiceDep, raw_body
from stepwell.messages import ARROW, IngestResult, Partition

router = APIRouter(prefix="/v1/datasets", tags=["ingest"])


@router.post(
    "/{name}/trajectories",
    openapi_extra=raw_body(ARROW),
)
async def post_trajectories(
    service: ServiceDep,
    request: Request,
    name: str,
    access: AccessDep,
    partition: Annotated[Partition, Query()] = "fifo",
    wait: Annotated[Literal["sealed"] | None, Query()] = None,
) -> IngestResult:
    """Store one or many trajectories exactly once; responds when they are durable."""
    what = "trajectories are sent as an Arrow IPC stream (stepwell.codec.encode)"
    require_media_type(request, what, ARROW)
    body = await read_whole_body(request)
    with create_first(access):
        return await run_in_threadpool(
            service.ingest.post,
            name,
            partition,
            body,
            request.state.reservation,
            wait_sealed=wait == "sealed",
            who=access.who,
        )
