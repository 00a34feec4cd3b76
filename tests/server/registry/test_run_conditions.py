"""Runs are found by their settings and newest metrics, and a wrong condition says what is wrong."""

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

CONFIGS = {
    "a": {"agent": {"discount": 0.99, "kind": "transformer"}, "seed": 1, "wide": True},
    "b": {"agent": {"discount": 0.9, "kind": "feed forward"}, "seed": 2, "wide": False},
    "c": {"agent.discount": 0.99, "seed": "two", "eval/return": 7, "wide": 1},
    "d": {},
}
RETURNS = {"a": [900.0, 100.0], "b": [0.0, 300.0], "c": [1e6], "d": []}
"""The last one counts."""


@pytest.fixture(scope="module")
def runs(shared_app: TestClient) -> TestClient:
    for name, config in CONFIGS.items():
        made = {"name": name, "kind": "train", "config": config}
        assert shared_app.post("/v1/runs", json=made).status_code == 201
        points = [
            {"key": "eval/return", "step": step, "value": value, "time": 0.0}
            for step, value in enumerate(RETURNS[name])
        ]
        shared_app.post(f"/v1/runs/{name}/metrics", json={"points": points})
    return shared_app


def found(app: TestClient, where: str) -> str:
    answer = app.get("/v1/runs", params={"where": where})
    assert answer.status_code == 200, answer.text
    names = "".join(sorted(run["name"] for run in answer.json()["items"]))
    assert answer.json()["total"] == len(names)
    return names


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("agent.discount = 0.99", "ac"),
        ("agent.discount==.99", "ac"),
        ("agent.discount != 0.99", "b"),
        ("agent.discount <> 0.99", "b"),
        ("agent.discount < 1 and seed >= 2", "b"),
        ("agent.discount<1, seed<=1", "a"),
        ("eval/return > 200", "b"),  # c has a setting of that name
        ("eval/return <= 100", "ac"),
        ('"eval/return" = 7', "c"),
        ("eval/return != 100 AND eval/return > -1e9", "bc"),
        ("agent.kind = transformer", "a"),
        ("agent.kind = 'feed forward'", "b"),
        ('agent.kind != "feed forward"', "a"),
        ("wide = true", "a"),
        ("wide != True", "bc"),
        ("wide = 1", "c"),
        ("seed > 0", "ab"),  # a text is not more than a number
        ("seed != 1", "bc"),
        ("seed = two", "c"),
        ("seed = 3", ""),
    ],
)
def test_conditions(runs: TestClient, where: str, names: str) -> None:
    assert found(runs, where) == names


@pytest.mark.parametrize(
    ("where", "said", "expected"),
    [
        ("agent.discount", "cannot read 'agent.discount'", "agent.discount = 0.99 and"),
        ("seed = 1 or seed = 2", "cannot read 'seed = 1 or seed = 2'", "agent.discount = 0.99"),
        ("seed = 1 and lr >", "cannot read 'lr >'", "agent.discount = 0.99 and"),
        ("agent.kind > transformer", "> compares numbers, and transformer is none", "and"),
        ("discount = 0.99", "no run has a setting or a metric 'discount'", "agent.discount"),
        ("kind = x", "no run has a setting or a metric 'kind'", "agent.kind"),
        ("return > 3", "no run has a setting or a metric 'return'", "eval/return"),
        ("eval/retrun > 3", "no run has a setting or a metric 'eval/retrun'", "eval/return"),
        ("zzz = 3", "no run has a setting or a metric 'zzz'", "the whole name"),
        ("seed = 1 and zzz = 3", "no run has a setting or a metric 'zzz'", "the whole name"),
        (",".join(["seed = 1"] * 21), "there are 21 conditions", "and"),
        (" ", "there are 0 conditions", "and"),
    ],
)
def test_wrong_conditions(runs: TestClient, where: str, said: str, expected: str) -> None:
    answer = runs.get("/v1/runs", params={"where": where})
    assert answer.status_code == 422
    problem = answer.json()
    assert said in problem["detail"] and expected in problem["expected"], problem


def test_without_runs_no_name_is_wrong(start_app: Callable[..., TestClient]) -> None:
    assert found(start_app(), "seed = 1") == ""


def test_conditions_go_with_other_filters_and_pages(runs: TestClient) -> None:
    params = {"where": "seed > 0", "limit": "1", "search": "", "brief": "true"}
    first = runs.get("/v1/runs", params=params).json()
    assert (first["total"], [r["name"] for r in first["items"]]) == (2, ["b"])
    second = runs.get("/v1/runs", params={**params, "cursor": first["next"]}).json()
    assert [r["name"] for r in second["items"]] == ["a"]
    assert runs.get("/v1/runs", params={**params, "search": "a"}).json()["total"] == 1
