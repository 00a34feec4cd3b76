"""A comparison of recipes on the evaluation page: chosen by its tag, with the same numbers."""

import uuid
from types import SimpleNamespace

import pytest

from stepwell import Client
from stepwell.messages import MetricPoint
from tests.dashboard.conftest import Page, check, evaluate, open_folders, play, scale
from workbench.analysis.comparison import RATE, read_comparison
from workbench.analysis.confidence_intervals import bootstrap_grouped_mean

RETURNS = {("good", 0): [5.0, 7.0], ("good", 1): [8.0, 9.0], ("bad", 0): [1.0, 3.0]}


@pytest.fixture(scope="module")
def compared(service) -> str:
    """Recipes `good` with two seeds and two versions each, `bad` with one that has failed."""
    client, name = service.client(), f"t-{uuid.uuid4().hex[:12]}"
    play(client, name, "Toy-v0", 1.0, 2.0, 6.0)
    client.flush(name)
    tags = [f"comparison:{name}", "mine"]
    for (recipe, seed), returns in [*RETURNS.items(), (("bad", 1), None)]:
        run = f"{name}-{recipe}-{seed}"
        config = {"recipe": recipe, "dataset": name}
        client.create_run(run, "train", config=config, seed=seed, tags=tags)
        if returns is None:
            client.patch_run(run, status="failed", error="NaN in the data")
            continue
        client.log_metrics(run, [MetricPoint(key=RATE, step=200, value=100.0, time=0.0)])
        client.patch_run(run, status="finished")
        for version in (100, 200):
            played(client, f"{run}-eval-{version}", f"{run}/{version}", returns, tags)
    played(client, f"{name}-random", "random", [0.0, 0.5], tags)
    # Of the same policy, and not of the comparison.
    played(client, f"{name}-else", f"{name}-good-0/200", [99.0, 99.0], [])
    return name


def played(client: Client, run: str, policy: str, returns: list[float], tags: list[str]) -> None:
    client.create_run(run, "eval", config={"env": "Toy-v0"}, tags=tags)
    client.patch_run(run, status="finished")
    # The newest counts; an earlier one had other seeds.
    for seeds, values in (([7, 8], [-50.0, -50.0]), ([0, 1], returns)):
        evaluate(client, policy, "Toy-v0", values, run=run, seeds=seeds)


def test_a_chosen_comparison_is_a_table_with_its_query(
    service, client: Client, compared: str, page: Page
) -> None:
    drawn = page("evaluation", service.url, comparison=compared)
    check(drawn)
    table = drawn.dataframe[0].value.set_index("recipe")
    assert list(table.index) == ["good", "bad", "random", "data"]
    assert table["mean"].tolist() == [7.25, 2.0, 0.25, 3.0]
    assert table.loc["good", "seeds"] == 2 and table.loc["good", "updates"] == 200
    expected = bootstrap_grouped_mean([RETURNS["good", 0], RETURNS["good", 1]])
    assert table.loc["good", "interval of the mean"] == f"{expected.low:.2f} … {expected.high:.2f}"
    assert table.loc["good", "seconds"] == 2.0
    assert table.loc["bad", "not included"] == "seed 1: failed: NaN in the data"
    assert "normalised" not in table
    charts = [element.key for element in drawn.get("vega_lite_chart")]
    assert len(charts) >= 2  # intervals and curves
    query = open_folders(drawn).code[0].value
    rows = {row[0]: row for row in client.sql(query, timeout=60)}
    assert {recipe: (row[1], row[2]) for recipe, row in rows.items()} == {
        "good": (2, 7.25),
        "bad": (1, 2.0),
    }


def test_a_recipe_has_one_colour_in_all_charts(
    service, compared: str, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where data and random, which only one chart has, would take a recipe's colour."""
    monkeypatch.setattr("hashlib.sha256", lambda _: SimpleNamespace(digest=lambda: bytes(4)))
    drawn = page("evaluation", service.url, comparison=compared)
    every, recipes = (scale(drawn, chart) for chart in (0, 1))  # intervals, curves
    assert set(every) == {"good", "bad", "random", "data"} and set(recipes) == {"good", "bad"}
    assert recipes.items() <= every.items()


def test_only_evaluations_with_the_seeds_asked_for_are_read(client: Client, compared: str) -> None:
    policies = {f"{compared}-{recipe}-{seed}/{v}" for recipe, seed in RETURNS for v in (100, 200)}
    for seeds, first in (([0, 1], 0.0), ([7, 8], -50.0)):
        found = read_comparison(client, compared, seeds)
        assert set(found.evaluations) == policies | {"random"}
        assert found.evaluations["random"].returns[0] == first
    assert not read_comparison(client, compared, [0, 1, 2]).evaluations
    assert not read_comparison(client, compared, env="Other-v0").evaluations


@pytest.mark.parametrize("asked", [{}, {"comparison": "gone"}])
def test_no_comparison_is_drawn_until_one_is_chosen(
    service, compared: str, page: Page, asked: dict[str, str]
) -> None:
    drawn = page("evaluation", service.url, **asked)
    check(drawn)
    menu = drawn.selectbox(key="comparison")
    assert menu.value is None and compared in menu.options
    assert "recipe" not in drawn.dataframe[0].value
    menu.set_value(compared).run()
    check(drawn)
    assert "recipe" in drawn.dataframe[0].value
