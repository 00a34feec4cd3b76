"""The page of runs: a table that sorts, a selection that is in the address, curves with intervals,
configs that differ, tags of many runs at once."""

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import api
from dashboard.components import digest
from dashboard.curve_cache import Curves
from dashboard.views import runs_config, runs_curves, runs_table
from stepwell import Client
from stepwell.messages import MetricPoint
from tests.dashboard.conftest import Page, check, evaluate, no_traceback, open_folders, scale


def point(key: str, step: int, value: float) -> MetricPoint:
    return MetricPoint(key=key, step=step, value=value, time=1000.0 + 60 * step)


@pytest.fixture
def runs(client: Client, name: str) -> list[str]:
    """Two learning rates of two seeds each, in order of creation; the last one is running."""
    names = []
    for lr, seed in ((0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)):
        run = f"{name}-{lr}-{seed}"
        config = {"agent": {"lr": lr, "layers": [1, 2]}, "seed": seed, "run": run}
        client.create_run(run, "train", config=config, seed=seed)
        points = [point("loss/all", step, lr + seed + step) for step in range(3)]
        points += [point("data/epoch", step, step / 2) for step in range(3)]
        client.log_metrics(run, points)
        names.append(run)
    for run in names[:-1]:
        client.patch_run(run, status="finished")
    progress = {"updates": 25.0, "total": 100.0, "updates_per_second": 0.5}
    client.log_metrics(names[-1], [point(f"progress/{k}", 2, v) for k, v in progress.items()])
    return names


@pytest.fixture
def charted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[pd.DataFrame, dict[str, Any]]]:
    """The data and the options of the curves of a page, in place of drawing them."""
    found: list[tuple[pd.DataFrame, dict[str, Any]]] = []
    for kind in ("lines", "bands"):
        monkeypatch.setattr(
            runs_curves.charts, kind, lambda data, **how: found.append((data, how)) or ()
        )
    monkeypatch.setattr(runs_curves.st, "vega_lite_chart", lambda *_, **__: None)
    return found


def table(page: AppTest) -> pd.DataFrame:
    return page.dataframe[0].value.set_index("run")


def address(page: AppTest) -> list[str]:
    """The selection: AppTest has one value as text, and several as a list."""
    asked = page.query_params["run"]
    return asked if isinstance(asked, list) else [asked]


def click(page: AppTest, *rows: int) -> None:
    """What the browser sends when the boxes of these rows, and no others, are marked."""
    names = page.dataframe[0].value["run"].tolist()
    page.session_state[f"runs_{digest(names)}"] = {"selection": {"rows": list(rows)}}
    page.run()
    check(page)


def test_rows_that_are_marked_are_in_the_address(
    service, runs: list[str], name: str, page: Page
) -> None:
    drawn = page("runs", service.url, search=name)
    check(drawn)
    newest = runs[::-1]
    assert drawn.dataframe[0].value["run"].tolist() == newest
    assert drawn.dataframe[0].value["⬤"].tolist() == ["⬤", "⬤", "⬤", ""], "newest trainers at first"
    click(drawn, 1)
    assert address(drawn) == [newest[1]]
    click(drawn, 1, 3)
    assert address(drawn) == [newest[1], newest[3]], "in order of selection"
    assert drawn.dataframe[0].value["⬤"].tolist() == ["", "⬤", "", "⬤"]
    # Those selected elsewhere stay selected.
    drawn.text_input(key="search").set_value(newest[0]).run()
    check(drawn)
    click(drawn, 0)
    assert address(drawn) == [newest[1], newest[3], newest[0]]
    drawn.button(key="select_none").click().run()
    check(drawn)
    assert drawn.dataframe[0].value["⬤"].tolist() == [""]
    linked = page("runs", service.url, search=name, run="")
    check(linked)
    assert linked.dataframe[0].value["⬤"].tolist() == [""] * 4


def test_a_run_that_comes_moves_no_selection(
    service, client: Client, runs: list[str], name: str, page: Page
) -> None:
    """Streamlit selects positions; a newer row would push another run into the place."""
    drawn = page("runs", service.url, search=name)
    click(drawn, 0)
    client.create_run(f"{name}-newer", "train")
    api.refresh()
    drawn.run()
    check(drawn)
    assert address(drawn) == [runs[-1]]
    assert drawn.dataframe[0].value["⬤"].tolist() == ["", "⬤", "", "", ""]


