"""Quotas of tokens: requests per minute and bytes per day."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import pytest
from starlette.testclient import TestClient

from server import auth, quotas
from server.quotas import DAY, MINUTE, Bucket
from stepwell.codec import encode
from stepwell.messages import ARROW
from stepwell.testing import make_spec, make_trajectory
from tests.server.registry.rights_world import OPERATOR, bearer

SPEC = make_spec()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of quotas, set by hand."""
    now = [1000.0]
    monkeypatch.setattr(quotas.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def closed(start_app: Callable[..., TestClient]) -> TestClient:
    return start_app(token=OPERATOR)


def token(app: TestClient, *scopes: str, **limits: int) -> tuple[str, dict[str, str]]:
    body = {"name": "t", "scopes": scopes, **limits}
    made = app.post("/v1/tokens", json=body, headers=bearer(OPERATOR)).json()
    return made["id"], bearer(made["token"])


def dataset(app: TestClient) -> None:
    body = {"name": "d", "spec": SPEC.to_json()}
    assert app.post("/v1/datasets", json=body, headers=bearer(OPERATOR)).status_code == 201


def test_requests_are_forgiven_evenly(closed: TestClient, clock: list[float]) -> None:
    """All at once, then one in 60/N seconds; others, and probes of the service, do not count."""
    _, head = token(closed, "read", requests_per_minute=3)
    _, other = token(closed, "read")
    statuses = [closed.get("/v1/runs", headers=head).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    refused = closed.get("/v1/runs", headers=head)
    assert (refused.json()["code"], refused.headers["retry-after"]) == ("quota_exceeded", "20")
    assert refused.headers["connection"] == "close"
    assert closed.get("/v1/runs", headers=other).status_code == 200
    assert closed.get("/readyz", headers=head).status_code == 200
    clock[0] += 20
    assert [closed.get("/v1/runs", headers=head).status_code for _ in range(2)] == [200, 429]
    clock[0] += MINUTE
    statuses = [closed.get("/v1/runs", headers=head).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]


def test_a_forbidden_request_counts(closed: TestClient, clock: list[float]) -> None:
    del clock
    _, head = token(closed, "read", requests_per_minute=2)
    statuses = [closed.get("/v1/tokens", headers=head).status_code for _ in range(3)]
    assert statuses == [403, 403, 429]


def test_bytes_are_counted_before_the_body_is_read(closed: TestClient, clock: list[float]) -> None:
    dataset(closed)
    body = encode([make_trajectory(SPEC)], SPEC)
    _, head = token(closed, "ingest:d", bytes_per_day=2 * len(body))
    url, kind = "/v1/datasets/d/trajectories", {"content-type": ARROW}

    def post() -> int:
        return closed.post(url, content=body, headers=head | kind).status_code

    assert [post(), post(), post()] == [200, 200, 429]
    refused = closed.post(url, content=body, headers=head | kind)
    assert int(refused.headers["retry-after"]) == DAY / 2
    assert closed.get("/v1/datasets/d", headers=head).status_code == 200, "without a body"
    clock[0] += DAY / 2
    assert [post(), post()] == [200, 429]

    async def receive() -> dict[str, object]:
        raise AssertionError("the body was asked for")

    seen: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        seen.append(message)

    scope = {
        "type": "http", "method": "POST", "path": url, "app": closed.app,
        "headers": [(b"authorization", head["authorization"].encode()),
                    (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    anyio.run(auth.AuthMiddleware(closed.app), scope, receive, send)  # type: ignore[arg-type]
    assert seen[0]["status"] == 429


def test_a_body_that_no_day_could_hold_or_has_no_length(closed: TestClient) -> None:
    """Waiting would not help: 413, and 411 where nothing says how much comes."""
    _, head = token(closed, "ingest", bytes_per_day=10)
    kind = {"content-type": "application/json"}
    answer = closed.post("/v1/runs", content=b"x" * 11, headers=head | kind)
    assert (answer.status_code, answer.json()["code"]) == (413, "quota_exceeded")
    chunks = iter([b"x"])
    answer = closed.post("/v1/runs", content=chunks, headers=head | kind)
    assert (answer.status_code, answer.json()["code"]) == (411, "length_required")


def test_what_did_not_come_is_given_back(closed: TestClient) -> None:
    """A body that was declared, and refused before it was read, costs nothing."""
    token_id, head = token(closed, "ingest:d", bytes_per_day=1000)
    used = closed.app.state.service.auth._known[token_id].quotas.bytes  # type: ignore[attr-defined]
    for url, status in (("/v1/runs/none/policies/1", 403), ("/v1/datasets/d/imports", 404)):
        method = "PUT" if "policies" in url else "POST"
        raw = {"content-type": "application/octet-stream"}
        answer = closed.request(method, url, content=b"x" * 900, headers=head | raw)
        assert answer.status_code == status, answer.text
        assert used.now() < 900
    run = b'{"name": "a", "kind": "collect"}'
    json = {"content-type": "application/json"}
    before = used.now()
    assert closed.post("/v1/runs", content=run, headers=head | json).status_code == 201
    assert before + len(run) - 1 < used.now() <= before + len(run)


def test_an_admin_changes_quotas_which_hold_at_once(closed: TestClient, clock: list[float]) -> None:
    del clock
    token_id, head = token(closed, "read", requests_per_minute=1)
    assert [closed.get("/v1/runs", headers=head).status_code for _ in range(2)] == [200, 429]
    url, admin = f"/v1/tokens/{token_id}", bearer(OPERATOR)
    assert closed.patch(url, json={"requests_per_minute": 2}, headers=head).status_code == 429
    changed = closed.patch(url, json={"requests_per_minute": 2}, headers=admin).json()
    assert (changed["requests_per_minute"], changed["bytes_per_day"]) == (2, None)
    assert [closed.get("/v1/runs", headers=head).status_code for _ in range(2)] == [200, 429]
    closed.patch(url, json={"requests_per_minute": None}, headers=admin)
    assert [closed.get("/v1/runs", headers=head).status_code for _ in range(9)] == [200] * 9
    assert closed.patch(url, json={"bytes_per_day": 0}, headers=admin).status_code == 422
    assert closed.patch("/v1/tokens/none", json={}, headers=admin).status_code == 404
    entries = closed.get("/v1/audit", headers=admin).json()["items"]
    assert [e["detail"] for e in entries if e["action"] == "token.change"] == [
        {"requests_per_minute": None}, {"requests_per_minute": 2},
    ]  # fmt: skip


def test_bytes_outlive_a_restart(
    start_app: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved with the last use; what would have been forgiven meanwhile is."""
    app = start_app(token=OPERATOR)
    token_id, head = token(app, "ingest", bytes_per_day=100)
    run = b'{"name": "a", "kind": "collect"}'
    json = {"content-type": "application/json"}
    assert app.post("/v1/runs", content=run, headers=head | json).status_code == 201

    def used(app: TestClient) -> float:
        return app.app.state.service.auth._known[token_id].quotas.bytes.now()  # type: ignore[attr-defined]

    app = start_app(token=OPERATOR)
    assert used(app) == pytest.approx(len(run), abs=0.5)
    assert (
        app.get("/v1/tokens", headers=bearer(OPERATOR)).json()["items"][0]["bytes_per_day"] == 100
    )
    later = time.time() + DAY / 10
    monkeypatch.setattr(quotas.time, "time", lambda: later)
    app = start_app(token=OPERATOR)
    assert used(app) == pytest.approx(len(run) - 10, abs=0.5)


def test_a_bucket_is_never_negative(clock: list[float]) -> None:
    bucket = Bucket(MINUTE, 60)
    bucket.add(5)
    bucket.add(-9)
    assert bucket.now() == 0.0
    bucket.add(60)
    assert (bucket.wait(0), bucket.wait(1), bucket.wait(61)) == (0, 1, 61)
    clock[0] += 30
    assert (bucket.now(), bucket.wait(30)) == (30, 0)
    unlimited = Bucket(MINUTE)
    unlimited.add(1e9)
    assert (unlimited.now(), unlimited.wait(1e9)) == (0, 0)
