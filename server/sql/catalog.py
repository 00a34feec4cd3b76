"""The SQL surface: tables, their columns and types, and their files.

The only definition of these shapes; query_tables.py turns them into views, `GET /v1/query/schema`
returns them. `steps` has one row per observation, T+1 per trajectory (stepwell/trajectory.py).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from server.index.lost_rows import NOTHING_LOST, LostRows
from server.index.mirror import MirrorState
from server.index.sql_tables import TABLES
from stepwell.messages import Column, QuerySchema, Table
from stepwell.schema import ACTION_KNOWN, column_names
from stepwell.spaces import EnvSpec, Space

_TYPES = {
    "float16": "FLOAT",  # DuckDB has no half precision
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "bool": "BOOLEAN",
    "int8": "TINYINT",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "uint8": "UTINYINT",
    "uint16": "USMALLINT",
    "uint32": "UINTEGER",
}

_HEAD = [
    ("dataset", "VARCHAR", "t.dataset"),
    ("trajectory_id", "VARCHAR", "t.id"),
    ("t", "INTEGER", "s.t"),
]
_TAIL = [
    ("reward", "FLOAT", "s.reward"),
    ("terminated", "BOOLEAN", "s.terminated"),
    ("truncated", "BOOLEAN", "s.truncated"),
    ("is_last", "BOOLEAN", "s.is_last"),
]
COMMON = [(name, kind) for name, kind, _ in (*_HEAD, *_TAIL)]
"""Columns of `steps` that every dataset has."""

DESCRIPTIONS = {
    "trajectories": "one row per living trajectory, as soon as it is acknowledged",
    "datasets": "one row per dataset",
    "versions": "one row per version of a dataset",
    "version_trajectories": "one row per version and trajectory in it",
    "annotations": "one row per step that a critic has valued, for each annotation of the step",
    "runs": "one row per run of a trainer, collector or evaluator",
    "metrics": "one row per run, key and step",
    "policies": "one row per published policy",
    "evaluations": "one row per evaluation of a policy on an environment",
    "videos": "one row per video of an evaluated episode",
    "workers": "one row per process that reports to the service",
    "steps": "the columns that all datasets have in common; one row per observation (T+1 each)",
}


def catalog(
    state: MirrorState, known: MirrorState | None = None, lost: LostRows = NOTHING_LOST
) -> dict[str, Any]:
    """The whole surface in the worker's format (plain JSON); what changed since `known`, if given.

    `merged` applies changes.
    """
    return {
        "tables": {
            name: {"columns": TABLES[name], "files": files}
            for name, files in state.tables.items()
            if known is None or files != known.tables.get(name)
        },
        "datasets": {
            name: {
                "columns": step_columns(spec),
                "files": state.shards.get(name, []),
                "most_rows": state.most_rows.get(name, 0),
                "excluded": state.excluded.get(name, []),
            }
            for name, spec in state.specs.items()
            if known is None or _dataset(state, name) != _dataset(known, name)
        },
        "whole": known is None,
        "gone": [] if known is None else [name for name in known.specs if name not in state.specs],
        "lost": {name: lost.excluded(name) for name in (*TABLES, "steps")} if lost else {},
        "common": COMMON,
    }


def _dataset(state: MirrorState, name: str) -> tuple[Any, ...]:
    """What its entry is made of."""
    parts = (state.specs, state.shards, state.most_rows, state.excluded)
    return tuple(part.get(name) for part in parts)


def describe(state: MirrorState) -> QuerySchema:
    """The surface for people: GET /v1/query/schema."""
    tables = [
        _table(name, [(n, k) for n, k in columns if not n.startswith("_")], DESCRIPTIONS[name])
        for name, columns in TABLES.items()
    ]
    per_dataset = {
        name: [(n, k) for n, k, _ in step_columns(spec)] for name, spec in state.specs.items()
    }
    common = COMMON
    # As in query_tables.py, bare `steps` has the columns of datasets that have data.
    if filled := [columns for name, columns in per_dataset.items() if state.shards.get(name)]:
        first, *others = filled
        common = [column for column in first if all(column in other for other in others)]
    tables.append(_table("steps", common, DESCRIPTIONS["steps"]))
    for name, columns in per_dataset.items():
        text = f"steps of dataset {name}; bare `steps` when the request names it"
        tables.append(_table(f'"{name}".steps', columns, text))
    return QuerySchema(tables=tables)


@lru_cache(maxsize=4096)
def step_columns(spec_json: str) -> list[tuple[str, str, str]]:
    """(name, SQL type, expression over a shard's row `s` and its trajectory `t`) of `steps`."""
    spec = EnvSpec.from_json(json.loads(spec_json))
    names = column_names(spec)
    columns = [*_HEAD, _struct("obs", names["obs"])]
    if [name for name, _, _ in names["action"]] == ["action"]:
        column, _, space = names["action"][0]
        columns.append(("action", sql_type(space), _value(column, space)))
    else:
        columns.append(_struct("action", names["action"]))
    columns += _TAIL
    if spec.action_known:
        columns.append((ACTION_KNOWN, "BOOLEAN", f's."{ACTION_KNOWN}"'))
    if names["info"]:
        columns.append(_struct("info", names["info"]))
    return columns


def sql_type(space: Space) -> str:
    """The DuckDB type of one element of a column; arrays are flat, in C order."""
    if space.shape == ():
        return _TYPES[space.dtype]
    if space.dtype == "uint8":
        return "BLOB"
    size = 1
    for n in space.shape:
        size *= n
    item = "TINYINT" if space.dtype == "bool" else _TYPES[space.dtype]
    return f"{item}[{size}]" if size <= 100_000 else f"{item}[]"


def _struct(name: str, members: list[tuple[str, str, Space]]) -> tuple[str, str, str]:
    fields = ", ".join(f'"{key}" {sql_type(space)}' for _, key, space in members)
    values = ", ".join(f'"{key}" := {_value(column, space)}' for column, key, space in members)
    return name, f"STRUCT({fields})", f"struct_pack({values})"


def _value(column: str, space: Space) -> str:
    # Parquet has only lists: the cast enables DuckDB's array functions.
    return f'CAST(s."{column}" AS {sql_type(space)})'


def _table(name: str, columns: list[tuple[str, str]], description: str) -> Table:
    return Table(
        name=name,
        columns=[Column(name=n, type=k) for n, k in columns],
        description=description,
    )
