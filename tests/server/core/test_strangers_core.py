"""What strangers may say: anything; what comes of it: a typed error, or something answerable."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvicorn

from server import http_protocol
from server.app import create_app
from server.settings import Settings
from stepwell.testing import make_spec, make_trajectory, wait_until
from tests.server.core.conftest import Live

SPEC = make_spec(observation=3, action=2)
HUGE = 10**30
JSON = {"content-type": "application/json"}
EVALUATION = b'{"policy":"p","env":"e","returns":[1],"mean":1,"iqm":1,"ci_low":1,"ci_high":1,'


def cursor(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.fixture(scope="module")
def filled(shared: Live) -> Live:
    """An app with a dataset, its only shard, and a run."""
    shared.create()
    shared.post([make_trajectory(SPEC)])
    shared.flush()
    shared.run()
    return shared


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        *(("GET", f"/v1/{what}?cursor={HUGE}", None) for what in ("runs", "jobs", "launches")),
        ("GET", f"/v1/evaluations?cursor={HUGE}", None),
        ("GET", f"/v1/datasets/d/trajectories?cursor={cursor([1, HUGE])}", None),
        ("GET", f"/v1/datasets/d/trajectories?cursor={cursor([2**64 - 1, 1])}", None),
        ("GET", f"/v1/datasets/d/trajectories?cursor={cursor([1, 1.5])}", None),
        ("PATCH", "/v1/datasets/d", b'{"capacity":{"steps":%d}}' % HUGE),
        ("POST", "/v1/runs", b'{"name":"x","kind":"train","config":{"a":"\\ud800"}}'),
        ("POST", "/v1/runs", b'{"name":"x","kind":"train","config":{"\\udfff":1}}'),
        (
            "POST",
            "/v1/runs",
            b'{"name":"x","kind":"train","config":' + b'{"a":' * 90 + b"1" + b"}" * 91,
        ),
        ("POST", "/v1/runs/r/metrics", b'{"points":[{"key":"k","step":1,"value":1,"time":NaN}]}'),
        ("POST", "/v1/runs/r/metrics", b'{"points":[{"key":"k","step":1,"value":1,"time":1e999}]}'),
        ("POST", "/v1/evaluations", EVALUATION + b'"seeds":[%d]}' % HUGE),
        ("POST", "/v1/evaluations", EVALUATION + b'"seeds":[1],"lengths":[%d]}' % HUGE),
        ("POST", "/v1/evaluations", EVALUATION + b'"seeds":[1],"details":{"a":["\\ud800"]}}'),
        ("POST", "/v1/launches", b'{"role":"train","args":{"\\ud800":1}}'),
        ("POST", "/v1/tokens", b'{"name":"t","scopes":["admin"],"expires_in":1e999}'),
        ("POST", "/v1/datasets/d/imports?action_low=nan", b"x"),
        ("POST", f"/v1/datasets/d/imports?max_steps={HUGE}", b"x"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_the_lists_go_on(
    filled: Live, method: str, path: str, body: bytes | None
) -> None:
    """One run with an unspeakable config would break GET /v1/runs for everybody, for ever."""
    headers = {"content-type": "application/octet-stream"} if "imports" in path else JSON
    response = filled.http.request(method, path, content=body, headers=headers)
    assert response.status_code == 422, response.text
    assert response.json()["code"] == "validation_error"
    for what in ("datasets", "runs", "evaluations", "launches", "workers", "tokens", "jobs"):
        assert filled.http.get(f"/v1/{what}").status_code == 200
    state = filled.service.mirror.state()  # SQL sees all of it, too
    assert state.tables["runs"]


@pytest.mark.parametrize("header", ['{"a": "\\ud800"}', "[" * 5000, "[1]", '{"step": 1e400}', "{"])
def test_a_policy_with_unspeakable_metadata_is_refused(filled: Live, header: str) -> None:
    response = filled.http.put(
        "/v1/runs/r/policies/1",
        content=b"x",
        headers={"content-type": "application/octet-stream", "x-stepwell-metadata": header},
    )
    assert (response.status_code, response.json()["code"]) == (422, "validation_error")


def test_a_version_of_five_thousand_digits_is_not_found(filled: Live) -> None:
    assert filled.http.get("/v1/runs/r/policies/" + "9" * 5000).status_code == 404


@pytest.mark.parametrize(
    ("asked", "status"),
    [("bytes=0-3", 206), ("bytes=5-2", 400), ("bytes=9999999-", 416), ("abc", 400), ("b=1", 400)],
)
def test_ranges_that_cannot_be_are_problems_too(filled: Live, asked: str, status: int) -> None:
    (file,) = (filled.data / "shards" / "fifo").iterdir()
    response = filled.http.get(f"/v1/shards/{file.stem}", headers={"range": asked})
    assert response.status_code == status
    if status >= 400:
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["code"] == "bad_range"
    if status == 416:
        assert response.headers["content-range"] == f"bytes */{file.stat().st_size}"


# --- the HTTP protocol ----------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """(port, app, server) of a service on a real socket whose patience is half a second."""
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "SEND_SECONDS", 0.5)
    app = create_app(Settings(data=tmp_path / "data", sql_workers=0, maintenance_interval=0))
    config = uvicorn.Config(
        app, http=http_protocol.HttpProtocol, ws="none", log_config=None, port=0
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started, what="the server")
    yield listener.getsockname()[1], app, server
    server.should_exit = True
    thread.join(60)


UNSET_SECONDS = http_protocol.SEND_SECONDS
PATIENCE = 12.0
"""Of these clients: longer than the half second, and shorter than what is set without it."""


def talk(port: int, *pieces: bytes) -> bytes:
    """Everything that is answered until the other side closes; a piece of b"" is a first answer."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            if piece:
                sock.sendall(piece)
            else:
                answer += sock.recv(65536)
        while chunk := sock.recv(65536):
            answer += chunk
        return answer


