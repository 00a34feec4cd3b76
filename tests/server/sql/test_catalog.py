"""What the SQL surface consists of, compared as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.index.mirror import MirrorState
from server.index.sql_tables import TABLES
from server.sql import catalog
from server.sql.query_tables import merged
from stepwell.spaces import Box, Discrete, MultiBinary, MultiDiscrete

DTYPES = {
    "float16": "FLOAT",
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_type_of_every_dtype(dtype: str) -> None:
    item = {"bool": "TINYINT"}.get(dtype, DTYPES[dtype])
    bounds = (0.0, 1.0)
    assert catalog.sql_type(Box((), dtype, *bounds)) == DTYPES[dtype]
    for shape, size in (((1,), 1), ((3,), 3), ((2, 3, 4), 24)):
        wanted = "BLOB" if dtype == "uint8" else f"{item}[{size}]"
        assert catalog.sql_type(Box(shape, dtype, *bounds)) == wanted


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (Discrete(5, start=-2), "BIGINT"),
        (MultiDiscrete((2, 3)), "BIGINT[2]"),
        (MultiBinary(4), "TINYINT[4]"),
        (Box((100_000,)), "FLOAT[100000]"),
        (Box((100_001,)), "FLOAT[]"),
        (Box((250, 400), "int32"), "INTEGER[100000]"),
        (Box((2, 50_001), "bool", 0.0, 1.0), "TINYINT[]"),
        (Box((500, 500), "uint8", 0.0, 255.0), "BLOB"),
    ],
)
def test_the_type_of_every_space(space: Any, kind: str) -> None:
    assert catalog.sql_type(space) == kind


def box(shape: list[int], dtype: str = "float32", **bounds: Any) -> dict[str, Any]:
    return {"type": "Box", "shape": shape, "dtype": dtype, **bounds}


PLAIN = json.dumps(
    {
        "observations": {"observation": box([4])},
        "actions": {"action": {"type": "Discrete", "n": 3}},
        "env": "Plain-v0",
    }
)
RICH = json.dumps(
    {
        "observations": {
            "camera": box([4, 5, 3], "uint8", low=0, high=255),
            "arm/angles": box([2, 3], "float64"),
            "legal": box([3], "bool", low=0, high=1),
            "room": {"type": "Discrete", "n": 5},
        },
        "actions": {"move": box([2]), "grip": {"type": "MultiDiscrete", "nvec": [2, 3]}},
        "infos": {"lidar": box([3], "int16"), "distance": box([])},
        "action_known": True,
        "env": "Rich-v0",
    }
)
ONE_ACTION = json.dumps(
    {
        "observations": {"observation": box([4])},
        "actions": {"move": box([2])},
        "env": "",
    }
)
START = [
    ("dataset", "VARCHAR", "t.dataset"),
    ("trajectory_id", "VARCHAR", "t.id"),
    ("t", "INTEGER", "s.t"),
]
END = [
    ("reward", "FLOAT", "s.reward"),
    ("terminated", "BOOLEAN", "s.terminated"),
    ("truncated", "BOOLEAN", "s.truncated"),
    ("is_last", "BOOLEAN", "s.is_last"),
]
OBSERVATION = (
    "obs",
    'STRUCT("observation" FLOAT[4])',
    'struct_pack("observation" := CAST(s."obs.observation" AS FLOAT[4]))',
)
PLAIN_COLUMNS = [
    *START,
    OBSERVATION,
    ("action", "BIGINT", 'CAST(s."action" AS BIGINT)'),
    *END,
]
RICH_COLUMNS = [
    *START,
    (
        "obs",
        'STRUCT("arm/angles" DOUBLE[6], "camera" BLOB, "legal" TINYINT[3], "room" BIGINT)',
        'struct_pack("arm/angles" := CAST(s."obs.arm/angles" AS DOUBLE[6]),'
        ' "camera" := CAST(s."obs.camera" AS BLOB),'
        ' "legal" := CAST(s."obs.legal" AS TINYINT[3]),'
        ' "room" := CAST(s."obs.room" AS BIGINT))',
    ),
    (
        "action",
        'STRUCT("grip" BIGINT[2], "move" FLOAT[2])',
        'struct_pack("grip" := CAST(s."action.grip" AS BIGINT[2]),'
        ' "move" := CAST(s."action.move" AS FLOAT[2]))',
    ),
    *END,
    ("action_known", "BOOLEAN", 's."action_known"'),
    (
        "info",
        'STRUCT("distance" FLOAT, "lidar" SMALLINT[3])',
        'struct_pack("distance" := CAST(s."info.distance" AS FLOAT),'
        ' "lidar" := CAST(s."info.lidar" AS SMALLINT[3]))',
    ),
]
COMMON = [
    *(("dataset", "VARCHAR"), ("trajectory_id", "VARCHAR"), ("t", "INTEGER")),
    *(("reward", "FLOAT"), ("terminated", "BOOLEAN"), ("truncated", "BOOLEAN")),
    ("is_last", "BOOLEAN"),
]


def test_the_columns_of_steps() -> None:
    catalog.step_columns.cache_clear()
    assert catalog.step_columns(PLAIN) == PLAIN_COLUMNS
    assert catalog.step_columns(RICH) == RICH_COLUMNS
    assert catalog.step_columns(ONE_ACTION) == [
        *START,
        OBSERVATION,
        (
            "action",
            'STRUCT("move" FLOAT[2])',
            'struct_pack("move" := CAST(s."action.move" AS FLOAT[2]))',
        ),
        *END,
    ]
    assert catalog.COMMON == COMMON


def test_the_columns_of_a_spec_are_kept() -> None:
    catalog.step_columns.cache_clear()
    assert catalog.step_columns(PLAIN) is catalog.step_columns(PLAIN)
    assert catalog.step_columns.cache_info().maxsize == 4096


def test_the_catalog_of_a_state() -> None:
    state = MirrorState(
        version=3,
        tables={"metrics": ["mirror/m1", "mirror/m2"], "workers": []},
        specs={"plain": PLAIN, "rich": RICH},
        shards={"plain": ["shards/fifo/a"]},
        excluded={"rich": [("bad", 2)]},
        most_rows={"plain": 7},
    )
    found = catalog.catalog(state)
    assert found == {
        "tables": {
            "metrics": {
                "columns": [
                    *(("run", "VARCHAR"), ("key", "VARCHAR"), ("step", "BIGINT")),
                    *(("time", "DOUBLE"), ("value", "DOUBLE")),
                ],
                "files": ["mirror/m1", "mirror/m2"],
            },
            "workers": {"columns": TABLES["workers"], "files": []},
        },
        "datasets": {
            "plain": {
                "columns": PLAIN_COLUMNS,
                "files": ["shards/fifo/a"],
                "most_rows": 7,
                "excluded": [],
            },
            "rich": {
                "columns": RICH_COLUMNS,
                "files": [],
                "most_rows": 0,
                "excluded": [("bad", 2)],
            },
        },
        "whole": True,
        "gone": [],
        "lost": {},
        "common": COMMON,
    }
    assert json.loads(json.dumps(found))["datasets"]["rich"]["excluded"] == [["bad", 2]]


def shown(table: Any) -> tuple[str, list[tuple[str, str]], str]:
    return table.name, [(c.name, c.type) for c in table.columns], table.description


def state_of(specs: dict[str, str], *empty: str) -> MirrorState:
    """All of these datasets have data, but the `empty` ones."""
    shards = {name: ["shards/fifo/s.parquet"] for name in specs if name not in empty}
    return MirrorState(1, {}, specs, shards)


def test_the_surface_for_people() -> None:
    state = state_of({"plain": PLAIN, "rich": RICH})
    tables = [shown(table) for table in catalog.describe(state).tables]
    names = [
        *(
            "trajectories",
            "datasets",
            "versions",
            "version_trajectories",
            "annotations",
            "runs",
            "metrics",
            "policies",
            "evaluations",
            "videos",
        ),
        "workers",
    ]
    assert [name for name, _, _ in tables] == [*names, "steps", '"plain".steps', '"rich".steps']
    assert sorted(catalog.DESCRIPTIONS) == sorted([*names, "steps"])
    for name, columns, description in tables[: len(names)]:
        hidden = [("_file", "VARCHAR"), ("_pk", "BIGINT")] if name == "trajectories" else []
        assert columns + hidden == TABLES[name]
        assert description == catalog.DESCRIPTIONS[name] != ""
    assert tables[len(names) :] == [
        ("steps", COMMON, catalog.DESCRIPTIONS["steps"]),
        (
            '"plain".steps',
            [(name, kind) for name, kind, _ in PLAIN_COLUMNS],
            "steps of dataset plain; bare `steps` when the request names it",
        ),
        (
            '"rich".steps',
            [(name, kind) for name, kind, _ in RICH_COLUMNS],
            "steps of dataset rich; bare `steps` when the request names it",
        ),
    ]


def test_bare_steps_for_people() -> None:
    """What all datasets with data have in common; without any, what each of them will have."""

    def columns(specs: dict[str, str], *empty: str) -> list[tuple[str, str]]:
        found = {table.name: table for table in catalog.describe(state_of(specs, *empty)).tables}
        return shown(found["steps"])[1]

    assert columns({}) == COMMON
    assert columns({"a": PLAIN}) == [(name, kind) for name, kind, _ in PLAIN_COLUMNS]
    with_observation = [*COMMON[:3], OBSERVATION[:2], *COMMON[3:]]
    assert columns({"a": PLAIN, "b": ONE_ACTION}) == with_observation
    assert columns({"a": PLAIN, "b": ONE_ACTION, "c": RICH}) == COMMON
    assert columns({"a": PLAIN, "b": ONE_ACTION, "c": RICH}, "c") == with_observation
    assert columns({"a": PLAIN}, "a") == COMMON


def test_changes_lead_from_any_state_to_any_other() -> None:
    """Also back, as when an answer is given from an older state than the last."""
    specs = {"a": PLAIN, "b": RICH, "c": ONE_ACTION}
    states = [
        MirrorState(1, {"metrics": ["m1"], "workers": []}, {}, {}),
        MirrorState(2, {"metrics": ["m1"], "workers": ["w"]}, specs, {"a": ["x"], "b": ["y"]}),
        MirrorState(3, {"metrics": [], "workers": ["w"]}, {"b": RICH}, {"b": ["y", "z"]}),
        MirrorState(4, {"metrics": [], "workers": ["w"]}, {"b": PLAIN}, {"b": ["y", "z"]}),
        MirrorState(
            5,
            {"metrics": ["m2"], "workers": ["w"]},
            specs,
            {"a": ["x"], "b": ["y"]},
            excluded={"a": [("f", 1)]},
            most_rows={"a": 9},
        ),
    ]
    for before in states:
        for after in states:
            found = merged(catalog.catalog(before), catalog.catalog(after, before))
            wanted = catalog.catalog(after)
            assert {name: found[name] for name in ("tables", "datasets", "common")} == {
                name: wanted[name] for name in ("tables", "datasets", "common")
            }
            assert list(found["datasets"]) == list(wanted["datasets"])
    unchanged = catalog.catalog(states[4], states[4])
    assert (unchanged["tables"], unchanged["datasets"], unchanged["gone"]) == ({}, {}, [])
