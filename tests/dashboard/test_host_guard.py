"""A page whose name somebody points to this machine (DNS rebinding) gets nothing of the dashboard.

Raw requests to a real `stepwell dash`: a client library would correct what a browser may send.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from dashboard import main
from dashboard.host_guard import POLICY_VIOLATION, HostGuard
from stepwell._hosts import HOSTS, ORIGINS, allowed_names, from_environment, is_allowed_origin
from stepwell._ports import free_port
from stepwell.errors import InvalidData
from stepwell.testing import wait_until

STREAM = "/_stcore/stream"
PATHS = (
    "GET /", "GET /runs", "GET /nowhere", "GET /_stcore/health", "GET /_stcore/host-config",
    "GET /_stcore/script-health-check", "GET /_stcore/metrics", "GET /static/js/index.js",
    "GET /media/a.png", "GET /component/a/b.html", "GET /_stcore/bidi-components/a/b.js",
    "PUT /_stcore/upload_file/session/file", "DELETE /_stcore/upload_file/session/file",
    "OPTIONS /_stcore/upload_file/session/file", "POST /signin", f"GET {STREAM}",
    "POST /_stcore/agent/interact",
)  # fmt: skip
EVIL = "attacker.example"
FOREIGN = (EVIL, f"{EVIL}:8501", f"127.0.0.1.{EVIL}", "10.0.0.7", "")
NAME, ORIGIN = "dash.example.org", "https://board.example.org"


@contextlib.contextmanager
def running(
    words: Sequence[str], port: int, log: Path, **allowed: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that serves the dashboard on a port."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")}
    env = {**inherited, "STEPWELL_URL": "http://127.0.0.1:9", **allowed}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env,
        )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return status(port, "GET /_stcore/health", "localhost") == 200
        except OSError:
            return False

    try:
        wait_until(answers, 120, what="Streamlit answers")
        yield process
    finally:
        process.kill()
        process.wait()


@dataclass
class Dash:
    port: int
    log: Path
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def dash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dash]:
    """A running `stepwell dash`, which allows NAME and ORIGIN."""
    port, log = free_port(), tmp_path_factory.mktemp("dash") / "log"
    allowed = {HOSTS: f'["{NAME.upper()}"]', ORIGINS: f'["{ORIGIN}"]'}
    with running(["dashboard.main", "--port", str(port)], port, log, **allowed) as process:
        yield Dash(port, log, process)


@pytest.fixture
def port(dash: Dash) -> int:
    return dash.port


def status(port: int, request: str, host: str | None, **headers: str) -> int:
    """The status of one raw request."""
    lines = [f"{request} HTTP/1.1", *([] if host is None else [f"Host: {host}"])]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        return status_of(sock)


def handshake(port: int, host: str, origin: str | None) -> int:
    """The status of a WebSocket handshake: 101 if it is opened."""
    lines = [f"GET {STREAM} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
    lines += [] if origin is None else [f"Origin: {origin}"]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        return status_of(sock)


def status_of(sock: socket.socket) -> int:
    answer = b""
    while b"\r\n" not in answer:
        chunk = sock.recv(4096)
        assert chunk, answer
        answer += chunk
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("request_line", PATHS)
def test_no_path_answers_to_a_foreign_name(port: int, request_line: str) -> None:
    for host in FOREIGN:
        assert status(port, request_line, host) == 421, host
    own = f"127.0.0.1:{port}"
    assert status(port, request_line, own) != 421
    for origin in ("https://attacker.example", "http://127.0.0.1:1", "null", "http://["):
        assert status(port, request_line, own, Origin=origin) == 403, origin


def test_a_page_elsewhere_opens_no_websocket(port: int) -> None:
    for host in FOREIGN:
        assert handshake(port, host, f"http://{host}") == 403, "its page came from here: rebinding"
        assert handshake(port, host, None) == 403
    own = f"127.0.0.1:{port}"
    for origin in (
        "https://attacker.example",
        "null",
        "http://localhost:1",
        f"http://[::1]:{port}",
    ):
        assert handshake(port, own, origin) == 403, origin


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", NAME])
def test_its_own_names_are_answered(port: int, name: str) -> None:
    """Also the one that is allowed, with the port of a proxy or without one."""
    for host in (name, f"{name}:{port}", f"{name}:443"):
        assert status(port, "GET /", host) == 200
        assert handshake(port, host, f"http://{host}") == 101
        assert handshake(port, host, f"https://{host}") == 101
        assert handshake(port, host, ORIGIN) == 101
        assert handshake(port, host, None) == 101, "programs send no Origin"


def test_an_address_that_it_listens_on_is_its_name() -> None:
    assert allowed_names("Robot.Local", ["A.example"]) == {
        "robot.local", "a.example", "localhost", "127.0.0.1", "::1"
    }  # fmt: skip
    guard = TestClient(HostGuard(Starlette(), "10.1.2.3"), base_url="http://10.1.2.3:8501")
    assert guard.get("/").status_code == 404
    everywhere = TestClient(HostGuard(Starlette(), "0.0.0.0"), base_url="http://10.1.2.3:8501")
    refused = everywhere.get("/")
    assert refused.status_code == 421 and HOSTS in refused.text
    with pytest.raises(WebSocketDisconnect) as closed, everywhere.websocket_connect(STREAM):
        pass
    assert closed.value.code == POLICY_VIOLATION, "by the guard itself; Streamlit has another"


def test_an_origin_without_a_host_is_nobody() -> None:
    assert not is_allowed_origin("file://", "")
    assert not is_allowed_origin("null", "null")


@pytest.mark.parametrize("text", ["dash.example.org", '{"a": 1}', "[1]", '"a"'])
def test_a_list_that_is_none_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Before a port is opened; a name that is not understood would be a dashboard for nobody."""
    monkeypatch.setenv(HOSTS, text)
    with pytest.raises(InvalidData, match=HOSTS):
        main.main(["--port", "0"])
    monkeypatch.setenv(HOSTS, "")
    assert from_environment(HOSTS) == ()


def test_the_pages_alone_have_streamlits_guard(tmp_path: Path) -> None:
    """`streamlit run dashboard/app.py` has no middleware: its websocket is guarded all the same."""
    app, port = str(Path(main.__file__).with_name("app.py")), free_port()
    words = ["streamlit", "run", app, "--server.port", str(port)]
    with running(words, port, tmp_path / "log"):
        for host in FOREIGN:
            assert handshake(port, host, f"http://{host}") == 403
        for name in ("127.0.0.1", "localhost", "[::1]"):
            assert handshake(port, f"{name}:{port}", f"http://{name}:{port}") == 101


def test_it_serves_on_loopback_and_stops_when_told(dash: Dash) -> None:
    """The last test of this file: then the dashboard has ended."""
    first, *_ = dash.log.read_text().splitlines()
    assert first == f"Stepwell dashboard: http://127.0.0.1:{dash.port}"
    listening = Path("/proc/net/tcp")
    if listening.exists():
        lines = (line.split() for line in listening.read_text().splitlines()[1:])
        end = f":{dash.port:04X}"
        mine = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(end)]
        assert mine == [f"0100007F{end}"]
    dash.process.send_signal(signal.SIGTERM)
    assert dash.process.wait(60) in (0, -signal.SIGTERM)
