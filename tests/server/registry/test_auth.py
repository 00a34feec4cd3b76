"""Tokens and scopes: who gets in where, checked before the body is read."""

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from server import auth
from server.auth import OPEN
from server.index.tables import tokens
from server.main import configure_logging
from stepwell.codec import encode
from stepwell.messages import ARROW
from stepwell.testing import make_spec, make_trajectory

OPERATOR = "operator-secret"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def app(start_app: Callable[..., TestClient]) -> TestClient:
    """One without tokens."""
    return start_app()


@pytest.fixture
def closed(start_app: Callable[..., TestClient]) -> TestClient:
    """A service whose operator has set a token."""
    return start_app(token=OPERATOR)


def token(app: TestClient, *scopes: str, **fields: object) -> str:
    body = {"name": "t", "scopes": list(scopes)} | fields
    answer = app.post("/v1/tokens", json=body, headers=bearer(OPERATOR))
    assert answer.status_code == 201, answer.text
    return answer.json()["token"]


def test_loopback_is_open_until_there_is_a_token(app: TestClient) -> None:
    """The first token closes the door behind it."""
    assert app.get("/v1/runs").status_code == 200
    made = app.post("/v1/tokens", json={"name": "me", "scopes": ["admin"]}).json()
    refused = app.get("/v1/runs")
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.headers["content-type"] == "application/problem+json"
    assert app.get("/v1/runs", headers=bearer(made["token"])).status_code == 200
    assert app.delete(f"/v1/tokens/{made['id']}", headers=bearer(made["token"])).status_code == 204
    assert app.get("/v1/runs").status_code == 200


def test_the_first_token_must_be_able_to_manage_the_others(app: TestClient) -> None:
    """A read token as the first would lock everybody out."""
    answer = app.post("/v1/tokens", json={"name": "me", "scopes": ["read"]})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert app.get("/v1/runs").status_code == 200


def test_the_last_admin_cannot_be_revoked_while_others_remain(app: TestClient) -> None:
    admin = app.post("/v1/tokens", json={"name": "me", "scopes": ["admin"]}).json()
    head = bearer(admin["token"])
    other = app.post("/v1/tokens", json={"name": "x", "scopes": ["read"]}, headers=head).json()
    assert app.delete(f"/v1/tokens/{admin['id']}", headers=head).status_code == 409
    assert app.delete(f"/v1/tokens/{other['id']}", headers=head).status_code == 204
    assert app.delete(f"/v1/tokens/{admin['id']}", headers=head).status_code == 204


def test_the_operators_token_may_everything(closed: TestClient) -> None:
    assert closed.get("/v1/tokens").status_code == 401
    assert closed.get("/v1/tokens", headers=bearer(OPERATOR)).status_code == 200


def test_whatever_is_not_the_token_is_401(closed: TestClient) -> None:
    for header in (
        *("", "Bearer", "Bearer x", "Basic b3BlcmF0b3I=", "Bearer stw_ff_x"),
        *("Bearer operator-secre", "Bearer stw__", "operator-secret"),
    ):
        answer = closed.get("/v1/runs", headers={"authorization": header})
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), header


def test_liveness_needs_no_token_and_everything_else_does(closed: TestClient) -> None:
    """A supervisor has none; a forgotten route would be a hole."""
    for path in sorted(OPEN):
        assert closed.get(path).status_code == 200, path
    assert closed.get("/openapi.json").status_code == 401
    schema = closed.get("/openapi.json", headers=bearer(OPERATOR)).json()
    tried = 0
    for path, methods in schema["paths"].items():
        for method in methods:
            if path in OPEN:
                continue
            url = path.replace("{", "").replace("}", "")
            assert closed.request(method.upper(), url).status_code == 401, (method, path)
            tried += 1
    assert tried > 15
    for path in ("/docs", "/redoc", "/", "/healthz/", "/metrics", "/v1", "/nothing"):
        assert closed.get(path).status_code == 401, path


