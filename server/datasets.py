"""Datasets: creating, describing, changing and deleting them. A dataset's spec never changes."""

from __future__ import annotations

import json
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import (
    Database,
    first_rows,
    next_change_id,
    next_dataset_pk,
    next_epoch,
    write_audit,
)
from server.index.tables import (
    ALIVE,
    datasets,
    partition_stats,
    segments,
    shards,
    tombstones,
    trajectories,
)
from server.ingest.evict import evict_over_capacity
from server.ingest.pipeline import Ingest
from server.integrity import excluded
from server.problems import MAX_HINTS, ProblemError, not_found
from stepwell.messages import (
    Capacity,
    CreateDataset,
    Dataset,
    Page,
    PartitionStats,
    PatchDataset,
)
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec


def create(db: Database, body: CreateDataset) -> Dataset:
    """A new, empty dataset. Raises 409 for a taken name; an `InvalidSpace` becomes 422."""
    spec = EnvSpec.from_json(body.spec)
    arrow_schema(spec)  # a spec that has no columns is refused here, not at the first post
    with db.write() as connection:
        insert(connection, body, spec)
    return get(db, body.name)


def insert(connection: Connection, body: CreateDataset, spec: EnvSpec) -> int:
    """Insert the row in the caller's transaction (an import creates its dataset with the data)."""
    taken = connection.execute(
        sa.select(datasets.c.spec_digest).where(datasets.c.name == body.name)
    ).scalar()
    if taken is not None:
        raise ProblemError(
            409,
            "dataset_exists",
            f"there is a dataset {body.name!r} already"
            + (", of the same layout" if taken == spec.digest else ", of another layout"),
            expected=f"a layout of digest {taken}, or another name",
            got=spec.digest,
        )
    pk = next_dataset_pk(connection)
    connection.execute(
        sa.insert(datasets).values(
            pk=pk,
            name=body.name,
            spec=json.dumps(spec.to_json()),
            spec_digest=spec.digest,
            description=body.description,
            tags=json.dumps(body.tags),
            created_at=time.time(),
            **_capacity_columns(body.capacity),
        )
    )
    return pk


def absent(connection: Connection, name: str) -> ProblemError:
    """404 that offers the nearest name: for callers who may read them all."""
    newest = sa.select(datasets.c.name).order_by(datasets.c.pk.desc()).limit(MAX_HINTS)
    return not_found("dataset", name, connection.execute(newest).scalars())


def get(db: Database, name: str, *, hint: bool = False) -> Dataset:
    """Raises 404, with `hint` one that offers the nearest name."""
    with db.read() as connection:
        row = (
            connection.execute(sa.select(datasets).where(datasets.c.name == name))
            .mappings()
            .one_or_none()
        )
        if row is None:
            raise absent(connection, name) if hint else not_found("dataset", name)
        return _message(connection, row)


def page(db: Database, *, limit: int, cursor: str | None) -> Page[Dataset]:
    """By name."""
    statement = sa.select(datasets).order_by(datasets.c.name)
    if cursor is not None:
        statement = statement.where(datasets.c.name > cursor)
    with db.read() as connection:
        rows, last = first_rows(connection, statement, limit)
        items = [_message(connection, row) for row in rows]
    return Page[Dataset](items=items, next=None if last is None else last["name"])


def patch(db: Database, name: str, body: PatchDataset) -> Dataset:
    """Change what is given; a smaller capacity takes effect in the same transaction."""
    values: dict[str, Any] = {}
    if body.description is not None:
        values["description"] = body.description
    if body.tags is not None:
        values["tags"] = json.dumps(body.tags)
    if body.capacity is not None:
        values |= _capacity_columns(body.capacity)
    with db.write() as connection:
        pk = connection.execute(
            sa.select(datasets.c.pk).where(datasets.c.name == name)
        ).scalar_one_or_none()
        if pk is None:
            raise absent(connection, name)
        if values:
            connection.execute(sa.update(datasets).where(datasets.c.pk == pk).values(**values))
        if body.capacity is not None:
            evict_over_capacity(connection, pk, next_change_id(connection))
    return get(db, name)


