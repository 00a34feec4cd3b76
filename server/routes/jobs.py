"""Jobs: read and cancel them; the check of the index."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter

from server.fsck import checks
from server.service import AccessDep, Caller, Cursor, Limit, ServiceDep
from stepwell.messages import Job, JobAccepted, JobState, Page

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("")
def list_jobs(
    service: ServiceDep,
    access: AccessDep,
    limit: Limit = 100,
    cursor: Cursor = None,
    state: JobState | None = None,
) -> Page[Job]:
    """Newest first; those that the caller may read."""
    return service.jobs.page(limit=limit, cursor=cursor, state=state, access=access)


@router.post("/check_index", status_code=202)
def check_index(service: ServiceDep, caller: Caller) -> JobAccepted:
    """Check the index while the service runs: rows, structure, triggers, totals.

    Its files are not read: `stepwell fsck` does that, while no service runs.
    """
    work = partial(checks.check_running, service.db)
    job = service.jobs.submit("check_index", work, {}, "reading the index", who=caller)
    return JobAccepted(job=job)


@router.get("/{job_id}")
def get_job(job_id: str, service: ServiceDep, access: AccessDep) -> Job:
    return service.jobs.get(job_id, access)


@router.delete("/{job_id}")
def cancel_job(job_id: str, service: ServiceDep, access: AccessDep) -> Job:
    """Request cancellation; the state becomes `cancelled` when the job stops and is undone."""
    return service.jobs.cancel(job_id, access)
