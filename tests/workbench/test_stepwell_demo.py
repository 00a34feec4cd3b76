"""What the demo refuses before it starts anything, or sends anything anywhere."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from stepwell.errors import InvalidData
from workbench import demo


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The demo is a program: it leaves the signals as it wants them."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_port_that_somebody_has_is_refused(tmp_path):
    """A service that runs there already must not get the demo's data."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidData, match=f"port {port} is taken"):
            demo.main(["--port", str(port), "--data", str(tmp_path), "--no-dashboard"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--env", "Hopper-v5"], "--file FILE.hdf5"),
        (["--dataset", "nowhere.hdf5", "--env", "X"], "no such file"),
        (["--dataset", __file__], "needs --env"),
    ],
)
def test_a_demo_without_its_data_or_environment_is_refused(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        demo.main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def commands(tmp_path, monkeypatch) -> demo.Commands:
    monkeypatch.setitem(demo.PROGRAMS, "sh", ("/bin/sh", "-c"))
    return demo.Commands(tmp_path)


def test_a_failure_shows_the_end_of_its_log(commands):
    commands.start("sh", "echo what went wrong; exit 3")
    with pytest.raises(demo.DemoError) as caught:
        commands.finish("echo what went wrong; exit 3")
    assert "ended with status 3" in str(caught.value) and "what went wrong" in str(caught.value)


def test_a_command_that_fails_beside_another_ends_both(commands):
    commands.start("sh", "sleep 600")
    commands.start("sh", "exit 3")
    child = commands.running["sleep 600"]
    with pytest.raises(demo.DemoError, match="exit 3 ended with status 3"):
        commands.finish("sleep 600")
    commands.stop_all()
    assert child.process.poll() is not None and commands.running == {}


def test_an_interrupt_stops_whatever_runs_and_starts_nothing_more(commands):
    """It is noticed where the demo waits: no child is lost between its start and its name."""
    commands.start("sh", "sleep 600")
    child = commands.running["sleep 600"]
    commands.interrupt()
    waits = (
        commands.check,
        lambda: commands.finish("sleep 600"),
        lambda: commands.start("sh", "true"),
    )
    for wait in waits:
        with pytest.raises(KeyboardInterrupt):
            wait()
    commands.stop_all()
    assert child.process.poll() is not None and commands.running == {}
