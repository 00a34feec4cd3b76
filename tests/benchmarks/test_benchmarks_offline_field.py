"""What the table of all datasets says about recipes, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.offline_field import (
    curves_chart,
    markdown,
    ranks_chart,
    report,
)
from benchmarks.report import place


def row(recipe: str, iqm: float, width: float = 1.0) -> dict[str, object]:
    interval = {"value": iqm, "low": iqm - width, "high": iqm + width, "n": 60, "confidence": 0.95}
    return {"recipe": recipe, "mean": iqm, "iqm": iqm, "interval": interval,
            "iqm_interval": interval, "by_seed": {"0": iqm}, "alarms": []}  # fmt: skip


def data(mean: float) -> dict[str, object]:
    return {"recipe": "data", "mean": mean, "iqm": mean, "interval": None, "iqm_interval": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """offline is better than bc on one dataset, within the interval on another, worse on a third;
    bc10 was run on two."""
    rows = {
        "pendulum-stitch": [row("offline", 9.0), row("bc", 3.0), row("bc10", 5.0), data(1.0)],
        "lunarlander": [row("offline", 5.0), row("bc", 5.5), row("bc10", 7.0), data(8.0)],
        "gridworld": [row("offline", 1.0), row("bc", 9.0), {"recipe": "bc10", "mean": None}],
    }
    about = {"kind": "control", "group": "fit", "memory": False, "env": "E"}
    about |= {"command": "m", "commit": "c", "date": "d"}
    (tmp_path / "tables").mkdir()
    for name, found in rows.items():
        curve = {"recipe": "offline", "updates": 5, "seeds": 1, "interval": {"value": 2.0}}
        table = {**about, "rows": found, "curves": [curve] if name == "gridworld" else []}
        (tmp_path / "tables" / f"{name}.json").write_text(json.dumps(table))
    return tmp_path


def test_ranks_count_the_datasets_with_all_recipes(folder: Path) -> None:
    (ranks,) = report(folder)["ranks"]
    assert ranks["datasets"] == ["pendulum-stitch", "lunarlander"]
    # pendulum: offline 1, bc10 2, bc 3; lunarlander: bc10 1, bc 2, offline 3
    assert ranks["mean_rank"] == {"bc10": 1.5, "offline": 2.0, "bc": 2.5}
    assert list(ranks["mean_rank"]) == ["bc10", "offline", "bc"]


def test_recipes_for_continuous_actions_have_a_ranking_of_their_own(folder: Path) -> None:
    recorded = {
        name: {"kind": "control", "group": "fit", "memory": False, "env": "E", "curves": [],
               "rows": {r: row(r, iqm) for r, iqm in scores.items()}}
        for name, scores in {
            "pendulum-stitch": {"td3bc": 7.0},
            "recall": {"offline": 2.0, "bc": 2.0, "bc10": 1.0},
            "bandit-continuous": {"offline": 2.0, "bc": 1.0, "bc10": 0.0, "td3bc": 3.0},
        }.items()
    }  # fmt: skip
    anywhere, continuous = report(folder, recorded)["ranks"]
    assert anywhere["datasets"] == ["pendulum-stitch", "lunarlander", "recall", "bandit-continuous"]
    # 1, 3, 1.5, 1 for offline; the two of recall are equal
    assert anywhere["mean_rank"] == {"offline": 1.625, "bc10": 2.25, "bc": 2.125}
    assert continuous["datasets"] == ["pendulum-stitch", "bandit-continuous"]
    assert continuous["mean_rank"] == {"offline": 1.5, "td3bc": 1.5, "bc10": 3.5, "bc": 3.5}


def test_duels_are_decided_by_both_intervals(folder: Path) -> None:
    duels = report(folder)["duels"]
    assert duels["bc"] == {
        "better": ["pendulum-stitch"], "within": ["lunarlander"], "worse": ["gridworld"]
    }  # fmt: skip
    assert duels["bc10"]["worse"] == ["lunarlander"]
    assert duels["data"]["worse"] == ["lunarlander"]  # a number without an interval


def test_recorded_rows_stay_until_the_folder_has_them(folder: Path) -> None:
    def old(recipe: str) -> dict[str, object]:
        return {**row(recipe, 7.0), "commit": "old"}

    recorded = {
        "recall": {"kind": "memory", "group": "held-out", "memory": True, "env": "R",
                   "rows": {"bc": old("bc")}, "curves": []},
        "gridworld": {"kind": "sparse", "group": "fit", "memory": False, "env": "E",
                      "rows": {"bc": old("bc"), "iql": old("iql")},
                      "curves": [{"recipe": r, "updates": 1, "mean": 0.0} for r in ("bc", "iql")]},
    }  # fmt: skip
    found = report(folder, recorded)["datasets"]
    assert list(found) == ["pendulum-stitch", "lunarlander", "gridworld", "recall"]
    assert found["recall"]["rows"]["bc"]["commit"] == "old"
    assert found["recall"]["group"] == "fit"  # as in the field today
    rows = found["gridworld"]["rows"]
    assert {r: (x["iqm"], x["commit"]) for r, x in rows.items()} == {
        "offline": (1.0, "c"), "bc": (9.0, "c"), "iql": (7.0, "old")
    }  # fmt: skip
    curves = found["gridworld"]["curves"]
    assert [(p["recipe"], p["updates"]) for p in curves] == [("iql", 1), ("offline", 5)]


def test_the_page_and_the_pictures_show_every_dataset(folder: Path) -> None:
    result = report(folder)
    page = folder / "results.md"
    page.write_text("# Title\n<!-- field: begin -->\nold\n<!-- field: end -->\nend\n")
    place(page, "field", markdown(result))
    text = page.read_text()
    assert text.startswith("# Title") and text.endswith("end\n") and "old" not in text
    assert markdown(result) in text and "worse" in text
    line = next(line for line in text.splitlines() if line.startswith("| pendulum-stitch"))
    assert "**9** (8 … 10)" in line and "-155" in line and "**3**" not in line
    assert "lunarlander" in json.dumps(ranks_chart(result).to_dict())
    curves = json.dumps(curves_chart(result).to_dict())
    assert "gridworld" in curves and "lunarlander" not in curves
    for table in result["datasets"].values():
        table["curves"] = []
    assert curves_chart(result) is None


def test_a_page_without_its_markers_is_left_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in ("# Title\n", "<!-- field: begin -->\nold\n"):
        page.write_text(text)
        with pytest.raises(ValueError, match=r"lacks <!-- field: begin --> … <!-- field: end -->"):
            place(page, "field", "new")
        assert page.read_text() == text
