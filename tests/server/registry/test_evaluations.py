"""Evaluations: kept as they came, found again, refused when their numbers contradict."""

import json

import pytest
from starlette.testclient import TestClient

GOOD = {
    "policy": "a/1",
    "env": "Pendulum-v1",
    "seeds": [0, 1, 2],
    "returns": [-100.0, -200.0, -300.0],
    "lengths": [200, 200, 200],
    "mean": -200.0,
    "iqm": -200.0,
    "ci_low": -280.0,
    "ci_high": -120.0,
    "normalised": 71.5,
    "details": {"greedy": True},
}


def test_an_evaluation_comes_back_whole(app: TestClient) -> None:
    made = app.post("/v1/evaluations", json=GOOD)
    assert made.status_code == 201
    listed = app.get("/v1/evaluations").json()["items"]
    assert listed == [made.json()]
    assert {k: listed[0][k] for k in GOOD} == GOOD


def test_lists_filter_by_env_run_and_policy(app: TestClient) -> None:
    app.post("/v1/runs", json={"name": "a", "kind": "train"})
    app.post("/v1/evaluations", json=GOOD | {"run": "a"})
    app.post("/v1/evaluations", json=GOOD | {"policy": "random", "env": "Other-v0"})

    def policies(**query: str) -> list[str]:
        items = app.get("/v1/evaluations", params=query).json()["items"]
        return [item["policy"] for item in items]

    assert policies() == ["random", "a/1"]
    assert policies(run="a") == policies(env="Pendulum-v1") == policies(policy="a/1") == ["a/1"]
    first = app.get("/v1/evaluations", params={"limit": 1}).json()
    rest = app.get("/v1/evaluations", params={"limit": 1, "cursor": first["next"]}).json()
    assert [i["policy"] for i in first["items"] + rest["items"]] == ["random", "a/1"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"seeds": [0, 1]}, "seeds"),
        ({"lengths": [1]}, "lengths"),
        ({"returns": []}, "returns"),
        ({"ci_low": 1.0, "ci_high": 0.0}, "ci_low"),
        ({"confidence": 1.5}, "confidence"),
    ],
)
def test_contradictions_are_refused(app: TestClient, change: dict, where: str) -> None:
    answer = app.post("/v1/evaluations", json=GOOD | change)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")
    assert where in answer.json()["detail"]
    assert app.get("/v1/evaluations").json()["items"] == []


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(app: TestClient, word: str) -> None:
    """Python's JSON writes NaN, and it would sort first on a leaderboard."""
    body = json.dumps(GOOD | {"mean": 0.0}).replace('"mean": 0.0', f'"mean": {word}')
    answer = app.post("/v1/evaluations", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert app.get("/v1/evaluations").json()["items"] == []


def test_an_unknown_run_is_refused(app: TestClient) -> None:
    assert app.post("/v1/evaluations", json=GOOD | {"run": "ghost"}).status_code == 404
