"""The tables of the SQL surface: their columns, and the queries that fill them.

They contain only living trajectories. mirror.py writes them to files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import pyarrow as pa

from server.index.dialect import json_list_sql, json_value_sql, total_sql

TABLES: dict[str, list[tuple[str, str]]] = {
    "trajectories": [
        *(("id", "VARCHAR"), ("seq", "BIGINT"), ("dataset", "VARCHAR"), ("partition", "VARCHAR")),
        *(("state", "VARCHAR"), ("env", "VARCHAR"), ("length", "BIGINT"), ("return", "DOUBLE")),
        *(("terminated", "BOOLEAN"), ("truncated", "BOOLEAN"), ("final_obs_valid", "BOOLEAN")),
        *(("success", "BOOLEAN"), ("purpose", "VARCHAR"), ("policy", "VARCHAR")),
        *(("run", "VARCHAR"), ("collector", "VARCHAR"), ("seed", "BIGINT")),
        *(("episode_id", "VARCHAR"), ("first_step", "BIGINT"), ("tags", "VARCHAR[]")),
        *(("flags", "VARCHAR[]"), ("notes", "VARCHAR"), ("source", "VARCHAR")),
        *(("digest", "VARCHAR"), ("bytes", "BIGINT"), ("started_at", "DOUBLE")),
        *(("created_at", "DOUBLE"), ("shard", "VARCHAR"), ("traj_idx", "INTEGER")),
        *(("metrics", "MAP(VARCHAR, DOUBLE)"), ("_file", "VARCHAR"), ("_pk", "BIGINT")),
    ],
    "datasets": [
        *(("name", "VARCHAR"), ("env", "VARCHAR"), ("description", "VARCHAR")),
        *(("tags", "VARCHAR[]"), ("capacity_trajectories", "BIGINT"), ("capacity_steps", "BIGINT")),
        *(("capacity_bytes", "BIGINT"), ("fifo_trajectories", "BIGINT"), ("fifo_steps", "BIGINT")),
        *(("fifo_bytes", "BIGINT"), ("protected_trajectories", "BIGINT")),
        *(("protected_steps", "BIGINT"), ("protected_bytes", "BIGINT")),
        *(("eval_trajectories", "BIGINT"), ("eval_steps", "BIGINT"), ("eval_bytes", "BIGINT")),
        *(("evicted", "BIGINT"), ("created_at", "DOUBLE"), ("last_ingest_at", "DOUBLE")),
        *(("spec", "VARCHAR"), ("spec_digest", "VARCHAR")),
    ],
    "versions": [
        *(("version", "VARCHAR"), ("dataset", "VARCHAR"), ("name", "VARCHAR")),
        *(("digest", "VARCHAR"), ("parent", "VARCHAR"), ("condition", "VARCHAR")),
        *(("include_eval", "BOOLEAN"), ("description", "VARCHAR"), ("licence", "VARCHAR")),
        *(("trajectories", "BIGINT"), ("steps", "BIGINT"), ("missing", "BIGINT")),
        *(("statistics", "VARCHAR"), ("created_by", "VARCHAR"), ("created_at", "DOUBLE")),
    ],
    "version_trajectories": [("version", "VARCHAR"), ("trajectory", "VARCHAR")],
    "annotations": [
        *(("dataset", "VARCHAR"), ("trajectory", "VARCHAR"), ("step", "INTEGER")),
        *(("name", "VARCHAR"), ("policy", "VARCHAR"), ("q", "FLOAT"), ("v", "FLOAT")),
        *(("advantage", "FLOAT"), ("weight", "FLOAT")),
    ],
    "runs": [
        *(("name", "VARCHAR"), ("title", "VARCHAR"), ("kind", "VARCHAR"), ("status", "VARCHAR")),
        *(("parent", "VARCHAR"), ("seed", "BIGINT"), ("git_commit", "VARCHAR")),
        ("host", "VARCHAR"),
        *(("snapshots", "VARCHAR[]"), ("tags", "VARCHAR[]"), ("notes", "VARCHAR")),
        *(("alarms", "VARCHAR"), ("command", "VARCHAR"), ("error", "VARCHAR")),
        ("config", "VARCHAR"),
        *(("created_at", "DOUBLE"), ("heartbeat_at", "DOUBLE"), ("finished_at", "DOUBLE")),
    ],
    "metrics": [
        *(("run", "VARCHAR"), ("key", "VARCHAR"), ("step", "BIGINT")),
        *(("time", "DOUBLE"), ("value", "DOUBLE")),
    ],
    "policies": [
        *(("run", "VARCHAR"), ("version", "BIGINT"), ("policy", "VARCHAR"), ("step", "BIGINT")),
        *(("sha256", "VARCHAR"), ("bytes", "BIGINT"), ("metadata", "VARCHAR")),
        *(("aliases", "VARCHAR[]"), ("created_at", "DOUBLE")),
    ],
    "evaluations": [
        *(("id", "VARCHAR"), ("run", "VARCHAR"), ("policy", "VARCHAR"), ("env", "VARCHAR")),
        *(("dataset", "VARCHAR"), ("episodes", "BIGINT"), ("mean", "DOUBLE"), ("iqm", "DOUBLE")),
        *(("ci_low", "DOUBLE"), ("ci_high", "DOUBLE"), ("confidence", "DOUBLE")),
        *(("normalised", "DOUBLE"), ("seeds", "BIGINT[]"), ("returns", "DOUBLE[]")),
        *(("lengths", "BIGINT[]"), ("details", "VARCHAR"), ("created_at", "DOUBLE")),
    ],
    "videos": [
        *(("evaluation", "VARCHAR"), ("seed", "BIGINT"), ("return", "DOUBLE")),
        *(("length", "BIGINT"), ("media_type", "VARCHAR"), ("sha256", "VARCHAR")),
        *(("bytes", "BIGINT"), ("created_at", "DOUBLE")),
    ],
    "workers": [
        *(("id", "VARCHAR"), ("role", "VARCHAR"), ("run", "VARCHAR"), ("host", "VARCHAR")),
        *(("pid", "BIGINT"), ("policy", "VARCHAR"), ("state", "VARCHAR")),
        *(("counters", "MAP(VARCHAR, DOUBLE)"), ("last_error", "VARCHAR"), ("command", "VARCHAR")),
        *(("started_at", "DOUBLE"), ("heartbeat_at", "DOUBLE")),
    ],
}
"""The tables of the SQL surface: (column, DuckDB type). Names with an underscore are internal."""

_ELSEWHERE = {
    "dataset": "d.name",
    "shard": "s.id",
    "return": 't."return"',
    "_file": "'stored://shards/' || s.partition || '/' || s.id || '.parquet'",
    "_pk": "t.pk",
}
TRAJECTORY_SQL = {name: _ELSEWHERE.get(name, f"t.{name}") for name, _ in TABLES["trajectories"]}
"""Each column of `trajectories` as an expression over the index."""
TRAJECTORIES = f"""
    SELECT {", ".join(TRAJECTORY_SQL.values())}
    FROM trajectories AS t JOIN datasets AS d ON d.pk = t.dataset_pk
    LEFT JOIN shards AS s ON s.pk = t.shard_pk
    WHERE t.pk BETWEEN ? AND ? AND t.state <> 'evicted' ORDER BY t.pk