def marks(page: AppTest, table: int = 0, by: str = "run") -> dict[str, str]:
    """Run → the colour of its mark in a table."""
    element = page.dataframe[table]
    # Rows of one colour share a rule.
    rules = re.findall(r"([^{}]*)\{\s*color: (#\w+)", element.proto.arrow_data.styler.styles)
    names = element.value[by].tolist()
    return {
        names[int(row)]: colour
        for cells, colour in rules
        for row in re.findall(r"_row(\d+)_col0", cells)
    }


def test_fifty_runs_have_fifty_colours_which_are_the_same_on_every_page(
    fresh_service, name: str, page: Page
) -> None:
    """A service of its own: the workers of other tests would take colours on their page."""
    service, client = fresh_service, fresh_service.client()
    names = [f"{name}-{i:02d}" for i in range(50)]
    tags = [f"comparison:{name}"]
    for i, run in enumerate(names):
        config = {"dataset": name, "recipe": run, "lr": i}
        client.create_run(run, "train", config=config, tags=tags)
        client.log_metrics(run, [point("loss", step, 1.0) for step in range(2)])
        client.patch_run(run, status="finished")
    drawn = page("overview", service.url)
    check(drawn)
    newest = marks(drawn)
    for run in names[::7]:
        client.heartbeat(f"{run}-w", role="train", run=run)
        client.create_run(f"{run}-eval", "eval", config={"env": name}, tags=tags)
        evaluate(client, f"{run}/1", name, [1.0], run=f"{run}-eval")
    whole: dict[str, str] = {}
    for at in (0, 25):
        drawn = page("runs", service.url, search=f"{name}-", run=names[at : at + 25])
        check(drawn)
        assert marks(drawn).items() <= (mine := scale(drawn)).items()
        whole |= mine
    assert list(whole) == names and len(set(whole.values())) == 50
    assert len(newest) > 5 and newest.items() <= whole.items()
    some = {run: whole[run] for run in names[::7]}
    drawn = page("evaluation", service.url, env=name, comparison=name)
    check(drawn)
    assert some.items() <= scale(drawn).items(), "the comparison"
    policies = {f"{run}/1": colour for run, colour in some.items()}
    assert scale(drawn, 1) == policies, "the leaderboard"
    assert marks(drawn, 0, "recipe").items() >= some.items()
    drawn = page("workers", service.url)
    check(drawn)
    assert some.items() <= marks(drawn).items()
    drawn = page("lineage", service.url, node=f"dataset:{name}")
    check(drawn)
    (drawing,) = drawn.get("graphviz_chart")
    assert dict(re.findall(r'"run:(\S+)" \[.*color="(#\w+)"', drawing.proto.spec)) == whole


def test_a_run_gets_a_title_which_tables_legends_and_the_search_have(
    service, client: Client, runs: list[str], name: str, page: Page, charted: list[Any]
) -> None:
    drawn = page("runs", service.url, part="Details", run=runs[0])
    drawn.text_input(key="run_title").set_value(f" Low rate {name} ")
    drawn.button(key="run_save").click().run()
    check(drawn)
    assert client.run(runs[0]).title == f"Low rate {name}"
    label = f"Low rate {name} ({runs[0]})"
    drawn = page("runs", service.url, search=f"low RATE {name}", metric="loss/all")
    check(drawn)
    assert drawn.dataframe[0].value["run"].tolist() == [runs[0]]
    assert drawn.dataframe[0].value["title"].tolist() == [f"Low rate {name}"]
    data, how = charted[-1]
    assert set(data["run"]) == {label} and list(how["colours"]) == [label]
    drawn = page("runs", service.url, search=name, part="Details")
    drawn.button(key="select_all").click().run()
    check(drawn)
    assert label in drawn.selectbox(key="detail_run").options
    drawn = page("runs", service.url, search=name, part="Config")
    drawn.button(key="select_all").click().run()
    assert label in drawn.dataframe[-1].value.columns


