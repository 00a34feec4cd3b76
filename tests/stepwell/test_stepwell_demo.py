"""What the demo refuses before it starts anything, or sends anything anywhere."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from stepwell import demo


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The demo is a program: it leaves the signals as it wants them."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_port_that_somebody_has_is_refused(tmp_path, capsys):
    """A service that runs there already must not get the demo's data."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status = demo.main(["--port", str(port), "--data", str(tmp_path), "--no-dashboard"])
    assert status == 1
    assert f"--port {port}" in capsys.readouterr().out
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--env", "Hopper-v5"], "--dataset FILE.hdf5"),
        (["--dataset", "nowhere.hdf5", "--env", "X"], "no such file"),
        (["--dataset", __file__], "needs --env"),
    ],
)
def test_a_demo_without_its_data_or_environment_is_refused(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        demo.main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_failure_shows_only_what_this_start_printed(tmp_path):
    """Logs are appended to: the failure of an earlier demo is not the one to read."""
    (tmp_path / "x.log").write_text("$ old\nold failure\n")
    commands = demo.Commands(tmp_path)
    commands.start("x", "false")
    with pytest.raises(demo.DemoError) as caught:
        commands.finish("x")
    assert "x ended with status 1" in str(caught.value)
    assert "$ false" in str(caught.value) and "old failure" not in str(caught.value)


def test_an_interrupt_stops_whatever_runs_and_starts_nothing_more(tmp_path):
    """It is noticed where the demo waits: no child is lost between its start and its name."""
    commands = demo.Commands(tmp_path)
    child = commands.start("x", "sleep", "600")
    commands.interrupt()
    for wait in (commands.check, lambda: commands.finish("x"), lambda: commands.start("y", "true")):
        with pytest.raises(KeyboardInterrupt):
            wait()
    commands.stop_all()
    assert child.poll() is not None and commands.running == {}
