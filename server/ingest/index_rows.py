"""A trajectory's row in the index, its seq (the order of FIFO), and the running totals.

All functions run inside the caller's write transaction: the group commit, an import, a seal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index import dialect
from server.index.tables import datasets, partition_stats, segments, tombstones, trajectories
from server.storage.shards import Entry

CHUNK = 500
"""Ids per IN list: well below the limit on parameters."""
NOWHERE: dict[str, Any] = dict.fromkeys(
    ("segment_pk", "segment_offset", "shard_pk", "traj_idx", "row_start")
)
"""The columns that say where a trajectory is stored."""


@dataclass(frozen=True, slots=True)
class KnownTrajectory:
    """The index's record of an id."""

    dataset_pk: int
    seq: int
    digest: str
    evicted: bool


def bucket_of(partition: str, purpose: str) -> str:
    """The bucket of totals that a trajectory counts in: evaluation is separate."""
    return "eval" if purpose == "eval" else partition


def chunks(items: Sequence[Any], size: int = CHUNK) -> Iterable[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def find_known(connection: Connection, ids: Sequence[str]) -> dict[str, KnownTrajectory]:
    """Find which of `ids` are or were stored: alive, evicted or tombstones."""
    found: dict[str, KnownTrajectory] = {}
    t, dead = trajectories.c, tombstones.c
    for some in chunks(ids):
        for columns, evicted in ((dead, sa.true()), (t, t.state == "evicted")):
            statement = sa.select(
                columns.id, columns.dataset_pk, columns.seq, columns.digest, evicted
            )
            for identity, *rest in connection.execute(statement.where(columns.id.in_(some))):
                found[identity] = KnownTrajectory(*rest)
    return found


def row_of(
    entry: Entry, dataset_pk: int, seq: int, change_id: int, default_env: str
) -> dict[str, Any]:
    """The columns that do not depend on where the trajectory is stored."""
    header, metadata = entry.header, entry.header.get("about", {})
    return {
        "id": header["id"],
        "dataset_pk": dataset_pk,
        "seq": seq,
        "partition": entry.partition,
        "env": metadata.get("env") or default_env,
        "length": header["length"],
        "return": entry.total_reward,
        "terminated": header["terminated"],
        "truncated": header["truncated"],
        "final_obs_valid": header["final_obs_valid"],
        "success": metadata.get("success"),
        "purpose": metadata.get("purpose", "train"),
        "policy": metadata.get("policy", ""),
        "run": metadata.get("run", ""),
        "collector": metadata.get("collector", ""),
        "seed": metadata.get("seed"),
        "episode_id": metadata.get("episode_id", ""),
        "first_step": metadata.get("first_step", 0),
        "tags": orjson.dumps(metadata.get("tags", [])).decode(),
        "source": metadata.get("source", ""),
        "metrics": orjson.dumps(metadata.get("metrics", {})).decode(),
        "digest": entry.digest,
        "bytes": entry.bytes,
        "started_at": metadata.get("started_at"),
        "created_at": entry.created_at,
        "change_id": change_id,
    }


def reserve_seqs(connection: Connection, dataset_pk: int, count: int, now: float) -> int | None:
    """Reserve `count` sequence numbers, which are the order of FIFO eviction.

    Returns the first, or None if the dataset was deleted.
    """
    after = connection.execute(
        sa.update(datasets)
        .where(datasets.c.pk == dataset_pk)
        .values(next_seq=datasets.c.next_seq + count, last_ingest_at=now)
        .returning(datasets.c.next_seq)
    ).scalar()
    return None if after is None else int(after) - count


def insert_rows(connection: Connection, rows: list[dict[str, Any]]) -> None:
    """Insert rows of one dataset (row_of + state and location), and update its totals."""
    dialect.insert_rows(connection, trajectories, rows)
    totals: dict[str, list[float]] = {}
    for row in rows:
        sums = totals.setdefault(bucket_of(row["partition"], row["purpose"]), [0, 0, 0, 0.0])
        for i, value in enumerate((1, row["length"], row["bytes"], row["return"])):
            sums[i] += value
    pk = rows[0]["dataset_pk"]
    for bucket, (count, steps, size, reward) in totals.items():
        add_totals(connection, pk, bucket, int(count), int(steps), int(size), reward)
    if inserted := sum(int(sums[1]) for bucket, sums in totals.items() if bucket != "eval"):
        d = datasets.c
        connection.execute(
            sa.update(datasets).where(d.pk == pk).values(inserted_steps=d.inserted_steps + inserted)
        )


def make_tombstones(connection: Connection, where: Any, uptime: float, change_id: int) -> None:
    """Replace rows of `trajectories` by tombstones, so that a late retry is recognised."""
    t = trajectories.c
    names = ["id", "dataset_pk", "seq", "digest", "evicted_uptime", "change_id"]
    values = (t.id, t.dataset_pk, t.seq, t.digest, sa.literal(uptime), sa.literal(change_id))
    connection.execute(sa.insert(tombstones).from_select(names, sa.select(*values).where(where)))
    connection.execute(sa.delete(trajectories).where(where))


def insert_segment(connection: Connection, name: str, created_at: float) -> int:
    """Insert an open segment; returns its key."""
    values = {"name": name, "state": "open", "created_at": created_at}
    statement = sa.insert(segments).values(values).returning(segments.c.pk)
    return int(connection.execute(statement).scalar_one())


def add_totals(
    connection: Connection,
    dataset_pk: int,
    bucket: str,
    count: int,
    steps: int,
    size: int,
    reward: float,
) -> None:
    """Add to a bucket's running totals; negative numbers subtract."""
    values = {"trajectories": count, "steps": steps, "bytes": size, "return_sum": reward}
    statement = dialect.upsert(partition_stats, *values, combine=operator.add)
    connection.execute(statement.values(dataset_pk=dataset_pk, bucket=bucket, **values))