"""
EXCLUDED = """
    SELECT d.name, s.id, count(*) FROM shards AS s JOIN trajectories AS t ON t.shard_pk = s.pk
    JOIN datasets AS d ON d.pk = t.dataset_pk
    WHERE s.state = 'quarantined' AND t.state <> 'evicted' GROUP BY d.name, s.id
    UNION ALL
    SELECT d.name, g.name, count(*)
    FROM segments AS g CROSS JOIN trajectories AS t ON t.segment_pk = g.pk
    JOIN datasets AS d ON d.pk = t.dataset_pk
    WHERE g.state = 'damaged' AND t.state = 'spooled' GROUP BY d.name, g.name
    UNION ALL
    SELECT dataset, 'index.sqlite', count(*) FROM lost_rows
    WHERE table_name = 'trajectories' AND dataset <> '' GROUP BY dataset
    ORDER BY 1, 2
"""
"""(dataset, file, trajectories): trajectories in damaged files, which are in no `steps`.
CROSS JOIN: else all trajectories are read, of which the few segments have few."""
METRICS = """
    SELECT r.name, m.key, m.step, m.time, m.value 
    FROM metrics AS m JOIN runs AS r ON r.pk = m.run_pk
    WHERE m.run_pk BETWEEN ? AND ? ORDER BY m.run_pk, m.key, m.step
