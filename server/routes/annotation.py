"""Annotations of datasets over HTTP, implemented in server/annotations.py."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from server.body_memory import read_whole_body
from server.problems import ProblemError
from server.routes.files import require_media_type
from server.service import Caller, ServiceDep, raw_body
from stepwell.errors import CodecError
from stepwell.messages import (
    ANNOTATION_NAME,
    ARROW,
    AnnotateResult,
    Annotation,
    Page,
    PostAnnotations,
)
from stepwell.step_values import decode, table_of

router = APIRouter(prefix="/v1/datasets/{name}/annotations", tags=["annotations"])


@router.post("")
def post_annotations(
    service: ServiceDep, name: str, body: PostAnnotations, caller: Caller
) -> AnnotateResult:
    """Store values of steps. Safe to repeat: a trajectory is annotated once under a name."""
    values = table_of([one.model_dump() for one in body.trajectories])
    return service.annotations.add(name, body.name, body.policy, values, caller)


@router.post("/values", openapi_extra=raw_body(ARROW))
async def post_values(
    service: ServiceDep,
    request: Request,
    name: str,
    annotation: Annotated[str, Query(pattern=ANNOTATION_NAME)],
    policy: Annotated[str, Query(min_length=1, max_length=200)],
    caller: Caller,
) -> AnnotateResult:
    """The same as an Arrow stream (stepwell/step_values.py), whose limit is STEPWELL_MAX_BODY."""
    require_media_type(request, "values of steps are sent as an Arrow IPC stream", ARROW)
    body = await read_whole_body(request)
    return await run_in_threadpool(_add, service, name, annotation, policy, body, caller)


def _add(
    service: ServiceDep, name: str, annotation: str, policy: str, body: memoryview, caller: str
) -> AnnotateResult:
    try:
        values = decode(body)
    except CodecError as error:
        raise ProblemError(
            422, "invalid_stream", str(error), expected=error.expected, got=error.got
        ) from None
    return service.annotations.add(name, annotation, policy, values, caller)


@router.get("")
def list_annotations(service: ServiceDep, name: str) -> Page[Annotation]:
    """One for each name; their values are in SQL."""
    return service.annotations.page(name)


@router.delete("", status_code=204)
def delete_annotations(service: ServiceDep, name: str, annotation: str, caller: Caller) -> None:
    """For admins; audited. `annotation`: its name."""
    service.annotations.delete(name, annotation, caller)
