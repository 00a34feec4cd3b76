"""What a snapshot selects: asked for in SQL, as rows of the index, and as a file of Arrow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.tables import datasets, shards, trajectories
from server.ingest.rows import chunks
from server.problems import ProblemError
from stepwell.messages import CreateSnapshot

COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("dataset", pa.string()),
        ("seq", pa.int64()),
        ("component", pa.int16()),  # which `from`
        ("weight", pa.float64()),
        ("shard", pa.string()),
        ("traj_idx", pa.int32()),
        ("row_start", pa.int64()),  # first row in the shard
        ("length", pa.int32()),  # T; the shard has T+1 rows
        ("first_step", pa.int32()),
        ("return", pa.float64()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("final_obs_valid", pa.bool_()),
        ("env", pa.string()),
    ]
)


def read_table(path: Path) -> pa.Table:
    """The frozen rows of a snapshot file."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return reader.read_all()


def sources_of(body: CreateSnapshot) -> list[tuple[str, str | None, float]]:
    """(select, dataset, share) per component; the sugar `dataset` + `where` becomes one SELECT."""
    if (body.sources is None) == (body.dataset is None):
        raise ProblemError(
            422,
            "validation_error",
            "a snapshot is selected either by `from` or by `dataset` (with or without `where`)",
            expected="one of from, dataset",
            got="both" if body.sources is not None else "neither",
        )
    if body.sources is not None:
        if not body.sources or body.where is not None:
            raise ProblemError(
                422,
                "validation_error",
                "`from` holds at least one SELECT, and `where` belongs to `dataset`",
            )
        return [(source.select, None, source.share) for source in body.sources]
    # A line of its own: a comment at the end of `where` must not swallow the parenthesis.
    where = f" AND (\n{body.where}\n)" if body.where else ""
    select = f"SELECT id FROM trajectories WHERE dataset = '{body.dataset}'{where}"
    return [(select, body.dataset, 1.0)]


def rows_of(
    connection: Connection, ids: Sequence[str], *, evicted: bool = False
) -> list[dict[str, Any]]:
    """These trajectories as the index has them, in no order: COLUMNS and their states."""
    t = trajectories.c
    names = [f.name for f in COLUMNS if f.name not in ("dataset", "component", "weight", "shard")]
    statement = sa.select(
        *(t[name] for name in names),
        t.state,
        t.purpose,
        t.digest,
        datasets.c.name.label("dataset"),
        shards.c.id.label("shard"),
        shards.c.state.label("shard_state"),
    ).select_from(
        trajectories.join(datasets, datasets.c.pk == t.dataset_pk).outerjoin(
            shards, shards.c.pk == t.shard_pk
        )
    )
    if not evicted:
        statement = statement.where(t.state != "evicted")
    found: list[dict[str, Any]] = []
    for some in chunks(ids, 5000):
        listed = sa.func.json_each(json.dumps(list(some))).table_valued("value")
        result = connection.execute(statement.where(t.id.in_(sa.select(listed.c.value))))
        found.extend(dict(row) for row in result.mappings())
    return found


def table_of(selected: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table of COLUMNS."""
    columns = [pa.array([row[field.name] for row in selected], field.type) for field in COLUMNS]
    return pa.Table.from_arrays(columns, schema=COLUMNS)


def digest_of(selected: list[dict[str, Any]], shares: list[float]) -> str:
    """sha256 over what is selected and how it is weighed, not over where it happens to lie."""
    sha = hashlib.sha256(json.dumps(shares).encode())
    for row in selected:
        identity = (row["component"], row["dataset"], row["seq"], row["id"], row["digest"])
        sha.update(f"\n{identity}{row['weight']!r}".encode())
    return sha.hexdigest()
