"""Every test and script that docs/reliability.md names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def test_what_the_page_names_exists() -> None:
    files = set(re.findall(r"\b(?:tests|benchmarks)/[\w/]+\.(?:py|json)\b", PAGE))
    files |= {f"{m.replace('.', '/')}.py" for m in re.findall(r"-m (benchmarks\.\w+)", PAGE)}
    assert not {name for name in files if not (ROOT / name).is_file()}
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    there = {n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    there |= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert not named - there


def test_every_main_promise_has_its_test() -> None:
    section = PAGE.partition("## The main promises")[2].partition("\n## ")[0]
    promises = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", section)
    assert len(promises) >= 10
    for path, name in promises:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (
            f"{path}::{name}"
        )
