"""The main job, whole: `stepwell demo` with tiny numbers, then every trace it must have left."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepwell.testing import wait_until

pytestmark = pytest.mark.timeout(1500)
ROOT = Path(__file__).resolve().parents[1]
DEMO = [sys.executable, "-m", "stepwell.cli", "demo", "--no-dashboard"]
TINY = ["--steps", "4000", "--updates", "20", "--episodes", "3", "--collect-episodes", "4"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A finished demo: its folder and its report."""
    folder = tmp_path_factory.mktemp("demo")
    report = folder / "report.json"
    done = subprocess.run(
        [*DEMO, *TINY, "--exit", "--data", str(folder), "--json", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads(report.read_text())


def test_the_table_has_all_four_rows(demo: tuple[Path, dict]) -> None:
    """Data mean, behaviour cloning, 10% BC and our agent, each with its interval."""
    _, report = demo
    assert list(report["scores"]) == ["data mean", "behaviour cloning", "10% BC", "our agent"]
    for score in report["scores"].values():
        assert score["low"] <= score["mean"] <= score["high"]
    assert report["scores"]["data mean"]["n"] == 20  # 4000 steps of 200
    assert report["scores"]["our agent"]["n"] == 3


def test_everything_that_happened_is_in_the_dataset(
    demo: tuple[Path, dict], start_service: Callable[..., Any]
) -> None:
    """Uploaded, evaluated and collected trajectories lie side by side, each saying whose it is."""
    folder, _ = demo
    with start_service(folder).client() as client:
        rows = client.sql(
            "select partition, purpose, count(*), sum(length), count(distinct policy) "
            "from trajectories group by all order by partition, purpose"
        ).rows
        counts = {(row[0], row[1]): row[2:] for row in rows}
        assert counts[("protected", "train")][:2] == (20, 4000)
        assert counts[("fifo", "train")][0] == 4  # the collector's episodes
        assert sum(n[0] for (_, purpose), n in counts.items() if purpose == "eval") == 9
        played = "select policy from trajectories where partition = 'fifo' and purpose = 'train'"
        assert all(policy.startswith("demo-agent/") for (policy,) in client.sql(played))
        assert {run.kind for run in client.runs()} == {"train", "collect", "eval"}
        assert {run.status for run in client.runs()} == {"finished"}
        assert client.policies("demo-agent")


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    """SIGINT in the middle of it: no process of the demo is left, and the way out says so."""
    process = subprocess.Popen(
        [*DEMO, *TINY, "--data", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    children: list[psutil.Process] = []

    def training() -> bool:
        children[:] = psutil.Process(process.pid).children(recursive=True)
        return any("trainer" in " ".join(child.cmdline()) for child in _alive(children))

    wait_until(training, 120, what="the trainer", pause=0.1)
    assert any("serve" in " ".join(child.cmdline()) for child in _alive(children))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "stopping" in output
    assert _alive(children) == []


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.cmdline()
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive
