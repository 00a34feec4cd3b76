"""The program: the router draws, `stepwell dash` listens on this machine only and ends cleanly."""

import socket
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import main
from stepwell.errors import InvalidData
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
