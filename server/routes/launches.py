"""Launches over HTTP; the work is in server/launches.py."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from server import launches
from server.service import Cursor, Limit, ServiceDep
from stepwell.messages import (
    Claimed,
    ClaimLaunch,
    CreateLaunch,
    Launch,
    LaunchRole,
    Page,
    PatchLaunch,
)

router = APIRouter(prefix="/v1/launches", tags=["launches"])

State = Literal["queued", "claimed", "running", "finished", "failed", "cancelled"]


@router.post("", status_code=201)
def create_launch(service: ServiceDep, body: CreateLaunch) -> Launch:
    return launches.create(service.db, body)


@router.get("")
def list_launches(
    service: ServiceDep,
    role: LaunchRole | None = None,
    state: State | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Launch]:
    """Newest first."""
    return launches.page(service.db, role=role, state=state, limit=limit, before=cursor)


@router.post("/claim")
def claim_launch(service: ServiceDep, body: ClaimLaunch) -> Claimed:
    """The oldest queued launch, now the caller's alone; null when there is nothing to do."""
    return launches.claim(service.db, body)


@router.get("/{launch_id}")
def get_launch(service: ServiceDep, launch_id: str) -> Launch:
    return launches.get(service.db, launch_id)


@router.patch("/{launch_id}")
def patch_launch(service: ServiceDep, launch_id: str, body: PatchLaunch) -> Launch:
    """The claiming launcher's report."""
    return launches.patch(service.db, launch_id, body)


@router.delete("/{launch_id}")
def cancel_launch(service: ServiceDep, launch_id: str) -> Launch:
    return launches.cancel(service.db, launch_id)
