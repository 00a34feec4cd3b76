"""Logical eviction: the oldest training trajectories of fifo go when a capacity is exceeded.

Exact: in the very transaction that added too much, by lowest seq. Invisible at once; the bytes go
later, when nobody holds a lease on their shard (upkeep/retain.py). Never protected, never eval.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.tables import datasets, partition_stats, trajectories
from server.ingest.rows import add_totals, chunks


def enforce(connection: Connection, dataset_pk: int, now: float, mark: int) -> int:
    """Evict what exceeds the dataset's capacity; returns how many went."""
    d = datasets.c
    capacity = connection.execute(
        sa.select(d.capacity_trajectories, d.capacity_steps, d.capacity_bytes).where(
            d.pk == dataset_pk
        )
    ).one()
    if all(limit is None for limit in capacity):
        return 0
    s = partition_stats.c
    held = connection.execute(
        sa.select(s.trajectories, s.steps, s.bytes).where(
            s.dataset_pk == dataset_pk, s.bucket == "fifo"
        )
    ).one_or_none()
    if held is None:
        return 0
    over = [
        0 if limit is None else max(0, have - limit)
        for have, limit in zip(held, capacity, strict=True)
    ]
    if not any(over):
        return 0
    return _evict_oldest(connection, dataset_pk, over, now, mark)


def _evict_oldest(
    connection: Connection, dataset_pk: int, over: list[int], now: float, mark: int
) -> int:
    """Walk from the lowest seq until each of `over` (trajectories, steps, bytes) is covered."""
    t = trajectories.c
    oldest = connection.execute(
        sa.select(t.pk, t.length, t.bytes, t["return"])
        .where(
            t.dataset_pk == dataset_pk,
            sa.text("partition = 'fifo' AND purpose = 'train' AND state <> 'evicted'"),
        )
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
            .values(state="evicted", evicted_at=now, mark=mark)
        )
    add_totals(connection, dataset_pk, "fifo", -count, -steps, -size, -reward)
    connection.execute(
        sa.update(datasets)
        .where(datasets.c.pk == dataset_pk)
        .values(evicted=datasets.c.evicted + count)
    )
    return count
