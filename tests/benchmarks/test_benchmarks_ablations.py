"""What benchmarks/ablations.py makes of its measurements; the measuring itself takes an hour."""

from __future__ import annotations

import json

import pytest

from benchmarks.ablations import TASKS, as_recipe, cell, fill, summary, without_stale
from benchmarks.report import RESULTS
from trainer.recipes import ABLATIONS

PAGE = """\
| part | what it buys | setting | recipe | measured here |
|---|---|---|---|---|
| the whole | | | `tmaze` | old |
| memory | a | b | `agent.x = 1` | `ablation_no_memory` | old |
| positions | a, or b | `ablation_no_position` | old |
| no recipe | a | `agent.losses.tau` |
"""


def row(recipe: str, seed: int, mean: float) -> dict:
    return {"recipe": recipe, "seed": seed, "mean": mean, "updates": 1500}


ROWS = [
    row("tmaze", 0, 1.0),
    row("tmaze", 1, 0.9),
    row("ablation_no_memory", 0, 0.5),
    row("ablation_no_memory", 1, 0.6),
    row("ablation_no_memory", 2, 0.4),
]


def test_an_ablation_is_compared_with_its_base_seed_by_seed():
    base, ablation = summary(ROWS)
    assert base["mean_per_seed"] == {"0": 1.0, "1": 0.9} and base["changes"] == {}
    assert ablation["changes"] == dict(ABLATIONS["ablation_no_memory"].changes)
    # Of the seeds that both have: (-0.5 - 0.3) / 2.
    assert ablation["mean_difference_to_base"] == pytest.approx(-0.4)
    assert (ablation["lowest"], ablation["highest"]) == (0.4, 0.6)


def test_the_last_column_is_filled_and_nothing_else():
    filled = fill(PAGE, summary(ROWS)).splitlines()
    assert filled[2] == "| the whole | | | `tmaze` | 0.95 (0.90 … 1.00), 2 seeds |"
    assert filled[3].endswith("| `ablation_no_memory` | 0.50 (0.40 … 0.60) |")
    assert filled[4] == "| positions | a, or b | `ablation_no_position` | not measured |"
    assert [filled[i] for i in (0, 1, 5)] == [PAGE.splitlines()[i] for i in (0, 1, 5)]
    assert fill("\n".join(filled), summary(ROWS)).splitlines() == filled


def test_the_docs_show_what_was_measured():
    """Rewritten with every measurement (`--write-docs` alone measures nothing)."""
    page = (RESULTS.parents[1] / "docs" / "reference" / "method.md").read_text()
    path = RESULTS / "ablations.json"
    lines = json.loads(path.read_text())["summary"] if path.exists() else []
    assert fill(page, lines) == page, "run: python -m benchmarks.ablations --write-docs"


def test_every_base_has_an_environment_that_scores_it():
    assert {ablation.base for ablation in ABLATIONS.values()} == set(TASKS)


def test_a_measurement_that_is_not_the_recipe_says_so():
    (line,) = summary([row("tmaze", 0, 1.0)])
    assert cell(line, updates=1500) == "1.00 (1.00 … 1.00), 1 seed"
    assert cell(line, updates=3000).endswith(", 1500 updates")
    assert cell(None, updates=1) == "not measured"


def test_runs_of_another_formula_of_dpg_say_so_and_are_measured_again() -> None:
    """Until one run of the recipe as it is now takes the place of all of them."""
    old = [row("pendulum_stitch", seed, -150.0) | {"dpg_detach_state": True} for seed in range(3)]
    kept = row("ablation_dpg_detached", 0, -151.0) | {"dpg_detach_state": True}
    assert [as_recipe(r) for r in (*old, kept)] == [False, False, False, True]
    base, ablation = summary([*old, kept])
    assert cell(base, updates=1500) == "-150 (-150 … -150), DPG detached"
    assert cell(ablation, updates=1500) == "-151 (-151 … -151), 1 seed"
    assert "mean_difference_to_base" not in ablation, "of runs of two formulas"
    new = row("pendulum_stitch", 1, -160.0) | {"dpg_detach_state": False}
    rows = [*without_stale([*old, kept], "pendulum_stitch", 1), new]
    base, ablation = sorted(summary(rows), key=lambda line: line["mean"])
    assert cell(base, updates=1500) == "-160 (-160 … -160), 1 seed"
    assert rows == [kept, new]
    again = new | {"mean": -155.0}
    assert [*without_stale(rows, "pendulum_stitch", 1), again] == [kept, again]
