"""Workers over HTTP: heartbeats in, commands out; the rules are in server/workers.py."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from server import workers
from server.service import Limit, ServiceDep
from stepwell.messages import Page, PostCommand, PutWorker, Worker, WorkerRole

router = APIRouter(prefix="/v1/workers", tags=["workers"])

WorkerId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]


@router.put("/{worker_id}")
def put_worker(service: ServiceDep, worker_id: WorkerId, body: PutWorker) -> Worker:
    """A heartbeat; `command` of the answer is what the worker should do."""
    return workers.heartbeat(service.db, worker_id, body)


@router.get("")
def list_workers(
    service: ServiceDep,
    role: WorkerRole | None = None,
    run: str | None = None,
    limit: Limit = 1000,
    cursor: str | None = None,
) -> Page[Worker]:
    """In order of id, also those that are not alive any more."""
    return workers.page(service.db, role=role, run=run, limit=limit, after=cursor)


@router.post("/{worker_id}/command")
def post_command(service: ServiceDep, worker_id: WorkerId, body: PostCommand) -> Worker:
    """Ask a worker to pause, resume, drain or stop; the answer to its next heartbeat carries it."""
    return workers.command(service.db, worker_id, body.command)
