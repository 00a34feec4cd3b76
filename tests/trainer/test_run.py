"""Whole training runs against a real service: killed, stopped, resumed, shared by two processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from amago_model import get_values
from amago_model.policy_file import load_policy
from stepwell.testing import make_spec, make_trajectory, wait_until
from tests.forks import Fork
from trainer import checkpoint as checkpoints
from trainer.checkpoint import load_agent
from trainer.data import stream

UPDATES = 60
PATIENCE = 900.0
"""Seconds after which something hangs and is not slow: trainers take 5 s of CPU to load."""
pytestmark = pytest.mark.timeout(2 * PATIENCE)
TINY = [
    *("--data.batch", "8", "--data.window", "8", "--schedule.log-every", "1"),
    *("--schedule.checkpoint-every", "7", "--schedule.publish-every", "25"),
    *("--agent.timestep-encoder.d-hidden", "16", "--agent.timestep-encoder.d-output", "16"),
    *("--agent.trajectory-encoder.d-model", "16"),
    *("--agent.actor.d-hidden", "16"),
    *("--optimizer.warmup", "5", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def dataset(service) -> str:
    spec = make_spec(env="Tiny-v0")
    with service.client() as client:
        client.create_dataset("trainer-tiny", spec)
        for part in range(3):  # three shards
            trajectories = [
                make_trajectory(spec, length=5 + 7 * i, seed=10 * part + i, terminated=i % 2 == 0)
                for i in range(5)
            ]
            client.post("trainer-tiny", trajectories, wait_sealed=True)
    return "trainer-tiny"


class Run:
    """A trainer in its own process, and what it left behind."""

    def __init__(
        self, service, folder: Path, dataset: str, name: str, *words: str, recipe: str = "offline"
    ):
        self.service, self.folder, self.name = service, folder, name
        self.words = [recipe, "--dataset", dataset, "--run", name, *TINY, *words]
        if recipe == "offline":  # cloning alone has no critic to make small
            self.words += ["--agent.critic.d-hidden", "16"]
        self.words += ["--output", str(folder), "--data.cache", str(folder / "cache")]

    def start(self, *more: str, updates: int = UPDATES) -> Fork:
        words = [*self.words, *more, "--updates", str(updates)]
        env = {**os.environ, "STEPWELL_URL": self.service.url, "OMP_NUM_THREADS": "1"}
        self.folder.mkdir(exist_ok=True)
        return Fork("trainer.main", words, env=env, output=self.folder / f"{self.name}.log")

    def finish(self, *more: str, updates: int = UPDATES) -> str:
        process = self.start(*more, updates=updates)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        return output

    def curve(self, key: str) -> dict[int, float]:
        """The last value logged for each update; the file may be written to meanwhile."""
        text = (self.folder / self.name / "metrics.jsonl").read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        points = [json.loads(line) for line in lines]
        return {p["step"]: p["value"] for p in points if p["key"] == key}

    def wait_for_update(self, process: Fork, update: int) -> None:
        path = self.folder / self.name / "metrics.jsonl"

        def there() -> bool:
            assert process.poll() is None, process.communicate()[0]
            return path.exists() and f'"step": {update},' in path.read_text()

        wait_until(there, PATIENCE, what=f"update {update}", pause=0.002)

    def checkpoint(self) -> checkpoints.Checkpoint:
        found = checkpoints.newest(self.folder / self.name / "checkpoints")
        assert found is not None
        return found


@pytest.fixture(scope="module")
def whole(service, dataset, tmp_path_factory) -> Run:
    """The run that nobody disturbs."""
    run = Run(service, tmp_path_factory.mktemp("whole"), dataset, "whole")
    run.finish()
    return run


def test_a_run_s_agent_says_what_it_thinks_of_data(service, dataset, whole, tmp_path):
    """From the run's folder or one checkpoint's: every weight, and values of a stream's batch."""
    agent = load_agent(whole.folder / "whole")
    kept = whole.checkpoint()
    assert agent.state_dict().keys() == kept.agent.keys() and not agent.training
    assert all(torch.equal(x, kept.agent[name]) for name, x in agent.state_dict().items())
    select = f"SELECT id FROM trajectories WHERE dataset = '{dataset}'"
    with service.client() as client:
        options = {"client": client, "cache": tmp_path, "batches": 1}
        for batch in stream(select, window=8, batch=6, **options):
            values = get_values(agent, batch)
    assert values.q.shape == (*batch.mask.shape, 1) and torch.equal(values.mask, batch.mask)
    assert values.q[values.mask].isfinite().all() and values.q[values.mask].std() > 0
    (earlier,) = set(kept.path.parent.iterdir()) - {kept.path}
    torch.manual_seed(0)
    other = get_values(load_agent(str(earlier)), batch)
    assert not torch.equal(other.q[values.mask], values.q[values.mask])
    with pytest.raises(checkpoints.CheckpointError, match="no whole checkpoint.*runs/first"):
        load_agent(tmp_path)
    without_spaces = {"config": kept.state["config"]}
    optimizer = torch.optim.AdamW(agent.trainable_parameters())
    checkpoints.save(tmp_path / "checkpoints", 1, agent, optimizer, without_spaces, keep=1)
    with pytest.raises(checkpoints.CheckpointError, match=r"'spaces'.*resume its run"):
        load_agent(tmp_path)