def test_a_stranger_learns_whether_it_works_and_nothing_else(
    closed: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions and the names of damaged files are for those who have a token."""
    for number in range(3):
        wrong = bearer(f"stw_{number}_x")
        maintenance = closed.app.state.service.maintenance
        monkeypatch.setattr(maintenance, "_index_trouble", "the index is damaged: x")
        for path in sorted(OPEN):
            for head in ({}, wrong):
                found = closed.get(path, headers=head).json()
                assert found["status"] == "degraded" and found["writable"] is True
                assert found["version"] == found["database_revision"] == found["detail"] == ""
            found = closed.get(path, headers=bearer(token(closed, "ingest:x"))).json()
            assert found["version"] and "damaged" in found["detail"]


def test_writing_the_registry_needs_its_scopes(closed: TestClient) -> None:
    """A reader reads, a trainer publishes, a collector reports; none of them manages."""
    read, train = bearer(token(closed, "read")), bearer(token(closed, "train"))
    ingest = bearer(token(closed, "ingest:hopper"))
    run = {"name": "a", "kind": "train"}
    refused = closed.post("/v1/runs", json=run, headers=read)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert "train" in refused.json()["expected"]
    assert refused.json()["got"] == "read"
    assert closed.post("/v1/runs", json=run, headers=train).status_code == 201
    assert closed.patch("/v1/runs/a", json={}, headers=ingest).json()["code"] == "not_owner"
    raw = {"content-type": "application/octet-stream"}
    for head, status in ((ingest, 403), (read, 403), (train, 201)):
        put = closed.put("/v1/runs/a/policies/1", content=b"x", headers=head | raw)
        assert put.status_code == status
    play = bearer(token(closed, "play:a"))
    for head in (read, train, play):
        assert closed.get("/v1/runs/a/policies/1", headers=head).content == b"x"
    for head in (read, train, ingest):
        assert closed.delete("/v1/runs/a", headers=head).status_code == 403
        assert closed.get("/v1/tokens", headers=head).status_code == 403
        command = closed.post("/v1/workers/w/command", json={"command": "stop"}, headers=head)
        assert command.status_code == 403
    closed.put("/v1/workers/w", json={"role": "launcher"}, headers=train)
    program = {"version": "1", "settings": {}}
    for head, status in ((read, 403), (train, 200), (ingest, 403)):
        put = closed.put("/v1/workers/w/programs/train", json=program, headers=head)
        assert put.status_code == status


@pytest.mark.parametrize("scope", ["read", "admin", "ingest"])
def test_the_secret_of_a_token_is_compared(closed: TestClient, scope: str) -> None:
    """Its id stands in lists and logs: with a secret of one's own making it opens nothing."""
    real, other = token(closed, scope), token(closed, scope)
    _, token_id, secret = real.split("_", 2)
    assert closed.get("/v1/runs", headers=bearer(real)).status_code == 200
    for made in ("", "x", secret[:-1], secret + "x", secret.swapcase(), other.split("_", 2)[2]):
        answer = closed.get("/v1/runs", headers=bearer(f"stw_{token_id}_{made}"))
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), made
    for made in (f"stw_{token_id}", f"STW_{token_id}_{secret}", f"sqw_{token_id}_{secret}"):
        assert closed.get("/v1/runs", headers=bearer(made)).status_code == 401, made


# --- failed tokens --------------------------------------------------------------------------------


