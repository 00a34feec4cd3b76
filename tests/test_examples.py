"""Every example runs, as its first line says, against a real service."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "own_data.py": "mean reward",
    "record_environment.py": "200 steps",
    "any_learner.py": "update  40",
    "relabel_template.py": "relabeled    mean return 1.00",
}


def run(example: str, url: str, dataset: str, tmp_path: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), dataset],
        cwd=ROOT,
        env={**os.environ, "STEPWELL_URL": url, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_list_is_complete() -> None:
    """A new example is a tested example, and stands in the table."""
    present = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert present == set(EXAMPLES)
    table = (ROOT / "examples" / "README.md").read_text()
    assert all(f"`{name}`" in table for name in present)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, service, name: str, tmp_path: Path) -> None:
    """It ends well and prints what it promises."""
    if example == "any_learner.py":
        run("own_data.py", service.url, name, tmp_path)
    assert EXAMPLES[example] in run(example, service.url, name, tmp_path)
