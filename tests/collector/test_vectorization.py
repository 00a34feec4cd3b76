"""Environments in processes of their own, or batched by themselves: the same data as one by one."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from collector.collect import collect
from collector.config import CollectConfig, EvaluateConfig
from collector.envs import EnvError, make_vector
from collector.evaluate import run_evaluation
from stepwell import Client
from stepwell.errors import StepwellError
from stepwell.testing import wait_until

WAIT = 120.0


def test_processes_play_the_same_episodes(service: Any) -> None:
    """Every seed gives the episode that it gives in this process."""
    common = dict(env="CartPole-v1", random=True, episodes=7, seeds=5, upload=False)
    results = [
        run_evaluation(EvaluateConfig(**common, envs=2, vectorization=mode), Console(quiet=True))[0]
        for mode in ("sync", "async")
    ]
    assert results[0].seeds == results[1].seeds
    first = [[t.obs["observation"][0].tolist() for t in r.trajectories] for r in results]
    assert first[0] == first[1]  # the actions are of one stream, which other orders share otherwise
    assert [len(r.returns) for r in results] == [7, 7]


@pytest.mark.parametrize("mode", ["async", "native"])
def test_they_are_collected_whole(
    service: Any, client: Client, name: str, tmp_path: Path, mode: str
) -> None:
    """CartPole has a batched implementation in gymnasium, which resets itself."""
    config = CollectConfig(
        env="CartPole-v1",
        random=True,
        vectorization=mode,
        envs=3,
        episodes=8,
        dataset=name,
        url=service.url,
        outbox=tmp_path / "outbox",
    )
    collect(config)
    client.flush(name)
    page = client.trajectories(name, limit=100)
    assert len(page.items) == 8
    assert all(i.terminated and i.length == i.total_reward for i in page.items)


def test_an_environment_without_a_batched_implementation_says_so() -> None:
    with pytest.raises(EnvError, match="vector entry point"):
        make_vector("stepwell/Recall-v0", {}, 2, native=True)
    with pytest.raises(EnvError, match="does not accept"):
        make_vector("stepwell/Recall-v0", {"speed": 3}, 2, native=False)
    with pytest.raises(StepwellError, match="native environments do not reset by seed"):
        EvaluateConfig(env="CartPole-v1", random=True, vectorization="native")


def workers(process: int) -> list[psutil.Process]:
    """The processes with an environment: the children of the fork server."""
    server = [
        child
        for child in psutil.Process(process).children()
        if "forkserver" in " ".join(child.cmdline())
    ]
    return [worker for one in server for worker in one.children()]


def start(service: Any, name: str, outbox: Path) -> subprocess.Popen[str]:
    words = ["collect", "--env", "CartPole-v1", "--random", "--vectorization", "async"]
    words += ["--envs", "2", "--dataset", name, "--run", f"run-{name}", "--url", service.url]
    words += ["--outbox", str(outbox), "--heartbeat-every", "0.2"]
    return subprocess.Popen(
        [sys.executable, "-m", "stepwell.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )


def test_ctrl_c_in_a_terminal_ends_it_cleanly(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """All processes of the terminal get the signal, and none is left."""
    process = start(service, name, tmp_path)
    try:
        wait_until(lambda: played(client, name), WAIT, what="an episode")
        mine = workers(process.pid)
        assert len(mine) == 2
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in errors
    assert client.run(f"run-{name}").status == "stopped"
    _, alive = psutil.wait_procs(mine, timeout=WAIT)
    assert not alive


@pytest.mark.parametrize("who", ["an environment", "the collector"])
def test_a_killed_process_loses_nothing_and_leaves_nothing(
    service: Any, client: Client, name: str, tmp_path: Path, who: str
) -> None:
    """An environment that dies ends the collector, which keeps what was played and says why."""
    process = start(service, name, tmp_path)
    try:
        wait_until(lambda: played(client, name), WAIT, what="an episode")
        mine = workers(process.pid)
        (mine[0] if who == "an environment" else psutil.Process(process.pid)).kill()
        _, errors = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    if who == "an environment":
        assert process.returncode == 1 and "CartPole-v1" in errors, errors
        assert client.run(f"run-{name}").status == "failed"
    _, alive = psutil.wait_procs(mine, timeout=WAIT)
    assert not alive


def played(client: Client, name: str) -> bool:
    try:
        return client.dataset(name).fifo.trajectories > 0
    except StepwellError:
        return False  # not made yet