def test_wrong_tokens_are_slowed_down_and_valid_ones_pass(
    closed: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """429 after a while, said once in the log; nobody of the same address is locked out."""
    configure_logging("info")  # an earlier test may have bound it to its own captured stream
    now = [1000.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: now[0])
    reader = bearer(token(closed, "read"))
    statuses = []
    for number in range(auth.FAILURES + 5):
        answer = closed.get("/v1/runs", headers=bearer(f"stw_{number}_guess"))
        statuses.append(answer.status_code)
        assert closed.get("/v1/runs", headers=reader).status_code == 200
    assert statuses == [401] * auth.FAILURES + [429] * 5
    assert answer.json()["code"] == "too_many_failed_tokens"
    wait = int(answer.headers["retry-after"])
    assert 1 <= wait <= auth.FORGIVEN_EVERY
    assert closed.get("/v1/runs").status_code == 401, "no token is not a wrong one"
    now[0] += wait
    assert closed.get("/v1/runs", headers=bearer("stw_x_guess")).status_code == 401
    assert closed.get("/v1/runs", headers=bearer("stw_x_guess")).status_code == 429
    now[0] += auth.FAILURES * auth.FORGIVEN_EVERY
    assert closed.get("/v1/runs", headers=bearer("stw_x_guess")).status_code == 401
    captured = capsys.readouterr()
    said = (captured.out + captured.err).count("many invalid tokens from one address; if it")
    assert said == 2, "as patience ended, and as what was forgiven was used up"


def test_failures_are_counted_by_address_in_constant_memory() -> None:
    failed = auth.FailedTokenLimiter()
    for number in range(3 * auth.MAX_ADDRESSES):
        assert failed.count(f"10.0.{number // 256}.{number % 256}") == 0.0
    assert len(failed._until) == auth.MAX_ADDRESSES
    assert [bool(failed.count("10.9.9.9")) for _ in range(auth.FAILURES + 1)][-2:] == [False, True]
    assert failed.count("10.9.9.8") == 0.0


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("testclient", 1), "testclient"),
        (None, "unknown"),
    ],
)
def test_an_ipv6_network_counts_as_one(client: object, address: str) -> None:
    """Its owner has 2^64 addresses to try from."""
    assert auth.address_of({"client": client}) == address


def test_who_may_only_ingest_fills_a_full_dataset_and_may_delete_nothing(
    closed: TestClient,
) -> None:
    """Making room is the service's own work: a collector needs no right to delete."""
    spec = make_spec()
    body = {"name": "hopper", "spec": spec.to_json(), "capacity": {"trajectories": 2}}
    answer = closed.post("/v1/datasets", json=body, headers=bearer(OPERATOR))
    assert answer.status_code == 201, answer.text
    collector = bearer(token(closed, "ingest:hopper"))
    for seed in range(4):
        answer = closed.post(
            "/v1/datasets/hopper/trajectories",
            content=encode([make_trajectory(spec, seed=seed)], spec),
            headers=collector | {"content-type": ARROW},
        )
        assert answer.status_code == 200 and answer.json()["items"][0]["status"] == "stored"
    found = closed.get("/v1/datasets/hopper", headers=bearer(OPERATOR)).json()
    assert (found["fifo"]["trajectories"], found["evicted"]) == (2, 2)
    assert closed.delete("/v1/datasets/hopper", headers=collector).status_code == 403


def test_the_body_is_not_read_for_a_stranger(closed: TestClient) -> None:
    """A gigabyte from someone without a token must not be received first."""
    seen: list[dict] = []

    async def receive() -> dict:
        raise AssertionError("the body was asked for")

    async def send(message: dict) -> None:
        seen.append(message)

    scope = {
        "type": "http", "method": "PUT", "path": "/v1/runs/a/policies/1", "headers": [],
        "app": closed.app,
    }  # fmt: skip
    anyio.run(auth.AuthMiddleware(closed.app), scope, receive, send)
    assert seen[0]["status"] == 401


def test_secrets_are_shown_once_and_stored_hashed(closed: TestClient, tmp_path: Path) -> None:
    """Neither a list nor a stolen index gives a token away."""
    shown = token(closed, "read")
    secret = shown.split("_", 2)[2]
    listed = closed.get("/v1/tokens", headers=bearer(OPERATOR))
    assert secret not in listed.text
    assert [item["scopes"] for item in listed.json()["items"]] == [["read"]]
    index = sqlite3.connect(tmp_path / "data" / "index.sqlite")
    try:
        stored = index.execute("SELECT * FROM tokens").fetchall()
    finally:
        index.close()
    assert secret not in json.dumps(stored)


