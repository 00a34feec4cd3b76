"""The page Start: forms from the programs' own schema, over a real service."""

import time
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import api, launching, programs
from dashboard.views.start import parse_args
from stepwell import Box, Client, EnvSpec
from stepwell.messages import MetricPoint, Program
from tests.conftest import ServiceProcess
from tests.dashboard.conftest import Page, check
from trainer.options import resolve
from workbench.launcher.programs import program_of


@pytest.fixture(scope="module")
def published() -> dict[str, Program]:
    return {role: program_of(role, ["my_envs"]) for role in ("train", "collect", "evaluate")}


@pytest.fixture(scope="module")
def launching_service(
    file_service: ServiceProcess, published: dict[str, Program]
) -> ServiceProcess:
    """A service with a launcher and a dataset."""
    client = file_service.client()
    client.heartbeat("box-1", role="launcher", host="box")
    for role, program in published.items():
        client.put_program("box-1", role, program)
    client.create_dataset("hops", EnvSpec.of(Box((2,)), Box((1,)), env="Hopper-v5"))
    return file_service


@pytest.fixture
def box(launching_service: ServiceProcess) -> ServiceProcess:
    """It, with the launcher just heard of."""
    launching_service.client().heartbeat("box-1", role="launcher", host="box")
    return launching_service


def key(name: str, recipe: str = "offline", role: str = "train") -> str:
    return f"set {role} {recipe} {name}"


def line(page: AppTest) -> str:
    return next(c.value for c in page.code if c.value.startswith("stepwell "))


def needed(page: AppTest) -> list[str]:
    return [c.value for c in page.caption if "Still to choose" in c.value]


def test_only_what_was_changed_is_launched(box: Any, page: Page) -> None:
    drawn = page("start", box.url)
    check(drawn)
    assert drawn.button(key="launch_go").disabled
    assert needed(drawn) == ["Still to choose: **dataset**."] and not drawn.warning
    assert drawn.number_input(key=key("updates")).value == 1500, "the recipe's, not the default"
    drawn.selectbox(key=key("dataset", "")).select("hops")
    drawn.number_input(key=key("agent.losses.gamma")).set_value(0.9)
    drawn.selectbox(key=key("optimizer.decay")).select("none")
    drawn.text_area(key=key("more")).set_value("agent.losses.td-lambda = 0.5").run()
    check(drawn)
    assert not drawn.warning and not needed(drawn)
    assert line(drawn) == (
        "stepwell train offline --dataset=hops --optimizer.decay=none --agent.losses.gamma=0.9"
        " --agent.losses.td-lambda=0.5"
    )
    resolve(line(drawn).split()[2:])  # the trainer reads that line
    drawn.button(key="launch_go").click().run()
    check(drawn)
    with Client(box.url) as client:
        made = client.launches()[0]
    assert (made.role, made.recipe, made.count) == ("train", "offline", 1)
    assert made.args == {
        "dataset": "hops", "optimizer.decay": "none", "agent.losses.gamma": 0.9,
        "agent.losses.td_lambda": 0.5,
    }  # fmt: skip


def test_defaults_are_those_of_the_chosen_recipe(box: Any, page: Page) -> None:
    drawn = page("start", box.url, recipe="bc")
    drawn.selectbox(key=key("dataset", "")).select("hops").run()
    shown = drawn.number_input(key=key("data.batch", "bc")).value
    drawn.selectbox(key="recipe").select("tmaze").run()
    check(drawn)
    other = drawn.number_input(key=key("data.batch", "tmaze")).value
    for recipe, batch in (("bc", shown), ("tmaze", other)):
        assert batch == resolve([recipe]).config.data.batch
    assert line(drawn) == "stepwell train tmaze --dataset=hops", "the dataset stays chosen"