def test_times_numbers_progress_and_end_sort_as_what_they_are(
    service, runs: list[str], name: str, page: Page
) -> None:
    drawn = page("runs", service.url, search=name)
    frame = table(drawn)
    for column in ("started", "heartbeat", "ends"):
        assert isinstance(frame[column].dtype, pd.DatetimeTZDtype), column
    assert pd.api.types.is_numeric_dtype(frame["seed"])
    assert frame["progress"].iloc[0] == pytest.approx(0.25)
    assert frame["progress"].isna().tolist() == [False, True, True, True]
    left = (frame["ends"].iloc[0] - pd.Timestamp.now("UTC")).total_seconds()
    assert 60 < left < 170, "75 updates at 0.5 per second"
    assert frame["ends"].isna().tolist() == [False, True, True, True]


def test_columns_of_metrics_and_settings_are_in_the_address(
    service, client: Client, runs: list[str], name: str, page: Page
) -> None:
    shown = {"metrics": "loss/all", "settings": "agent.lr"}
    drawn = page("runs", service.url, search=name, **shown)
    check(drawn)
    frame = table(drawn)
    assert frame["loss/all "].tolist() == pytest.approx([3.2, 2.2, 3.1, 2.1])
    assert frame["config agent.lr"].tolist() == [0.2, 0.2, 0.1, 0.1]
    (sql,) = [code.value for code in open_folders(drawn).code if "map(" in code.value]
    newest = dict(client.sql(sql).to_pandas().set_index("name")["newest"].loc[runs[0]])
    assert newest == {"loss/all": pytest.approx(2.1)}
    assert "loss/all" in drawn.multiselect(key="metrics").options
    assert {"agent.lr", "agent.layers", "seed"} <= set(drawn.multiselect(key="settings").options)
    drawn.multiselect(key="settings").set_value(["agent.layers"]).run()
    check(drawn)
    assert table(drawn)["config agent.layers"].tolist() == ["[1, 2]"] * 4


def test_runs_are_filtered_by_settings_and_metrics(
    service, runs: list[str], name: str, page: Page
) -> None:
    """In the address like the other filters; a wrong condition is named, and can be mended."""
    where = "agent.lr = 0.1 and loss/all > 3"
    drawn = page("runs", service.url, search=name, where=where)
    check(drawn)
    assert table(drawn).index.tolist() == [runs[1]]
    drawn.text_input(key="where").set_value("agent.lr = 0.2").run()
    check(drawn)
    assert table(drawn).index.tolist() == [runs[3], runs[2]]
    drawn = page("runs", service.url, where="agent.lr = 7.125")
    check(drawn)
    assert drawn.info[0].value == "No run matches these filters."
    for wrong, said in (("agent.lr", "cannot read"), ("x.lr = 0.1", "agent.lr")):
        drawn.text_input(key="where").set_value(wrong).run()
        no_traceback(drawn)
        assert said in drawn.error[0].value
    drawn.text_input(key="where").set_value("").run()
    check(drawn)
    assert set(runs) <= set(table(drawn).index)


def test_archived_runs_are_shown_if_asked_for(
    service, client: Client, runs: list[str], name: str, page: Page
) -> None:
    client.patch_run(runs[2], tags=["keep"])
    drawn = page("runs", service.url, search=name)
    click(drawn, 0, 1)
    drawn.button(key="archive").click().run()
    check(drawn)
    assert [client.run(run).tags for run in runs] == [[], [], ["keep", "archived"], ["archived"]]
    assert drawn.dataframe[0].value["run"].tolist() == [runs[1], runs[0]]
    drawn.toggle(key="archived").set_value(True).run()
    check(drawn)
    assert drawn.dataframe[0].value["run"].tolist() == runs[::-1]
    drawn.button(key="unarchive").click().run()
    check(drawn)
    assert [client.run(run).tags for run in runs] == [[], [], ["keep"], []]


def test_tags_of_all_selected_runs_are_changed_at_once(
    service, client: Client, runs: list[str], name: str, page: Page
) -> None:
    client.patch_run(runs[2], tags=["old", "keep"])
    drawn = page("runs", service.url, search=name)
    click(drawn, 0, 1)
    drawn.text_input(key="tags_add").set_value("good, new")
    drawn.text_input(key="tags_remove").set_value("old")
    drawn.button(key="tags_go").click().run()
    check(drawn)
    assert [client.run(run).tags for run in runs] == [
        [], [], ["keep", "good", "new"], ["good", "new"],
    ]  # fmt: skip


