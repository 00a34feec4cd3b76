"""POST /v1/query and GET /v1/query/schema over HTTP: JSON for people, Arrow for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.settings import Settings
from stepwell.codec import encode
from stepwell.messages import ARROW, PROBLEM, QueryResult, QuerySchema
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=4)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    data: Path = tmp_path_factory.mktemp("query") / "data"
    with TestClient(create_app(Settings(data=data)), base_url="http://127.0.0.1") as client:
        client.post("/v1/datasets", json={"name": "d", "spec": SPEC.to_json()})
        body = encode([make_trajectory(SPEC, length=4, seed=s) for s in range(3)], SPEC)
        client.post(
            "/v1/datasets/d/trajectories?wait=sealed", content=body, headers={"content-type": ARROW}
        )
        yield client


def ask(client: TestClient, sql: str, **fields: Any) -> Any:
    return client.post("/v1/query", json={"sql": sql, "timeout": 60, **fields})


def test_json(client: TestClient) -> None:
    answer = ask(client, "select dataset, count(*) as n, sum(length) from trajectories group by 1")
    result = QueryResult.model_validate(answer.json())
    assert [(c.name, c.type) for c in result.columns[:2]] == [
        ("dataset", "VARCHAR"),
        ("n", "BIGINT"),
    ]
    assert result.rows == [["d", 3, 12]]
    assert not result.truncated
    assert result.elapsed_ms > 0


def test_arrow(client: TestClient) -> None:
    answer = client.post(
        "/v1/query",
        json={"sql": "select obs.observation as o from steps", "dataset": "d", "limit": 5},
        headers={"accept": ARROW},
    )
    assert answer.headers["content-type"] == ARROW
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.num_rows == 5
    assert table.schema.field("o").type.list_size == 4
    assert table.schema.metadata[b"truncated"] == b"true"
    assert float(table.schema.metadata[b"elapsed_ms"]) > 0


def test_sums_of_integers_are_integers(client: TestClient) -> None:
    """DuckDB's 128-bit sum would arrive as Decimal; beyond 64 bits it does, and is exact."""
    sql = "select sum(length) as steps, sum(length * 1e19::hugeint) as huge from trajectories"
    answer = client.post("/v1/query", json={"sql": sql}, headers={"Accept": ARROW})
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.schema.field("steps").type == pa.int64()
    assert table["steps"].to_pylist() == [12]
    assert table["huge"].to_pylist() == [12 * 10**19]


def test_a_slow_query_answers_like_a_quick_one(client: TestClient) -> None:
    """DuckDB draws a progress bar after two seconds; none of it may get into the answer."""
    size, elapsed = 20_000, 0.0
    while elapsed < 2500:  # on this machine, whatever it is and however busy
        product = f"from range({size}) a, range(1500) b where (a.range * b.range) % 7 = 1"
        answer = ask(client, f"select count(*) {product}", timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["rows"][0][0] > 0
        elapsed, size = answer.json()["elapsed_ms"], size * 2


def test_parameters_by_place_and_by_name(client: TestClient) -> None:
    assert ask(client, "select ?, ? + 1", params=["a", 2]).json()["rows"] == [["a", 3]]
    assert ask(client, "select $x || $y", params={"x": "a", "y": "b"}).json()["rows"] == [["ab"]]
    # A parameter is a value and never SQL.
    assert ask(client, "select ?", params=["'; drop table x"]).json()["rows"] == [
        ["'; drop table x"]
    ]
    assert ask(client, "select ?", params=[]).json()["code"] == "sql_error"
    assert ask(client, "select ?", params=[2**80]).json()["code"] == "sql_error"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"sql": "drop table trajectories"}, "sql_not_allowed"),
        ({"sql": "select nope from trajectories"}, "sql_error"),
        (
            {"sql": "select count(*) from range(100000000000) a, range(99999)", "timeout": 2},
            "query_timeout",
        ),
        ({"sql": ""}, "validation_error"),
        ({"sql": "select 1", "limit": -1}, "validation_error"),
        ({"sql": "select 1", "limit": 1_000_001}, "validation_error"),
        ({"sql": "select 1", "timeout": 0}, "validation_error"),
        ({"sql": "select 1", "timeout": 1e9}, "validation_error"),
        ({"sql": "select 1", "more": 1}, "validation_error"),
        ({}, "validation_error"),
    ],
)
def test_errors_have_the_one_shape(client: TestClient, body: dict[str, Any], code: str) -> None:
    answer = client.post("/v1/query", json=body)
    assert answer.headers["content-type"] == PROBLEM
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert answer.json()["detail"]


def test_duckdbs_own_words_come_through(client: TestClient) -> None:
    problem = ask(client, "select lenght from trajectories").json()
    assert "length" in problem["detail"], "DuckDB suggests the right name"


def test_the_schema(client: TestClient) -> None:
    schema = QuerySchema.model_validate(client.get("/v1/query/schema").json())
    tables = {table.name: [column.name for column in table.columns] for table in schema.tables}
    assert {
        *("trajectories", "datasets", "runs", "metrics", "policies", "evaluations", "videos"),
        *("workers", "versions", "version_trajectories", "annotations"),
        *("steps", '"d".steps'),
    } == set(tables)
    assert tables['"d".steps'][:5] == ["dataset", "trajectory_id", "t", "obs", "action"]
    assert all(table.description for table in schema.tables)