def test_a_run_leaves_what_it_promised(service, whole):
    """Row with complete config and origins, gapless metrics, policies that load and say whose."""
    with service.client() as client:
        log = client.run_log("whole").splitlines()
        said = [line[len("2026-11-21 16:40:12 ") :] for line in log]
        assert said[0].startswith("started on ") and " of snapshot sn_" in "".join(said)
        assert f"policy whole/{UPDATES}" in said and said[-1] == f"finished after {UPDATES} updates"
        assert any(line.startswith(f"update {UPDATES}/{UPDATES}  loss") for line in said)
        row = client.run("whole")
        assert (row.status, row.kind, row.seed) == ("finished", "train", 0)
        assert row.config["agent"]["critic"]["d_hidden"] == 16
        assert row.config["origins"]["data.batch"] == "command line"
        assert row.config["origins"]["agent.losses.gamma"].startswith("derived: ")
        assert row.snapshots and row.snapshots[0].startswith("sn_")
        series = client.metrics("whole", ["loss/total", "data/sample_checksum"], points=1000)
        assert series["loss/total"].steps == list(range(1, UPDATES + 1))
        assert series["loss/total"].values == list(whole.curve("loss/total").values())
        assert [p.version for p in client.policies("whole")] in ([25, 50, 60], [60, 50, 25])
        policy = load_policy(client.download_policy("whole").data)
        assert policy.metadata["step"] == UPDATES
        assert policy.metadata["extra"]["training"]["data"]["batch"] == 8