def test_settings_that_differ_stand_side_by_side(
    service, runs: list[str], name: str, page: Page
) -> None:
    drawn = page("runs", service.url, search=name, part="Config", run=runs[0])
    check(drawn)
    drawn.query_params["run"] = [runs[0], runs[2]]
    drawn.run()
    check(drawn)
    frame = drawn.dataframe[-1].value
    assert frame["setting"].tolist() == ["agent.lr", "run"]
    assert frame[runs[0]].tolist() == ["0.1", runs[0]]
    assert frame[runs[2]].tolist() == ["0.2", runs[2]]
    drawn.toggle(key="config_all").set_value(True).run()
    check(drawn)
    settings = drawn.dataframe[-1].value["setting"].tolist()
    assert settings == ["agent.layers", "agent.lr", "run", "seed"]
    drawn.text_input(key="config_search").set_value("nothing like it").run()
    assert "No setting" in drawn.info[-1].value


@pytest.mark.parametrize("group", [runs_config.SEEDS, "agent.lr"])
def test_seeds_are_folded_to_mean_and_interval(
    service, runs: list[str], name: str, page: Page, group: str, charted: list[Any]
) -> None:
    drawn = page("runs", service.url, search=name, group=group, metric="loss/all", run=runs[0])
    check(drawn)
    assert ("group" in charted[-1][0]) == (group == runs_config.SEEDS), "one run differs from none"
    drawn = page("runs", service.url, search=name, group=group, metric="loss/all", run=runs)
    check(drawn)
    data, how = charted[-1]
    assert list(how["colours"]) == ["lr = 0.1 (2 runs)", "lr = 0.2 (2 runs)"]
    assert len(set(how["colours"].values())) == 2
    low = data[data["group"] == "lr = 0.1 (2 runs)"]
    assert low["x"].tolist() == [0, 1, 2]
    assert low["value"].tolist() == pytest.approx([0.6, 1.6, 2.6])
    assert (low["low"] < low["value"]).all() and (low["high"] > low["value"]).all()
    assert low["n"].tolist() == [2, 2, 2]


def test_runs_of_one_experiment_differ_in_seed_and_names_only() -> None:
    class Run:
        def __init__(self, name: str, **config: object) -> None:
            self.name, self.config = name, config

    runs = [
        Run("a", seed=0, agent={"lr": 1, "on": True}, run="a", none={}),
        Run("b", seed=1, agent={"lr": 1, "on": True}, run="b"),
        Run("c", seed=0, agent={"lr": 1}),
        Run("d"),
    ]
    found = runs_config.groups(runs, runs_config.SEEDS)  # type: ignore[arg-type]
    assert list(found.values()) == [["a", "b"], ["c"], ["d"]]
    assert list(found)[1:] == ["lr = 1, on = –", "d"]
    by_lr = runs_config.groups(runs, "agent.lr")  # type: ignore[arg-type]
    assert by_lr == {"lr = 1": ["a", "b", "c"], "lr = –": ["d"]}


def test_a_mean_is_taken_where_there_are_curves() -> None:
    short = pd.DataFrame({"x": [0.0, 2.0], "value": [0.0, 2.0]})
    long = pd.DataFrame({"x": [0.0, 1.0, 4.0], "value": [2.0, 3.0, 6.0]})
    found = runs_curves.fold([short, long])
    assert found["x"].tolist() == [0, 1, 2], "no jump where the short one ends"
    assert found["value"].tolist() == pytest.approx([1, 2, 3])
    assert found["n"].tolist() == [2, 2, 2]
    late = long.assign(x=long["x"] + 0.5)
    assert runs_curves.fold([short, late])["x"].tolist() == [0.5, 1.5, 2]
    steps = np.arange(10_000.0)
    many = runs_curves.fold([pd.DataFrame({"x": steps, "value": steps})])
    assert len(many) == runs_curves.GRID
    apart = runs_curves.fold([short, short.assign(x=[3.0, 4.0])])
    assert apart.empty and list(apart.columns) == list(found.columns)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((100, 40), "Drawn where all runs of a mean have values: `all` until 39 of 99"),
        ((100, 99), ""),
        ((100, 0), ""),  # one run has no value at all
    ],
)
def test_a_mean_that_ends_with_its_first_run_says_so(
    service, client: Client, name: str, page: Page, steps: tuple[int, ...], said: str,
    charted: list[Any],
) -> None:  # fmt: skip
    for seed, length in enumerate(steps):
        run = f"{name}-{seed}"
        client.create_run(run, "train", config={"seed": seed, "lr": 1})
        client.log_metrics(run, [point("m/value", step, 1.0) for step in range(length)])
        client.patch_run(run, status="finished")
    names = [f"{name}-{seed}" for seed in range(len(steps))]
    shown = page("runs", service.url, search=name, group=runs_config.SEEDS, run=names)
    check(shown)
    captions = [c.value for c in shown.caption if "all runs of a mean" in c.value]
    assert captions == ([said] if said else [])
    expected = "all (2 runs)" if min(steps) else "all (1 of 2 runs)"
    assert set(charted[-1][0]["group"]) == {expected}


