"""The program: the router draws, `stepwell dash` listens on this machine only and ends cleanly."""

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import main
from stepwell._ports import free_port
from stepwell.errors import InvalidData
from stepwell.testing import wait_until
from tests.dashboard.conftest import no_traceback

APP = Path(main.__file__).with_name("app.py")


def test_the_router_draws_its_default_page(fresh_service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_URL", fresh_service.url)
    app = AppTest.from_file(APP, default_timeout=120).run()
    no_traceback(app)
    assert app.title[0].value == "Overview"
    assert "service ok" in " ".join(m.value for m in app.sidebar.markdown)


def test_the_router_survives_a_service_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_URL", "http://127.0.0.1:9")
    app = AppTest.from_file(APP, default_timeout=120).run()
    no_traceback(app)
    assert "not reachable" in " ".join(m.value for m in app.sidebar.markdown)


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidData, match=f"port {port} is taken"):
            main.main(["--port", str(port)])
    with pytest.raises(InvalidData, match="port 70000"):
        main.main(["--port", "70000"])


def test_it_serves_on_loopback_and_stops_when_told() -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "dashboard.main", "--port", str(port), "--url", "http://127.0.0.1:9"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == f"Stepwell dashboard: http://127.0.0.1:{port}"

        def healthy() -> bool:
            assert process.poll() is None, process.stdout.read()
            try:
                address = f"http://127.0.0.1:{port}/_stcore/health"
                with urllib.request.urlopen(address, timeout=10) as answer:
                    return answer.read() == b"ok"
            except OSError:
                return False

        wait_until(healthy, 120, what="Streamlit answers")
        listening = Path("/proc/net/tcp")
        if listening.exists():
            mine = [
                line.split()[1]
                for line in listening.read_text().splitlines()[1:]
                if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
            ]
            assert mine == [f"0100007F:{port:04X}"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
