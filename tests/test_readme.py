"""The README's commands, run as they are written there, in their order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "pip install": "the installation of this environment",
    "make demo": "tests/test_whole_loop.py",
    "make test": "this run",
    "stepwell serve": "started by this test",
    "stepwell dash": "tests/browser",
    "stepwell compare": "tests/test_compare.py, with fewer seeds",
    "stepwell run": "tests/test_run.py",
}
"""Lines that other tests run, or that take an hour."""
NOT_COMMANDS = ("collectors ──", "▲", "│", "└")


def lines() -> list[str]:
    """Indented lines, with continuation lines joined."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    found = re.findall(r"^    (\S.*)$", text.replace("\\\n     ", ""), re.MULTILINE)
    return [line for line in found if not line.startswith(NOT_COMMANDS)]


@pytest.mark.timeout(900)
def test_every_command_of_the_readme_works_as_it_is_pasted(
    start_service: Callable[..., Any], tmp_path: Path
) -> None:
    service = start_service()
    port = f"127.0.0.1:{service.port}"
    env = os.environ | {
        "STEPWELL_URL": service.url,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "STEPWELL_OUTBOX": str(tmp_path / "outbox"),
        "ACCELERATE_USE_CPU": "1",
        "OMP_NUM_THREADS": "1",
    }
    ran = []
    for line in lines():
        if line.startswith(tuple(ELSEWHERE)):
            continue
        words = line.replace("127.0.0.1:8000", port)
        done = subprocess.run(
            words, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        ran.append(line)
        if line.startswith("stepwell sql"):
            assert "Pendulum-v1" in done.stdout and "100" in done.stdout, "the data are there"
    assert len(ran) >= 9
    with service.client() as client:
        assert client.dataset("swings").fifo.trajectories == 8
        # The second run's selection is neither all of the data nor a handful.
        rows = client.sql("SELECT count(*) FILTER (\"return\" > -1000), count(*) FROM trajectories"
                          " WHERE dataset = 'swings' AND partition = 'protected'").rows  # fmt: skip
        assert 30 <= rows[0][0] < rows[0][1] == 100
