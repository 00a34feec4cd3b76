"""Learning checks run the real command, and notice what does not learn."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.learn_checks import (
    CHECKS,
    NAME,
    WITHOUT_MEMORY,
    Check,
    add,
    chosen_checks,
    measure,
    outcome,
)
from benchmarks.learn_curves import PAGE, chart, markdown
from benchmarks.report import RESULTS, place
from tests.run_words import settings

pytestmark = pytest.mark.timeout(300)
EASY = Check("easy", "a cue", -100.0, 200.0, (), ("stepwell/Recall-v0", "--envs", "2"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.key)
def test_every_part_accepts_the_words_of_a_check(check: Check) -> None:
    args, config = settings(*check.words, *check.common, *check.memory)
    assert args.recipe == config.recipe == "online"
    memory = config.agent.trajectory_encoder
    assert memory.kind == "gru" or memory.context >= config.data.window
    _, blind = settings(*check.words, *check.common, *WITHOUT_MEMORY)
    inputs = blind.agent.timestep_encoder
    assert blind.agent.trajectory_encoder.context == 1
    assert inputs.hide_previous and not inputs.differences


@pytest.mark.long
def test_a_target_that_is_reached_ends_the_run(tmp_path: Path) -> None:
    run = outcome(EASY, 0, tmp_path / "run")
    assert run["reached"] == run["scores"][0] | {"frames": run["reached"]["frames"]}
    assert run["reached"]["version"] == 0 and run["reached"]["mean"] >= EASY.target
    assert run["best"] == run["reached"]["mean"] and run["reached"]["seconds"] > 0.0
    assert "the same command continues" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.long
def test_a_run_that_breaks_is_no_score(tmp_path: Path) -> None:
    broken = dataclasses.replace(EASY, words=("stepwell/Recall-v0", "--env-args", "nothing=1"))
    with pytest.raises(RuntimeError, match="easy-0 ended by itself"):
        outcome(broken, 0, tmp_path / "run")


def test_a_check_fails_without_its_target_or_with_a_policy_that_needs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(best: float, reached: bool) -> dict[str, object]:
        score = {"version": 1, "seconds": 2.0, "mean": best, "frames": 3}
        return {"seed": 0, "best": best, "scores": [], "reached": score if reached else None}

    memory = dataclasses.replace(EASY, without_memory=0.5)
    for runs, passed in (
        ([fake(1.0, True), fake(0.4, False)], True),
        ([fake(1.0, True), fake(0.6, False)], False),
        ([fake(0.2, False), fake(0.4, False)], False),
    ):
        its = iter(runs)
        monkeypatch.setattr("benchmarks.learn_checks.outcome", lambda *_, its=its, **__: next(its))
        found = measure(memory, range(1), tmp_path)
        assert (found["passed"], found["target"]) == (passed, -100.0)
        assert len(found["runs"]) == len(found["without_memory"]) == 1 and found["commit"]


def test_the_last_attempt_must_be_better_than_the_first() -> None:
    rises = dataclasses.replace(EASY, target=3.0, rises=("success_0", "success_4", 0.15))
    for mean, first, last, expected in (
        (3.8, 0.6, 0.9, True),
        (3.8, 0.8, 0.9, False),
        (2.9, 0.2, 0.9, False),
    ):
        score = {"mean": mean, "success_0": first, "success_4": last}
        assert rises.has_target(score) is expected


@pytest.mark.long
def test_metrics_of_attempts_are_read_from_evaluations(tmp_path: Path) -> None:
    words = ("stepwell/MetaFrozenLake-v0", "--env-args", "size=2", "attempts=2", "--envs", "2")
    attempts = dataclasses.replace(EASY, words=words, rises=("success_0", "success_1", -1.0))
    score = outcome(attempts, 0, tmp_path / "run")["reached"]
    assert 0.0 <= score["success_0"] <= 1.0 and 0.0 <= score["success_1"] <= 1.0
    assert score["mean"] == pytest.approx(score["success_0"] + score["success_1"])


def test_checks_are_chosen_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = dataclasses.replace(EASY, key="other")
    absent = dataclasses.replace(EASY, key="absent", package="no_such_package")

    def choose(*words: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["learn_checks", *words])
        chosen, _ = chosen_checks(argparse.ArgumentParser(), [EASY, other, absent])
        return [check.key for check in chosen]

    assert choose() == ["easy", "other"]
    assert "no_such_package is not installed" in capsys.readouterr().out
    assert choose("other", "--keep", str(tmp_path)) == ["other"]
    (tmp_path / "file").touch()
    for words, said in (
        (["elsewhere"], "there are easy, other, absent"),
        (["--keep", str(tmp_path)], "is not empty"),
    ):
        with pytest.raises(SystemExit):
            choose(*words)
        assert said in capsys.readouterr().err


def test_results_are_added_to_those_of_other_checks(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    add({"a": {"passed": True}}, path)
    add({"b": {"passed": False}}, path)
    assert json.loads(path.read_text()) == {"a": {"passed": True}, "b": {"passed": False}}


def test_the_table_and_the_picture_show_what_was_reached_and_what_was_not() -> None:
    score = {"version": 200, "seconds": 30.4, "mean": 1.0, "frames": 4_321}
    low = {"version": 400, "seconds": 90.0, "mean": 0.45}
    runs = [
        {"seed": 0, "reached": score, "best": 1.0, "scores": [score]},
        {"seed": 1, "reached": None, "best": 0.5, "scores": [low]},
    ]
    blind = [{"seed": 0, "reached": None, "best": 0.501, "scores": [low]}]
    c5 = {"task": "T-Maze", "target": 1.0, "runs": runs, "without_memory": blind}
    c1 = {"task": "CartPole", "target": 400.0, "runs": runs[:1], "without_memory": []}
    rows = markdown({"c5": c5, "c1": c1}).splitlines()[2:]
    assert rows == [
        "| c1 | CartPole | 400 | 30 s (4,321 steps) |  | 341 at 101 s, 356 at 123 s |",
        "| c5 | T-Maze | 1 | 30 s (4,321 steps); **not reached**: 0.5 in 90 s | 0.501 at most "
        "| 1 at 39 s |",
    ]
    drawn = json.dumps(chart({"c5": c5, "c1": c1}).to_dict())
    assert "c5 T-Maze" in drawn and '"mean return": 0.45' in drawn and '"mean return": 341' in drawn


def test_the_docs_show_the_recorded_checks(tmp_path: Path) -> None:
    again = tmp_path / "page.md"
    again.write_text(PAGE.read_text())
    place(again, "learning checks", markdown(json.loads((RESULTS / f"{NAME}.json").read_text())))
    assert again.read_text() == PAGE.read_text(), "run: python -m benchmarks.learn_curves"