def delete(db: Database, ingest: Ingest, name: str, who: str) -> None:
    """Remove a dataset with all it holds. 409 while protected trajectories exist.

    Its shards are retired, not unlinked: a leased snapshot keeps what it needs.
    """
    ingest.flush(name)
    # The lock keeps the sealer from moving trajectories that are about to go.
    with ingest.sealer.lock, db.write() as connection:
        d, t = datasets.c, trajectories.c
        pk = connection.execute(sa.select(d.pk).where(d.name == name)).scalar_one_or_none()
        if pk is None:
            raise absent(connection, name)
        protected = connection.execute(
            sa.select(sa.func.count()).where(t.dataset_pk == pk, t.partition == "protected")
        ).scalar_one()
        if protected:
            raise ProblemError(
                409,
                "protected",
                f"dataset {name!r} holds protected trajectories; an admin demotes them first"
                " (POST /v1/trajectories/{id}/demote)",
                expected="no protected trajectories",
                got=protected,
            )
        connection.execute(sa.delete(trajectories).where(t.dataset_pk == pk))
        for table in (partition_stats, tombstones):
            connection.execute(sa.delete(table).where(table.c.dataset_pk == pk))
        connection.execute(
            sa.update(shards)
            .where(shards.c.dataset_pk == pk)
            .values(
                dataset_pk=None,
                state=sa.case((shards.c.state == "live", "retired"), else_=shards.c.state),
                retired_uptime=sa.func.coalesce(shards.c.retired_uptime, db.uptime()),
            )
        )
        connection.execute(sa.delete(datasets).where(d.pk == pk))
        write_audit(connection, who, "dataset.delete", name)
        next_epoch(connection)
    ingest.registry.forget(name)


def _capacity_columns(capacity: Capacity) -> dict[str, int | None]:
    return {f"capacity_{what}": value for what, value in capacity.model_dump().items()}


def _message(connection: Connection, row: Any) -> Dataset:
    pk = row["pk"]
    t, s = trajectories.c, shards.c
    buckets = {
        r["bucket"]: r
        for r in connection.execute(
            sa.select(partition_stats).where(partition_stats.c.dataset_pk == pk)
        ).mappings()
    }
    count = sum(b["trajectories"] for b in buckets.values())
    steps = sum(b["steps"] for b in buckets.values())
    alive = sa.and_(t.dataset_pk == pk, ALIVE)
    least, most = connection.execute(
        sa.select(
            sa.select(sa.func.min(t["return"])).where(alive).scalar_subquery(),
            sa.select(sa.func.max(t["return"])).where(alive).scalar_subquery(),
        )
    ).one()
    # From the segments, of which there are few; `+` keeps SQLite from walking the dataset instead.
    unsealed = connection.execute(
        sa.select(sa.func.count())
        .select_from(trajectories)
        .where(
            t.segment_pk.in_(sa.select(segments.c.pk)),
            sa.text("+trajectories.dataset_pk = :pk").bindparams(pk=pk),
            t.state == "spooled",
        )
    ).scalar_one()
    files, stored = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(s.bytes), 0)).where(
            s.dataset_pk == pk, s.state.in_(("live", "retired", "quarantined"))
        )
    ).one()

    def stats(bucket: str) -> PartitionStats:
        found = buckets.get(bucket)
        if found is None:
            return PartitionStats()
        return PartitionStats(
            trajectories=found["trajectories"], steps=found["steps"], bytes=found["bytes"]
        )

    return Dataset(
        name=row["name"],
        spec=json.loads(row["spec"]),
        spec_digest=row["spec_digest"],
        capacity=Capacity(
            trajectories=row["capacity_trajectories"],
            steps=row["capacity_steps"],
            bytes=row["capacity_bytes"],
        ),
        description=row["description"],
        tags=json.loads(row["tags"]),
        created_at=row["created_at"],
        fifo=stats("fifo"),
        protected=stats("protected"),
        eval=stats("eval"),
        evicted=row["evicted"],
        unsealed=unsealed,
        shards=files,
        stored_bytes=stored,
        return_mean=sum(b["return_sum"] for b in buckets.values()) / count if count else None,
        return_min=least,
        return_max=most,
        length_mean=steps / count if count else None,
        last_ingest_at=row["last_ingest_at"],
        excluded=excluded(connection, row["name"]),
    )
