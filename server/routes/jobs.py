"""Jobs: read and cancel them."""

from __future__ import annotations

from fastapi import APIRouter

from server.service import Cursor, Limit, ServiceDep
from stepwell.messages import Job, JobState, Page

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("")
def list_jobs(
    service: ServiceDep,
    limit: Limit = 100,
    cursor: Cursor = None,
    state: JobState | None = None,
) -> Page[Job]:
    """Newest first."""
    return service.jobs.page(limit=limit, cursor=cursor, state=state)


@router.get("/{job_id}")
def get_job(job_id: str, service: ServiceDep) -> Job:
    return service.jobs.get(job_id)


@router.delete("/{job_id}")
def cancel_job(job_id: str, service: ServiceDep) -> Job:
    """Request cancellation; the state becomes `cancelled` when the job stops and is undone."""
    return service.jobs.cancel(job_id)
