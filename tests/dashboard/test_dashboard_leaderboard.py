"""Policies by environments: which cells there are, and of which statistic their intervals are."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import ranking
from dashboard.views import score_table
from tests.dashboard.conftest import Page, check, evaluate, play
from workbench.analysis.confidence_intervals import bootstrap_grouped_iqm, bootstrap_grouped_mean

ENVS = ("Hopper-v5", "Plain-v0", "Walker2d-v5")
RETURNS = {
    "bc": {"Hopper-v5": ([900.0, 1000.0, 1700.0, 1100.0], [1200.0, 1200.0, 1300.0, 100.0])},
    "dpg": {env: ([30.0, 10.0, 20.0, 60.0],) for env in ENVS},
}


@pytest.fixture(scope="module")
def scored(file_service: Any) -> Any:
    """Two recipes, one with two seeds, random actions and data."""
    client = file_service.client()
    for recipe, cells in RETURNS.items():
        for env, seeds in cells.items():
            for seed, returns in enumerate(seeds):
                run = f"{recipe}-{env}-{seed}"
                config = {"recipe": recipe, "dataset": env.lower(), "seed": seed}
                client.create_run(run, "train", config=config)
                evaluate(client, f"{run}/1", env, returns)
    evaluate(client, "random", "Plain-v0", [0.0, 1.0])
    play(client, "plain", "Plain-v0", 2.0, 4.0)
    return file_service


def shown(page: AppTest) -> pd.DataFrame:
    check(page)
    return page.dataframe[0].value.set_index("policy")


def test_policies_by_environments(scored: Any, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[float, str] = {}
    made = score_table.Score.of

    def spied(*args: Any) -> score_table.Score:
        score = made(*args)
        texts[round(float(score), 6)] = score.text
        return score

    monkeypatch.setattr(score_table.Score, "of", spied)
    drawn = page("evaluation", scored.url)
    table = shown(drawn)
    assert list(table.columns[-3:]) == list(ENVS)
    references = {"random", "data", "D4RL's random", "D4RL's expert"}
    assert set(table.index) == {"bc-Hopper-v5", "dpg", *references}
    assert table["Hopper-v5"]["D4RL's expert"] == 100.0
    assert table["Plain-v0"]["data"] == 3.0 and pd.isna(table["Hopper-v5"]["data"])
    assert table["Plain-v0"]["dpg"] == 30.0, "no reference, no scale"
    assert table["seeds"]["bc-Hopper-v5"] == "2" and pd.isna(table["average"]["bc-Hopper-v5"])
    low, high = table["Hopper-v5"]["dpg"], table["Walker2d-v5"]["dpg"]
    assert table["average"]["dpg"] == pytest.approx((low + high) / 2)
    both = RETURNS["bc"]["Hopper-v5"]
    for statistic, bootstrap in (("mean", bootstrap_grouped_mean), ("IQM", bootstrap_grouped_iqm)):
        texts.clear()
        drawn.segmented_control(key="statistic").set_value(statistic).run()
        found = ranking.normalised("Hopper-v5", bootstrap(both))
        assert found is not None
        assert shown(drawn)["Hopper-v5"]["bc-Hopper-v5"] == pytest.approx(found.value)
        expected = f"{found.value:.1f} ({found.low:.1f} … {found.high:.1f})"
        assert texts[round(found.value, 6)] == expected
    assert pd.isna(shown(drawn)["Hopper-v5"].get("D4RL's expert")), "D4RL published means only"
    captions = " ".join(c.value for c in drawn.caption)
    assert "--scripted MODULE:FUNCTION" in captions and "--random" not in captions
    evaluate(scored.client(), "scripted", "Plain-v0", [50.0])
    st.cache_data.clear()
    table = shown(page("evaluation", scored.url))
    assert table["Plain-v0"]["scripted"] == 50.0


def test_a_cell_opens_its_environment(scored: Any, page: Page) -> None:
    """Of a cell that has no environment nothing changes."""
    drawn = page("evaluation", scored.url)
    assert drawn.selectbox(key="env").options == ["all", *ENVS]
    for column, opened in (("policy", None), ("Walker2d-v5", "Walker2d-v5")):
        st.session_state[score_table.KEY] = {"selection": {"cells": [(0, column)]}}
        score_table._open(list(ENVS))
        assert st.session_state.get("env") == opened
    drawn = page("evaluation", scored.url, env="Walker2d-v5")
    assert list(shown(drawn)["policies"]["dpg-Walker2d-v5-0/1"].split()) == ["dpg-Walker2d-v5-0/1"]


@pytest.mark.parametrize(("most", "expected"), [(7, "ab…wxyz"), (26, None)])
def test_a_long_name_keeps_both_ends(most: int, expected: str | None) -> None:
    from dashboard.formatting import middle

    name = "abcdefghijklmnopqrstuvwxyz"
    assert middle(name, most) == (expected or name)
    for length, most in itertools.product(range(1, 40), range(3, 30)):
        assert len(middle("x" * length, most)) == min(length, most)
