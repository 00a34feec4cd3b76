"""Workers: their state, their counters, and their commands.

    POST command ──▶ stored in the row ──▶ sent with every heartbeat response until it is done:

    pause         kept until `resume`, `stop`, `drain` or `none` replaces it
    resume        sent at least once, and removed when the worker reports that it is not paused
    drain, stop   kept until the worker reports `stopped` or `failed`
    none          cancels the previous command

So a lost response loses no command. A new process with an existing id starts without a command.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from server.registry import workers
from server.service import AccessDep, Caller, Limit, ServiceDep
from stepwell.messages import (
    LaunchRole,
    Page,
    PostCommand,
    Program,
    PutWorker,
    Worker,
    WorkerRole,
)

router = APIRouter(prefix="/v1/workers", tags=["workers"])

WorkerId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]


@router.put("/{worker_id}")
def put_worker(
    service: ServiceDep, worker_id: WorkerId, body: PutWorker, access: AccessDep
) -> Worker:
    """A heartbeat; `command` in the response is what the worker should do."""
    return workers.heartbeat(service.db, worker_id, body, access)


@router.post("/{worker_id}/command")
def post_command(
    service: ServiceDep, worker_id: WorkerId, body: PostCommand, caller: Caller
) -> Worker:
    """Command a worker to pause, resume, drain or stop; the next heartbeat response carries it."""
    return workers.command(service.db, worker_id, body, caller)


@router.get("")
def list_workers(
    service: ServiceDep,
    access: AccessDep,
    role: WorkerRole | None = None,
    run: str | None = None,
    limit: Limit = 1000,
    cursor: str | None = None,
) -> Page[Worker]:
    """Sorted by id, including dead ones; those that the caller may read."""
    return workers.page(service.db, access, role=role, run=run, limit=limit, cursor=cursor)


@router.put("/{worker_id}/programs/{role}")
def put_program(
    service: ServiceDep, worker_id: WorkerId, role: LaunchRole, body: Program, caller: Caller
) -> Program:
    """A launcher says what its program of this role can be told; the newest replaces the others."""
    workers.save_program(service.db, worker_id, role, body, caller)
    return body


@router.get("/{worker_id}/programs/{role}")
def get_program(service: ServiceDep, worker_id: WorkerId, role: LaunchRole) -> Program:
    return workers.program(service.db, worker_id, role)
