"""Jobs: look at them, and stop one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from server.deps import ServiceDep
from stepwell.messages import Job, JobPage, JobState

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("")
def list_jobs(
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    state: JobState | None = None,
) -> JobPage:
    """Newest first."""
    page: JobPage = service.jobs.page(limit=limit, cursor=cursor, state=state)
    return page


@router.get("/{job_id}")
def get_job(job_id: str, service: ServiceDep) -> Job:
    job: Job = service.jobs.get(job_id)
    return job


@router.delete("/{job_id}")
def cancel_job(job_id: str, service: ServiceDep) -> Job:
    """Ask it to stop; it is `cancelled` when it has. What it had done is undone."""
    job: Job = service.jobs.cancel(job_id)
    return job
