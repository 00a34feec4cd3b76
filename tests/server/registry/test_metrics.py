"""Metrics: the last word counts, and a down-sampled curve keeps its spikes."""

import random

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from server.registry.runs import LATEST, LATEST_OF


@pytest.fixture
def run(app: TestClient) -> str:
    app.post("/v1/runs", json={"name": "a", "kind": "train"})
    return "/v1/runs/a"


def points(key: str, values: dict[int, float | None]) -> dict:
    return {
        "points": [{"key": key, "step": s, "value": v, "time": float(s)} for s, v in values.items()]
    }


def series(app: TestClient, run: str, **params: object) -> dict[str, dict]:
    found = app.get(f"{run}/metrics", params=params).json()["series"]
    return {one["key"]: one for one in found}


def test_the_same_point_again_replaces_itself(app: TestClient, run: str) -> None:
    """A trainer that was cut off sends again; a resumed one rewrites what the killed one said."""
    for value in (1.0, 1.0, 2.0):
        assert app.post(f"{run}/metrics", json=points("loss", {5: value})).json() == {"stored": 1}
    got = series(app, run)["loss"]
    assert (got["steps"], got["values"], got["total"]) == ([5], [2.0], 1)


def test_points_come_back_in_order_of_step(app: TestClient, run: str) -> None:
    app.post(f"{run}/metrics", json=points("loss", {9: 0.9, 1: 0.1, 5: 0.5}))
    got = series(app, run)["loss"]
    assert (got["steps"], got["values"]) == ([1, 5, 9], [0.1, 0.5, 0.9])


def test_nan_is_null_and_not_the_latest_value(app: TestClient, run: str) -> None:
    app.post(f"{run}/metrics", json=points("loss", {1: 0.5}))
    app.post(f"{run}/metrics", json=points("grad", {1: 0.5, 2: None}))
    assert series(app, run)["grad"]["values"] == [0.5, None]
    assert app.get(run).json()["latest"] == {"loss": 0.5}


def test_latest_is_the_value_at_the_greatest_step(app: TestClient, run: str) -> None:
    """Whatever came last by the clock: a retry may bring old points late."""
    app.post(f"{run}/metrics", json=points("loss", {10: 0.1}))
    app.post(f"{run}/metrics", json=points("loss", {5: 0.9}))
    app.post(f"{run}/metrics", json=points("zeta", {1: 3.0}))
    assert app.get(run).json()["latest"] == {"loss": 0.1, "zeta": 3.0}
    assert app.get("/v1/runs").json()["items"][0]["latest"] == {"loss": 0.1, "zeta": 3.0}


@pytest.mark.parametrize("budget", [2, 3, 10, 100, 501])
def test_down_sampling_keeps_ends_extremes_and_budget(
    app: TestClient, run: str, budget: int
) -> None:
    """A single spike among thousands must survive, at its own step."""
    rng = random.Random(0)
    values = {step: rng.random() for step in range(0, 9000, 3)}
    values[4500], values[6000] = 50.0, -50.0
    app.post(f"{run}/metrics", json=points("loss", values))
    got = series(app, run, points=budget)["loss"]
    assert len(got["steps"]) <= budget
    assert got["total"] == len(values)
    assert got["steps"] == sorted(set(got["steps"]))
    assert (got["steps"][0], got["steps"][-1]) == (0, 8997)
    assert [values[step] for step in got["steps"]] == got["values"]
    assert got["times"] == [float(step) for step in got["steps"]]
    if budget >= 4:
        assert {50.0, -50.0} <= set(got["values"])


def test_down_sampling_survives_any_spacing_of_steps(app: TestClient, run: str) -> None:
    """Steps up to 2^53, all in one place but one: no overflow, no loss of the ends."""
    values = {step: float(step) for step in range(1000)} | {2**53: -1.0}
    app.post(f"{run}/metrics", json=points("loss", values))
    got = series(app, run, points=100)["loss"]
    assert len(got["steps"]) <= 100
    assert (got["steps"][0], got["steps"][-1]) == (0, 2**53)
    assert 999.0 in got["values"]


def test_only_the_keys_asked_for_come(app: TestClient, run: str) -> None:
    for key in ("a/x", "a/y", "b"):
        app.post(f"{run}/metrics", json=points(key, {1: 1.0}))
    assert set(series(app, run)) == {"a/x", "a/y", "b"}
    assert set(series(app, run, keys="a/x,b,ghost")) == {"a/x", "b"}


