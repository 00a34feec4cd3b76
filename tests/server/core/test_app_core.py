"""The edge: who may call, how much a body may bring, and one shape for every error."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import UncaughtErrors
from server.index.tables import REVISION
from server.problems import ProblemError
from stepwell.messages import ARROW
from stepwell.testing import make_spec, make_trajectory
from tests.server.core.conftest import Live, serving

SPEC = make_spec()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:9", 200),
        ("LOCALHOST:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_only_our_own_names_are_answered(shared: Any, host: str, status: int) -> None:
    """A page whose name resolves to 127.0.0.1 still says its own name."""
    response = shared.http.get("/healthz", headers={"host": host})
    assert response.status_code == status
    if status != 200:
        assert response.json()["code"] == "bad_host"


def test_foreign_origins_are_refused_and_listed_ones_are_not(start: Callable[..., Any]) -> None:
    live = start(allowed_origins=("http://dash.example",), allowed_hosts=("data.example",))
    refused = live.http.get("/v1/datasets", headers={"origin": "http://evil.example"})
    assert (refused.status_code, refused.json()["code"]) == (403, "foreign_origin")
    assert live.http.get("/v1/datasets", headers={"origin": "null"}).status_code == 403
    for origin in ("http://dash.example", "http://127.0.0.1:8000"):
        assert live.http.get("/v1/datasets", headers={"origin": origin}).status_code == 200
    assert live.http.get("/healthz", headers={"host": "data.example"}).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_writes_need_a_content_type_that_a_foreign_page_cannot_send(
    shared: Any, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"name": "x", "spec": {}}'
    response = shared.http.post("/v1/datasets", content=body, headers=headers)
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("path", ["/v1/datasets?limt=3", "/v1/runs?knd=train", "/healthz?x=1"])
def test_a_parameter_that_no_route_knows_is_refused(shared: Any, path: str) -> None:
    """A typo would otherwise be the same as saying nothing."""
    response = shared.http.get(path)
    assert (response.status_code, response.json()["code"]) == (422, "validation_error")
    assert response.json()["got"] in path


def test_every_failure_has_one_shape(shared: Any) -> None:
    """Unknown route, wrong method, broken JSON, wrong fields: problem+json with a code."""
    shared.create()
    json_type = {"content-type": "application/json"}
    cases = [
        (shared.http.get("/nope"), 404, "not_found"),
        (shared.http.put("/v1/datasets", json={}), 405, "method_not_allowed"),
        (
            shared.http.post("/v1/datasets", content=b"{", headers=json_type),
            422,
            "validation_error",
        ),
        (shared.http.post("/v1/datasets", json={"name": 3}), 422, "validation_error"),
        (shared.http.patch("/v1/datasets/d", json={"nam": "x"}), 422, "validation_error"),
        (shared.http.get("/v1/datasets", params={"limit": "many"}), 422, "validation_error"),
    ]
    for response, status, code in cases:
        problem = response.json()
        assert (response.status_code, problem["code"]) == (status, code), response.text
        assert response.headers["content-type"] == "application/problem+json"
        assert problem["status"] == status and problem["title"] and problem["detail"]
    errors = cases[3][0].json()["errors"]
    assert {e["where"] for e in errors} >= {"body.name", "body.spec"}


def test_a_defect_is_a_problem_too_and_tells_strangers_nothing(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret path /etc/x")

    monkeypatch.setattr("server.registry.datasets.first_rows", fail)
    response = shared.http.get("/v1/datasets")
    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert "secret" not in response.text


def test_json_bodies_have_their_own_limit(start: Callable[..., Any]) -> None:
    live = start(max_json=1000)
    response = live.http.post("/v1/datasets", json={"name": "x", "description": "y" * 2000})
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service that takes bodies of a thousand bytes."""
    limits = ("max_body", "max_json", "max_upload", "max_policy", "max_video")
    data = tmp_path_factory.mktemp("narrow") / "data"
    with serving(data, **dict.fromkeys(limits, 1000)) as live:
        live.create()
        yield live


