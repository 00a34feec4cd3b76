"""Every test that docs/parity.md names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "parity.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:tests/[\w/]+/|tests/)?test_\w+\.py)(?:::(\w+))?`", PAGE)))


def test_the_page_names_tests() -> None:
    assert len([function for _, function in NAMED if function]) > 40
    assert "test_slow_reference.py" in {file for file, _ in NAMED}


@pytest.mark.parametrize(("file", "function"), NAMED)
def test_a_test_that_the_page_names_exists(file: str, function: str) -> None:
    path = ROOT / (file if file.startswith("tests/") else f"tests/amago_model/{file}")
    assert path.is_file()
    if function:
        tree = ast.parse(path.read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_nothing_else_is_said_to_be_a_test() -> None:
    """A row whose last cell names no test promises without proof."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith(("| feature", "| defect")):
            assert re.search(r"`[\w/]*test_\w+\.py", line.rsplit("|", 2)[1]), line