def test_only_what_lies_beyond_a_step_comes(app: TestClient, run: str) -> None:
    """Who looks every few seconds reads what is new, and each key may stand somewhere else."""
    app.post(f"{run}/metrics", json=points("a", {step: float(step) for step in range(1000)}))
    app.post(f"{run}/metrics", json=points("b", {0: 0.0, 500: None}))
    got = series(app, run, keys="a,b", after="997,-1")
    assert (got["a"]["steps"], got["a"]["values"]) == ([998, 999], [998.0, 999.0])
    assert (got["b"]["steps"], got["a"]["total"]) == ([0, 500], 2)
    assert series(app, run, keys="a,b", after="999,500") == {}
    few = series(app, run, keys="a", after="99", points=10)["a"]
    assert (few["steps"][0], few["steps"][-1], few["total"]) == (100, 999, 900)
    assert len(few["steps"]) <= 10


@pytest.mark.parametrize("after", ["1", "1,2,3", "x,y", "1,,2", "9" * 30 + ",1"])
def test_steps_that_do_not_match_the_keys_are_refused(
    app: TestClient, run: str, after: str
) -> None:
    answer = app.get(f"{run}/metrics", params={"keys": "a,b", "after": after})
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")


def test_a_run_says_where_each_of_its_metrics_stands(app: TestClient, run: str) -> None:
    """Also one whose newest value is not finite: a curve that diverged is still a curve."""
    app.post(f"{run}/metrics", json=points("loss", {1: 0.5, 9: None}))
    app.post(f"{run}/metrics", json=points("grad", {3: 0.5}))
    got = app.get(run).json()
    assert (got["latest_steps"], got["latest"]) == ({"loss": 9, "grad": 3}, {"grad": 0.5})


def test_newest_points_are_found_by_seeks(app: TestClient, run: str) -> None:
    """SQLite's own choice reads all the metrics of a run, once for each key that is asked for."""
    with app.app.state.service.db.read() as c:  # type: ignore[attr-defined]
        for query, given in (
            (LATEST, {"run": 1}),
            (LATEST_OF, {"runs": "[1, 2]", "keys": '["a", "b"]'}),
        ):
            plan = [row[-1] for row in c.execute(sa.text(f"EXPLAIN QUERY PLAN {query}"), given)]
            (of_points,) = [line for line in plan if line.startswith("SEARCH m USING PRIMARY KEY")
                            and "key=?" in line]  # fmt: skip
            assert of_points.endswith("(run_pk=? AND key=? AND step=?)"), plan


def test_a_list_has_the_newest_points_of_the_keys_asked_for(app: TestClient, run: str) -> None:
    app.post("/v1/runs", json={"name": "b", "kind": "train"})
    for name, value in (("a", 1.0), ("b", 2.0)):
        body = {"points": [p for k in "abc" for p in points(k, {1: 0.0, 2: value})["points"]]}
        assert app.post(f"/v1/runs/{name}/metrics", json=body).status_code == 200
    asked = {"name": ["a", "b"], "key": ["a", "c", "a", "missing"], "brief": True}
    found = {r["name"]: r for r in app.get("/v1/runs", params=asked).json()["items"]}
    assert found["a"]["latest"] == {"a": 1.0, "c": 1.0}
    assert found["b"]["latest"] == {"a": 2.0, "c": 2.0}
    assert found["b"]["latest_steps"] == {"a": 2, "c": 2}
    rest = app.get("/v1/runs", params={"brief": True}).json()["items"]
    assert [r["latest"] for r in rest] == [{}, {}]
    rest = app.get("/v1/runs").json()["items"]
    assert [set(r["latest"]) for r in rest] == [set("abc")] * 2


def test_metrics_of_an_unknown_run_are_refused(app: TestClient) -> None:
    assert app.post("/v1/runs/ghost/metrics", json=points("x", {1: 1.0})).status_code == 404
    assert app.get("/v1/runs/ghost/metrics").status_code == 404


def test_too_many_points_in_one_body_are_refused(app: TestClient, run: str) -> None:
    body = points("x", {step: 0.0 for step in range(10_001)})
    assert app.post(f"{run}/metrics", json=body).status_code == 422
    assert series(app, run) == {}


@pytest.mark.parametrize("step", [-1, 2**53 + 1, 1.5, "x"])
def test_bad_steps_are_refused(app: TestClient, run: str, step: object) -> None:
    body = {"points": [{"key": "x", "step": step, "value": 1.0, "time": 0.0}]}
    assert app.post(f"{run}/metrics", json=body).status_code == 422
