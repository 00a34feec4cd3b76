"""Time and memory: every recipe can be measured, and every recipe has a row in the docs."""

from __future__ import annotations

import re

import pytest

from amago_model import ActionSpace, ObsSpace, Spaces
from benchmarks.recipes import (
    PAGE,
    SPACES,
    USUAL,
    made_up,
    measure,
    spaces_for,
    stored,
    table,
)
from benchmarks.report import place
from trainer.recipes import RECIPES, recipe

MEASURED = {
    "updates_per_second": 41.27,
    "whole_run_seconds": 5400,
    "peak_rss_mb": 1240,
    "peak_gpu_mb": None,
}


@pytest.mark.parametrize(
    "action",
    [
        ActionSpace(kind="discrete", n=3, start=5),
        ActionSpace(kind="multi_binary", n=4),
        ActionSpace(kind="multi_discrete", nvec=(2, 5)),
        ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
    ],
    ids=lambda action: action.kind,
)
def test_a_made_up_batch_fits_any_spaces(action):
    observations = {
        "image": ObsSpace(shape=(8, 8, 3), dtype="uint8"),
        "token": ObsSpace(shape=(2,), dtype="int64", n=7),
        "numbers": ObsSpace(shape=(3,), dtype="float32"),
        "flags": ObsSpace(shape=(2,), dtype="bool"),
    }
    spaces = Spaces(observations=observations, action=action)
    batch = made_up(spaces, windows=3, length=5)
    batch.check(spaces)
    assert int(batch.obs["token"].max()) < 7 and int(batch.obs["image"].max()) > 127
    if action.kind == "discrete":
        assert int(batch.action.min()) >= 5 and int(batch.action.max()) < 8


def test_a_recipe_is_measured():
    config = recipe("pendulum_stitch")
    small = config.replace(data=config.data.replace(batch=2, window=4))
    line = measure(small, SPACES["pendulum_stitch"], seconds=0.0, device="cpu")
    assert line["updates_measured"] == 2 and line["updates_per_second"] > 0
    assert line["peak_rss_mb"] > 50 and line["peak_gpu_mb"] is None
    seconds = config.updates / line["updates_per_second"]
    assert line["whole_run_seconds"] == pytest.approx(seconds, abs=1 + 0.1 * seconds)


def test_recipes_are_measured_on_what_they_are_made_for():
    assert spaces_for("default") is USUAL
    observations = spaces_for("pixels").observations
    assert observations["image"].dtype == "uint8" and observations["mission"].n
    made_up(spaces_for("pixels"), windows=2, length=3).check(spaces_for("pixels"))


def test_the_table_has_a_row_for_every_recipe_measured_or_not():
    text = table({"offline": {"cpu": MEASURED, "gpu": None}})
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert list(rows) == list(RECIPES)
    assert rows["offline"] == "6,000 | 41.3 | 2 h | 1.2 GB | not measured | not measured"
    assert rows["tmaze"].startswith("1,500 | not measured")


def test_the_docs_show_the_last_result_for_every_recipe(tmp_path):
    """Rewritten by `python -m benchmarks.recipes --write-docs` (`--only-docs` measures nothing)."""
    again = tmp_path / "page.md"
    again.write_text(PAGE.read_text())
    place(again, "recipes", table(stored()))
    assert again.read_text() == PAGE.read_text(), "run: python -m benchmarks.recipes --only-docs"
