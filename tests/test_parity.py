"""Every test that docs/reference/parity.md names exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from amago_model.presets import DEVIATIONS
from collector.config import CollectConfig, EvaluateConfig
from stepwell._settings import flatten, options, override
from trainer.options import resolve
from trainer.recipes import recipe

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "parity.md").read_text()
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


def _rows(head: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    table = re.search(rf"^\| {head} .*?(?=^$)", PAGE, re.DOTALL | re.MULTILINE)
    assert table
    cells = (line.strip("|").split(" | ") for line in table[0].splitlines()[2:])
    return [[cell.strip() for cell in row] for row in cells]


def values_of(name: str) -> dict[str, object]:
    """With the kind that has all deviations."""
    return resolve([name, "--agent.critic.kind", "hlgauss"]).config.to_dict()


def test_the_recipe_sets_all_that_the_page_lists_to_what_it_says_and_nothing_else() -> None:
    """Each row that is not said to be outside of the recipe; and the preset is its agent's part."""
    listed = {}
    for _, switch, where, _ in _rows("deviation"):
        if not where.startswith("not in the recipe: "):
            found = re.fullmatch(r"`(\S+) = (.+)`", switch)
            assert found, switch
            listed[found[1]] = tomllib.loads(f"x = {found[2]}")["x"]
    plain, published = (flatten(values_of(name)) for name in ("default", "published_v3"))
    set_so = {path: value for path, value in published.items() if value != plain.get(path, value)}
    assert set_so.pop("recipe") == "published_v3"
    assert set_so == listed
    of_the_agent = {path for path in listed if path.startswith("agent.")}
    assert {f"agent.{name}" for name in DEVIATIONS} == of_the_agent


def test_what_lies_outside_of_the_recipe_can_be_set_all_the_same() -> None:
    outside = [row for row in _rows("deviation") if row[2].startswith("not in the recipe: ")]
    assert len(outside) == 2
    for _, switch, _, _ in outside:
        for word in re.findall(r"`([^`]+)`", switch):
            if word.startswith("stepwell "):
                command, flag = re.fullmatch(r"stepwell (\w+) --(\S+).*", word).groups()  # type: ignore[union-attr]
                made = {"collect": CollectConfig, "evaluate": EvaluateConfig}[command]
                own = made(env="E", random=True, **{"dataset": "d"} if command == "collect" else {})
                assert flag in options(type(own))
            else:
                path, _, value = word.partition(" = ")
                value = tomllib.loads(f"x = {value}")["x"]
                assert override(recipe("default"), {path: value}) != recipe("default")


def test_what_is_never_switched_back_has_a_reason_and_a_test() -> None:
    rows = _rows("difference")
    assert len(rows) >= 5
    for what, why, test in rows:
        assert what and why and re.search(r"`[\w/]*test_\w+\.py::\w+`", test)
        assert "agent." not in what + why, "what can be set belongs into the first table"


HEADS = ("| feature", "| defect", "| deviation", "| difference")


def test_nothing_else_is_said_to_be_a_test() -> None:
    """A row whose last cell names no test promises without proof."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith(HEADS):
            assert re.search(r"`[\w/]*test_\w+\.py", line.rsplit("|", 2)[1]), line
