"""Every test that docs/parity.md names exists."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from amago_model.presets import DEVIATIONS, published_v3
from trainer.config import flatten, to_json
from trainer.recipes import recipe

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


def test_the_page_lists_what_the_preset_switches_back_and_reasons_for_the_rest() -> None:
    """And the values that it gives are those of the preset."""
    table = re.search(r"^\| deviation .*?(?=^$)", PAGE, re.DOTALL | re.MULTILINE)
    assert table
    listed = {}
    for line in table[0].splitlines()[2:]:
        switch = line.strip("|").split("|")[1].strip()
        if found := re.fullmatch(r"`(\S+) = (.+)`", switch):
            listed[found[1]] = tomllib.loads(f"x = {found[2]}")["x"]
        else:
            assert switch.startswith("not offered: ") or "recipe" in switch, switch
    assert {f"agent.{name}" for name in DEVIATIONS} == set(listed)
    default = recipe("default").agent
    default = dataclasses.replace(default, losses=dataclasses.replace(default.losses, filter="exp"))
    preset = flatten({"agent": to_json(published_v3(default))})
    assert listed == {path: preset[path] for path in listed}


def test_nothing_else_is_said_to_be_a_test() -> None:
    """A row whose last cell names no test promises without proof."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith(("| feature", "| defect", "| deviation")):
            assert re.search(r"`[\w/]*test_\w+\.py", line.rsplit("|", 2)[1]), line
