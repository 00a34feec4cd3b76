"""A condition on `dataset` opens the files of those datasets alone, and changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from server.sql.dataset_filter import named_datasets
from server.sql.guard import check
from stepwell.testing import make_spec, make_trajectory

A, AB = frozenset("a"), frozenset("ab")


@pytest.mark.parametrize(
    ("sql", "params", "wanted"),
    [
        ("SELECT * FROM steps WHERE dataset = 'a'", None, A),
        ("select 1 from main.STEPS where 'a' = DATASET and t > 1", None, A),
        ("SELECT * FROM steps WHERE t > 1 AND (dataset = 'a' OR steps.dataset = 'b')", None, AB),
        ("SELECT * FROM steps WHERE dataset IN ('a', 'b')", None, AB),
        ("SELECT * FROM steps WHERE dataset IN ('a', 'b') AND dataset = 'a'", None, A),
        ("SELECT * FROM steps WHERE dataset = $1", ["a"], A),
        ("SELECT * FROM steps WHERE dataset IN (?, ?)", ["a", "b"], AB),
        ("SELECT * FROM steps WHERE dataset = $name", {"name": "a"}, A),
        ("SELECT * FROM steps AS s WHERE s.dataset = 'a'", None, A),
        ("SELECT dataset, count(*) FROM steps WHERE dataset = 'a' GROUP BY 1", None, A),
        (
            "SELECT * FROM steps s JOIN trajectories t ON s.trajectory_id = t.id"
            " WHERE s.dataset = 'a'",
            None,
            A,
        ),
        ("SELECT * FROM steps s, trajectories t WHERE s.dataset = 'a'", None, A),
        (
            "SELECT * FROM trajectories t LEFT JOIN steps s ON s.trajectory_id = t.id"
            " WHERE s.dataset = 'a'",
            None,
            A,
        ),
        (
            "SELECT (SELECT max(t) FROM steps WHERE dataset = 'a') FROM steps WHERE dataset = 'b'",
            None,
            AB,
        ),
        ("WITH x AS (SELECT * FROM steps WHERE dataset = 'a') SELECT * FROM x", None, A),
        ("SELECT * FROM steps WHERE dataset='a' UNION SELECT * FROM steps WHERE dataset='b'",
         None, AB),
        ("SELECT * FROM trajectories", None, frozenset()),
        # Any dataset, or not certainly these.
        ("SELECT * FROM steps", None, None),
        ("SELECT * FROM steps WHERE dataset = 'a' OR t > 1", None, None),
        ("SELECT * FROM steps WHERE NOT dataset = 'a'", None, None),
        ("SELECT * FROM steps WHERE dataset <> 'a'", None, None),
        ("SELECT * FROM steps WHERE dataset NOT IN ('a')", None, None),
        ("SELECT * FROM steps WHERE dataset = upper('a')", None, None),
        ("SELECT * FROM steps WHERE dataset = 7", None, None),
        ("SELECT * FROM steps WHERE dataset = NULL", None, None),
        ("SELECT * FROM steps WHERE dataset = $1", [7], None),
        ("SELECT * FROM steps WHERE dataset = $2", ["a"], None),
        ("SELECT * FROM steps WHERE dataset = 'a' COLLATE NOCASE", None, None),
        ("SELECT * FROM steps WHERE dataset IN (SELECT name FROM datasets)", None, None),
        ("SELECT upper(dataset) AS dataset FROM steps WHERE dataset = 'a'", None, None),
        ("SELECT * FROM steps AS s(dataset, x) WHERE s.dataset = 'a'", None, None),
        ("SELECT * FROM steps AS s WHERE obs.dataset = 'a'", None, None),
        ("SELECT * FROM steps USING SAMPLE 3 ROWS", None, None),
        ("SELECT * FROM steps TABLESAMPLE reservoir(3) WHERE dataset = 'a'", None, None),
        ("SELECT * FROM steps WHERE dataset = 'a' USING SAMPLE 3 ROWS", None, None),
        (
            "SELECT * FROM steps s JOIN trajectories t ON s.trajectory_id = t.id"
            " WHERE dataset = 'a'",
            None,
            None,
        ),
        ("SELECT * FROM trajectories t ANTI JOIN steps s ON s.trajectory_id = t.id"
         " WHERE dataset = 'a'", None, None),
        ("SELECT * FROM steps POSITIONAL JOIN trajectories WHERE steps.dataset = 'a'", None, None),
        ("SELECT * FROM trajectories t ASOF JOIN steps s ON t.length >= s.t"
         " WHERE s.dataset = 'a'", None, None),
        ("SELECT * FROM steps a, steps b WHERE a.dataset = 'a'", None, None),
        ("SELECT * FROM steps, (SELECT 'a' AS dataset) AS steps WHERE steps.dataset = 'a'",
         None, None),
        ("SELECT count(*) FILTER (dataset = 'a') FROM steps", None, None),
        ("SELECT dataset FROM steps GROUP BY 1 HAVING dataset = 'a'", None, None),
        ("SELECT (SELECT count(*) FROM steps) FROM steps WHERE dataset = 'a'", None, None),
        ("WITH x AS (FROM steps) SELECT * FROM x WHERE dataset = 'a'", None, None),
        ("FROM steps PIVOT (sum(reward) FOR t IN (0, 1)) WHERE dataset = 'a'", None, None),
    ],
)  # fmt: skip
def test_what_a_condition_says(
    parser: Any, sql: str, params: Any, wanted: frozenset[str] | None
) -> None:
    assert named_datasets(check(sql, parser).tree, params) == wanted


@pytest.fixture(scope="module")
def filled(make_world: Callable[..., Any]) -> Any:
    """Three datasets of two layouts; the one with other columns is `c`."""
    world = make_world(sql_workers=1)
    for seed, name in enumerate("abc"):
        spec = make_spec(observation=2 + (name == "c"), action=1, env=f"{name}-v0")
        world.create(name, spec)
        world.post(name, [make_trajectory(spec, length=3 + seed + i, seed=i) for i in range(2)])
    return world


QUERIES = [
    "SELECT {} FROM steps WHERE dataset = 'a' ORDER BY 1",
    "SELECT {} FROM steps WHERE dataset IN ('a', 'c') AND t < 3 ORDER BY 1",
    "SELECT {} FROM steps WHERE dataset = 'nobody' ORDER BY 1",
    "SELECT {} FROM trajectories AS r LEFT JOIN steps ON steps.trajectory_id = r.id AND t = 4"
    " WHERE steps.dataset = 'b' ORDER BY 1",
    "SELECT {} FROM trajectories AS r FULL JOIN steps ON steps.trajectory_id = r.id"
    " WHERE steps.dataset = 'b' OR steps.dataset = 'a' ORDER BY 1",
]


@pytest.mark.parametrize("sql", QUERIES)
@pytest.mark.parametrize("what", ["steps.*", "count(*)", "sum(steps.reward), max(steps.t)"])
def test_the_answer_is_the_same(filled: Any, sql: str, what: str) -> None:
    """As that of a condition which is not understood."""
    opaque = sql.replace("dataset =", "concat(dataset) =")
    opaque = opaque.replace("dataset IN", "concat(dataset) IN")
    opaque = opaque.replace("steps.concat(dataset)", "concat(steps.dataset)")
    wanted = filled.service.sql.query(opaque.format(what), timeout=60.0)
    found = filled.service.sql.query(sql.format(what), timeout=60.0)
    assert (found.payload, found.columns) == (wanted.payload, wanted.columns)
    assert wanted.rows or "nobody" in sql


def test_other_datasets_files_are_not_opened(make_world: Callable[..., Any]) -> None:
    """So their damage does not matter, and nothing is said of it."""
    world = make_world(sql_workers=1)
    spec = make_spec()
    for name in "ab":
        world.create(name, spec)
        world.post(name, [make_trajectory(spec, length=4)])
    state = world.service.mirror.state("steps")
    (path,) = state.shards["b"]
    (world.service.settings.data / path).write_bytes(b"broken")
    found = world.service.sql.query(
        "SELECT count(*) FROM steps WHERE dataset = $1", ["a"], timeout=60.0
    )
    assert (bytes(found.payload), found.excluded) == (b"[[5]]", [])
    found = world.service.sql.query("SELECT count(*) FROM steps", timeout=60.0)
    assert bytes(found.payload) == b"[[5]]" and [one.dataset for one in found.excluded] == ["b"]
