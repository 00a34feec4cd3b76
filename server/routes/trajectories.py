"""Single trajectories: list, read, label, protect, and read their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from server.answer_memory import Answer, Damaged
from server.ingest.segments import SegmentDamaged, read_spooled
from server.integrity import damaged_shard
from server.problems import ProblemError
from server.registry import trajectories
from server.registry.trajectories import Place
from server.service import AccessDep, Caller, Service, ServiceDep
from server.storage.shards import ShardDamaged
from server.storage.steps import HeldSteps, Steps, arrow_parts, json_parts, shard_steps
from stepwell.messages import (
    ARROW,
    Labelled,
    LabelTrajectories,
    ListTrajectories,
    Page,
    PatchTrajectory,
    TrajectoryInfo,
)

router = APIRouter(prefix="/v1", tags=["trajectories"])


@router.get("/datasets/{name}/trajectories")
def list_trajectories(
    service: ServiceDep, name: str, wanted: Annotated[ListTrajectories, Query()]
) -> Page[TrajectoryInfo]:
    """Living trajectories, newest first unless `order` is given."""
    return trajectories.page(service.db, name, wanted)


@router.get("/trajectories/{trajectory_id}")
def get_trajectory(service: ServiceDep, trajectory_id: str, access: AccessDep) -> TrajectoryInfo:
    return trajectories.get(service.db, trajectory_id, access)


@router.patch("/trajectories/{trajectory_id}")
def patch_trajectory(
    service: ServiceDep, trajectory_id: str, body: PatchTrajectory, caller: Caller
) -> TrajectoryInfo:
    """Tags, flags, notes, and fifo → protected."""
    # The reverse is `demote`.
    return trajectories.label(service.db, trajectory_id, body, caller)


@router.post("/trajectories/labels")
def label_trajectories(service: ServiceDep, body: LabelTrajectories, caller: Caller) -> Labelled:
    """Add and remove tags and flags of up to 10,000 trajectories, and protect them."""
    return Labelled(changed=trajectories.label_many(service.db, body, caller))


@router.post(
    "/trajectories/{trajectory_id}/demote",
    responses={204: {"description": "demoted, and evicted at once"}},
)
def demote_trajectory(
    service: ServiceDep, trajectory_id: str, access: AccessDep, response: Response
) -> TrajectoryInfo | None:
    """protected → fifo, for admins; audited. 204 if fifo was full and it was evicted at once."""
    trajectories.demote(service.db, trajectory_id, access)
    try:
        return trajectories.get(service.db, trajectory_id, access)
    except ProblemError as error:
        if error.status != 410:
            raise
        response.status_code = 204
        return None


@router.get(
    "/trajectories/{trajectory_id}/steps",
    responses={200: {"content": {ARROW: {}, "application/json": {}}}},
)
def get_steps(
    service: ServiceDep, trajectory_id: str, request: Request, access: AccessDep
) -> Response:
    """The trajectory as an Arrow stream, exactly as it was sent; JSON on request."""
    trajectories.get(service.db, trajectory_id, access)
    as_json = "application/json" in request.headers.get("accept", "")
    found = trajectories.find(service.db, service.store, trajectory_id)

    def damaged() -> ProblemError:
        assert found.shard is not None, "the record of a segment is read before the first part"
        service.integrity.recheck_shard(found.shard)
        return damaged_shard(found.shard)

    return Answer(
        service.answers,
        found.memory(as_json),
        lambda: _parts(service, trajectory_id, found, json_parts if as_json else arrow_parts),
        media_type="application/json" if as_json else ARROW,
        damaged=damaged,
    )


def _parts(
    service: Service,
    trajectory_id: str,
    found: Place,
    encode: Callable[[Steps], Iterator[bytes | memoryview]],
) -> Iterator[bytes | memoryview]:
    """What `encode` makes of a trajectory. Raises `Damaged`; 410 for the record of a segment."""
    with contextlib.ExitStack() as stack:
        for attempt in range(3):
            try:
                steps = stack.enter_context(_opened(service, found))
                break
            except FileNotFoundError:
                if attempt == 2:
                    raise
            except ShardDamaged as error:
                assert found.shard is not None, "only a shard raises it"
                if service.integrity.recheck_shard(found.shard) or attempt == 2:
                    raise Damaged(str(error)) from None
            # Sealed or compacted between the look-up and the read: look it up again.
            found = trajectories.find(service.db, service.store, trajectory_id)
        try:
            if found.shard in service.integrity.quarantined:
                for _ in encode(steps):  # all is checked before the response starts
                    pass
            yield from encode(steps)
        except ShardDamaged as error:
            raise Damaged(str(error)) from None


@contextlib.contextmanager
def _opened(service: Service, found: Place) -> Iterator[Steps]:
    if found.shard is not None:
        with shard_steps(found.source, found.number) as steps:
            yield steps
        return
    try:
        entry, batch = read_spooled(found.source, found.number, found.spec)
    except SegmentDamaged as error:
        # Named in the log and in /readyz.
        service.integrity.damaged_file(f"segments/{found.source.name}")
        raise ProblemError(
            410, "damaged", f"the record of this trajectory is damaged ({error})"
        ) from None
    yield HeldSteps(entry.header, found.spec, batch)
