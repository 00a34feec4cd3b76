"""FIFO eviction: when a capacity is exceeded, the trajectories with the lowest seq are evicted.

Exact: it runs in the transaction that exceeds the capacity. index_rows.py:reserve_seqs assigns seq.
The capacity applies to training and to evaluation separately, so neither displaces the other.
Evicted trajectories are invisible at once; their bytes are deleted later, when no lease holds their
shard (maintenance/shard_deletion.py). Protected trajectories are never evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import SERVICE, count_audit
from server.index.tables import datasets, partition_stats, trajectories
from server.ingest.index_rows import add_totals, bucket_of, chunks

# Literals, not parameters: with parameters the partial indexes are not used (index/dialect.py).
EVICTABLE = {
    purpose: sa.text(f"partition = 'fifo' AND purpose = '{purpose}' AND state <> 'evicted'")
    for purpose in ("train", "eval")
}
PROTECTED_EVALUATION = sa.text(
    "partition = 'protected' AND purpose = 'eval' AND state <> 'evicted'"
)


def evict_over_capacity(connection: Connection, dataset_pk: int, change_id: int) -> int:
    """Evict what exceeds the dataset's capacity; returns the number evicted. Audited."""
    d = datasets.c
    capacity = connection.execute(
        sa.select(d.capacity_trajectories, d.capacity_steps, d.capacity_bytes).where(
            d.pk == dataset_pk
        )
    ).one()
    if all(limit is None for limit in capacity):
        return 0
    total: Counter[str] = Counter()
    for purpose in EVICTABLE:
        over = _excess(_held(connection, dataset_pk, purpose), capacity)
        if any(over) and purpose == "eval":
            # The running totals of evaluation cover both partitions.
            kept = _protected_evaluation(connection, dataset_pk)
            over = [max(0, much - there) for much, there in zip(over, kept, strict=True)]
        if any(over):
            total.update(_evict_oldest(connection, dataset_pk, purpose, over, change_id))
    if total["trajectories"]:
        name = connection.execute(sa.select(d.name).where(d.pk == dataset_pk)).scalar_one()
        count_audit(connection, SERVICE, "trajectories.evict", name, **total)
    return total["trajectories"]


def _held(connection: Connection, dataset_pk: int, purpose: str) -> Sequence[int]:
    """(trajectories, steps, bytes) of a purpose, from the running totals."""
    s = partition_stats.c
    row = connection.execute(
        sa.select(s.trajectories, s.steps, s.bytes).where(
            s.dataset_pk == dataset_pk, s.bucket == bucket_of("fifo", purpose)
        )
    ).one_or_none()
    return (0, 0, 0) if row is None else tuple(row)


def _protected_evaluation(connection: Connection, dataset_pk: int) -> Sequence[int]:
    t = trajectories.c
    sums = (sa.func.coalesce(sa.func.sum(column), 0) for column in (t.length, t.bytes))
    where = (t.dataset_pk == dataset_pk, PROTECTED_EVALUATION)
    return tuple(connection.execute(sa.select(sa.func.count(), *sums).where(*where)).one())


def _excess(held: Sequence[int], capacity: Sequence[int | None]) -> list[int]:
    return [
        0 if limit is None else max(0, have - limit)
        for have, limit in zip(held, capacity, strict=True)
    ]


def _evict_oldest(
    connection: Connection,
    dataset_pk: int,
    purpose: str,
    over: list[int],
    change_id: int,
) -> dict[str, int]:
    """Evict from the lowest seq until each of `over` (trajectories, steps, bytes) is covered;
    returns the sums of these."""
    t = trajectories.c
    oldest = connection.execute(
        sa.select(t.pk, t.length, t.bytes, t["return"])
        .where(t.dataset_pk == dataset_pk, EVICTABLE[purpose])
        .order_by(t.seq)
        .execution_options(yield_per=1000)
    )
    gone: list[int] = []
    count = steps = size = 0
    reward = 0.0
    for pk, length, nbytes, total in oldest:
        if count >= over[0] and steps >= over[1] and size >= over[2]:
            break
        gone.append(pk)
        count, steps, size, reward = count + 1, steps + length, size + nbytes, reward + total
    oldest.close()
    for some in chunks(gone):
        connection.execute(
            sa.update(trajectories)
            .where(t.pk.in_(some))
            .values(state="evicted", change_id=change_id)
        )
    bucket = bucket_of("fifo", purpose)
    add_totals(connection, dataset_pk, bucket, -count, -steps, -size, -reward)
    connection.execute(
        sa.update(datasets)
        .where(datasets.c.pk == dataset_pk)
        .values(evicted=datasets.c.evicted + count)
    )
    return {"trajectories": count, "steps": steps, "bytes": size}