def test_what_the_program_would_refuse_is_said_before(published: dict[str, Program]) -> None:
    settings = programs.settings_of(published["train"], "bc")

    def said(**args: Any) -> str:
        given = {"dataset": "d", **{k.replace("__", "."): v for k, v in args.items()}}
        return "; ".join(programs.problems("train", settings, given))

    assert said() == ""
    assert "did you mean agent.losses.gamma" in said(agent__losses__gama=0.9)
    assert "minimum" in said(data__batch=0)
    assert "'many' is not of type 'integer'" in said(updates="many")
    assert "not one of" in said(optimizer__decay="fast")
    assert "expected the name of a dataset" in said(dataset="Not A Name")
    assert "only with agent.trajectory_encoder.kind transformer" in said(
        agent__trajectory_encoder__n_heads=4, agent__trajectory_encoder__kind="gru"
    )
    assert "agent.critic is switched off" in said(agent__critic__n_critics=2)
    assert "output: there is no such setting" in said(output="/tmp/x")
    assert said(agent__critic=True, agent__critic__n_critics=2, tags="a b") == ""


def test_no_schema_is_fetched_from_elsewhere() -> None:
    setting = programs.Setting("x", {"$ref": "http://127.0.0.1:9/x.json"}, None)
    found = programs.problems("train", {"x": setting}, {"dataset": "d", "x": 1})
    assert "x: its schema cannot be read" in found[-1]


def test_a_launch_and_a_run_are_copied_into_the_form(box: Any, page: Page) -> None:
    args = {"dataset": "hops", "seed": 3, "tags": "a b", "agent.losses.td_lambda": 0.5, "run": "x"}
    config = resolve(["bc", "--dataset", "hops", "--seed", "7", "--data.batch", "8"])
    with Client(box.url) as client:
        launch = client.create_launch("train", "bc", args)
        row = {**config.config.to_dict(), "origins": config.origins}
        client.create_run("old", "train", config=row, host="box")
    drawn = page("start", box.url, clone=f"launch:{launch.id}")
    check(drawn)
    assert line(drawn) == (
        "stepwell train bc --dataset=hops --seed=3 --tags a b --agent.losses.td-lambda=0.5"
    )
    drawn.number_input(key=key("seed", "bc")).set_value(4).run()
    assert "--seed=4" in line(drawn), "what was copied can be changed"
    drawn = page("start", box.url, clone="run:old")
    check(drawn)
    assert line(drawn) == "stepwell train bc --dataset=hops --seed=7 --data.batch=8"
    gone = page("start", box.url, clone="launch:la_gone")
    assert [e.message for e in gone.exception] == [] and "la_gone" in gone.error[0].value


def test_a_selection_fills_the_form(box: Any, page: Page) -> None:
    """A condition of several lines stays one, comments included."""
    where = "id IN (SELECT id FROM (\nSELECT id FROM trajectories -- all\n))"
    drawn = page("start", box.url, **launching.selected("hops", where))
    check(drawn)
    assert drawn.selectbox(key="recipe").value == "offline"
    assert drawn.selectbox(key=key("dataset", "")).value == "hops"
    assert drawn.text_area(key=key("where", "")).value == where
    assert not needed(drawn) and not drawn.warning
    drawn.button(key="launch_go").click().run()
    check(drawn)
    with Client(box.url) as client:
        assert client.launches()[0].args == {"dataset": "hops", "where": where}
    drawn.text_area(key=key("where", "")).set_value("").run()
    assert line(drawn) == "stepwell train offline --dataset=hops", "it is filled in only once"
    drawn.selectbox(key="recipe").select("bc").run()
    assert line(drawn) == "stepwell train bc --dataset=hops"