def test_what_is_done_to_tokens_is_noted(closed: TestClient, tmp_path: Path) -> None:
    """Who, what, to which token, when; and they are listed newest first."""
    before = time.time()
    names = ["a", "b", "c"]
    ids = [token(closed, "read", "sql", name=name).split("_")[1] for name in names]
    listed = closed.get("/v1/tokens", headers=bearer(OPERATOR)).json()["items"]
    assert [item["name"] for item in listed] == ["c", "b", "a"]
    assert all(before <= item["created_at"] <= time.time() for item in listed)
    admin = token(closed, "admin", name="me")
    assert closed.delete(f"/v1/tokens/{ids[1]}", headers=bearer(admin)).status_code == 204
    index = sqlite3.connect(tmp_path / "data" / "index.sqlite")
    try:
        noted = index.execute("SELECT who, action, subject, detail, time FROM audit").fetchall()
    finally:
        index.close()
    me = admin.split("_")[1]
    scopes = ["read", "sql"]
    made = [("operator", i, {"name": n, "scopes": scopes}) for i, n in zip(ids, names, strict=True)]
    made.append(("operator", me, {"name": "me", "scopes": ["admin"]}))
    expected = [(who, "token.create", subject, detail) for who, subject, detail in made]
    expected.append((me, "token.revoke", ids[1], {}))
    assert [(*row[:3], json.loads(row[3])) for row in noted] == expected
    assert all(before <= row[4] <= time.time() for row in noted)


def test_a_refusal_says_what_it_expects(closed: TestClient) -> None:
    form = "the Authorization header is not of the form: Bearer TOKEN"
    unknown = "the token is unknown or was revoked"
    for header, detail in (
        (None, "this service requires a token: set STEPWELL_TOKEN"),
        ("Basic abc", form),
        ("Bearer ", form),
        ("Bearer stw_0_x", unknown),
        ("Bearer other", unknown),
    ):
        answer = closed.get("/v1/runs", headers={} if header is None else {"authorization": header})
        told = {
            **{"type": "about:blank", "title": "Unauthorized", "status": 401, "detail": detail},
            **{"code": "unauthorized", "expected": "Authorization: Bearer stw_…"},
        }
        assert {**answer.json(), "type": "about:blank"} == told
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-length"] == str(len(answer.content))
        assert answer.headers["connection"] == "close"


def test_a_right_that_is_missing_is_named(closed: TestClient) -> None:
    """Also what there is instead; and what slows down who tries tokens says how to be heard."""
    head = bearer(token(closed, "read", "ingest:hop*"))
    answer = closed.post("/v1/query", json={"sql": "SELECT 1"}, headers=head).json()
    assert (answer["status"], answer["code"]) == (403, "forbidden")
    assert answer["detail"] == "the token may not POST /v1/query"
    assert (answer["expected"], answer["got"]) == ("one of sql, admin", "read, ingest:hop*")
    answer = closed.get("/v1/tokens", headers=head).json()
    assert answer["expected"] == "one of admin"
    for _ in range(auth.FAILURES + 1):
        answer = closed.get("/v1/runs", headers=bearer("stw_x_guess")).json()
    assert answer["code"] == "too_many_failed_tokens"
    assert answer["expected"] == "Authorization: Bearer stw_…"
    assert answer["detail"] == (
        "the token is invalid, as were many before it from this address; a valid token is accepted"
        " at any time"
    )


