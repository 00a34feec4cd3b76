"""Runs: one row per execution of a trainer, collector or evaluator.

PATCH is the heartbeat. Metrics are in run_metrics.py, policies in policies.py; the column
`trajectories.run` names the run that made a trajectory.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from server.registry import runs
from server.service import AccessDep, Caller, ServiceDep
from stepwell.messages import CreateRun, ListRuns, PatchRun, Run, RunPage

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("", status_code=201, responses={200: {"model": Run}})
def create_run(service: ServiceDep, body: CreateRun, response: Response, access: AccessDep) -> Run:
    """Create a run (201), or with `exist_ok` resume an existing one (200)."""
    run, new = runs.create(service.db, body, access)
    if not new:
        response.status_code = 200
    return run


@router.get("")
def list_runs(
    service: ServiceDep, access: AccessDep, wanted: Annotated[ListRuns, Query()]
) -> RunPage:
    """Sorted newest first, with the total number of matches; those that the caller may read."""
    return runs.page(service.db, access, wanted)


@router.get("/{name}")
def get_run(service: ServiceDep, name: str, access: AccessDep) -> Run:
    return runs.get(service.db, name, access)


@router.patch("/{name}")
def patch_run(service: ServiceDep, name: str, body: PatchRun, access: AccessDep) -> Run:
    """Update a run. Also the heartbeat: an empty body only records that the run is alive."""
    return runs.change(service.db, name, body, access)


@router.delete("/{name}", status_code=204)
def delete_run(service: ServiceDep, name: str, caller: Caller) -> None:
    """Delete the run, its metrics and its policies; trajectories and evaluations stay."""
    runs.delete(service.db, service.store, name, caller)


@router.get("/{name}/log", response_class=PlainTextResponse)
def get_log(service: ServiceDep, name: str, access: AccessDep) -> str:
    """The tail of the run's log (PATCH `log` appends)."""
    return runs.log(service.db, name, access)