def test_times_are_those_of_earlier_runs_or_of_the_docs(box: Any, page: Page) -> None:
    """How many updates a recipe makes that derives them is known from its runs alone; else it is
    the number in the form."""
    drawn = page("start", box.url, recipe="bc")
    drawn.selectbox(key=key("dataset", "")).select("hops").run()
    assert any("reference/training.md" in c.value and "About" in c.value for c in drawn.caption)
    with Client(box.url) as client:
        for i, speed in enumerate((10.0, 20.0, 30.0, 50.0)):
            recipe = "online_memory" if i == 3 else "bc"
            client.create_run(f"r{i}", "train", config={"recipe": recipe}, host="box")
            points = {launching.RATE: speed, launching.TOTAL: 600.0}
            client.log_metrics(
                f"r{i}",
                [MetricPoint(key=k, step=1, value=v, time=time.time()) for k, v in points.items()],
            )
    api.refresh()
    drawn.run()
    said = next(c.value for c in drawn.caption if "About" in c.value)
    assert said == (
        "About **30 s**: 600 updates at 20/s, the median of the last 3 runs of `bc` on box; this "
        "recipe derives their number from the data."
    )
    drawn = page("start", box.url, recipe="online_memory")
    assert any(
        "5,000 updates at 50/s, the median of one earlier run" in c.value for c in drawn.caption
    )


def test_collecting_and_evaluating_have_forms_too(box: Any, page: Page) -> None:
    with Client(box.url) as client:
        client.create_run("first", "train")
        client.publish_policy("first", 3, b"weights")
        client.set_alias("first", "best", 3)
    drawn = page("start", box.url, role="evaluate")
    check(drawn)
    assert line(drawn) == "stepwell evaluate", "nothing that is empty"
    assert needed(drawn) == ["Still to choose: **policy or random**."], "its data tell the env"
    assert not drawn.warning and drawn.button(key="launch_go").disabled
    drawn.selectbox(key=key("policy", "", "evaluate")).select("first").run()
    drawn.selectbox(key=key("policy", "", "evaluate") + "/").select("best")
    drawn.selectbox(key=key("env", "", "evaluate")).select("Hopper-v5").run()
    check(drawn)
    assert line(drawn) == "stepwell evaluate --policy=first/best --env=Hopper-v5"
    drawn = page("start", box.url, role="collect")
    assert line(drawn) == "stepwell collect"
    assert needed(drawn) == ["Still to choose: **env**, **dataset**, **policy or random**."]
    assert not drawn.warning
    drawn.selectbox(key=key("env", "", "collect")).select("Hopper-v5")
    drawn.selectbox(key=key("dataset", "", "collect")).select("hops")
    drawn.checkbox(key=key("random", "", "collect")).check().run()
    check(drawn)
    assert line(drawn) == "stepwell collect --env=Hopper-v5 --dataset=hops --random=true"
    assert not drawn.button(key="launch_go").disabled and not needed(drawn)
    drawn.selectbox(key=key("policy", "", "collect")).select("first").run()
    assert any("not both" in w.value for w in drawn.warning)
    assert drawn.button(key="launch_go").disabled
    drawn = page("start", box.url, role="run")
    assert line(drawn).startswith("stepwell run Hopper-v5 --recipe online")


def test_a_launch_is_seen_and_stopped(box: Any, page: Page) -> None:
    with Client(box.url) as client:
        made = client.create_launch("collect", args={"run": "x"}, count=2)
        client.claim_launch("box-1", ["collect"])
        client.patch_launch(made.id, state="running", run="x-1 … x-2", log="hello from afar")
        drawn = page("start", box.url)
        drawn.session_state["launches"] = {"selection": {"rows": [0], "columns": [], "cells": []}}
        drawn.run()
        check(drawn)
        assert any("hello from afar" in c.value for c in drawn.code)
        drawn.button(key="launch_stop_go").click().run()
        check(drawn)
        assert client.launch(made.id).state == "cancelled"


def test_options_are_typed_and_never_a_shell_string() -> None:
    text = "a.b = 0.5\n\n--steps=100\nresume = true\nname = x = y; rm"
    assert parse_args(text) == {"a.b": 0.5, "steps": 100, "resume": True, "name": "x = y; rm"}
    with pytest.raises(ValueError, match="line 2"):
        parse_args("a = 1\nnonsense")
    assert (
        programs.command_line("collect", "", {"env": "a; rm"}) == "stepwell collect '--env=a; rm'"
    )