def test_an_expired_manager_is_none(app: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last living token that manages the others stays, whoever managed them once."""
    admin = app.post("/v1/tokens", json={"name": "me", "scopes": ["admin"]}).json()
    head = bearer(admin["token"])
    for name, seconds in (("brief", 60), ("long", 7200)):
        body = {"name": name, "scopes": ["admin"], "expires_in": seconds}
        assert app.post("/v1/tokens", json=body, headers=head).status_code == 201
    later = time.time() + 3600
    monkeypatch.setattr(auth.time, "time", lambda: later)
    listed = app.get("/v1/tokens", headers=head).json()["items"]
    long = next(item["id"] for item in listed if item["name"] == "long")
    assert app.delete(f"/v1/tokens/{long}", headers=head).status_code == 204
    answer = app.delete(f"/v1/tokens/{admin['id']}", headers=head)
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert answer.json()["detail"].startswith("this is the last token that may manage the others;")


def test_expired_and_revoked_tokens_open_nothing(
    start_app: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart."""
    app = start_app(token=OPERATOR)
    brief, gone = token(app, "read", expires_in=3600), token(app, "read")
    token_id = gone.split("_")[1]
    assert app.get("/v1/runs", headers=bearer(brief)).status_code == 200
    app.delete(f"/v1/tokens/{token_id}", headers=bearer(OPERATOR))
    assert app.get("/v1/runs", headers=bearer(gone)).status_code == 401
    app = start_app(token=OPERATOR)
    assert app.get("/v1/runs", headers=bearer(gone)).status_code == 401
    assert app.get("/v1/runs", headers=bearer(brief)).status_code == 200
    later = time.time() + 3601
    monkeypatch.setattr(auth.time, "time", lambda: later)
    expired = app.get("/v1/runs", headers=bearer(brief))
    assert (expired.status_code, "expired" in expired.json()["detail"]) == (401, True)


def test_an_expired_token_still_keeps_the_door_closed(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time must not open a service that somebody had closed."""
    app.post("/v1/tokens", json={"name": "me", "scopes": ["admin"], "expires_in": 1})
    later = time.time() + 61
    monkeypatch.setattr(auth.time, "time", lambda: later)
    assert app.get("/v1/runs").status_code == 401


def test_use_is_noted_and_outlives_a_restart(start_app: Callable[..., TestClient]) -> None:
    app = start_app(token=OPERATOR)
    reader = token(app, "read")

    def used() -> float | None:
        items = app.get("/v1/tokens", headers=bearer(OPERATOR)).json()["items"]
        return items[0].get("last_used_at")

    assert used() is None
    before = time.time()
    app.get("/v1/runs", headers=bearer(reader))
    first = used()
    assert first is not None and first >= before
    app = start_app(token=OPERATOR)
    assert used() == first


def test_use_is_written_by_maintenance_and_not_too_often(closed: TestClient) -> None:
    """A request that only reads never waits for the disk, so a full one refuses nobody."""
    reader = bearer(token(closed, "read"))
    book = closed.app.state.service.auth  # type: ignore[attr-defined]

    def written() -> float | None:
        with book._db.read() as c:
            return c.execute(sa.select(tokens.c.last_used_at)).scalar()

    assert closed.get("/v1/runs", headers=reader).status_code == 200
    assert written() is None
    closed.app.state.service.maintenance.round()  # type: ignore[attr-defined]
    first = written()
    assert first is not None
    assert closed.get("/v1/runs", headers=reader).status_code == 200
    book.save_last_used()
    assert written() == first, "within USED_INTERVAL"
    book.save_last_used(every=0.0)
    assert written() > first


def test_unknown_scopes_are_refused(closed: TestClient) -> None:
    for scopes in ([], ["root"], ["ingest:"], ["ingest:UPPER"], ["read write"]):
        answer = closed.post(
            "/v1/tokens", json={"name": "t", "scopes": scopes}, headers=bearer(OPERATOR)
        )
        assert answer.status_code == 422, scopes


def test_beyond_loopback_nothing_is_open(start_app: Callable[..., TestClient]) -> None:
    """Even if it were started without a token."""
    app = start_app(host="0.0.0.0", allowed_hosts=["127.0.0.1"])
    assert app.get("/v1/runs").status_code == 401


def test_beyond_loopback_every_name_is_answered_and_nobody_without_a_token(
    start_app: Callable[..., TestClient],
) -> None:
    """The public name is unknown, whoever holds the keys: the operator, or tokens of the index."""
    app = start_app()
    admin = bearer(app.post("/v1/tokens", json={"name": "me", "scopes": ["admin"]}).json()["token"])
    foreign = {"host": "robots.example"}
    assert app.get("/v1/runs", headers=admin | foreign).status_code == 421, "on loopback"
    app = start_app(host="0.0.0.0")
    assert app.get("/v1/runs", headers=foreign).status_code == 401
    assert app.get("/v1/runs", headers=admin | foreign).status_code == 200
    app = start_app(host="0.0.0.0", allowed_hosts=["data.example"])
    assert app.get("/v1/runs", headers=admin | foreign).status_code == 421


def test_beyond_loopback_the_last_manager_cannot_be_revoked(
    start_app: Callable[..., TestClient],
) -> None:
    """On loopback it opens the service; elsewhere nobody could come in again."""
    app = start_app()
    made = app.post("/v1/tokens", json={"name": "me", "scopes": ["admin"]}).json()
    app = start_app(host="0.0.0.0")
    url, head = f"/v1/tokens/{made['id']}", bearer(made["token"])
    assert app.delete(url, headers=head).status_code == 409
    app = start_app(host="0.0.0.0", token=OPERATOR)
    assert app.delete(url, headers=head).status_code == 204
