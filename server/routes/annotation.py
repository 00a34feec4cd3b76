"""Annotations of datasets over HTTP, implemented in server/annotations.py."""

from __future__ import annotations

from fastapi import APIRouter

from server.service import Caller, ServiceDep
from stepwell.messages import AnnotateResult, Annotation, Page, PostAnnotations

router = APIRouter(prefix="/v1/datasets/{name}/annotations", tags=["annotations"])


@router.post("")
def post_annotations(service: ServiceDep, name: str, body: PostAnnotations) -> AnnotateResult:
    """Store values of steps. Safe to repeat: a trajectory is annotated once under a name."""
    return service.annotations.add(name, body)


@router.get("")
def list_annotations(service: ServiceDep, name: str) -> Page[Annotation]:
    """One for each name; their values are in SQL."""
    return service.annotations.page(name)


@router.delete("", status_code=204)
def delete_annotations(service: ServiceDep, name: str, annotation: str, caller: Caller) -> None:
    """For admins; audited. `annotation`: its name."""
    service.annotations.delete(name, annotation, caller)
