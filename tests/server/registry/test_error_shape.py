"""One error shape over every route family: RFC 9457, with a code that programs can read."""

import pytest
from starlette.testclient import TestClient

from stepwell.messages import PROBLEM, Problem

FAMILIES = [
    # (method, path, body, status, code)
    ("GET", "/v1/datasets/ghost", None, 404, "not_found"),
    ("POST", "/v1/datasets", {"name": "BAD NAME", "spec": {}}, 422, "validation_error"),
    ("GET", "/v1/datasets/ghost/trajectories", None, 404, "not_found"),
    ("POST", "/v1/datasets/ghost/flush", None, 404, "not_found"),
    ("GET", "/v1/trajectories/ghost", None, 404, "not_found"),
    ("GET", "/v1/datasets/ghost/annotations", None, 404, "not_found"),
    ("GET", "/v1/jobs/ghost", None, 404, "not_found"),
    ("POST", "/v1/query", {"sql": "DROP TABLE x"}, 422, "sql_not_allowed"),
    ("GET", "/v1/snapshots/ghost", None, 404, "not_found"),
    ("GET", "/v1/shards/ghost", None, 404, "not_found"),
    ("GET", "/v1/runs/ghost", None, 404, "not_found"),
    ("PATCH", "/v1/runs/ghost", {}, 404, "not_found"),
    ("POST", "/v1/runs", {"name": "a", "kind": "nothing"}, 422, "validation_error"),
    ("POST", "/v1/runs/ghost/metrics", {"points": []}, 404, "not_found"),
    ("GET", "/v1/runs/ghost/log", None, 404, "not_found"),
    ("GET", "/v1/runs/ghost/policies", None, 404, "not_found"),
    ("GET", "/v1/runs/ghost/policies/latest", None, 404, "not_found"),
    ("PUT", "/v1/runs/ghost/aliases/best", {"version": 1}, 404, "not_found"),
    ("POST", "/v1/evaluations", {"policy": "x"}, 422, "validation_error"),
    ("GET", "/v1/evaluations?limit=0", None, 422, "validation_error"),
    ("GET", "/v1/evaluations/ghost/videos", None, 404, "not_found"),
    ("GET", "/v1/evaluations/ghost/videos/0", None, 404, "not_found"),
    ("PUT", "/v1/evaluations/e/videos/0?return=1&length=1", {}, 415, "unsupported_media_type"),
    ("PUT", "/v1/workers/w", {"role": "king"}, 422, "validation_error"),
    ("POST", "/v1/workers/ghost/command", {"command": "stop"}, 404, "not_found"),
    ("GET", "/v1/launches/ghost", None, 404, "not_found"),
    ("PATCH", "/v1/launches/ghost", {"state": "running"}, 404, "not_found"),
    ("DELETE", "/v1/tokens/ghost", None, 404, "not_found"),
    ("GET", "/v1/nothing", None, 404, "not_found"),
    ("PUT", "/v1/runs", {}, 405, "method_not_allowed"),
    ("GET", "/v1/runs?cursor=x", None, 422, "validation_error"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code"), FAMILIES)
def test_every_family_answers_a_problem_document(
    shared_app: TestClient, method: str, path: str, body: dict | None, status: int, code: str
) -> None:
    answer = shared_app.request(method, path, json=body)
    assert answer.headers["content-type"] == PROBLEM
    problem = Problem.model_validate(answer.json())
    assert (answer.status_code, problem.status, problem.code) == (status, status, code)
    assert problem.title
    assert problem.detail


def test_what_a_name_may_be_is_told_in_words(shared_app: TestClient) -> None:
    answer = shared_app.post("/v1/datasets", json={"name": "BAD NAME", "spec": {}}).json()
    assert answer["detail"].startswith("body.name: a name has at most 64 of a-z, 0-9, ")
    assert answer["got"] == "'BAD NAME'"


@pytest.mark.parametrize(
    ("url", "said", "known"),
    [
        ("/v1/runs?statu=x", "query.statu: there is no such parameter; did you mean status?", 14),
        ("/v1/jobs?stat=x", "query.stat: there is no such parameter; did you mean state?", 3),
        ("/v1/datasets/d/trajectories?q=1", "query.q: there is no such parameter", 10),
    ],
)
def test_a_parameter_that_a_route_does_not_have_is_refused(
    shared_app: TestClient, url: str, said: str, known: int
) -> None:
    answer = shared_app.get(url)
    assert answer.status_code == 422
    assert (answer.json()["detail"], len(answer.json()["expected"])) == (said, known)


def test_a_wrong_parameter_is_named(shared_app: TestClient) -> None:
    for url in ("/v1/runs?cursor=x", "/v1/jobs?cursor=x"):
        assert shared_app.get(url).json()["detail"].startswith("query.cursor: ")


def test_a_body_that_is_not_json_is_a_problem_too(shared_app: TestClient) -> None:
    headers = {"content-type": "application/json"}
    answer = shared_app.post("/v1/runs", content=b"{", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
