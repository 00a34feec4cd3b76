"""A person's way through the dashboard, from a file to a leaderboard, without a terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from stepwell import Client
from stepwell.testing import wait_until

EPISODES, STEPS = 12, 60
COPY, OUTLIER = 3, 7
"""Episodes with a defect: equal to the one before, and one reward a thousand times too large."""
FLAGGED = "SELECT count(*) FROM trajectories WHERE list_contains(flags, 'outlier')"
SECONDS = 600.0


def write_swings(path: Path) -> Path:
    """Random play on Pendulum, with two planted defects, in the layout of D4RL."""
    rng = np.random.default_rng(0)
    env = gym.make("Pendulum-v1", max_episode_steps=STEPS)
    episodes = []
    for number in range(EPISODES):
        observation, _ = env.reset(seed=number)
        rows = []
        for _ in range(STEPS):
            action = rng.uniform(-2, 2, 1).astype(np.float32)
            following, reward, *_ = env.step(action)
            rows.append((observation, action, float(reward)))
            observation = following
        episodes.append(rows)
    env.close()
    episodes[COPY] = episodes[COPY - 1]
    at = STEPS // 2
    observation, action, reward = episodes[OUTLIER][at]
    episodes[OUTLIER][at] = (observation, action, 1000 * reward - 5000)
    rows = [row for episode in episodes for row in episode]
    np.savez(
        path,
        observations=np.stack([row[0] for row in rows]).astype(np.float32),
        actions=np.stack([row[1] for row in rows]),
        rewards=np.array([row[2] for row in rows], np.float32),
        terminals=np.zeros(len(rows), bool),
        timeouts=np.arange(1, len(rows) + 1) % STEPS == 0,
    )
    return path


@pytest.fixture
def launcher(fresh_service: Any, tmp_path: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "stepwell.cli", "launcher", "--url", fresh_service.url]
    command += ["--data", str(tmp_path / "launcher"), "--capacity", "2", "--grace", "5"]
    with (tmp_path / "launcher.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    yield
    process.terminate()
    process.wait(240)


@pytest.mark.timeout(1500)
def test_from_a_file_to_a_leaderboard(
    fresh_service: Any,
    launcher: None,
    dashboard: Callable[..., Any],
    person: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Upload, check, flag, select by SQL, make a version, train two seeds, evaluate, compare."""
    del launcher
    running = dashboard(fresh_service.url)
    me = person(running)
    client: Client = fresh_service.client()

    me.opens("/datasets")
    me.clicks("Upload a file")
    me.page.locator("input[type=file]").set_input_files(write_swings(tmp_path / "swings.npz"))
    me.rests()
    me.types("Into dataset (made if it is not there)", "swings")
    me.types("Environment", "Pendulum-v1")
    me.rests()
    me.clicks("Upload")
    me.sees(f"{EPISODES} trajectories, {EPISODES * STEPS} transitions in")
    me.look("1-upload")

    me.clicks("Check it", role="link")
    me.clicks("Check")
    me.sees("duplicate")
    me.look("2-doctor")

    me.opens('/trajectories?dataset=swings&where="return"<-5000')
    me.sees("1 matching trajectory")
    me.unfolds("Label many")
    me.types("Add flag", "outlier")
    me.clicks("Apply")
    wait_until(lambda: client.sql(FLAGGED).one() == 1, SECONDS, what="a flag")
    me.opens("/trajectories?dataset=swings&label=outlier")
    me.sees("1 matching trajectory")
    me.look("3-flag")

    kept = "SELECT id, dataset FROM trajectories WHERE dataset = 'swings' AND len(flags) = 0"
    me.opens("/sql")
    me.types("Query", kept)
    me.sees(f"{EPISODES - 1} rows")
    me.unfolds("Make a version")
    me.types("Name", "clean")
    me.clicks("Create")
    me.sees(f"has {EPISODES - 1} trajectories")
    me.look("4-version")

    me.opens("/start?recipe=bc")
    me.chooses("dataset", "swings")
    me.chooses("dataset version", "clean")
    me.types("run", "swing")
    me.types("updates", "40")
    me.types("Copies", "2")
    me.look("5-start")
    me.clicks("Launch")
    ended(client, "swing-1", "swing-2")
    me.look("6-launched")

    me.opens("/start?role=evaluate")
    for run in ("swing-1", "swing-2"):
        me.chooses("policy", run)
        me.chooses("env", "Pendulum-v1")
        me.types("episodes", "4")
        me.clicks("Launch")
        wait_until(lambda run=run: evaluated(client, run), SECONDS, what=f"scores of {run}")

    me.opens("/runs?run=swing-1&run=swing-2&part=Config")
    me.sees_cell("seed")
    me.look("7-compare")
    me.opens("/evaluation")
    me.sees_cell("swing-1/40, swing-2/40")  # their seeds are one row
    me.look("8-leaderboard")

    assert client.run("swing-1").config["dataset"] == "swings@clean"
    assert me.requests == []
    assert running.tracebacks() == []


def ended(client: Client, *runs: str) -> None:
    def states() -> list[str]:
        return [run.status for run in client.runs() if run.name in runs]

    wait_until(lambda: len(states()) == len(runs) and "running" not in states(), SECONDS,
               what="the end of the runs")  # fmt: skip
    assert states() == ["finished"] * len(runs)


def evaluated(client: Client, run: str) -> bool:
    return any(one.policy.startswith(f"{run}/") for one in client.evaluations())
