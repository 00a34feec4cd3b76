"""Upload of an offline dataset as the body (`curl -T FILE -X POST …`), imported by a job."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool

from server.imports.raw_file import ImportOptions
from server.problems import ProblemError
from server.routes.datasets import create_first
from server.service import AccessDep, Service, ServiceDep, raw_body
from stepwell.import_options import OPTIONS
from stepwell.messages import JOB_ENDS, NAME, Format, Job, JobAccepted, Partition

router = APIRouter(prefix="/v1/datasets", tags=["imports"])
POLL = 0.1
"""Seconds between two looks at a job that a client waits for."""


def about(option: str) -> str:
    return OPTIONS[option].about


@router.post(
    "/{name}/imports",
    status_code=202,
    openapi_extra=raw_body("application/octet-stream"),
)
async def upload(
    service: ServiceDep,
    request: Request,
    response: Response,
    access: AccessDep,
    name: Annotated[str, Path(pattern=NAME)],
    format: Annotated[Format, Query()] = "d4rl",  # noqa: A002 - the API's word
    partition: Annotated[Partition, Query()] = "protected",
    create: Annotated[bool, Query(description="create the dataset if it does not exist")] = False,
    env: Annotated[str, Query(max_length=256, description="for instance Hopper-v5")] = "",
    observation: Annotated[str, Query(max_length=32, description=about("observation"))] = "",
    action: Annotated[str, Query(max_length=32, description=about("action"))] = "",
    action_low: Annotated[str, Query(max_length=4096, description=about("action_low"))] = "",
    action_high: Annotated[str, Query(max_length=4096, description=about("action_high"))] = "",
    max_steps: Annotated[int, Query(ge=0, lt=2**53, description=about("max_steps"))] = 0,
    columns: Annotated[
        list[Annotated[str, StringConstraints(max_length=4096)]],
        Query(
            max_length=256,
            description="of tables and flat arrays: role=column,column; once for each role",
        ),
    ] = [],  # noqa: B006 - FastAPI copies it
    split: Annotated[str, Query(max_length=128, description=about("split"))] = "",
    videos: Annotated[
        str,
        Query(pattern=r"^(no|[1-9]\d{0,3}x[1-9]\d{0,3})?$", description=about("videos")),
    ] = "",
    keep_last_step: Annotated[bool, Query(description=about("keep_last_step"))] = False,
    drop_infos: Annotated[str, Query(max_length=4096, description=about("drop_infos"))] = "",
    wait: Annotated[bool, Query(description="answer when the job has ended")] = False,
) -> JobAccepted:
    """All or nothing of the file becomes trajectories; GET /v1/jobs/{id} gives the progress.

    With `wait` the answer is 200 and the job's result, or its error. A client that leaves earlier
    cancels nothing.
    """
    wanted = ImportOptions(
        dataset=name,
        format=format,
        partition=partition,
        # Who may only fill datasets fills those that there are.
        create=create and access.creates,
        env=env,
        observation=observation,
        action=action,
        action_low=_numbers("action_low", action_low),
        action_high=_numbers("action_high", action_high),
        max_steps=max_steps,
        columns=tuple(columns),
        split=split,
        videos=videos,
        keep_last_step=keep_last_step,
        drop_infos=tuple(name.strip() for name in drop_infos.split(",") if name.strip()),
    )
    with create_first(access):
        await run_in_threadpool(service.imports.check, wanted, access.creates)
    stored, sha256, size = await service.imports.receive(request.stream())
    job = await run_in_threadpool(service.imports.submit, wanted, stored, sha256, size, access.who)
    if wait:
        job = await _ended(service, request, job)
        response.status_code = 200
    return JobAccepted(job=job)


async def _ended(service: Service, request: Request, job: Job) -> Job:
    """The job when it has ended, or when its client has gone. Raises the error of one that failed,
    and 409 for one that was cancelled."""
    while job.state not in JOB_ENDS and not await request.is_disconnected():
        await asyncio.sleep(POLL)
        job = await run_in_threadpool(service.jobs.get, job.id)
    if job.error is not None:
        error = job.error
        detail = f"{error.detail} (job {job.id})"
        raise ProblemError(error.status, error.code, detail, expected=error.expected, got=error.got)
    if job.state == "cancelled":
        raise ProblemError(409, "cancelled", f"the import was cancelled (job {job.id})")
    return job


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(",")) if text else ()
        if not all(map(math.isfinite, numbers)):
            raise ValueError
        return numbers
    except ValueError:
        raise ProblemError(
            422, "validation_error", f"{name} is not a list of finite numbers", got=text[:100]
        ) from None
