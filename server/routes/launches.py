"""Launches: requests to start programs. A launcher on a machine claims one and reports on it.

    queued ──claim──▶ claimed ──▶ running ──▶ finished | failed
       └────────────────┴────────────┴──────▶ cancelled

Only names and values are stored, never a shell string; the launcher validates them
(workbench/launcher/launch_permissions.py).
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from server.registry import launches
from server.service import AccessDep, Caller, Cursor, Limit, ServiceDep
from stepwell.messages import (
    Claimed,
    ClaimLaunch,
    CreateLaunch,
    Launch,
    LaunchRole,
    LaunchState,
    Page,
    PatchLaunch,
)

router = APIRouter(prefix="/v1/launches", tags=["launches"])


@router.post("", status_code=201)
def create_launch(service: ServiceDep, body: CreateLaunch, caller: Caller) -> Launch:
    return launches.create(service.db, body, caller)


@router.get("")
def list_launches(
    service: ServiceDep,
    role: LaunchRole | None = None,
    state: LaunchState | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Launch]:
    """Newest first."""
    return launches.page(service.db, role=role, state=state, limit=limit, cursor=cursor)


@router.post("/claim")
def claim_launch(service: ServiceDep, body: ClaimLaunch, caller: Caller) -> Claimed:
    """Claim the oldest queued launch; null if there is none."""
    return Claimed(launch=launches.claim(service.db, body, caller))


@router.get("/{launch_id}")
def get_launch(service: ServiceDep, launch_id: str) -> Launch:
    return launches.get(service.db, launch_id)


@router.get("/{launch_id}/log", response_class=PlainTextResponse)
def get_launch_log(service: ServiceDep, launch_id: str) -> str:
    """The end of the output of its processes."""
    return launches.log(service.db, launch_id)


@router.patch("/{launch_id}")
def patch_launch(
    service: ServiceDep, launch_id: str, body: PatchLaunch, access: AccessDep
) -> Launch:
    """The report of the launcher that claimed the launch: with the token of the claim."""
    # 409 if the launch has ended, for instance because it was cancelled.
    return launches.report(service.db, launch_id, body, access)


@router.delete("/{launch_id}")
def cancel_launch(service: ServiceDep, launch_id: str, caller: Caller) -> Launch:
    # A queued launch is not started; a launcher that has claimed it stops its program.
    return launches.cancel(service.db, launch_id, caller)