def test_the_horizontal_axis_is_any_count_that_the_runs_report(
    service, client: Client, runs: list[str], page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    found = Curves().get(client.run(runs[0]), ["loss/all", "data/epoch"])
    assert runs_curves.line(found, "loss/all", "step")["x"].tolist() == [0, 1, 2]
    assert runs_curves.line(found, "loss/all", "time")["x"].tolist() == [0, 1, 2]
    assert runs_curves.line(found, "loss/all", "data/epoch")["x"].tolist() == [0, 0.5, 1]
    assert len(runs_curves.line(found, "loss/all", "data/none")) == 0
    drawn = page("runs", service.url, run=runs[0], x="data/epoch")
    check(drawn)
    assert drawn.selectbox(key="x").value == "data/epoch"
    assert drawn.selectbox(key="x").options == ["step", "time", "data/epoch"]
    # Another run has no such metric.
    client.create_run(f"{runs[0]}-bare", "train")
    client.log_metrics(f"{runs[0]}-bare", [point("loss/all", 1, 1.0)])
    drawn.query_params["run"] = f"{runs[0]}-bare"
    drawn.run()
    check(drawn)
    assert drawn.selectbox(key="x").value == "step"


def test_runs_that_have_ended_are_not_read_again(
    service, client: Client, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    asked: list[list[str]] = []
    real = Client.runs_page

    def spied(self: Client, **filters: object):
        if not filters.get("brief"):
            asked.append(list(filters["names"]))  # type: ignore[call-overload]
        return real(self, **filters)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "runs_page", spied)
    # Which runs are alive is asked each time; the cache would answer for three seconds.
    monkeypatch.setattr(api, "_named", api._named.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(api, "_live", api._live.__wrapped__)  # type: ignore[attr-defined]
    assert [r.name for r in api.chosen_runs([*runs, "gone"])] == runs
    assert [sorted(names) for names in asked] == [runs[:-1], [runs[-1]]]
    asked.clear()
    api.chosen_runs(runs)
    assert asked == [[runs[-1]]]
    client.patch_run(runs[0], notes="heard of again")
    assert [r.notes for r in api.chosen_runs(runs)] == ["heard of again", "", "", ""]


def test_long_names_are_drawn_with_both_ends(
    service, client: Client, name: str, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell has the whole name, and what is drawn is wide enough for it."""
    drawn: list[tuple[list[str], int]] = []
    draw = runs_table.st.dataframe

    def spied(styled: Any, **how: Any) -> Any:
        cells = [row[2]["display_value"] for row in styled._translate(False, False)["body"]]
        drawn.append((cells, how["column_config"]["run"]["width"]))
        return draw(styled, **how)

    long = [f"{name}-a-sweep-of-many-words-and-settings-seed-{seed}" for seed in (0, 1)]
    for run in (*long, f"{name}-b"):
        client.create_run(run, "train")
    monkeypatch.setattr(runs_table.st, "dataframe", spied)
    shown = page("runs", service.url, search=name)
    check(shown)
    assert table(shown).index.tolist() == [f"{name}-b", *reversed(long)]
    cells, width = drawn[0]
    assert len(set(cells)) == 3 and cells[0] == f"{name}-b"
    assert [cell[-6:] for cell in cells[1:]] == ["seed-1", "seed-0"]
    assert max(map(len, cells)) == runs_table.MOST_OF_NAME and 300 <= width <= 320
