"""Every page over a real service: empty, filled, and when nobody answers. Never a traceback."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from stepwell import Box, Client, Discrete, EnvSpec
from stepwell.messages import MetricPoint

Page = Callable[..., AppTest]
VIEWS = ["overview", "datasets", "trajectories", "console", "runs", "evaluation", "workers"]
NOBODY = "http://127.0.0.1:9"
LENGTH = 12


@pytest.fixture
def filled(service, client: Client, name: str) -> str:
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
        client.create_evaluation(
            run=run, policy=f"{run}/1", env=f"Env-{name}", seeds=[0, 1], returns=[1.0, 2.0],
            mean=1.5, iqm=1.5, ci_low=1.0, ci_high=2.0, dataset=name,
        )  # fmt: skip
    client.heartbeat(f"{name}-w", role="train", run=f"{name}-a", counters={"updates": 7})
    return name


def texts(page: AppTest) -> str:
    """Everything a reader sees, but for tables and charts."""
    kinds = ("title", "subheader", "caption", "markdown", "info", "warning", "error", "success",
             "code", "text")  # fmt: skip
    return "\n".join(str(e.value) for kind in kinds for e in getattr(page, kind))


def check(page: AppTest) -> None:
    assert [e.message for e in page.exception] == []
    assert [e.value for e in page.error] == []


@pytest.mark.parametrize("view", VIEWS)
def test_without_a_service_every_page_says_how_to_start_one(view: str, page: Page) -> None:
    drawn = page(view, NOBODY)
    assert [e.message for e in drawn.exception] == []
    assert "No answer from the service" in drawn.error[0].value
    assert "stepwell serve" in texts(drawn)


def test_every_page_of_an_empty_service_says_what_to_do_next(fresh_service, page: Page) -> None:
    """The first thing a newcomer sees."""
    hints = {
        "overview": "stepwell demo",
        "datasets": "imports?format=d4rl",
        "trajectories": "stepwell collect",
        "console": "T+1",
        "runs": "stepwell train",
        "evaluation": "stepwell evaluate",
        "workers": "stepwell serve",
    }
    for view in VIEWS:
        drawn = page(view, fresh_service.url)
        check(drawn)
        assert hints[view] in texts(drawn), view


@pytest.mark.parametrize("view", VIEWS)
def test_every_page_draws_what_there_is(view: str, filled: str, service, page: Page) -> None:
    drawn = page(view, service.url)
    check(drawn)
    assert len(drawn.dataframe) + len(drawn.metric) > 0


def test_overview_counts_and_warns(filled: str, service, client: Client, page: Page) -> None:
    """What failed is named where one looks first."""
    client.heartbeat(f"{filled}-x", role="eval", state="failed", last_error="Trace\nValueError: no")
    client.patch_run(f"{filled}-b", status="failed", error="NaN everywhere")
    drawn = page("overview", service.url)
    check(drawn)
    figures = {m.label: m.value for m in drawn.metric}
    total = client.sql("SELECT count(*) FROM trajectories").one()
    assert figures["Trajectories"] == f"{total:,}"
    warnings = " ".join(w.value for w in drawn.warning)
    more = " ".join(c.value for c in drawn.caption)
    assert "ValueError: no" in warnings or "more" in more


def test_dataset_detail_follows_the_url(filled: str, service, page: Page) -> None:
    drawn = page("datasets", service.url, dataset=filled)
    check(drawn)
    assert drawn.selectbox(key="dataset").value == filled
    figures = {m.label: m.value for m in drawn.metric}
    assert figures["Trajectories"] == "5"
    assert figures["Transitions"] == str(5 * LENGTH)
    assert figures["Evaluation"] == "1"
    assert figures["Mean return"] == f"{np.mean([i * LENGTH for i in range(5)]):.2f}"


def test_a_stale_link_does_not_break_a_page(service, filled: str, page: Page) -> None:
    """Datasets and runs get deleted; bookmarks stay."""
    for view, query in (
        ("datasets", {"dataset": "gone"}),
        ("runs", {"run": "gone"}),
        ("evaluation", {"env": "gone", "evaluation": "gone"}),
        ("trajectories", {"dataset": "gone", "page": "99", "t": "999999"}),
    ):
        check(page(view, service.url, **query))


def test_trajectories_filter_by_the_url(filled: str, service, page: Page) -> None:
    drawn = page("trajectories", service.url, dataset=filled, purpose="train", order="best return")
    check(drawn)
    frame = drawn.dataframe[0].value
    assert frame["return"].tolist() == [i * LENGTH for i in (4, 3, 2, 1, 0)]
    drawn = page("trajectories", service.url, dataset=filled, where='"return" > 30')
    check(drawn)
    assert sorted(drawn.dataframe[0].value["return"]) == [36.0, 48.0, 60.0]


def test_a_wrong_condition_is_explained_in_its_place(filled: str, service, page: Page) -> None:
    drawn = page("trajectories", service.url, where="retrun > 3")
    assert [e.message for e in drawn.exception] == []
    assert "retrun" in drawn.error[0].value


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
    assert [e.message for e in drawn.exception] == []
    assert "not_found" in drawn.error[0].value


def test_the_console_answers_and_explains(service, filled: str, page: Page) -> None:
    query = f"SELECT length FROM trajectories WHERE dataset = '{filled}' ORDER BY seq"
    drawn = page("console", service.url, q=query)
    check(drawn)
    assert drawn.dataframe[0].value["length"].tolist() == [LENGTH] * 6
    drawn.text_area(key="q").set_value("SELECT nothing FROM nowhere").run()
    assert [e.message for e in drawn.exception] == []
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
    assert drawn.multiselect(key="run").value == [f"{filled}-a"]
    seen = texts(drawn)
    for what in ("train/loss", "train/odd[0]", "evaluation/return", "hello from the log"):
        assert what in seen
    drawn.multiselect(key="run").set_value([f"{filled}-a", f"{filled}-b"]).run()
    check(drawn)


def test_evaluations_are_ranked_with_their_seeds(service, filled: str, page: Page) -> None:
    drawn = page("evaluation", service.url, env=f"Env-{filled}")
    check(drawn)
    table = drawn.dataframe[0].value
    assert set(table["policy"]) == {f"{filled}-a/1", f"{filled}-b/1"}
    assert table["mean"].tolist() == [1.5, 1.5]
    assert drawn.dataframe[-1].value["return"].tolist() == [1.0, 2.0]


def test_workers_show_their_heartbeat_and_a_line_to_copy(service, filled: str, page: Page) -> None:
    drawn = page("workers", service.url)
    check(drawn)
    table = drawn.dataframe[0].value.set_index("worker")
    assert table.loc[f"{filled}-w", "counters"] == "updates 7"
    assert "stepwell collect" in texts(drawn)


def test_queries_shown_are_the_ones_that_run(service, filled: str, page: Page) -> None:
    """Every number has its SQL; SQL that does not run would be worse than none."""
    with Client(service.url) as client:
        tried = 0
        for view in VIEWS:
            drawn = page(view, service.url)
            for block in drawn.code:
                if block.value.lstrip().upper().startswith(("SELECT", "WITH")):
                    client.sql(block.value)
                    tried += 1
    assert tried >= 10
