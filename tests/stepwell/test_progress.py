"""What a command shows of its progress where the output is no terminal."""

import io

import pytest
from rich.console import Console

from stepwell import _progress
from stepwell._progress import CommandProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("quiet", [False, True])
def test_it_prints_a_line_a_minute(clock: list[float], quiet: bool) -> None:
    out = io.StringIO()
    with CommandProgress(console=Console(file=out), quiet=quiet) as bar:
        task = bar.add_task("importing [x]", total=200)
        for _ in range(100):
            clock[0] += 2.0
            bar.advance(task, 2)
        unknown = bar.add_task("sending", total=None)
        clock[0] += 60.0
        bar.update(unknown, completed=3)
    said = ["importing [x]: 30%", "importing [x]: 60%", "importing [x]: 90%", "sending"]
    assert out.getvalue().splitlines() == ([] if quiet else said)