def test_a_head_that_never_comes_or_never_ends_frees_its_connection(quick: Any) -> None:
    port, *_ = quick
    assert http_protocol.HEAD_SECONDS < PATIENCE
    answer = talk(port)
    assert b"head_timeout" in answer and b"\r\nRetry-After: 1\r\n" in answer
    assert b"head_timeout" in talk(port, b"GET / HTTP/1.1\r\nHost: x\r\n")
    assert b"head_timeout" in talk(port, b"\r\n", b"\r\n")
    answer = talk(port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"", b"\r\n")
    assert b" 200 " in answer and b"head_timeout" in answer, "also after a request that was good"


def test_an_endless_head_is_cut_off_before_it_fills_the_memory(quick: Any) -> None:
    port, *_ = quick
    line = b"X: " + b"a" * 8000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(10_000):
                sock.sendall(line)


def test_what_is_no_http_gets_a_problem(quick: Any) -> None:
    port, *_ = quick
    head, _, body = talk(port, b"\x16\x03\x01\x00 TLS\r\n\r\n").partition(b"\r\n\r\n")
    assert b" 400 " in head and orjson.loads(body)["code"] == "bad_request"


def test_a_reader_that_takes_nothing_is_given_up(quick: Any) -> None:
    """Or its file, task and descriptor would be held for as long as it likes."""
    port, app, server = quick
    service = app.state.service
    big = service.store.put("policies", "pol_x.bin", b"\0" * (64 << 20))
    from fastapi.responses import FileResponse

    app.add_api_route("/v1/runs/big", lambda: FileResponse(big.path), methods=["GET"])
    app.router.routes.insert(0, app.router.routes.pop())
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    sock.sendall(b"GET /v1/runs/big HTTP/1.1\r\nHost: localhost\r\n\r\n")
    held = server.server_state.connections
    wait_until(lambda: len(held) == 1, what="the connection")
    # Sooner than without the fixture's half second, however busy the machine is.
    wait_until(lambda: not held, UNSET_SECONDS / 2, what="the connection to be given up")
    got = 0
    with pytest.raises(ConnectionError):
        while chunk := sock.recv(1 << 20):
            got += len(chunk)
        raise ConnectionError("closed")
    assert got < 64 << 20
    sock.close()
