"""Trajectories over HTTP; the work is in server/trajectories.py."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server import trajectories
from server.service import Limit, ServiceDep, who
from stepwell.codec import encode
from stepwell.messages import ARROW, Page, Partition, PatchTrajectory, TrajectoryInfo
from stepwell.trajectory import Trajectory

router = APIRouter(prefix="/v1", tags=["trajectories"])


@router.get("/datasets/{name}/trajectories")
def list_trajectories(
    service: ServiceDep,
    name: str,
    partition: Partition | None = None,
    env: str | None = None,
    policy: str | None = None,
    run: str | None = None,
    purpose: str | None = None,
    state: str | None = None,
    tag: str | None = None,
    order: str = "-seq",
    limit: Limit = 100,
    cursor: str | None = None,
) -> Page[TrajectoryInfo]:
    """Living trajectories, newest first unless `order` says otherwise."""
    filters = {
        "partition": partition,
        "env": env,
        "policy": policy,
        "run": run,
        "purpose": purpose,
        "state": state,
    }
    return trajectories.page(
        service.db, name, filters, tag=tag, order=order, limit=limit, cursor=cursor
    )


@router.get("/trajectories/{trajectory_id}")
def get_trajectory(service: ServiceDep, trajectory_id: str) -> TrajectoryInfo:
    return trajectories.get(service.db, trajectory_id)


@router.patch("/trajectories/{trajectory_id}")
def patch_trajectory(
    service: ServiceDep, trajectory_id: str, body: PatchTrajectory
) -> TrajectoryInfo:
    """Tags, flags, notes, and fifo → protected."""
    return trajectories.patch(service.db, trajectory_id, body)


@router.post(
    "/trajectories/{trajectory_id}/demote",
    responses={204: {"description": "demoted, and evicted at once"}},
)
def demote_trajectory(
    service: ServiceDep, trajectory_id: str, request: Request, response: Response
) -> TrajectoryInfo | None:
    """protected → fifo: an admin's act, audited. 204 when fifo was full and it went at once."""
    found = trajectories.demote(service.db, trajectory_id, who(request))
    if found is None:
        response.status_code = 204
    return found


@router.get(
    "/trajectories/{trajectory_id}/steps",
    responses={200: {"content": {ARROW: {}, "application/json": {}}}},
)
def get_steps(service: ServiceDep, trajectory_id: str, request: Request) -> Response:
    """The trajectory as an Arrow stream, exactly as it was sent; as JSON if asked for."""
    trajectory, spec = trajectories.steps(
        service.db, service.store, service.integrity, trajectory_id
    )
    if "application/json" in request.headers.get("accept", ""):
        return Response(orjson.dumps(_rows(trajectory)), media_type="application/json")
    return Response(encode([trajectory], spec), media_type=ARROW)


def _rows(trajectory: Trajectory) -> dict[str, Any]:
    """{columns, rows}, one row per observation; the last has no action and no reward."""
    steps = len(trajectory)
    columns: dict[str, list[Any]] = {"t": list(range(steps + 1))}
    for key, array in trajectory.obs.items():
        columns[f"obs.{key}"] = array.tolist()
    for key, array in trajectory.actions.items():
        name = "action" if list(trajectory.actions) == ["action"] else f"action.{key}"
        columns[name] = [*array.tolist(), None]
    columns["reward"] = [*trajectory.rewards.tolist(), None]
    for name, flag in (("terminated", trajectory.terminated), ("truncated", trajectory.truncated)):
        columns[name] = [flag and t == steps - 1 for t in range(steps + 1)]
    columns["is_last"] = [t == steps for t in range(steps + 1)]
    if trajectory.action_known is not None:
        columns["action_known"] = [*trajectory.action_known.tolist(), None]
    for key, array in trajectory.infos.items():
        columns[f"info.{key}"] = array.tolist()  # orjson writes NaN, which infos may hold, as null
    return {
        "columns": list(columns),
        "rows": [list(row) for row in zip(*columns.values(), strict=True)],
    }