"""
_TOTALS = ", ".join(map(total_sql, ("value", "step")))
METRIC_SUMS = f"""
    SELECT count(*), max(time), {_TOTALS} FROM metrics WHERE run_pk BETWEEN ? AND ?
"""
_STATS = ", ".join(
    f"coalesce((SELECT {what} FROM partition_stats AS p WHERE p.dataset_pk = d.pk"
    f" AND p.bucket = '{bucket}'), 0)"
    for bucket in ("fifo", "protected", "eval")
    for what in ("trajectories", "steps", "bytes")
)
VERSION_TRAJECTORIES = """
    SELECT d.name || '@' || v.name, t.id FROM version_trajectories AS m
    JOIN versions AS v ON v.pk = m.version_pk JOIN datasets AS d ON d.pk = v.dataset_pk
    JOIN trajectories AS t ON t.pk = m.trajectory_pk WHERE m.version_pk = ?
"""
SMALL: dict[str, str] = {
    "datasets": f"""
        SELECT name, coalesce({json_value_sql("spec", "env")}, ''), description, tags,
            capacity_trajectories, capacity_steps, capacity_bytes, {_STATS}, evicted, created_at,
            last_ingest_at, spec, spec_digest
        FROM datasets AS d ORDER BY name""",
    "versions": f"""
        SELECT d.name || '@' || v.name, d.name, v.name, v.digest, d.name || '@' || v.parent,
            v.condition, v.include_eval, v.description, v.licence,
            {json_value_sql("v.statistics", "trajectories")},
            {json_value_sql("v.statistics", "steps")},
            v.missing, v.statistics, v.created_by, v.created_at
        FROM versions AS v JOIN datasets AS d ON d.pk = v.dataset_pk ORDER BY v.pk""",
    "runs": """
        SELECT name, title, kind, status, parent, seed, git_commit, host, snapshots, tags, notes,
            alarms, command, error, config, created_at, heartbeat_at, finished_at
        FROM runs ORDER BY pk""",
    "policies": f"""
        SELECT r.name, p.version, r.name || '/' || p.version, p.step, p.sha256, p.bytes, p.metadata,
            (SELECT {json_list_sql("a.alias")} FROM policy_aliases AS a WHERE a.policy_pk = p.pk),
            p.created_at
        FROM policies AS p JOIN runs AS r ON r.pk = p.run_pk ORDER BY p.pk""",
    "evaluations": """
        SELECT id, run, policy, env, dataset, episodes, mean, iqm, ci_low, ci_high, confidence,
            normalised, seeds, returns, lengths, details, created_at
        FROM evaluations ORDER BY pk""",
    "videos": """
        SELECT e.id, v.seed, v."return", v.length, v.media_type, v.sha256, v.bytes, v.created_at
        FROM videos AS v JOIN evaluations AS e ON e.pk = v.evaluation_pk ORDER BY v.pk""",
    "workers": """
        SELECT id, role, run, host, pid, policy, state, counters, last_error, command, started_at,
            heartbeat_at
        FROM workers ORDER BY id""",
}

ARROW: dict[str, pa.DataType] = {
    "VARCHAR": pa.string(),
    "BIGINT": pa.int64(),
    "INTEGER": pa.int32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "VARCHAR[]": pa.list_(pa.string()),
    "BIGINT[]": pa.list_(pa.int64()),
    "DOUBLE[]": pa.list_(pa.float64()),
    "MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64()),
}


def arrow_array(kind: str, values: Iterable[Any]) -> pa.Array:
    """Values from the index (lists and maps are JSON text) as an Arrow array of type `kind`."""
    if kind == "BOOLEAN":
        values = [None if value is None else bool(value) for value in values]
    elif kind not in ("VARCHAR", "BIGINT", "INTEGER", "DOUBLE"):
        # Most texts are empty or equal: each distinct one is parsed once per call.
        values = map(cache(_parsed), values)
    return pa.array(values, ARROW[kind])


def _parsed(text: str | None) -> list[Any]:
    found = json.loads(text or "[]")
    if isinstance(found, dict):
        return [(name, float(value)) for name, value in found.items() if value is not None]
    return list(found)