def test_killed_and_resumed_is_bit_equal(service, dataset, whole, tmp_path):
    """SIGKILL at a random update, twice: the same samples, and the same losses to the last bit."""
    run = Run(service, tmp_path, dataset, "killed")
    seed = random.SystemRandom().randrange(1 << 30)
    draw = random.Random(seed)
    for low, high in ((8, 25), (26, 50)):
        process = run.start()
        run.wait_for_update(process, draw.randint(low, high))
        process.kill()
        process.communicate()
    output = run.finish("--resume", "must")
    assert "resumed after" in output
    for key in ("data/sample_checksum", "loss/total", "loss/critic", "optimizer/gradient_norm"):
        assert run.curve(key) == whole.curve(key), (key, seed)
    ours, theirs = run.checkpoint(), whole.checkpoint()
    assert ours.agent.keys() == theirs.agent.keys()
    for name, value in ours.agent.items():
        assert value.equal(theirs.agent[name]), (name, seed)
    for name, value in ours.optimizer.items():
        assert value.equal(theirs.optimizer[name]), (name, seed)


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_and_says_so(service, dataset, tmp_path, processes):
    """An orderly stop: the checkpoint of the update it stood at, and a run that says "stopped"."""
    name = f"stopped-{processes}"
    run = Run(service, tmp_path, dataset, name, "--schedule.checkpoint-every", "0")
    process = run.start("--processes", str(processes), updates=100_000)
    run.wait_for_update(process, 5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Traceback" not in output, output
    reached, world = (run.checkpoint().state[key] for key in ("update", "world"))
    assert (reached, world) == (max(run.curve("loss/total")), processes)
    with service.client() as client:
        assert client.run(name).status == "stopped"


def test_a_trainer_may_be_there_before_its_data(service, tmp_path):
    """Started with a dataset that does not exist yet, it waits for it and for its first episode."""
    run = Run(service, tmp_path, "later", "early", "--data.wait-for-data", "60")
    process = run.start(updates=3)
    spec = make_spec(env="Tiny-v0")
    waiting = "waiting for the first trajectory: "
    with service.client() as client:
        process.wait_for(waiting + "there is no dataset", PATIENCE)
        client.create_dataset("later", spec)
        process.wait_for(re.escape(waiting) + "(?!there is no dataset)", PATIENCE)
        client.post("later", [make_trajectory(spec, length=9)])
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output


def test_settings_are_derived_when_enough_is_there(service, tmp_path):
    """Not from the first of 60 steps; then the untrained policy of that shape is published."""
    words = ["--data.wait-for-data", "60", "--data.refresh-every", "5"]
    words += ["--data.ratio.min-size", "60", "--data.ratio.updates-per-step", "1"]
    run = Run(service, tmp_path, "enough", "enough", *words, "--verbose", recipe="offline")
    spec = make_spec(env="Tiny-v0")
    with service.client() as client:
        client.create_dataset("enough", spec)
        client.post("enough", [make_trajectory(spec, length=20)])
        process = run.start(updates=3)
        process.wait_for("waiting for 60 steps to derive", PATIENCE)
        client.post("enough", [make_trajectory(spec, length=20, seed=s) for s in (1, 2)])
        wait_until(lambda: 0 in {p.version for p in _policies(client, "enough")}, PATIENCE)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert "too little data for critics (3 trajectories, 60 steps)" in output


def _policies(client, run):
    return client.policies(run) if run in {r.name for r in client.runs()} else []


@pytest.mark.long
def test_collectors_get_the_untrained_policy_before_there_is_data(service, tmp_path):
    """Version 0 is what the networks begin with. The run can be stopped, or killed, while it waits:
    the same command again waits on, and then trains."""
    name, spec = "untrained", make_spec(env="Tiny-v0")
    words = ("--data.wait-for-data", "600", "--processes", "2")
    run = Run(service, tmp_path, name, name, *words, recipe="pendulum_stitch")
    with service.client() as client:

        def start_and_wait() -> Fork:
            process = run.start(updates=3)
            process.wait_for("waiting for the first trajectory", PATIENCE)
            return process

        process = start_and_wait()
        client.create_dataset(name, spec)
        wait_until(lambda: name in {r.name for r in client.runs()}, PATIENCE)
        wait_until(lambda: client.policies(name), PATIENCE)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and "stopped before there was data" in output, output
        assert client.run(name).status == "stopped"
        first = client.download_policy(name, "0").data
        process = start_and_wait()
        assert client.run(name).status == "running"
        for victim in (process, *psutil.Process(process.pid).children(recursive=True)):
            victim.kill()
        process.communicate(timeout=PATIENCE)

        process = start_and_wait()
        client.post(name, [make_trajectory(spec, length=9)])
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        done = client.run(name)
        assert done.status == "finished" and len(done.snapshots) == 1
        assert [p.version for p in client.policies(name)] == [3, 0]
        assert client.download_policy(name, "0").data == first

    anew = Run(service, tmp_path / "2", name, f"{name}-now", recipe="pendulum_stitch")
    anew.finish("--resume", "never", updates=0)  # all the data is there: the same weights
    now = load_file(tmp_path / "2" / f"{name}-now" / "policies" / "0.safetensors")
    begun = load_file(run.folder / name / "policies" / "0.safetensors")
    assert begun.keys() == now.keys()
    assert all(torch.equal(value, begun[key]) for key, value in now.items())


def test_an_output_that_is_no_folder_is_said_as_such(service, dataset, tmp_path):
    (tmp_path / "file").write_text("")
    run = Run(service, tmp_path, dataset, "nowhere", "--output", str(tmp_path / "file"))
    run.words = run.words[:-4] + run.words[-2:]  # the later --output goes
    output, _ = (process := run.start()).communicate(timeout=PATIENCE)
    assert process.returncode == 2 and "stepwell train: output: " in output
    assert "Traceback" not in output


def test_a_run_says_by_what_its_memory_is_computed(service, dataset, tmp_path):
    run = Run(service, tmp_path, dataset, "named", recipe="recall")
    at = run.words.index("--agent.trajectory-encoder.d-model")
    del run.words[at : at + 2]  # the recipe's memory is a Transformer
    assert "attention by sdpa, on cpu\n" in run.finish(updates=2)
    with service.client() as client:
        assert client.run("named").config["kernels"] == {"attention": "sdpa"}
        assert "attention by sdpa, on cpu\n" in client.run_log("named")


def test_never_resuming_begins_anew_and_keeps_what_there_was(service, dataset, tmp_path):
    """A fresh life is not overtaken by the checkpoints of one that came further.

    What a resumed run was told otherwise stands in its log, for whoever reads its curves.
    """
    run = Run(service, tmp_path, dataset, "anew")
    run.finish(updates=21)
    output = run.finish("--resume", "never", updates=14)
    assert "resumed" not in output and "checkpoints-1" in output
    assert run.checkpoint().state["update"] == 14
    assert (tmp_path / "anew" / "checkpoints-1" / "update-000000021.safetensors").exists()
    told = "warning: agent.losses.tau was 0.01, is 0.5 from here on"
    assert told in run.finish("--agent.losses.tau", "0.5", updates=15)
    with service.client() as client:
        log = client.run_log("anew")
    assert told in log and "warning: --resume never: the earlier checkpoints" in log


def test_commands_from_the_service_are_obeyed(service, dataset, tmp_path):
    """Somebody pauses the run (its numbers stand still), then stops it."""
    run = Run(service, tmp_path, dataset, "ordered")
    process = run.start(updates=100_000)
    run.wait_for_update(process, 3)
    with service.client() as client:

        def worker() -> Any:
            assert process.poll() is None
            # Its first heartbeat may come after the numbers of its first updates.
            return next((w for w in client.workers() if w.run == "ordered"), None)

        def wait_for(state: str) -> None:
            wait_until(lambda: (w := worker()) and w.state == state, PATIENCE, what=state)

        wait_for("running")
        client.command("train-ordered", "pause")
        wait_for("paused")
        stood = max(run.curve("loss/total"))
        for _ in range(2):
            heard = worker().heartbeat_at
            wait_until(lambda h=heard: worker().heartbeat_at != h, PATIENCE, what="a heartbeat")
        assert max(run.curve("loss/total")) == stood
        client.command("train-ordered", "stop")
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        assert run.checkpoint().state["update"] == max(run.curve("loss/total"))
        assert client.run("ordered").status == "stopped"


def test_two_processes_see_the_samples_of_one(service, dataset, whole, tmp_path):
    """--processes 2 really is two; the same stream; and one process can take up where two left.

    Cloning draws no noise, so two halves must also learn what the whole does, and publish it under
    the same names.
    """
    one = Run(service, tmp_path, dataset, "one", recipe="bc")
    two = Run(service, tmp_path, dataset, "two", recipe="bc")
    two.finish("--processes", "2", updates=20)
    found = two.checkpoint().state
    assert (found["world"], found["update"]) == (2, 20)
    one.finish(updates=20)
    assert one.checkpoint().state["world"] == 1
    losses = [[*run.curve("loss/bc").values()] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name in ("count/bc", "count/transitions", "policy/log_prob", "policy/entropy"):
        curves = [[*run.curve(name).values()] for run in (one, two)]
        assert curves[0] == pytest.approx(curves[1], rel=1e-3), name
    kept = [{**run.checkpoint().agent, **run.checkpoint().optimizer} for run in (one, two)]
    published = [load_file(run.folder / run.name / "policies/20.safetensors") for run in (one, two)]
    for whole_one, shared in (kept, published):
        assert {k: v.shape for k, v in whole_one.items()} == {k: v.shape for k, v in shared.items()}
        assert not any("module." in name for name in shared)
    for name, value in published[0].items():
        torch.testing.assert_close(published[1][name], value, rtol=1e-2, atol=1e-4, msg=name)
    two.finish("--resume", "must", updates=30)
    found = two.checkpoint().state
    assert (found["world"], found["update"]) == (1, 30)
    ours, theirs = two.curve("data/sample_checksum"), whole.curve("data/sample_checksum")
    assert ours == {step: theirs[step] for step in range(1, 31)}


def test_a_world_of_another_size_is_refused(service, dataset, tmp_path):
    """A launcher that silently starts one process (it happens) is found out at once."""
    run = Run(service, tmp_path, dataset, "lonely")
    env = {**os.environ, "STEPWELL_URL": service.url, "RANK": "0", "WORLD_SIZE": "1"}
    env |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "trainer.main", *run.words, "--processes", "2"],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert "expected 2 processes (--processes), but 1 process runs" in done.stderr


def test_growing_data_and_an_outage(fresh_service, tmp_path):
    """New trajectories are taken up while training; the service dies and training goes on.

    In the end no metric is missing, and a resumed run replays the views it had.
    """
    spec = make_spec(env="Tiny-v0")
    client = fresh_service.client()
    client.create_dataset("growing", spec)
    client.post("growing", [make_trajectory(spec, length=30, seed=i) for i in range(4)])
    run = Run(fresh_service, tmp_path, "growing", "grow", "--data.refresh-every", "20")
    process = run.start(updates=100_000)
    run.wait_for_update(process, 10)
    client.post("growing", [make_trajectory(spec, length=30, seed=9)])

    def grown() -> bool:
        assert process.poll() is None
        return max(run.curve("data/trajectories").values()) >= 5

    wait_until(grown, PATIENCE, what="the fifth trajectory")
    fresh_service.kill()
    reached = max(run.curve("loss/total"))
    run.wait_for_update(process, reached + 60)
    process.kill()
    process.communicate()
    with (run.folder / "grow" / "metrics.jsonl").open("a") as file:
        file.write('{"key": "loss/total", "st')  # killed within a write
    found = run.checkpoint().state
    views, reached = found["snapshot_views"], found["update"]
    assert len(views) == 2 and views[1]["start"] > 10
    # No service: the snapshots and their columns are here.
    words = ("--resume", "must", "--data.refresh-every", "0", "--schedule.drain-timeout", "0.5")
    run.finish(*words, updates=reached + 20)
    assert run.checkpoint().state["snapshot_views"] == views
    fresh_service.start()
    run.finish(*words[:4], updates=reached + 25)
    total = reached + 25
    assert sorted(run.curve("loss/total")) == list(range(1, total + 1))
    series = client.metrics("grow", ["loss/total"], points=10_000)["loss/total"]
    assert series.steps[:total] == list(range(1, total + 1))
