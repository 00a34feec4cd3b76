"""Datasets: their rows, settings and totals. A dataset's spec never changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.index.annotation_rows import drop_annotations
from server.index.db import (
    Database,
    count_audit,
    find_pk,
    first_rows,
    next_change_id,
    next_epoch,
    write_audit,
)
from server.index.deleted_files import delete_given_up
from server.index.dialect import matches, not_by_index_sql
from server.index.tables import (
    ALIVE,
    annotation_files,
    audit,
    consumers,
    datasets,
    partition_stats,
    segments,
    shards,
    tombstones,
    trajectories,
    versions,
)
from server.ingest.dataset_registry import capacity_columns, insert_dataset
from server.ingest.evict import evict_over_capacity
from server.ingest.pipeline import Ingest
from server.integrity import excluded
from server.problems import ProblemError
from server.rights import Access
from server.storage.store import Store
from server.versions.versions import refuse_if_versioned
from stepwell.messages import (
    Capacity,
    CreateDataset,
    Dataset,
    Excluded,
    FlushResult,
    Page,
    PartitionStats,
    PatchDataset,
)
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec


def create(db: Database, body: CreateDataset, caller: str) -> Dataset:
    """Raises 409 if the name is taken; `InvalidSpace`, which becomes 422."""
    spec = EnvSpec.from_json(body.spec)
    arrow_schema(spec)  # refuses a spec without columns now, not at the first post
    with db.write() as connection:
        return _read(connection, insert_dataset(connection, body, spec, caller))


def page(db: Database, access: Access, limit: int, cursor: str | None) -> Page[Dataset]:
    """Sorted by name; those that the caller may read."""
    statement = sa.select(datasets).order_by(datasets.c.name)
    if (patterns := access.patterns) is not None:
        fits = (matches(datasets.c.name, pattern) for pattern in patterns)
        statement = statement.where(sa.or_(sa.false(), *fits))
    if cursor is not None:
        statement = statement.where(datasets.c.name > cursor)
    with db.read() as connection:
        rows, last = first_rows(connection, statement, limit)
        items = _messages(connection, rows)
    return Page[Dataset](items=items, next=None if last is None else last["name"])


def get(db: Database, name: str, access: Access) -> Dataset:
    """Raises 404."""
    with db.read() as connection:
        return _read(connection, find_pk(connection, datasets, name, hint=access.reads))


def change(db: Database, name: str, body: PatchDataset, caller: str) -> Dataset:
    """A smaller capacity evicts at once. Raises 404."""
    values: dict[str, Any] = body.model_dump(include={"description", "tags"}, exclude_none=True)
    if body.capacity is not None:
        values |= capacity_columns(body.capacity)
    with db.write() as connection:
        pk = find_pk(connection, datasets, name)
        if values:
            connection.execute(sa.update(datasets).where(datasets.c.pk == pk).values(**values))
        if described := body.model_dump(include={"description", "tags"}, exclude_none=True):
            write_audit(connection, caller, "dataset.change", name, fields=[*described])
        if body.capacity is not None:
            write_audit(connection, caller, "dataset.capacity", name, **body.capacity.model_dump())
            evict_over_capacity(connection, pk, next_change_id(connection))
        return _read(connection, pk)


def delete(
    db: Database, store: Store, ingest: Ingest, name: str, caller: str, *, protected: bool
) -> None:
    """Raises 404; 409 if it has versions, or holds protected trajectories, unless `protected`."""
    # Its shards are retired, not unlinked: a leased snapshot keeps what it needs.
    ingest.flush(name)
    # The lock keeps the sealer from moving trajectories that are being deleted.
    with ingest.sealer.lock, db.write() as connection:
        t = trajectories.c
        pk = find_pk(connection, datasets, name)
        refuse_if_versioned(connection, f"data of {name!r}", versions.c.dataset_pk == pk)
        guarded = sa.and_(t.dataset_pk == pk, t.partition == "protected")
        if protected:
            _demote(connection, guarded, caller, name)
        elif held := connection.scalar(sa.select(sa.func.count()).where(guarded)):
            raise ProblemError(
                409,
                "protected",
                f"dataset {name!r} holds protected trajectories; to delete these, too: "
                f"stepwell datasets delete {name} --yes --protected (?protected=true)",
                expected="no protected trajectories",
                got=held,
            )
        connection.execute(sa.delete(trajectories).where(t.dataset_pk == pk))
        for table in (partition_stats, tombstones, consumers):
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
        drop_annotations(connection, annotation_files.c.dataset_pk == pk)
        connection.execute(sa.delete(datasets).where(datasets.c.pk == pk))
        write_audit(connection, caller, "dataset.delete", name)
        next_epoch(connection)
    ingest.registry.forget(name)
    delete_given_up(db, store)


def _demote(connection: Connection, which: sa.ColumnElement[bool], caller: str, name: str) -> None:
    """protected → fifo, each trajectory with its row of the audit log, which triggers ask for."""
    columns = (audit.c.time, audit.c.who, audit.c.action, audit.c.subject, audit.c.detail)
    values = sa.literal(time.time()), sa.literal(caller), sa.literal("demote"), trajectories.c.id
    detail = sa.literal({"dataset": name, "reason": "dataset.delete"}, sa.JSON)
    rows = sa.select(*values, detail).where(which)
    connection.execute(sa.insert(audit).from_select([c.name for c in columns], rows))
    connection.execute(sa.update(trajectories).where(which).values(partition="fifo"))


def note_flush(db: Database, name: str, sealed: FlushResult, caller: str) -> None:
    """In the audit log, if it sealed anything."""
    if sealed.sealed:
        with db.write() as connection:
            count_audit(connection, caller, "dataset.flush", name, trajectories=sealed.sealed)


def _read(connection: Connection, pk: int) -> Dataset:
    found = connection.execute(sa.select(datasets).where(datasets.c.pk == pk))
    return _messages(connection, found.mappings().all())[0]


def _messages(connection: Connection, rows: Sequence[RowMapping]) -> list[Dataset]:
    """In the order of `rows`, by as many statements for a thousand as for one."""
    pks = [row["pk"] for row in rows]
    buckets = _buckets(connection, pks)
    returns = _returns(connection, pks)
    unsealed = _unsealed(connection, pks)
    files = _files(connection, pks)
    damaged: dict[str, list[Excluded]] = {}
    for file in excluded(connection):
        damaged.setdefault(file.dataset, []).append(file)
    return [
        _message(
            row,
            buckets.get(row["pk"], {}),
            returns[row["pk"]],
            unsealed.get(row["pk"], 0),
            files.get(row["pk"], (0, 0)),
            damaged.get(row["name"], []),
        )
        for row in rows
    ]


def _message(
    row: RowMapping,
    buckets: dict[str, RowMapping],
    returns: tuple[float | None, float | None],
    unsealed: int,
    files: tuple[int, int],
    damaged: list[Excluded],
) -> Dataset:
    count = sum(b["trajectories"] for b in buckets.values())
    steps = sum(b["steps"] for b in buckets.values())
    return Dataset(
        **row,
        **{bucket: PartitionStats(**sums) for bucket, sums in buckets.items()},
        capacity=Capacity(
            trajectories=row["capacity_trajectories"],
            steps=row["capacity_steps"],
            bytes=row["capacity_bytes"],
        ),
        unsealed=unsealed,
        shards=files[0],
        stored_bytes=files[1],
        return_mean=sum(b["return_sum"] for b in buckets.values()) / count if count else None,
        return_min=returns[0],
        return_max=returns[1],
        length_mean=steps / count if count else None,
        excluded=damaged,
    )


def _buckets(connection: Connection, pks: list[int]) -> dict[int, dict[str, RowMapping]]:
    """Dataset → bucket → its running totals."""
    found: dict[int, dict[str, RowMapping]] = {}
    which = partition_stats.c.dataset_pk.in_(pks)
    for row in connection.execute(sa.select(partition_stats).where(which)).mappings():
        found.setdefault(row["dataset_pk"], {})[row["bucket"]] = row
    return found


def _returns(
    connection: Connection, pks: list[int]
) -> dict[int, tuple[float | None, float | None]]:
    """Dataset → least and greatest return; each is one look into an index."""
    d, t = datasets.c, trajectories.c
    alive = sa.and_(t.dataset_pk == d.pk, ALIVE)
    least, most = (
        sa.select(of(t["return"])).where(alive).scalar_subquery()
        for of in (sa.func.min, sa.func.max)
    )
    rows = connection.execute(sa.select(d.pk, least, most).where(d.pk.in_(pks)))
    return {pk: (low, high) for pk, low, high in rows}


def _unsealed(connection: Connection, pks: list[int]) -> dict[int, int]:
    """Dataset → trajectories in segments. From the segments, which are few, instead of the
    datasets."""
    t = trajectories.c
    of: sa.ColumnElement[int] = sa.literal_column(not_by_index_sql("trajectories.dataset_pk"))
    rows = connection.execute(
        sa.select(of, sa.func.count())
        .where(t.segment_pk.in_(sa.select(segments.c.pk)), of.in_(pks), t.state == "spooled")
        .group_by(of)
    )
    return {pk: count for pk, count in rows}


def _files(connection: Connection, pks: list[int]) -> dict[int, tuple[int, int]]:
    """Dataset → number and bytes of its shards."""
    s = shards.c
    rows = connection.execute(
        sa.select(s.dataset_pk, sa.func.count(), sa.func.sum(s.bytes))
        .where(s.dataset_pk.in_(pks), s.state.in_(("live", "retired", "quarantined")))
        .group_by(s.dataset_pk)
    )
    return {pk: (count, size) for pk, count, size in rows}
