"""Every page over a real service: empty, filled, and when nobody answers. Never a traceback."""

import io
import shlex
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import streamlit as st
from PIL import Image
from streamlit.testing.v1 import AppTest

from dashboard import api, components, curve_cache
from stepwell import Box, Client, Discrete, EnvSpec, cli
from stepwell.messages import MetricPoint
from tests.dashboard.conftest import Page, check, evaluate, no_traceback, open_folders, play, texts
from tests.index_file import write_index
from workbench.analysis.confidence_intervals import iqm
from workbench.analysis.doctor import Report

WITHOUT_SQL = ("console", "doctor", "lineage", "start", "admin")
VIEWS = [
    *("overview", "datasets", "trajectories", "doctor", "console", "lineage"),
    *("start", "runs", "evaluation", "workers", "admin"),
]
NOBODY = "http://127.0.0.1:9"
LENGTH = 12


@pytest.fixture(scope="module")
def filled(service) -> str:
    """What many tests look at, and none changes."""
    return fill(service.client(), f"t-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def own(client: Client, name: str) -> str:
    """The same, for one test alone."""
    return fill(client, name)


def fill(client: Client, name: str) -> str:
    """A dataset, two runs, a policy, an evaluation and a worker, all called after `name`."""
    image = Box((4, 4, 3), dtype="uint8", low=0, high=255)
    spec = EnvSpec.of({"vector": Box((2,)), "image": image}, Discrete(3), env="Toy-v0")
    client.create_dataset(name, spec, capacity={"steps": 1000}, description="Toys", tags=["toy"])
    for i in range(6):
        client.add(
            name,
            obs={
                "vector": np.full((LENGTH + 1, 2), i, np.float32),
                "image": np.full((LENGTH + 1, 4, 4, 3), i, np.uint8),
            },
            actions=np.arange(LENGTH) % 3,
            rewards=np.full(LENGTH, float(i), np.float32),
            terminated=True,
            env="Toy-v0",
            policy=f"{name}-a/1",
            purpose="eval" if i == 5 else "train",
        )
    client.flush(name)
    for letter in "ab":
        run = f"{name}-{letter}"
        client.create_run(run, "train", config={"lr": 0.5}, command=f"stepwell train --run {run}")
        points = [
            MetricPoint(key=key, step=step, value=1.0 / (step + 1), time=time.time())
            for key in ("train/loss", "train/odd[0]", "evaluation/return")
            for step in range(20)
        ]
        client.log_metrics(run, points)
        client.publish_policy(run, 1, b"weights", step=20)
        client.patch_run(run, log="hello from the log")
        evaluate(client, f"{run}/1", f"Env-{name}", [1.0, 2.0], run=run, dataset=name)
    client.heartbeat(f"{name}-w", role="train", run=f"{name}-a", counters={"updates": 7})
    client.create_launch("train", "offline", {"dataset": name})
    return name


@pytest.mark.sample(3)
@pytest.mark.parametrize("view", VIEWS)
def test_without_a_service_every_page_says_how_to_start_one(view: str, page: Page) -> None:
    drawn = page(view, NOBODY)
    only_the_notice(drawn)
    assert "stepwell serve" in texts(drawn)


def only_the_notice(page: AppTest) -> None:
    """One, in place of everything else, and no traceback."""
    no_traceback(page)
    assert [e.value.split(" at ")[0] for e in page.error] == ["No answer from the service"]
    assert [b.key for b in page.button] == ["try_again"]
    assert (len(page.metric), len(page.dataframe)) == (0, 0)


def test_every_page_of_an_empty_service_says_what_to_do_next(fresh_service, page: Page) -> None:
    """The first thing a newcomer sees."""
    hints = {
        "overview": "stepwell demo",
        "datasets": "imports?format=d4rl",
        "trajectories": "stepwell collect",
        "console": "T+1",
        "doctor": "stepwell import",
        "lineage": "stepwell import",
        "start": "stepwell launcher",
        "runs": "stepwell train",
        "evaluation": "stepwell evaluate",
        "workers": "stepwell serve",
        "admin": "own machine",
    }
    for view in VIEWS:
        drawn = page(view, fresh_service.url)
        check(drawn)
        assert hints[view] in texts(drawn), view


def test_a_service_that_stops_and_returns_is_one_notice_meanwhile(
    fresh_service, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every page that is open, also one of several live parts. It comes back without a hand,
    and what was chosen on it is still chosen."""
    monkeypatch.setattr(components, "RETRY_SECONDS", 0.0)
    with Client(fresh_service.url) as client:
        client.create_dataset("d", EnvSpec.of(Box((2,)), Box((1,))))
        for name in ("a", "b", "c"):
            client.create_run(name, "train")
        client.heartbeat("w", role="train", run="a")
    pages = {view: page(view, fresh_service.url) for view in VIEWS}
    for drawn in pages.values():
        check(drawn)
    runs, datasets = pages["runs"], pages["datasets"]
    runs.query_params["run"] = "b"
    runs.slider(key="smooth").set_value(0.5).run()
    fresh_service.stop()
    datasets.text_input(key="new_name").set_value("made")
    datasets.button(key="new_go").click().run()
    no_traceback(datasets)
    assert datasets.error
    assert not datasets.toast, "nobody may be told that it was done"
    api.refresh()
    for drawn in (runs, *pages.values()):
        only_the_notice(drawn.run())
    fresh_service.restart()
    for drawn in pages.values():
        drawn.run()
        check(drawn)
        assert "try_again" not in [b.key for b in drawn.button]
    assert runs.query_params["run"] == "b"
    assert runs.slider(key="smooth").value == 0.5


def writing() -> None:
    """A page, drawn by AppTest."""
    import streamlit as st

    from dashboard import api, components

    def write() -> None:
        raise api.ServiceUnreachable("the connection broke")

    st.text_input("Name", "kept")
    assert not components.attempt(write, "done")


def test_after_a_write_without_an_answer_the_input_stays() -> None:
    drawn = AppTest.from_function(writing, default_timeout=120).run()
    no_traceback(drawn)
    assert drawn.error[0].value == "Not known whether this was done: the connection broke"
    assert drawn.text_input[0].value == "kept" and not drawn.toast


def test_a_part_that_breaks_while_the_service_is_ready_is_not_asked_without_a_pause(
    service, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that cuts one route must not make the page draw itself over and over."""
    asked = []

    def broken(*_: object, **__: object) -> None:
        asked.append(1)
        raise api.ServiceUnreachable("the connection broke")

    monkeypatch.setattr(api, "sql", broken)
    drawn = page("trajectories", service.url)
    only_the_notice(drawn)
    first = len(asked)
    drawn.run()
    only_the_notice(drawn)
    assert len(asked) == first > 0


@pytest.mark.parametrize("view", VIEWS)
def test_every_page_draws_what_there_is_and_the_queries_behind_it(
    view: str, filled: str, service, client: Client, page: Page
) -> None:
    """Every number has its SQL, drawn once it is opened; one that does not run would be worse than
    none."""
    drawn = page(view, service.url)
    check(drawn)
    assert len(drawn.dataframe) + len(drawn.metric) + len(drawn.selectbox) > 0
    assert queries(drawn) == []
    found = queries(open_folders(drawn))
    assert bool(found) == (view not in WITHOUT_SQL)
    for query in found:
        client.sql(query)


def queries(page: AppTest) -> list[str]:
    """The SQL that it shows."""
    return [c.value for c in page.code if c.value.lstrip().upper().startswith(("SELECT", "WITH"))]


def test_overview_counts(filled: str, service, client: Client, page: Page) -> None:
    drawn = page("overview", service.url)
    check(drawn)
    figures = {m.label: m.value for m in drawn.metric}
    total = client.sql("SELECT count(*) FROM trajectories").one()
    assert figures["Trajectories"] == f"{total:,}"


def test_what_needs_attention_is_named_and_counted_over_all_there_is(
    fresh_service, page: Page
) -> None:
    """The newest of a list say nothing about the rest: the service counts."""
    with Client(fresh_service.url) as client:
        client.create_run("loud", "train")
        client.heartbeat("w", role="train", run="loud")
        drawn = page("overview", fresh_service.url)
        check(drawn)
        assert drawn.success[0].value == "Nothing needs attention."
        client.heartbeat("x", role="eval", state="failed", last_error="Trace\nValueError: no")
        client.patch_run("loud", status="failed", error="NaN everywhere")
        for i in range(130):
            client.create_run(f"quiet-{i:03d}", "train")
        # Nobody reports for an hour, as the index has it.
        with write_index(fresh_service.data / "index.sqlite", timeout=60) as index:
            index.execute(
                "UPDATE runs SET heartbeat_at = heartbeat_at - 3600 WHERE name LIKE 'quiet%'"
            )
        client.create_run("newest", "train")
        api.refresh()
        drawn.run()
        check(drawn)
        assert not drawn.success
        figures = {m.label: m.value for m in drawn.metric}
        assert (figures["Running"], figures["Silent"]) == ("1", "130")
        # On a busy machine the workers are silent, too, before the page is drawn.
        warnings = [w.value for w in drawn.warning]
        (silent,) = (w for w in warnings if "130 running runs are silent" in w)
        assert "`quiet-129` (1 h ago)" in silent
        assert "and 120 more" in silent
        assert any("`loud`: NaN everywhere" in w for w in warnings)
        assert any("x: ValueError: no" in w for w in warnings)
        listed = page("runs", fresh_service.url, status="silent")
        check(listed)
        assert listed.dataframe[0].value["run"].tolist()[0] == "quiet-129"
        assert set(listed.dataframe[0].value["status"]) == {components.mark("lost")}


def test_every_run_of_a_long_list_can_be_reached(
    service, client: Client, name: str, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By paging, by search and by address; and what is not shown is counted."""
    monkeypatch.setattr(api, "PAGE", 10)
    for i in range(25):
        client.create_run(f"{name}-{i:02d}", "train", tags=[f"Odd-{name}"] if i % 2 else [])
    drawn = page("runs", service.url, search=f"{name}-")
    seen: list[str] = []
    for place in ("1–10", "11–20", "21–25"):
        check(drawn)
        assert f"Rows {place} of 25, newest first" in texts(drawn)
        seen += drawn.dataframe[0].value["run"].tolist()
        if not drawn.button(key="runs_older").disabled:
            drawn.button(key="runs_older").click().run()
    assert seen == [f"{name}-{i:02d}" for i in range(24, -1, -1)]
    drawn.button(key="runs_newer").click().run()
    assert "Rows 11–20 of 25" in texts(drawn)
    # Another filter begins at its newest.
    drawn.text_input(key="search").set_value(f"odd-{name}").run()
    check(drawn)
    assert "Rows 1–10 of 12" in texts(drawn)
    linked = page("runs", service.url, run=f"{name}-00")
    check(linked)
    assert "1 selected, 1 of them not in these rows" in texts(linked)


def test_only_open_sections_are_read_and_drawn(
    service, client: Client, name: str, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of three hundred curves costs what one sees of it."""
    client.create_run(name, "train")
    keys = [f"{part}/m{i:02d}" for part in ("loss", "other") for i in range(30)]
    client.log_metrics(name, [MetricPoint(key=k, step=1, value=1.0, time=0.0) for k in keys])
    asked: list[str] = []
    whole = curve_cache._series

    def spied(name: str, wanted: list[str], points: int, after: list[int] | None = None):
        asked.extend(wanted)
        return whole(name, wanted, points, after)

    monkeypatch.setattr(curve_cache, "_series", spied)
    drawn = page("runs", service.url, run=name)
    check(drawn)
    keys = [f"loss/m{i:02d}" for i in range(30)]

    def shown() -> list[str]:
        return sorted(m.value.strip("`") for m in drawn.markdown)

    assert asked == shown() == keys[:4]
    drawn.button(key="section_all_loss").click().run()
    check(drawn)
    assert shown() == keys[:12] and asked[4:] == keys[4:12]
    drawn.pagination(key="section_page_loss").set_value(3).run()
    check(drawn)
    assert asked[12:] == keys[24:] == shown()
    assert drawn.query_params["all"] in ("loss", ["loss"])
    linked = page("runs", service.url, run=name, all="loss")
    check(linked)
    assert linked.button(key="section_all_loss").label == "Show 4"
    assert sorted(m.value.strip("`") for m in linked.markdown) == keys[:12]
    drawn.text_input(key="metric").set_value("loss/m0").run()
    check(drawn)
    assert shown() == keys[:10], "fewer pages than the one that was shown"
    drawn.text_input(key="metric").set_value("").run()
    asked.clear()
    drawn.button(key="section_all_loss").click().run()
    check(drawn)
    assert shown() == keys[:4]
    assert drawn.button(key="section_all_loss").label == "Show all 30"
    drawn.text_input(key="metric").set_value("OTHER/m07").run()
    check(drawn)
    assert asked == ["other/m07"]
    assert "section_all_other" not in {b.key for b in drawn.button}
    drawn.text_input(key="metric").set_value("nothing like this").run()
    assert "None of 60 metrics" in texts(drawn)


def test_a_page_goes_idle_when_what_it_shows_has_ended(
    service, client: Client, name: str, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals: list[float | None] = []
    real = components.st.fragment

    def fragment(function: Any = None, **how: Any) -> Any:
        intervals.extend(how.values())
        return real(function, **how)

    monkeypatch.setattr(components.st, "fragment", fragment)
    client.create_run(name, "train")
    drawn = page("runs", service.url, run=name, search=name)
    check(drawn)
    assert intervals and set(intervals) == {components.LIVE_SECONDS}
    client.patch_run(name, status="finished")
    api.refresh()
    intervals.clear()
    drawn.run()
    check(drawn)
    assert intervals and set(intervals) == {components.IDLE_SECONDS}
    intervals.clear()
    drawn.session_state["live"] = False
    drawn.run()
    assert intervals and set(intervals) == {None}


def test_the_log_says_what_it_leaves_out(service, client: Client, name: str, page: Page) -> None:
    client.create_run(name, "train")
    client.patch_run(name, log="\n".join(f"line {i}" for i in range(600)))
    drawn = page("runs", service.url, run=name, part="Details")
    check(drawn)
    assert "line 599" in texts(drawn) and "line 99\n" not in texts(drawn)
    assert "The last 500 of 600 lines, newest last" in texts(drawn)
    drawn.text_input(key="log_search").set_value("LINE 10").run()
    check(drawn)
    assert "\n".join(["line 10", *(f"line 10{i}" for i in range(10))]) in texts(drawn)
    assert "11 of 600 lines, newest last" in texts(drawn)


def test_dataset_detail_follows_the_url(filled: str, service, page: Page) -> None:
    drawn = page("datasets", service.url, dataset=filled)
    check(drawn)
    assert drawn.selectbox(key="dataset").value == filled
    figures = {m.label: m.value for m in drawn.metric}
    assert figures["Trajectories"] == "5"
    assert figures["Transitions"] == str(5 * LENGTH)
    assert figures["Evaluation"] == "1"
    assert figures["Mean return"] == f"{np.mean([i * LENGTH for i in range(5)]):.2f}"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("Schema", "digest of the layout"),
        ("Versions", "No version yet"),
        ("Snapshots", "No snapshot of this dataset"),
        ("Imports", ""),
        ("Manage", "Delete dataset"),
        ("Gone", "By policy"),
    ],
)
def test_only_the_open_tab_of_a_dataset_is_drawn(
    filled: str, service, page: Page, part: str, text: str
) -> None:
    drawn = page("datasets", service.url, dataset=filled, dataset_tab=part)
    check(drawn)
    assert text in texts(drawn)
    assert ("By policy" in texts(drawn)) == (part == "Gone")
    assert bool(drawn.metric) == (part == "Gone")
    open_folders(drawn)
    check(drawn)


def test_a_stale_link_does_not_break_a_page(service, filled: str, page: Page) -> None:
    """Datasets and runs get deleted; bookmarks stay."""
    for view, query in (
        ("datasets", {"dataset": "gone"}),
        ("runs", {"run": "gone"}),
        ("evaluation", {"env": "gone", "evaluation": "gone"}),
        ("trajectories", {"dataset": "gone", "page": "99", "t": "999999"}),
    ):
        check(page(view, service.url, **query))


@pytest.mark.parametrize(
    ("query", "returns"),
    [
        ({"purpose": "train"}, [48.0, 36.0, 24.0, 12.0, 0.0]),
        ({"where": '"return" > 30'}, [60.0, 48.0, 36.0]),
        ({"where": '"return" > 30 -- the good'}, [60.0, 48.0, 36.0]),
    ],
)
def test_trajectories_filter_by_the_url(
    filled: str, service, page: Page, query: dict[str, str], returns: list[float]
) -> None:
    drawn = page("trajectories", service.url, dataset=filled, order="best return", **query)
    check(drawn)
    assert drawn.dataframe[0].value["return"].tolist() == returns


@pytest.mark.parametrize(
    "where",
    [
        "retrun > 3",
        "false) or (dataset <> ''",
        "false) union all select * from trajectories where (true",
        "true; select 1",
        "/* not closed",
    ],
)
def test_a_condition_that_is_wrong_or_would_lift_the_other_filters_is_an_error(
    filled: str, service, page: Page, where: str
) -> None:
    """A link with a condition may come from anybody, and all that match can be labelled."""
    drawn = page("trajectories", service.url, dataset=filled, where=where)
    no_traceback(drawn)
    (error,) = drawn.error
    assert "retrun" not in where or "retrun" in error.value
    assert not drawn.dataframe
    assert not any(button.key == "many_apply" for button in drawn.button)


def test_the_episode_viewer_shows_the_step_of_the_url(
    filled: str, service, client: Client, page: Page
) -> None:
    """A link to one step of one trajectory is how people talk about data."""
    (best, *_) = client.trajectories(filled, order="-return").items
    drawn = page("trajectories", service.url, dataset=filled, id=best.id, t="3")
    check(drawn)
    assert drawn.slider(key="t").value == 3
    row = drawn.dataframe[-1].value
    shown = dict(zip(row["column"], row["value"], strict=True))
    assert shown["obs.vector"] == "5, 5"
    assert (shown["action"], shown["reward"]) == ("0", "5")
    assert {m.label: m.value for m in drawn.metric}["Return"] == "60.000"
    drawn.slider(key="t").set_value(LENGTH).run()
    check(drawn)
    last = drawn.dataframe[-1].value
    assert "none: the last row is an observation only" in last["value"].tolist()


def test_an_annotated_episode_shows_the_critics_values_of_its_steps(
    own: str, service, client: Client, page: Page
) -> None:
    best, other, *_ = client.trajectories(own, order="-return").items
    values = {
        "q": [t / 2 for t in range(LENGTH)],
        "v": [1.25] * LENGTH,
        "advantage": [None, *[0.75] * (LENGTH - 1)],
        "weight": [1.0] * LENGTH,
    }
    client.annotate(own, "critic", "r/1", [{"trajectory": best.id, **values}])

    def captions(identity: str, t: int) -> list[str]:
        drawn = page("trajectories", service.url, dataset=own, id=identity, t=str(t))
        check(drawn)
        specs = [chart.proto.spec for chart in drawn.get("vega_lite_chart")]
        titles = ("Q and V (return)", "advantage")
        charted = [title for title in titles if any(title in spec for spec in specs)]
        assert charted == (list(titles) if identity == best.id else [])
        return [caption.value for caption in drawn.caption]

    assert "Annotations: critic" in captions(best.id, 3)
    assert "t = 3: q 1.500 · v 1.250 · advantage 0.750 · weight 1.000" in captions(best.id, 3)
    assert "t = 0: q 0.000 · v 1.250 · advantage – · weight 1.000" in captions(best.id, 0)
    assert not any("Annotations" in caption for caption in captions(other.id, 3))


def test_two_episodes_are_shown_side_by_side(
    filled: str, service, client: Client, page: Page
) -> None:
    best, second, *_ = client.trajectories(filled, order="-return").items
    drawn = page("trajectories", service.url, dataset=filled, id=best.id, other=second.id, t="3")
    check(drawn)
    assert [m.value for m in drawn.metric if m.label == "Return"] == ["60.000", "48.000"]
    shown = [dict(zip(f.value["column"], f.value["value"], strict=True))
             for f in drawn.dataframe[-2:]]  # fmt: skip
    assert [row["obs.vector"] for row in shown] == ["5, 5", "4, 4"]


def test_an_episode_plays_to_its_end(filled: str, service, client: Client, page: Page) -> None:
    (best, *_) = client.trajectories(filled, order="-return").items
    drawn = page("trajectories", service.url, dataset=filled, id=best.id, t=str(LENGTH - 1))
    drawn.button(key="play").click().run()
    check(drawn)
    assert drawn.button(key="play").label == "Pause"
    drawn.button(key="play").click().run()
    assert drawn.button(key="play").label == "Play"
    drawn.button(key="forward").click().run()
    drawn.button(key="forward").click().run()
    assert drawn.slider(key="t").value == LENGTH
    drawn.button(key="play").click().run()
    assert drawn.slider(key="t").value < LENGTH, "from the end it begins again"
    drawn.button(key="play").click().run()
    drawn.button(key="back").click().run()
    check(drawn)


def test_next_and_previous_walk_through_the_list(
    filled: str, service, client: Client, page: Page
) -> None:
    ids = [item.id for item in client.trajectories(filled, order="-seq").items]
    drawn = page("trajectories", service.url, dataset=filled, id=ids[0])
    assert drawn.button(key="previous").disabled
    drawn.button(key="next").click().run()
    assert drawn.text_input(key="id").value == ids[1]
    drawn.button(key="previous").click().run()
    assert drawn.text_input(key="id").value == ids[0]
    check(drawn)


def test_an_unknown_trajectory_is_a_message(service, filled: str, page: Page) -> None:
    drawn = page("trajectories", service.url, id="01900000-0000-7000-8000-000000000000")
    no_traceback(drawn)
    assert "not_found" in drawn.error[0].value


def test_the_console_answers_and_explains(service, filled: str, page: Page) -> None:
    query = f"SELECT length FROM trajectories WHERE dataset = '{filled}' ORDER BY seq"
    drawn = page("console", service.url, q=query)
    check(drawn)
    assert drawn.dataframe[0].value["length"].tolist() == [LENGTH] * 6
    drawn.text_area(key="q").set_value("SELECT nothing FROM nowhere").run()
    no_traceback(drawn)
    assert "nowhere" in drawn.error[0].value
    drawn.text_area(key="q").set_value("DROP TABLE trajectories").run()
    assert "sql_not_allowed" in drawn.error[0].value


def test_every_example_of_the_console_runs(service, filled: str, page: Page) -> None:
    from dashboard.views.console import EXAMPLES

    drawn = page("console", service.url)
    for name in EXAMPLES:
        drawn.button(key=f"example_{name}").click().run()
        check(drawn)


def test_runs_show_curves_of_those_chosen(service, filled: str, page: Page) -> None:
    drawn = page("runs", service.url, run=f"{filled}-a")
    check(drawn)
    assert "1 selected" in texts(drawn)
    seen = texts(drawn)
    for what in ("train/loss", "train/odd[0]", "evaluation/return"):
        assert what in seen
    drawn.query_params["run"] = [f"{filled}-a", f"{filled}-b"]
    drawn.run()
    check(drawn)
    assert "2 selected" in texts(drawn)


def test_alarms_of_the_chosen_runs_are_shown(service, page: Page) -> None:
    name, said = f"alarmed-{uuid.uuid4().hex[:8]}", "Q has reached 17; <b>no</b> return exceeds 1"
    with service.client() as client:
        for run in (name, f"{name}-fine"):
            client.create_run(run, "train")
        alarm = {"key": "q_above_data", "message": said, "update": 1400, "value": 16.0}
        client.patch_run(name, alarms=[alarm])
        client.create_run(f"{name}-worse", "train")
        other = {"key": "td_error", "message": "by 3", "update": 9, "value": 2.0}
        client.patch_run(f"{name}-worse", alarms=[alarm, other])
    drawn = page("runs", service.url, run=name)
    check(drawn)
    assert [w.value for w in drawn.warning] == [f"Run `{name}` has 1 alarm:"]
    assert f"q_above_data, since update 1,400: {said}" in [code.value for code in drawn.code]
    table = drawn.dataframe[0].value.set_index("run")
    assert table.loc[name, "alarms"] == "q_above_data" and table.loc[f"{name}-fine", "alarms"] == ""
    assert table.loc[f"{name}-worse", "alarms"] == "q_above_data +1"
    drawn.query_params["run"] = f"{name}-fine"
    drawn.run()
    check(drawn)
    assert not drawn.warning


def test_policies_show_their_estimates(service, client: Client, name: str, page: Page) -> None:
    client.create_run(name, "train")
    for version in (1, 2):
        client.publish_policy(name, version, b"weights", step=version)
    drawn = page("runs", service.url, run=name, part="Details")
    check(drawn)
    assert not [d for d in drawn.dataframe if "estimate (95 %)" in d.value]
    values = {"return": 3.25, "low": 2.5, "high": 4.0}
    points = [
        MetricPoint(key=f"estimate/{what}", step=2, value=value, time=time.time())
        for what, value in values.items()
    ]
    client.log_metrics(name, points)
    st.cache_data.clear()  # a page may show what it read a few seconds ago
    drawn.run()
    check(drawn)
    (table,) = [d.value for d in drawn.dataframe if "estimate (95 %)" in d.value]
    shown = dict(zip(table["version"], table["estimate (95 %)"], strict=True))
    assert shown == {2: "3.25 (2.5 … 4)", 1: ""}


def test_evaluations_are_ranked_with_their_seeds(service, filled: str, page: Page) -> None:
    drawn = page("evaluation", service.url, env=f"Env-{filled}", one_open="true")
    check(drawn)
    table = drawn.dataframe[0].value
    assert table["policies"].tolist() == [f"{filled}-a/1, {filled}-b/1"]
    assert table["mean"].tolist() == [1.5]
    assert drawn.dataframe[-1].value["return"].tolist() == [1.0, 2.0]
    assert len(drawn.get("video")) == len(drawn.get("image")) == 0
    command = f"stepwell evaluate --policy {filled}-b/1 --env Env-{filled} --videos 3"
    assert command in texts(drawn), "how to record some"


def test_a_title_stands_with_the_name_of_a_run(
    own: str, service, client: Client, page: Page
) -> None:
    """Text of people: no HTML and no Markdown."""
    title = "*Big* <b>`batch`</b>"
    for letter in "ab":
        client.patch_run(f"{own}-{letter}", title=title)
    titled = f"{title} ({own}-a)"
    asked = {"node": f"run:{own}-a", "search": "*big*", "one_open": "true", "env": f"Env-{own}"}
    for view, shown in {
        "overview": {f"{own}-a", f"{own}-b", title},
        "runs": {f"{own}-a", f"{own}-b", title},
        "evaluation": {f"{title} ({own})"},  # both seeds have the title
        "workers": {titled},
        "lineage": {titled},
    }.items():
        drawn = page(view, service.url, **asked)
        check(drawn)
        cells = {str(cell) for table in drawn.dataframe for cell in table.value.to_numpy().ravel()}
        assert shown <= cells, view
        if view == "evaluation":
            assert any(title in label for label in drawn.selectbox(key="evaluation").options)
    menu = drawn.selectbox(key="node")
    assert menu.value == f"run:{own}-a" and f"run {titled}" in menu.options
    menu.set_value(f"dataset:{own}").run()
    check(drawn)
    # A link outlives a change of the title.
    assert drawn.query_params["node"] in (f"dataset:{own}", [f"dataset:{own}"])


def test_videos_of_an_evaluation_are_played(service, own: str, client: Client, page: Page) -> None:
    """One at a time, with the return of what it shows."""
    evaluation = client.evaluations(env=f"Env-{own}")[0].id
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 255)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    gif = {"media_type": "image/gif", "total_reward": 2.0, "length": 7}
    client.put_video(evaluation, 1, file.getvalue(), **gif)
    mp4 = {"media_type": "video/mp4", "total_reward": 1.25, "length": 1200}
    client.put_video(evaluation, 0, b"\0\0\0\x20ftypisom", **mp4)
    drawn = page("evaluation", service.url, env=f"Env-{own}", one_open="true")
    check(drawn)
    assert "stepwell evaluate" not in texts(drawn)
    choice = drawn.selectbox(key="video")
    assert choice.options == ["seed 1: return 2, 7 steps", "seed 0: return 1.25, 1,200 steps"]
    assert (len(drawn.get("image")), len(drawn.get("video"))) == (1, 0)
    choice.set_value(0).run()
    check(drawn)
    assert (len(drawn.get("image")), len(drawn.get("video"))) == (0, 1)
    assert drawn.get("video")[0].proto.loop


def test_workers_show_their_heartbeat_and_a_line_to_copy(service, filled: str, page: Page) -> None:
    drawn = page("workers", service.url)
    check(drawn)
    table = drawn.dataframe[0].value.set_index("worker")
    assert table.loc[f"{filled}-w", "counters"] == "updates 7"
    assert "stepwell collect" in texts(drawn)


def test_a_query_has_parameters_whose_values_are_in_the_url(
    filled: str, service, page: Page
) -> None:
    query = "SELECT seq FROM trajectories WHERE dataset = $name AND seq > $low ORDER BY seq"
    drawn = page("console", service.url, q=query, param_name=filled)
    check(drawn)
    assert "Give $low a value" in drawn.info[0].value
    drawn.text_input(key="param_low").set_value("4").run()
    check(drawn)
    assert drawn.dataframe[0].value["seq"].tolist() == [5, 6]
    open_folders(drawn)
    assert "--param name=" in drawn.code[-1].value and "--param low=4" in drawn.code[-1].value


def test_python_and_command_line_ask_for_the_same_rows(
    filled: str,
    service,
    page: Page,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    query = "SELECT trajectory_id, t FROM steps WHERE t >= $first ORDER BY ALL"
    asked = {"q": query, "dataset": filled, "param_first": "1"}
    drawn = page("console", service.url, **asked, limit="3", timeout="60")
    check(open_folders(drawn))
    shown = drawn.dataframe[0].value
    assert len(shown) == 3
    program, command = (c.value for c in drawn.code[-2:])
    made: dict[str, Any] = {}
    exec(program, made)
    pd.testing.assert_frame_equal(made["frame"].reset_index(drop=True), shown, check_dtype=False)
    words = shlex.split(command)
    assert words[words.index("--timeout") + 1] == "60.0"
    monkeypatch.setenv("STEPWELL_URL", service.url)
    capsys.readouterr()
    assert cli.main([*words[1:], "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
    drawn = page("console", service.url, **asked, limit="1000", timeout="5")
    check(open_folders(drawn))
    for line in drawn.code[-2:]:
        assert filled in line.value
        assert "timeout" not in line.value and "limit" not in line.value


def test_a_link_opens_a_chart_whose_settings_are_all_defaults(
    filled: str, service, page: Page
) -> None:
    query = f"SELECT seq, length FROM trajectories WHERE dataset = '{filled}'"
    drawn = page("console", service.url, q=query)
    check(drawn)
    assert "chart" not in {c.key for c in drawn.segmented_control}
    drawn.session_state["chart_open"] = True
    check(drawn.run())
    assert "chart" in {c.key for c in drawn.segmented_control}
    linked = page("console", service.url, q=query, chart_open="true")
    check(linked)
    assert "chart" in {c.key for c in linked.segmented_control}


def test_a_chart_of_another_query_leaves_no_column_behind(filled: str, service, page: Page) -> None:
    query = f"SELECT policy, seq, length FROM trajectories WHERE dataset = '{filled}'"
    drawn = page("console", service.url, q=query, chart="line", chart_x="seq", chart_by="policy")
    check(drawn)
    assert drawn.selectbox(key="chart_by").value == "policy"
    for kind in ("bars", "dots", "histogram"):
        drawn.segmented_control(key="chart").set_value(kind).run()
        check(drawn)
    drawn.text_area(key="q").set_value(query.replace("seq, ", "")).run()
    check(drawn)
    assert drawn.selectbox(key="chart_x").value == "policy"


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow"])
def test_the_whole_answer_is_a_file(
    filled: str, service, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    query = "SELECT seq, tags FROM trajectories WHERE dataset = $name ORDER BY seq"
    data = io.BytesIO(api.whole_answer(query, {"name": filled}, None, suffix))
    read = {"csv": pd.read_csv, "parquet": pd.read_parquet, "arrow": pd.read_feather}[suffix]
    assert read(data)["seq"].tolist() == [1, 2, 3, 4, 5, 6]


def test_an_answer_with_ids_is_a_selection_to_train_on(
    filled: str,
    service,
    client: Client,
    page: Page,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = (
        f"SELECT id, dataset FROM trajectories WHERE dataset = '{filled}' AND purpose = 'train'\n"
        'ORDER BY "return" DESC LIMIT 2 -- the best'
    )
    drawn = page("console", service.url, q=query.replace("SELECT id, dataset", "SELECT id"))
    check(open_folders(drawn))
    (command,) = [c.value for c in drawn.code if c.value.startswith("stepwell train")]
    words = shlex.split(command)
    assert words[words.index("--dataset") + 1] == filled
    where = words[words.index("--where") + 1]
    assert client.create_snapshot(dataset=filled, where=where).trajectories == 2
    (program,) = [c.value for c in drawn.code if c.value.startswith("from stepwell.torch")]
    monkeypatch.setenv("STEPWELL_URL", service.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: dict[str, Any] = {}
    exec(program, made)
    assert client.snapshot(made["windows"].snapshot).trajectories == 2
    made["windows"].close()


def test_the_leaderboard_folds_seeds_and_has_references(
    own: str, service, client: Client, page: Page
) -> None:
    """Two runs with one config are a row; its interval is that of the statistic drawn."""
    env = f"Env-{own}"
    for policy, returns in ((f"{own}-a/2", [9.0, 9.0]), ("random", [0.0, 0.5])):
        evaluate(client, policy, env, returns)
    drawn = page("evaluation", service.url, env=env)
    check(drawn)
    table = drawn.dataframe[0].value
    assert table["policy"].tolist() == [own, "random"]
    assert table["seeds"].tolist() == [2, 1]
    assert table["mean"].tolist() == [5.25, 0.25]
    assert table["policies"][0] == f"{own}-a/2, {own}-b/1"
    drawn.segmented_control(key="statistic").set_value("IQM").run()
    check(drawn)
    evaluate(client, f"{own}-a/3", env, [-1.0])
    st.cache_data.clear()
    drawn = page("evaluation", service.url, env=env)
    assert drawn.dataframe[0].value["mean"][0] == 0.25
    drawn = page("evaluation", service.url, env=env, pick="best")
    assert drawn.dataframe[0].value["mean"][0] == 5.25


def test_d4rl_environments_and_data_stand_beside_policies(
    service, client: Client, name: str, page: Page
) -> None:
    returns = [0.0, 10.0, 20.0, 30.0, 440.0]
    play(client, name, "Hopper-v5", *returns)
    client.create_run(name, "train", config={})
    evaluate(client, f"{name}/1", "Hopper-v5", [1000.0, 1200.0])
    drawn = page("evaluation", service.url, env="Hopper-v5")
    check(drawn)
    table = drawn.dataframe[0].value.set_index("policy")
    assert table["normalised"]["D4RL's expert"] == 100.0
    data, expert = table.loc[f"data of {name}"], table.loc["D4RL's expert"]
    assert (data["mean"], data["episodes"]) == (100.0, 5)
    assert data["IQM"] == pytest.approx(iqm(returns))
    for row in (data, expert):
        assert pd.isna(row["interval of the mean"]) and pd.isna(row["interval of the IQM"])
    assert pd.isna(expert["IQM"]), "D4RL published means only"
    assert table["episodes"][f"{name}/1"] == 2
    assert table["interval of the mean"][f"{name}/1"] == "1000.00 … 1200.00"
    drawn.segmented_control(key="statistic").set_value("IQM").run()
    check(drawn)


def test_the_doctor_says_what_was_not_checked_and_not_that_nothing_was_found(
    service, client: Client, name: str, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_dataset(name, EnvSpec.of(Box((1,)), Discrete(2), env="Toy-v0"))
    report = Report(name, 3, 9, 1, 600, 512, failed={"sentinel": "out of memory"})
    monkeypatch.setattr("workbench.analysis.doctor.diagnose", lambda *_, **__: report)
    drawn = page("doctor", service.url, dataset=name)
    drawn.button(key="check").click().run()
    check(drawn)
    assert "sentinel was not checked: out of memory" in texts(drawn)
    assert "Of 600 numbers of an observation, the first 512" in texts(drawn)
    assert "Nothing found" not in texts(drawn) and not drawn.success


def test_the_doctor_shows_what_it_finds_and_repairs_a_version(
    service, client: Client, name: str, page: Page
) -> None:
    client.create_dataset(name, EnvSpec.of(Box((1,)), Discrete(2), env="Toy-v0"))
    ids = [
        client.add(
            name, obs=np.random.default_rng(seed).normal(size=(4, 1)).astype(np.float32),
            actions=np.asarray([0, 1, 0]), rewards=np.ones(3, np.float32),
            terminated=seed > 1, truncated=False, env="Toy-v0",
        ).id
        for seed in range(4)
    ]  # fmt: skip
    client.create_version(name, "v1", where=f"id <> '{ids[0]}'")
    drawn = page("doctor", service.url, dataset=name)
    check(drawn)
    assert f"stepwell doctor {name}" in texts(drawn)
    assert drawn.selectbox(key="version").value is None
    drawn.button(key="check").click().run()
    check(drawn)
    assert "open end" in texts(drawn) and "2 trajectories neither terminated" in texts(drawn)
    assert any("--repair without-open-end" in code.value for code in drawn.code)
    (shown,) = [q for q in queries(open_folders(drawn)) if "not terminated and not truncated" in q]
    assert len(client.sql(shown).rows) == 2
    drawn.selectbox(key="version").set_value("v1").run()
    check(drawn)
    assert f"stepwell doctor {name}@v1" in texts(drawn), "the report is not that of the version"
    drawn.button(key="check").click().run()
    check(drawn)
    assert "1 trajectory neither terminated" in texts(drawn)
    drawn.multiselect(key="repair_kinds").set_value(["open_end"]).run()
    drawn.button(key="repair_preview").click().run()
    check(drawn)
    assert "1 trajectory left out; 2 trajectories, 6 steps remain" in texts(drawn)
    drawn.button(key="repair_go").click().run()
    check(drawn)
    assert drawn.toast[0].value == f"version {name}@clean made"
    made = client.version(f"{name}@clean")
    assert made.parent == f"{name}@v1" and made.statistics.trajectories == 2
    again = page("doctor", service.url, dataset=name, version="v1")
    assert again.selectbox(key="version").value == "v1"
