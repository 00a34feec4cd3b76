"""Environments in processes of their own, or batched by themselves: the same data as one by one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from rich.console import Console

from collector.collect import collect
from collector.config import CollectConfig, EvaluateConfig
from collector.envs import EnvError, make, make_native
from collector.evaluate import run_evaluation
from collector.process_env import ProcessDied, ProcessEnv, open_process_envs
from stepwell import Client
from stepwell.errors import StepwellError
from stepwell.testing import wait_until

WAIT = 120.0


@pytest.mark.parametrize("env", ["CartPole-v1", "stepwell/MetaFrozenLake-v0"])
def test_processes_play_the_same_episodes(env: str) -> None:
    """Rows, ends and reported metrics are those of environments in this process."""
    common = dict(env=env, random=True, episodes=7, seeds=5, upload=False)
    one, other = (
        run_evaluation(EvaluateConfig(**common, envs=2, vectorization=mode), Console(quiet=True))[0]
        for mode in ("sync", "async")
    )
    assert one.to_json() == other.to_json()
    for a, b in zip(one.trajectories, other.trajectories, strict=True):
        assert np.array_equal(a.obs["observation"], b.obs["observation"])
        assert a.metadata.metrics == b.metadata.metrics


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


def test_an_environment_that_is_only_batched_says_so() -> None:
    gymnasium.register("tests/OnlyBatched-v0", vector_entry_point="nowhere:Vector")
    with pytest.raises(EnvError, match="only a batched .* --vectorization native"):
        make("tests/OnlyBatched-v0")


def test_an_environment_without_a_batched_implementation_says_so() -> None:
    with pytest.raises(EnvError, match="has no batched implementation"):
        make_native("stepwell/Recall-v0", {}, 2)
    with pytest.raises(StepwellError, match="native environments do not reset by seed"):
        EvaluateConfig(env="CartPole-v1", random=True, vectorization="native")


def workers(process: int) -> list[psutil.Process]:
    """The processes with an environment."""
    children = psutil.Process(process).children()
    return [child for child in children if "collector.process_env" in " ".join(child.cmdline())]


@contextmanager
def collecting(
    service: Any, client: Client, name: str, outbox: Path
) -> Iterator[subprocess.Popen[str]]:
    """A collector with two environments, once it has sent an episode; in a session of its own."""
    words = ["collect", "--env", "CartPole-v1", "--random", "--vectorization", "async"]
    words += ["--envs", "2", "--dataset", name, "--run", f"run-{name}", "--url", service.url]
    words += ["--outbox", str(outbox), "--heartbeat-every", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stepwell.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    with process:
        try:
            wait_until(lambda: played(client, name), WAIT, what="an episode")
            yield process
        finally:
            process.kill()


def test_ctrl_c_in_a_terminal_ends_it_cleanly(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """All processes of the terminal get the signal, and none is left."""
    with collecting(service, client, name, tmp_path) as process:
        mine = workers(process.pid)
        assert {os.getsid(child.pid) for child in mine} == {process.pid}, "its share, and its nice"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0 and "Traceback" not in errors
    assert client.run(f"run-{name}").status == "stopped"
    assert len(mine) == 2 and all_end(mine)


def test_a_killed_collector_leaves_nothing(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    with collecting(service, client, name, tmp_path) as process:
        mine = workers(process.pid)
    assert len(mine) == 2 and all_end(mine)


def test_an_environment_that_hangs_ends_with_its_collector() -> None:
    """Killed, that says nothing; the process of the environment finds out."""
    code = (
        "import sys; from collector.process_env import ProcessEnv; "
        "env = ProcessEnv('tests/Hanging-v0', {}, ['tests.collector.hanging_env']); "
        "env.connect(); env.reset(); env.begin('step', 0); print(flush=True); sys.stdin.read()"
    )
    collector = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    with collector:
        assert collector.stdout is not None
        assert collector.stdout.readline() == b"\n"
        mine = workers(collector.pid)
        collector.kill()
    assert len(mine) == 1 and all_end(mine)


def test_an_environment_that_dies_is_made_again(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """Its episode is kept, tagged; the others go on."""
    with collecting(service, client, name, tmp_path) as process:
        workers(process.pid)[0].kill()
        wait_until(lambda: broken(client, process.pid), WAIT, what="word of the broken episode")
        wait_until(lambda: len(workers(process.pid)) == 2, WAIT, what="another process")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 3 and "died" in errors, errors
    assert client.run(f"run-{name}").status == "stopped"


def all_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=WAIT)[1]


def test_errors_of_the_other_process_are_typed() -> None:
    with pytest.raises(EnvError, match="does not accept"):
        ProcessEnv("stepwell/Recall-v0", {"speed": 3}).connect()
    with pytest.raises(EnvError, match="--plugin nothing_here"):
        ProcessEnv("CartPole-v1", {}, ("nothing_here",)).connect()
    with open_process_envs("CartPole-v1", {}, 1, ()) as (env,):
        with pytest.raises(RuntimeError, match="ResetNeeded"):
            env.step(0)  # it serves on
        env.reset(seed=1)
        assert isinstance(env, ProcessEnv)
        env._process.kill()
        with pytest.raises(ProcessDied, match=r"CartPole-v1 died \(exit code -9\)"):
            env.step(0)


ODD = """
import gymnasium

class Odd(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, move):
        return move, 1.0, True, False, {}

gymnasium.register("Odd-v0", Odd, order_enforce=False)
"""


def test_a_plug_in_may_name_its_arguments_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the current folder, as in this process."""
    (tmp_path / "odd_env.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    with open_process_envs("Odd-v0", {}, 1, ("odd_env",)) as (env,):
        env.reset()
        assert env.step(2) == (2, 1.0, True, False, {})


def broken(client: Client, pid: int) -> bool:
    return any(w.pid == pid and w.counters.get("broken") == 1 for w in client.workers())


def played(client: Client, name: str) -> bool:
    try:
        return client.dataset(name).fifo.trajectories > 0
    except StepwellError:
        return False  # not made yet
