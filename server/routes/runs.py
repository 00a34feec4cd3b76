"""Runs and their metrics over HTTP; the work is in server/runs.py."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from server import policies, runs
from server.service import Cursor, Limit, ServiceDep
from stepwell.messages import (
    CreateRun,
    MetricsAccepted,
    MetricSeries,
    PatchRun,
    PostMetrics,
    Run,
    RunKind,
    RunPage,
    RunStatus,
)

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("", status_code=201, responses={200: {"model": Run}})
def create_run(service: ServiceDep, body: CreateRun, response: Response) -> Run:
    """A new run (201), or with `exist_ok` the old one taken up again (200)."""
    run, new = runs.create(service.db, body)
    if not new:
        response.status_code = 200
    return run


@router.get("")
def list_runs(
    service: ServiceDep,
    kind: RunKind | None = None,
    status: RunStatus | None = None,
    tag: str | None = None,
    parent: str | None = None,
    search: Annotated[str | None, Query(max_length=200)] = None,
    alive: bool | None = None,
    since: float | None = None,
    brief: bool = False,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> RunPage:
    """Newest first, and how many match in all.

    `search`: text in the name or a tag. `alive=false&status=running`: silent ones. `since`: heard
    of at that Unix time or later. `brief`: without config and newest metrics.
    """
    return runs.page(
        service.db,
        kind=kind,
        status=status,
        tag=tag,
        parent=parent,
        search=search,
        alive=alive,
        since=since,
        brief=brief,
        limit=limit,
        before=cursor,
    )


@router.get("/{name}")
def get_run(service: ServiceDep, name: str) -> Run:
    return runs.get(service.db, name)


@router.patch("/{name}")
def patch_run(service: ServiceDep, name: str, body: PatchRun) -> Run:
    """Also the heartbeat: an empty body only says that the run is alive."""
    return runs.patch(service.db, name, body)


@router.delete("/{name}", status_code=204)
def delete_run(service: ServiceDep, name: str) -> None:
    """The run, its metrics and its policies; trajectories and evaluations stay."""
    policies.remove_files(service.store, runs.delete(service.db, name))


@router.post("/{name}/metrics")
def post_metrics(service: ServiceDep, name: str, body: PostMetrics) -> MetricsAccepted:
    """Idempotent on (key, step): sent again, a point replaces itself."""
    return runs.add_metrics(service.db, name, body)


@router.get("/{name}/metrics")
def get_metrics(
    service: ServiceDep,
    name: str,
    keys: str | None = None,
    after: Annotated[str | None, Query(pattern=r"^-?\d{1,18}(,-?\d{1,18})*$")] = None,
    points: Annotated[int, Query(ge=2, le=runs.MAX_POINTS)] = 500,
) -> MetricSeries:
    """Series of `keys` (comma-separated; all without), down-sampled to `points` each.

    `after`: a step for each key (comma-separated); only points beyond it come.
    """
    wanted = None if keys is None else [key for key in keys.split(",") if key]
    steps = None if after is None else [int(step) for step in after.split(",")]
    return runs.series(service.db, name, keys=wanted, after=steps, points=points)


@router.get("/{name}/log", response_class=PlainTextResponse)
def get_log(service: ServiceDep, name: str) -> str:
    """The tail of what the run wrote (PATCH `log` appends)."""
    return runs.log(service.db, name)
