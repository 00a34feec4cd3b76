"""Single trajectories: their rows, labels and places."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import Database, equal, find_pk, first_rows, next_change_id, write_audit
from server.index.dialect import holds
from server.index.tables import ALIVE, datasets, segments, shards, tombstones, trajectories
from server.ingest.evict import evict_over_capacity
from server.ingest.index_rows import add_totals, bucket_of, chunks
from server.problems import ProblemError, not_found
from server.rights import Access
from server.storage.checksums import Source
from server.storage.shards import ShardDamaged, shard_file
from server.storage.steps import steps_memory
from server.storage.store import Store
from server.versions.versions import holding, refuse_if_versioned
from stepwell.codec import MAX_HEADER
from stepwell.messages import (
    LabelTrajectories,
    ListTrajectories,
    Page,
    PatchTrajectory,
    TrajectoryInfo,
)
from stepwell.spaces import EnvSpec

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
_NAME = sa.text("SELECT name FROM datasets WHERE pk = :pk")


def page(db: Database, name: str, wanted: ListTrajectories) -> Page[TrajectoryInfo]:
    """Living trajectories that are as `wanted`. Raises 404, 422."""
    same = wanted.model_dump(exclude={"tag", "order", "limit", "cursor"})
    order, cursor = wanted.order, wanted.cursor
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
    with db.read() as connection:
        statement = _SELECT.where(t.dataset_pk == find_pk(connection, datasets, name), ALIVE)
        statement = statement.where(*equal(trajectories, **same))
        if wanted.tag is not None:
            statement = statement.where(holds(t.tags, wanted.tag))
        if cursor is not None:
            place = sa.tuple_(column, t.seq)
            there = sa.tuple_(*map(sa.literal, _read_cursor(cursor)))
            statement = statement.where(place < there if descending else place > there)
        ordering = (column.desc(), t.seq.desc()) if descending else (column, t.seq)
        rows, last = first_rows(connection, statement.order_by(*ordering), wanted.limit)
    return Page[TrajectoryInfo](
        items=[_info(row) for row in rows],
        next=None if last is None else _write_cursor(last[column_name], last["seq"]),
    )


def get(db: Database, trajectory_id: str, access: Access) -> TrajectoryInfo:
    """Raises 404, or 410 if it was evicted; 403 in a dataset that the caller may not read."""
    with db.read() as connection:
        row = _row(connection, trajectory_id)
    access.require_fit(row["dataset"])
    return _info(row)


def label(db: Database, trajectory_id: str, body: PatchTrajectory, caller: str) -> TrajectoryInfo:
    """Raises 404, 410, 409."""
    values: dict[str, Any] = {}
    for name in ("tags", "flags"):
        labels = getattr(body, name)
        if labels is not None:
            values[name] = orjson.dumps(labels).decode()
    if body.notes is not None:
        values["notes"] = body.notes
    with db.write() as connection:
        row = _row(connection, trajectory_id)
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
            _recount(connection, row, "protected")
        if values:
            connection.execute(
                sa.update(trajectories)
                .where(trajectories.c.pk == row["pk"])
                .values(change_id=next_change_id(connection), **values)
            )
            about = {"dataset": row["dataset"], "fields": [*values]}
            write_audit(connection, caller, "trajectory.label", trajectory_id, **about)
        return _info(_row(connection, trajectory_id))


def label_many(db: Database, body: LabelTrajectories, caller: str) -> int:
    """All of them change, or none. Returns how many have changed. Raises 404, 410."""
    with db.write() as connection:
        rows = _rows(connection, body.ids)
        change_id, changed = next_change_id(connection), []
        datasets: Counter[int] = Counter()
        for row in rows:
            values = _labels(row, body)
            if body.protect and row["partition"] == "fifo":
                values["partition"] = "protected"
                _recount(connection, row, "protected")
            kept = {name: row[name] for name in ("tags", "flags", "partition")}
            if kept | values != kept:
                changed.append({**kept, **values, "key": row["pk"], "change": change_id})
                datasets[row["dataset_pk"]] += 1
        if changed:
            names = ("tags", "flags", "partition")
            connection.execute(
                sa.update(trajectories)
                .where(trajectories.c.pk == sa.bindparam("key"))
                .values(change_id=sa.bindparam("change"), **{n: sa.bindparam(n) for n in names}),
                changed,
            )
        labels = body.model_dump(exclude={"ids"}, exclude_defaults=True)
        for pk, count in datasets.items():
            name = connection.execute(_NAME, {"pk": pk}).scalar_one()
            write_audit(
                connection, caller, "trajectories.label", name, trajectories=count, **labels
            )
    return len(changed)


def _rows(connection: Connection, ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """Their rows. Raises 404 or 410 for the first that is not there."""
    t = trajectories.c
    found: dict[str, Mapping[str, Any]] = {}
    for some in chunks(ids):
        statement = sa.select(trajectories).where(t.id.in_(some), t.state != "evicted")
        found |= {row["id"]: row for row in connection.execute(statement).mappings()}
    for one in ids:
        if one not in found:
            _row(connection, one)
    return list(found.values())


def _labels(row: Mapping[str, Any], body: LabelTrajectories) -> dict[str, str]:
    """Columns with the new labels: without the removed ones, then the added ones."""
    values = {}
    for name, add, remove in (
        ("tags", body.add_tags, body.remove_tags),
        ("flags", body.add_flags, body.remove_flags),
    ):
        now = orjson.loads(row[name])
        labels = list(dict.fromkeys([*(x for x in now if x not in remove), *add]))
        if labels != now:
            values[name] = orjson.dumps(labels).decode()
    return values


def demote(db: Database, trajectory_id: str, access: Access) -> None:
    """protected → fifo, where it may be evicted at once. Raises 404, 410, 409."""
    with db.write() as connection:
        row = _row(connection, trajectory_id)
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
            _recount(connection, row, "fifo")
            evict_over_capacity(connection, row["dataset_pk"], change_id)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trajectory is stored: in a shard or in a segment."""

    spec: EnvSpec
    bytes: int
    shard: str | None
    source: Source
    number: int
    """traj_idx in the shard, or offset in the segment."""

    def memory(self, whole_rows: bool) -> int:
        """Of reading it, see `Answer`."""
        if self.shard is None:
            return self.bytes + MAX_HEADER
        try:
            return steps_memory(self.source, self.number, rows_at_once=whole_rows)
        except ShardDamaged:  # reading it will say so
            return 0


def find(db: Database, store: Store, trajectory_id: str) -> Place:
    """Raises 404, or 410 if it was evicted."""
    with db.read() as connection:
        row = _row(connection, trajectory_id)
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
        record = store.source("segments", segment)
        return Place(spec, row["bytes"], None, record, row["segment_offset"])
    assert place is not None, "a living trajectory has a location"
    file = shard_file(place.partition, row["shard"])
    source = store.source(*file, place.bytes, place.checksums)
    return Place(spec, row["bytes"], row["shard"], source, row["traj_idx"])


def _info(row: Mapping[Any, Any]) -> TrajectoryInfo:
    """The message of an index row."""
    values = dict(row)
    for name in ("tags", "flags", "metrics"):
        values[name] = orjson.loads(values[name])
    return TrajectoryInfo.model_validate(values)


def _row(connection: Connection, trajectory_id: str) -> Mapping[str, Any]:
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


def _recount(connection: Connection, row: Mapping[str, Any], partition: str) -> None:
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
