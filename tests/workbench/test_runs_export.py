"""`stepwell runs export`: every point once, whatever is repeated, late, away or not finite."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading

import pytest

from stepwell import cli, new_id
from stepwell.messages import MetricPoint
from stepwell.testing import wait_until
from workbench.commands import runs_export
from workbench.commands.runs_export import copy_new
from workbench.commands.trackers import TOOLS, Tracker, flat_config


class Notebook(Tracker):
    """A tool that keeps what it is given; another one of the same pages goes on there."""

    def __init__(self, run, pages=None):
        super().__init__(run)
        self.rows = [] if pages is None else pages
        self.closed = False
        for row in self.rows:
            self.last_step |= {k: row.step for k in row.values if not k.startswith("eval/")}
            if any(k.startswith("eval/") for k in row.values):
                self.evaluated.add(row.ms)

    def write(self, rows):
        self.rows += rows

    def close(self):
        self.closed = True

    @property
    def points(self):
        return [(key, row.step, value) for row in self.rows for key, value in row.values.items()]


@pytest.fixture
def run_name(client):
    name = f"run-{new_id()[-8:]}"
    client.create_run(name, "train", config={"lr": 0.5})
    return name


def log(client, run, key, steps, value=lambda step: step / 3):
    points = [MetricPoint(key=key, step=s, value=value(s), time=1e9 + s / 7) for s in steps]
    client.log_metrics(run, points)


def publish(client, run, version, step):
    """A policy is a safetensors file; the service looks no closer."""
    content = version.to_bytes()
    tensor = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"x": tensor}).encode()
    client.publish_policy(
        run, version, struct.pack("<Q", len(header)) + header + content, step=step
    )


def evaluate(client, run, version, mean):
    scores = {"mean": mean, "iqm": mean, "ci_low": mean - 1, "ci_high": mean + 1}
    client.create_evaluation(
        policy=f"{run}/{version}", env="Test-v1", seeds=[1], returns=[mean], **scores
    )


def test_points_arrive_exactly_and_a_repeat_adds_only_what_is_new(client, run_name):
    log(client, run_name, "a", range(0, 30, 10))
    log(client, run_name, "b", [10], lambda _: None)
    tool = Notebook(client.run(run_name))
    copy_new(client, tool)
    assert tool.copied == 4
    together = [row for row in tool.rows if row.step == 10]
    assert len(together) == 1 and together[0].time == 1e9 + 10 / 7
    assert together[0].values["a"] == 10 / 3 and math.isnan(together[0].values["b"])
    copy_new(client, tool)
    assert tool.copied == 4

    again = Notebook(client.run(run_name), tool.rows)
    log(client, run_name, "a", [30])
    log(client, run_name, "c", [5])
    copy_new(client, again)
    assert again.copied == 2
    assert again.points[-2:] == [("c", 5, 5 / 3), ("a", 30, 10.0)]


def test_no_point_is_left_out_of_a_long_series(client, run_name, monkeypatch):
    """The route that answers fast returns at most so many points of a series."""
    monkeypatch.setattr(runs_export, "MAX_POINTS", 10)
    monkeypatch.setattr(runs_export, "MAX_ROWS", 30)
    log(client, run_name, "long", range(100))
    log(client, run_name, "a, b", range(3))
    log(client, run_name, "short", range(5))
    tool = Notebook(client.run(run_name))
    copy_new(client, tool)
    assert tool.copied == 108
    expected = {("long", s, s / 3) for s in range(100)} | {("a, b", s, s / 3) for s in range(3)}
    assert set(tool.points) == expected | {("short", s, s / 3) for s in range(5)}


def test_evaluations_are_copied_once_in_whatever_order_versions_are_evaluated(client, run_name):
    publish(client, run_name, 2, 200)
    publish(client, run_name, 1, 100)
    evaluate(client, run_name, 2, 7.0)
    client.create_evaluation(
        policy="random", env="Test-v1", seeds=[1], returns=[0.0], mean=0, iqm=0, ci_low=0, ci_high=0
    )
    tool = Notebook(client.run(run_name))
    copy_new(client, tool)
    evaluate(client, run_name, 1, 5.0)
    evaluate(client, run_name, 2, 8.0)
    copy_new(client, tool)
    copy_new(client, Notebook(client.run(run_name), tool.rows))
    means = [(step, v) for key, step, v in tool.points if key == "eval/Test-v1/mean"]
    assert means == [(200, 7.0), (100, 5.0), (200, 8.0)]
    assert ("eval/Test-v1/ci_low", 100, 4.0) in tool.points


def test_the_config_is_flat_and_without_origins(client):
    name = f"run-{new_id()[-8:]}"
    config = {"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None, "f": "x", "origins": {"f": "default"}}
    client.create_run(name, "train", config=config)
    assert flat_config(client.run(name)) == {"a.b.c": 1, "a.d": "[1, 2]", "e": "null", "f": "x"}


def test_following_waits_for_the_service_and_ends_after_the_run(fresh_service, monkeypatch, capsys):
    client = fresh_service.client()
    client.create_run("r", "train")
    log(client, "r", "a", [1])
    tools = []

    monkeypatch.setattr(
        runs_export, "open_tracker", lambda _, run: tools.append(Notebook(run)) or tools[-1]
    )
    words = ["runs", "export", "r", "--to", "tensorboard:x", "--follow", "--every", "0.1"]
    status = []
    thread = threading.Thread(
        target=lambda: status.append(cli.main([*words, "--url", fresh_service.url]))
    )
    thread.start()
    wait_until(lambda: tools and tools[0].rows)
    fresh_service.kill()
    said: list[str] = []  # a line may be read in two parts

    def is_said():
        said.append(capsys.readouterr().err)
        return "waiting: no service" in "".join(said)

    wait_until(is_said)
    fresh_service.start()
    log(client, "r", "a", [2])
    client.patch_run("r", status="finished")
    thread.join(60)
    assert status == [0] and tools[0].closed and tools[0].run.status == "finished"
    assert tools[0].points == [("a", 1, 1 / 3), ("a", 2, 2 / 3)]
    assert "r (finished): 2 new points in tensorboard:x" in capsys.readouterr().out


def test_ctrl_c_ends_after_what_is_being_written(service, client, run_name, monkeypatch):
    class Interrupted(Notebook):
        def write(self, rows):
            os.kill(os.getpid(), signal.SIGINT)
            super().write(rows)

    tools = []
    monkeypatch.setattr(
        runs_export, "open_tracker", lambda _, run: tools.append(Interrupted(run)) or tools[-1]
    )
    log(client, run_name, "a", [1])
    words = ["runs", "export", run_name, "--to", "wandb:x", "--follow", "--url", service.url]
    assert cli.main(words) == 130
    assert tools[0].closed and tools[0].points == [("a", 1, 1 / 3)]


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["tensorboard", "tensorboard:", "aim:x"])
def test_a_wrong_destination_shows_the_right_ones(to, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["runs", "export", "r", "--to", to])
    assert left.value.code == 2 and "mlflow:URI" in capsys.readouterr().err


def test_an_unknown_run_is_one_line(service, capsys):
    words = ["runs", "export", "nobody", "--to", "tensorboard:x", "--url", service.url]
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("stepwell: 404 not_found") and err.count("\n") == 1


@pytest.mark.parametrize("tool", TOOLS)
def test_a_missing_library_is_one_line_with_the_cure(service, run_name, tool, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, tool, None)
    for module in [name for name in sys.modules if name.startswith(f"{tool}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, f"workbench.commands.trackers.to_{tool}", raising=False)
    words = ["runs", "export", run_name, "--to", f"{tool}:x", "--url", service.url]
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert f"pip install 'stepwell[{tool}]'" in err and err.count("\n") == 1


# --- the real libraries, where they are installed ---------------------------------------------

PLACES = {"tensorboard": "tb", "wandb": "project", "mlflow": "sqlite:///mlflow.db"}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_real_tool_gets_each_point_once(service, client, run_name, tool, tmp_path):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    log(client, run_name, "a", range(20), lambda step: None if step == 3 else float(step))
    log(client, run_name, "b[0]", range(20))
    publish(client, run_name, 1, 10)
    evaluate(client, run_name, 1, 5.0)
    command = [sys.executable, "-m", "stepwell.cli", "runs", "export", run_name, "--json"]
    command += ["--to", f"{tool}:{PLACES[tool]}", "--url", service.url]
    env = {**os.environ, "WANDB_MODE": "offline"}

    def export():
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0]["points"]

    assert export() == 40
    log(client, run_name, "a", [20])
    client.patch_run(run_name, status="finished")
    assert export() == 1
    if tool == "tensorboard":
        from workbench.commands.trackers.to_tensorboard import _events

        events = [e for e in _events(tmp_path / "tb" / run_name) if e.summary.value]
        points = [(v.tag, e.step) for e in events[1:] for v in e.summary.value]
        assert sorted(points) == [("a", s) for s in range(21)] + [("b[0]", s) for s in range(20)]
        (scores,) = [e for e in _events(tmp_path / "tb" / run_name / "eval") if e.summary.value]
        assert scores.step == 10 and scores.summary.value[0].simple_value == 5.0
