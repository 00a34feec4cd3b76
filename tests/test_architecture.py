"""The rules of the house: who loads what, in fresh interpreters, and where packages lie."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["amago_model", "collector", "dashboard", "migrations", "server", "stepwell", "trainer"]

FORBIDDEN = {
    "stepwell": ["torch", "fastapi", "sqlalchemy", "duckdb", "gymnasium", "streamlit", "pandas"],
    "amago_model": ["pyarrow", "httpx2", "pydantic", "gymnasium", "accelerate", "stepwell"],
    "server.app": ["torch", "gymnasium", "amago_model", "streamlit"],
    "dashboard.api": ["torch", "gymnasium", "amago_model", "duckdb", "server"],
    "trainer.main": ["gymnasium", "fastapi", "sqlalchemy", "streamlit"],
    "collector.main": ["fastapi", "sqlalchemy", "duckdb", "streamlit", "accelerate"],
}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_lie_in_this_repository(package: str) -> None:
    """A stray package of the same name on the path would be imported instead of ours."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT)


@pytest.mark.parametrize("module", FORBIDDEN)
def test_importing_a_part_loads_nothing_it_must_not(module: str) -> None:
    """import-linter reads the source; this sees what really gets loaded, also through others."""
    code = (
        f"import sys, {module}\n"
        f"print(*sorted(set({FORBIDDEN[module]!r}) & set(sys.modules)))"
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_every_top_level_folder_is_in_the_readme() -> None:
    """A newcomer finds each folder in the README's table, and none that is not there."""
    readme = (ROOT / "README.md").read_text()
    tracked = {
        p.name
        for p in ROOT.iterdir()
        if p.is_dir() and not p.name.startswith(".") and (p / "__init__.py").exists()
    } | {"tests", "docs", "examples", "benchmarks", "migrations"}
    missing = [name for name in sorted(tracked) if f"`{name}/`" not in readme]
    assert missing == []
