"""Single trajectories: list, read, label, protect, and read their steps."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa
from fastapi import APIRouter, Request, Response
from sqlalchemy.engine import Connection

from server.answer_memory import Answer, Damaged
from server.checksums import Source
from server.index.db import equal, find_pk, first_rows, next_change_id, write_audit
from server.index.tables import ALIVE, datasets, segments, shards, tombstones, trajectories
from server.ingest.evict import evict_over_capacity
from server.ingest.index_rows import add_totals, bucket_of
from server.ingest.segments import SegmentDamaged, read_spooled
from server.integrity import damaged_shard
from server.problems import ProblemError, not_found
from server.rights import Access
from server.service import AccessDep, Caller, Limit, Service, ServiceDep
from server.storage.shards import ShardDamaged
from server.storage.steps import (
    HeldSteps,
    Steps,
    arrow_parts,
    json_parts,
    shard_steps,
    steps_memory,
)
from server.versions.versions import holding, refuse_if_versioned
from stepwell.codec import MAX_HEADER
from stepwell.messages import ARROW, Page, Partition, PatchTrajectory, TrajectoryInfo
from stepwell.spaces import EnvSpec

router = APIRouter(prefix="/v1", tags=["trajectories"])

ORDERS = ("seq", "return", "length", "created_at")

_SELECT = sa.select(
    trajectories,
    datasets.c.name.label("dataset"),
    shards.c.id.label("shard"),
).select_from(
    trajectories.join(datasets, datasets.c.pk == trajectories.c.dataset_pk).outerjoin(
        shards, shards.c.pk == trajectories.c.shard_pk
    )
)


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
    """Living trajectories, newest first unless `order` is given."""
    column_name = order.removeprefix("-")
    if column_name not in ORDERS:
        raise ProblemError(
            422,
            "validation_error",
            "order: unknown column",
            expected=" | ".join(f"{name} | -{name}" for name in ORDERS),
            got=order,
        )
    t = trajectories.c
    column, descending = t[column_name], order.startswith("-")
    with service.db.read() as connection:
        statement = _SELECT.where(t.dataset_pk == find_pk(connection, datasets, name), ALIVE)
        same = equal(trajectories, partition=partition, env=env, policy=policy, run=run)
        statement = statement.where(*same, *equal(trajectories, purpose=purpose, state=state))
        if tag is not None:
            tags = sa.func.json_each(t.tags).table_valued("value")
            statement = statement.where(
                sa.exists(sa.select(1).select_from(tags).where(tags.c.value == tag))
            )
        if cursor is not None:
            place = sa.tuple_(column, t.seq)
            there = sa.tuple_(*map(sa.literal, _read_cursor(cursor)))
            statement = statement.where(place < there if descending else place > there)
        ordering = (column.desc(), t.seq.desc()) if descending else (column, t.seq)
        rows, last = first_rows(connection, statement.order_by(*ordering), limit)
    return Page[TrajectoryInfo](
        items=[info(row) for row in rows],
        next=None if last is None else _write_cursor(last[column_name], last["seq"]),
    )


@router.get("/trajectories/{trajectory_id}")
def get_trajectory(service: ServiceDep, trajectory_id: str, access: AccessDep) -> TrajectoryInfo:
    # 404, or 410 if it was evicted; 403 in a dataset that the caller may not read.
    return _info(service, trajectory_id, access)


def _info(service: Service, trajectory_id: str, access: Access) -> TrajectoryInfo:
    with service.db.read() as connection:
        row = get_row(connection, trajectory_id)
    access.require_fit(row["dataset"])
    return info(row)


@router.patch("/trajectories/{trajectory_id}")
def patch_trajectory(
    service: ServiceDep, trajectory_id: str, body: PatchTrajectory, caller: Caller
) -> TrajectoryInfo:
    """Tags, flags, notes, and fifo → protected."""
    # The reverse is `demote`.
    values: dict[str, Any] = {}
    for name in ("tags", "flags"):
        labels = getattr(body, name)
        if labels is not None:
            values[name] = orjson.dumps(labels).decode()
    if body.notes is not None:
        values["notes"] = body.notes
    with service.db.write() as connection:
        row = get_row(connection, trajectory_id)
        if body.partition == "fifo" and row["partition"] == "protected":
            raise ProblemError(
                409,
                "protected",
                "an edit cannot unprotect a trajectory; an admin demotes it:"
                " POST /v1/trajectories/{id}/demote",
                expected="protected",
                got="fifo",
            )
        if body.partition == "protected" and row["partition"] == "fifo":
            values["partition"] = "protected"
            recount(connection, row, "protected")
        if values:
            connection.execute(
                sa.update(trajectories)
                .where(trajectories.c.pk == row["pk"])
                .values(change_id=next_change_id(connection), **values)
            )
            about = {"dataset": row["dataset"], "fields": [*values]}
            write_audit(connection, caller, "trajectory.label", trajectory_id, **about)
        return info(get_row(connection, trajectory_id))


@router.post(
    "/trajectories/{trajectory_id}/demote",
    responses={204: {"description": "demoted, and evicted at once"}},
)
def demote_trajectory(
    service: ServiceDep, trajectory_id: str, access: AccessDep, response: Response
) -> TrajectoryInfo | None:
    """protected → fifo, for admins; audited. 204 if fifo was full and it was evicted at once."""
    with service.db.write() as connection:
        row = get_row(connection, trajectory_id)
        if row["partition"] == "protected":
            refuse_if_versioned(connection, f"trajectory {trajectory_id}", holding(row["pk"]))
            where = {"dataset": row["dataset"], "seq": row["seq"]}
            write_audit(connection, access.who, "demote", trajectory_id, **where)
            change_id = next_change_id(connection)
            connection.execute(
                sa.update(trajectories)
                .where(trajectories.c.pk == row["pk"])
                .values(partition="fifo", change_id=change_id)
            )
            recount(connection, row, "fifo")
            evict_over_capacity(connection, row["dataset_pk"], change_id)
    try:
        return _info(service, trajectory_id, access)
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
    _info(service, trajectory_id, access)
    as_json = "application/json" in request.headers.get("accept", "")
    found = _find(service, trajectory_id)

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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a trajectory is stored: in a shard or in a segment."""

    spec: EnvSpec
    bytes: int
    shard: str | None
    source: Source
    number: int
    """traj_idx in the shard, or offset in the segment."""

    def memory(self, whole_rows: bool) -> int:
        """Return the memory needed to read the trajectory; see `Answer`."""
        if self.shard is None:
            return self.bytes + MAX_HEADER
        try:
            return steps_memory(self.source, self.number, rows_at_once=whole_rows)
        except ShardDamaged:  # reading it will say so
            return 0