@pytest.mark.parametrize(
    ("method", "path", "kind", "advice"),
    [
        ("POST", "/v1/datasets/d/trajectories", ARROW, "max_steps"),
        ("POST", "/v1/datasets/d/trajectories", ARROW, "STEPWELL_MAX_BODY"),
        ("POST", "/v1/datasets/d/annotations/values", ARROW, "STEPWELL_MAX_BODY"),
        ("POST", "/v1/datasets/d/imports", "application/octet-stream", "STEPWELL_MAX_UPLOAD"),
        ("PUT", "/v1/runs/r/policies/1", "application/octet-stream", "STEPWELL_MAX_POLICY"),
        ("PUT", "/v1/evaluations/e/videos/0", "video/mp4", "STEPWELL_MAX_VIDEO"),
        ("POST", "/v1/runs", "application/json", "STEPWELL_MAX_JSON"),
    ],
)
def test_a_body_that_is_too_large_is_told_what_helps(
    narrow: Live, method: str, path: str, kind: str, advice: str
) -> None:
    """Sending less in one request is no help for one trajectory, one policy, one video."""
    headers = {"content-type": kind}
    response = narrow.http.request(method, path, content=b"x" * 2000, headers=headers)
    problem = response.json()
    assert (response.status_code, problem["code"]) == (413, "body_too_large")
    assert advice in problem["detail"] and problem["expected"].startswith("at most ")
    if "/trajectories" in path:  # of no declared length
        grown = narrow.http.post(path, content=iter([b"x" * 2000]), headers=headers)
        assert grown.status_code == 413 and grown.json() == problem


@pytest.mark.parametrize("status", [408, 429, 503])
def test_what_may_be_retried_says_when(status: int) -> None:
    """docs/reference/http.md promises it of all of them; the more exact of two is kept."""
    assert ProblemError(status, "x", "y").response().headers["retry-after"] == "1"
    exact = ProblemError(status, "x", "y", headers={"Retry-After": "7"})
    assert exact.copy().response().headers["retry-after"] == "7"
    assert "retry-after" not in ProblemError(422, "x", "y").response().headers


def test_metrics_and_health_are_served(live: Any) -> None:
    live.create()
    live.post([make_trajectory(make_spec(observation=3, action=2))])
    text = live.http.get("/metrics").text
    assert 'stepwell_ingest_trajectories_total{status="stored"} 1.0' in text
    assert "stepwell_writable 1.0" in text
    assert live.http.get("/healthz").json()["database_revision"] == REVISION


def test_a_body_that_stands_still_is_given_up_and_others_are_served(
    start_service: Callable[..., Any],
) -> None:
    """A slow client costs a connection, not the service. It waits half as long as a service would
    that had not heard of the setting."""
    service = start_service(env={"STEPWELL_BODY_TIMEOUT": "0.3", "STEPWELL_SQL_WORKERS": "1"})
    with service.client() as client:
        client.create_dataset("d", SPEC)
        with socket.create_connection(("127.0.0.1", service.port), timeout=15) as slow:
            slow.sendall(
                b"POST /v1/datasets/d/trajectories HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                b"Content-Type: application/vnd.apache.arrow.stream\r\n"
                b"Content-Length: 1000\r\n\r\nabc"
            )
            assert client.post("d", [make_trajectory(SPEC)]).items[0].status == "stored"
            answer = b""
            while chunk := slow.recv(4096):  # head and body may come apart; then it is closed
                answer += chunk
        assert b" 408 " in answer and b"body_timeout" in answer
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
    # Settings come from STEPWELL_* alone; a graceful end is 0 and leaves nothing to recover.
    assert service.stop() == 0


def test_a_defect_is_answered_and_logged_once(
    live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither raised on into the server, which would log it again, nor a word of it sent."""

    def broken() -> None:
        raise ZeroDivisionError("secret")

    live.http.app.add_api_route("/v1/runs/broken", broken, methods=["GET"])
    live.http.app.router.routes.insert(0, live.http.app.router.routes.pop())
    strict = TestClient(live.http.app, base_url=str(live.http.base_url))
    answer = strict.get("/v1/runs/broken")  # it would raise what the server would see
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    said = capsys.readouterr()
    assert (said.out + said.err).count("ZeroDivisionError: secret") == 1


def test_what_is_cut_off_by_a_stop_is_told_to_come_again() -> None:
    sent: list[Any] = []

    async def cancelled(*_: Any) -> None:
        raise asyncio.CancelledError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/"}
    asyncio.run(UncaughtErrors(cancelled)(scope, cancelled, send))
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"5") in sent[0]["headers"]