def _find(service: Service, trajectory_id: str) -> _Place:
    """Raises 404, or 410 if it was evicted."""
    with service.db.read() as connection:
        row = get_row(connection, trajectory_id)
        spec = EnvSpec.from_json(
            connection.execute(
                sa.select(datasets.c.spec).where(datasets.c.pk == row["dataset_pk"])
            ).scalar_one()
        )
        segment = connection.execute(
            sa.select(segments.c.name).where(segments.c.pk == row["segment_pk"])
        ).scalar()
        place = connection.execute(
            sa.select(shards.c.partition, shards.c.bytes, shards.c.checksums).where(
                shards.c.pk == row["shard_pk"]
            )
        ).one_or_none()
    if segment is not None:
        record = Source(service.store.path("segments", segment))
        return _Place(spec, row["bytes"], None, record, row["segment_offset"])
    assert place is not None, "a living trajectory has a location"
    path = service.store.path(f"shards/{place.partition}", f"{row['shard']}.parquet")
    source = Source(path, place.bytes, place.checksums)
    return _Place(spec, row["bytes"], row["shard"], source, row["traj_idx"])


def _parts(
    service: Service,
    trajectory_id: str,
    found: _Place,
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
            found = _find(service, trajectory_id)
        try:
            if found.shard in service.integrity.quarantined:
                for _ in encode(steps):  # all is checked before the response starts
                    pass
            yield from encode(steps)
        except ShardDamaged as error:
            raise Damaged(str(error)) from None


@contextlib.contextmanager
def _opened(service: Service, found: _Place) -> Iterator[Steps]:
    if found.shard is not None:
        with shard_steps(found.source, found.number) as steps:
            yield steps
        return
    path = found.source.path
    try:
        entry, batch = read_spooled(path, found.number, found.spec)
    except SegmentDamaged as error:
        service.integrity.damaged_file(f"segments/{path.name}")  # named in the log and /readyz
        raise ProblemError(
            410, "damaged", f"the record of this trajectory is damaged ({error})"
        ) from None
    yield HeldSteps(entry.header, found.spec, batch)


def info(row: Mapping[Any, Any]) -> TrajectoryInfo:
    """The message of an index row."""
    values = dict(row)
    for name in ("tags", "flags", "metrics"):
        values[name] = orjson.loads(values[name])
    return TrajectoryInfo.model_validate(values)


def get_row(connection: Connection, trajectory_id: str) -> Mapping[str, Any]:
    """The row of a living trajectory. Raises 404, or 410 if it was evicted."""
    row = (
        connection.execute(_SELECT.where(trajectories.c.id == trajectory_id))
        .mappings()
        .one_or_none()
    )
    if row is not None and row["state"] != "evicted":
        return dict(row)
    gone = (
        row is not None
        or connection.execute(
            sa.select(tombstones.c.id).where(tombstones.c.id == trajectory_id)
        ).scalar()
    )
    if gone:
        raise ProblemError(
            410, "evicted", f"trajectory {trajectory_id} was evicted from fifo (oldest first)"
        )
    raise not_found("trajectory", trajectory_id[:64])


def recount(connection: Connection, row: Mapping[str, Any], partition: str) -> None:
    """Move one trajectory's counts between the totals of two partitions."""
    numbers = (1, row["length"], row["bytes"], row["return"])
    before = bucket_of(row["partition"], row["purpose"])
    after = bucket_of(partition, row["purpose"])
    if before != after:
        add_totals(connection, row["dataset_pk"], before, *(-n for n in numbers))
        add_totals(connection, row["dataset_pk"], after, *numbers)


def _write_cursor(value: Any, seq: int) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([value, seq])).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[float, int]:
    try:
        value, seq = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not (isinstance(seq, int) and 0 <= seq < 2**63 and abs(value) < 2**63):
            raise ValueError
        return value, seq
    except (ValueError, TypeError):
        raise ProblemError(
            422, "validation_error", "invalid cursor", expected="`next`", got=cursor[:80]
        ) from None
