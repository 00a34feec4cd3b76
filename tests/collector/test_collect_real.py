"""Collecting into a real service: what was played is there, whatever happens on the way."""

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from rich.console import Console

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from amago_model.policy_file import load_policy, save_policy
from collector import evaluate_versions as evaluate_versions_module
from collector.collect import collect
from collector.config import CollectConfig, EvaluateConfig, UsageError
from collector.control import Control
from collector.envs import make
from collector.evaluate import evaluate_policy, run_evaluation
from collector.evaluate_versions import evaluate_versions, table_of
from collector.interface import BrokenEnv, interface_of
from collector.main import evaluate, main
from collector.policy_actor import RandomActor
from collector.record import record
from collector.registered_run import open_dataset
from collector.rollout import Rollout
from stepwell import Client
from stepwell.errors import InvalidSpace, ServiceUnreachable
from stepwell.messages import TrajectoryInfo
from stepwell.outbox import Outbox
from stepwell.spaces import Box, EnvSpec
from stepwell.testing import wait_until
from stepwell.trajectory import Trajectory
from tests.collector.fake_env import FakeEnv
from tests.forks import Fork
from tests.specs import assert_same

ENV = "CartPole-v1"
PACED = "tests/Paced-v0"
WAIT = 120.0


class Paced(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment as slow as a simulator, so that playing on leaves the machine to others."""

    def step(self, action: Any) -> Any:
        time.sleep(0.003)  # a moment: the simulator's
        return super().step(action)


gymnasium.register(PACED, lambda: Paced(gymnasium.make(ENV)))


def policy_file(version: int) -> bytes:
    torch.manual_seed(version)
    config = {
        "timestep_encoder": {"kind": "any", "d_hidden": 16, "d_output": 16},
        "trajectory_encoder": {"kind": "identity"},
    }
    spaces = Spaces.of_spec(interface_of(make(ENV), ENV).spec.to_json())
    return save_policy(ActingPolicy(AgentConfig.from_dict(config), spaces), step=100 * version)


def settings(service: Any, name: str, tmp_path: Path, **changed: Any) -> CollectConfig:
    values: dict[str, Any] = {
        "env": ENV,
        "dataset": name,
        "envs": 2,
        "url": service.url,
        "token": service.token,
        "run": f"run-{name}",
        "outbox": tmp_path / "outbox",
        "poll_every": 0.05,
        "heartbeat_every": 0.1,
        "seed": 1,
    }
    return CollectConfig(**{**values, **changed})


def stored(client: Client, name: str) -> list[TrajectoryInfo]:
    found: list[TrajectoryInfo] = []
    cursor = None
    while True:
        page = client.trajectories(name, order="seq", limit=100, cursor=cursor)
        found += page.items
        if (cursor := page.next) is None:
            return found


def until(condition: Callable[[], Any], what: str) -> Any:
    return wait_until(condition, WAIT, what=what)


@contextmanager
def collecting(config: CollectConfig) -> Iterator[Control]:
    """A collector in a thread, stopped at the end of the block; its error is raised here."""
    control, errors = Control(), []

    def run() -> None:
        try:
            collect(config, control=control)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield control
    finally:
        if control.state != "draining":  # that one ends by itself, and a stop would change how
            control.command("stop")
        thread.join(WAIT)
    if errors:
        raise errors[0]
    assert not thread.is_alive()


def test_what_was_played_reads_back_bit_by_bit(client: Client, name: str, tmp_path: Path) -> None:
    """Random Pendulum through outbox, wire, disk and back: equal digests, equal seq order."""
    interface = interface_of(make("Pendulum-v1"), "Pendulum-v1")
    interface = open_dataset(client, name, interface)
    played: list[Trajectory] = []
    with Outbox(tmp_path, client, name, interface.spec) as outbox:

        def sink(trajectory: Trajectory, _: int) -> None:
            outbox.put(trajectory)
            played.append(trajectory)

        rollout = Rollout(
            [make("Pendulum-v1") for _ in range(3)],
            RandomActor(interface, 3),
            interface,
            make_env=lambda: make("Pendulum-v1"),
            seeds=iter(range(7)),
            sink=sink,
        )
        while not rollout.done:
            rollout.step()
        assert outbox.flush(WAIT)
    client.flush(name)
    infos = stored(client, name)
    assert [i.id for i in infos] == [t.id for t in played]
    for info, trajectory in zip(infos, played, strict=True):
        assert info.digest == trajectory.digest
        assert_same(client.steps(info.id), trajectory)
        assert (info.truncated, info.terminated, info.seed) == (
            True,
            False,
            trajectory.metadata.seed,
        )


def test_a_collect_run_leaves_everything_a_person_asks_for(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """Episodes with policy, run and worker; a finished run with config and metrics; a worker."""
    learner = f"learner-{name}"
    client.create_run(learner, "train")
    client.publish_policy(learner, 3, policy_file(3), step=300)
    config = settings(service, name, tmp_path, policy=learner, episodes=11, tags=("a", "b"))
    stats = collect(config)
    infos = stored(client, name)
    assert len(infos) == stats.episodes == 11
    assert sum(i.length for i in infos) == stats.steps
    (worker,) = [w for w in client.workers() if w.run == config.run]
    for info in infos:
        assert (info.policy, info.run, info.env) == (f"{learner}/3", config.run, ENV)
        assert (info.tags, info.purpose, info.collector) == (["a", "b"], "train", worker.id)
    run = client.run(config.run)
    assert (run.kind, run.status, run.seed) == ("collect", "finished", 1)
    assert run.config["policy"] == learner and run.config["env"] == ENV
    assert run.latest["collect/length"] > 0
    assert worker.state == "stopped" and worker.policy == f"{learner}/3"
    assert worker.counters["episodes"] == 11 and worker.counters["outbox"] == 0


def test_a_run_that_is_taken_up_again_plays_new_episodes_and_keeps_its_clock(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """Same run, same seed, same outbox: the schedule goes on, and no episode comes twice."""
    first = collect(settings(service, name, tmp_path, random=True, episodes=5))
    second = collect(settings(service, name, tmp_path, random=True, episodes=5))
    assert second.earlier_steps == first.clock and second.clock == first.steps + second.steps
    seeds = [i.seed for i in stored(client, name)]
    assert len(seeds) == len(set(seeds)) == 10


def test_collectors_of_the_same_words_play_different_episodes(
    service: Any, client: Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several with one --seed, as a launch starts them: each has an outbox slot, so its seeds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPWELL_OUTBOX")
    words = {"random": True, "outbox": None}
    with collecting(settings(service, name, tmp_path, **words)):
        until(lambda: (tmp_path / "stepwell-outbox" / name / "0" / "clock.json").exists(), "slot 0")
        collect(settings(service, name, tmp_path, **words, run=f"other-{name}", episodes=5))
        until(lambda: any(i.run == f"run-{name}" for i in stored(client, name)), "an episode")
    by_run: dict[str, set[int | None]] = {}
    for item in stored(client, name):
        by_run.setdefault(item.run, set()).add(item.seed)
    first, second = by_run[f"run-{name}"], by_run[f"other-{name}"]
    assert len(second) == 5 and first and not first & second


def test_a_new_policy_is_played_from_the_next_episode_on(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """Published while collecting: later episodes are its, and every episode has one policy."""
    learner = f"learner-{name}"
    config = settings(service, name, tmp_path, policy=learner, wait_for_policy=True)
    with collecting(config) as control:
        until(lambda: any(w.run == config.run for w in client.workers()), "a heartbeat")
        assert control.state == "starting", "it waits for the first policy"
        client.create_run(learner, "train")
        for version in (0, 1, 2):
            client.publish_policy(learner, version, policy_file(version))
            until(
                lambda v=version: any(i.policy.endswith(f"/{v}") for i in stored(client, name)),
                f"episodes of version {version}",
            )
    infos = stored(client, name)
    assert {i.policy for i in infos} == {f"{learner}/{v}" for v in range(3)}
    assert {i.metrics["policy_lag"] for i in infos} <= {0.0, 1.0, 2.0}
    assert all(i.metrics["policy_lag"] == 0 for i in infos if i.policy.endswith("/2"))


def test_it_warms_up_with_random_actions_then_waits_for_the_policy(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    learner = f"learner-{name}"
    noise = {"kind": "greedy", "clock": "policy", "start": 0.5}  # of a policy that is not there yet
    config = settings(service, name, tmp_path, policy=learner, warm_up_steps=50, epsilon=noise)
    with collecting(config.replace(wait_for_policy=True)):

        def waits() -> bool:
            mine = [w for w in client.workers() if w.run == config.run and w.state == "waiting"]
            played = mine[0].counters["env_steps"] if mine else -1
            return played >= 50 and sum(i.length for i in stored(client, name)) == played

        until(waits, "the end of the warm-up, and all of it delivered")
        random = stored(client, name)
        assert {i.policy for i in random} == {"random"}
        assert not any("interrupted" in i.tags or i.metrics.get("policy_lag") for i in random)
        client.create_run(learner, "train")
        client.publish_policy(learner, 0, policy_file(0))
        until(lambda: len(stored(client, name)) > len(random) + 2, "episodes of the policy")
    assert {i.policy for i in stored(client, name)[len(random) :]} == {f"{learner}/0"}


def test_a_service_that_goes_away_loses_nothing_and_stops_nobody(
    fresh_service: Any, name: str, tmp_path: Path
) -> None:
    """Down: the outbox grows and playing goes on. Up again: all of it arrives, once, in order."""
    client = fresh_service.client(retry_for=0.0, timeout=5.0)
    config = settings(fresh_service, name, tmp_path, random=True, env=PACED)

    def files() -> set[str]:
        return {path.name for path in config.outbox.glob("*.arrow")} if config.outbox else set()

    def waiting() -> int:
        return len(files())

    with collecting(config):
        until(lambda: client.ready() and _count(client, name) > 5, "first episodes")
        fresh_service.kill()
        before = until(waiting, "episodes in the outbox")
        until(lambda: waiting() > before + 20, "a growing outbox")
        kept = files()
        fresh_service.restart()
        until(lambda: not kept & files(), "what was kept in the outbox arrives")
    infos = stored(client, name)
    assert waiting() == 0 and len(infos) > 20
    assert len({i.id for i in infos}) == len(infos)
    assert [i.id for i in infos] == sorted(i.id for i in infos), "UUIDv7 order is order of birth"


def _count(client: Client, name: str) -> int:
    return sum(1 for d in client.datasets() if d.name == name and d.fifo.trajectories > 5) * 6


def test_people_pause_resume_and_drain_a_worker(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """Commands come with heartbeats; drain lets the running episodes end by themselves."""
    config = settings(service, name, tmp_path, random=True, env=PACED)

    def worker() -> Any:
        return next((w for w in client.workers() if w.run == config.run), None)

    with collecting(config) as control:
        until(lambda: (w := worker()) and w.counters.get("env_steps", 0) > 20, "first steps")
        client.command(worker().id, "pause")
        until(lambda: worker().state == "paused", "the pause")
        beats: list[tuple[float, float]] = []

        def rests() -> bool:
            """Whether two heartbeats in a row tell of the same steps."""
            now = worker()
            beat = (now.heartbeat_at, now.counters["env_steps"])
            if not beats or beats[-1][0] != beat[0]:
                beats.append(beat)
            return len(beats) > 1 and beats[-1][1] == beats[-2][1]

        until(rests, "no more steps")
        steps = worker().counters["env_steps"]
        assert worker().alive
        client.command(worker().id, "resume")
        until(lambda: worker().counters["env_steps"] > steps, "more steps")
        client.command(worker().id, "drain")
        until(lambda: worker().state == "stopped", "the end")
        assert control.state == "draining"
    assert all(i.tags == [] and i.terminated for i in stored(client, name))
    assert client.run(config.run).status == "finished"


@pytest.mark.parametrize("when_ahead", ["wait", "spool", "drop-oldest"])
def test_ahead_of_a_trainer_it_waits_spools_or_drops(
    service: Any, client: Client, name: str, tmp_path: Path, when_ahead: Any
) -> None:
    client.create_dataset(name, interface_of(make(PACED), PACED).spec)
    client.report_samples(name, "t", 0, {"samples_per_insert": 1.0, "buffer": 300.0, "min_size": 1})
    config = settings(service, name, tmp_path, random=True, when_ahead=when_ahead, env=PACED)

    def held(counter: str) -> Any:
        """The worker, once the dataset has grown as far as it may and `counter` is above 5."""
        full = not client.report_samples(name, "t", 0).may_insert
        (worker,) = [w for w in client.workers() if w.run == config.run] or [None]
        there = worker is not None and worker.counters.get(counter, 0) > 5
        return worker if full and there else None

    with collecting(config):
        counter = {"wait": "episodes", "spool": "outbox", "drop-oldest": "dropped"}[when_ahead]
        worker = until(lambda: held(counter), counter)
        if when_ahead == "wait":
            until(lambda: held(counter).state == "waiting", "waiting")
            longest = 2 * 500  # both environments finish what they had begun
            assert client.dataset(name).fifo.steps < 301 + longest
            episodes = held(counter).counters["episodes"]
            seen = {held(counter).heartbeat_at}
            until(lambda: seen.add(held(counter).heartbeat_at) or len(seen) > 5, "heartbeats")
            assert held(counter).counters["episodes"] == episodes
        elif when_ahead == "drop-oldest":
            until(lambda: held(counter).counters["outbox"] <= config.envs, "only the newest wait")
        before = client.dataset(name).fifo.trajectories
        client.report_samples(name, "t", 1_000_000)
        until(lambda: client.dataset(name).fifo.trajectories > before + 5, "it goes on")
    (worker,) = [w for w in client.workers() if w.run == config.run]
    infos = stored(client, name)
    complete = sum("interrupted" not in info.tags for info in infos)
    assert complete + worker.counters["dropped"] == worker.counters["episodes"]
    assert (worker.counters["dropped"] > 0) == (when_ahead == "drop-oldest")


def test_a_step_limit_keeps_what_was_played(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """Exactly the steps asked for (to the width), the unfinished ones tagged."""
    stats = collect(settings(service, name, tmp_path, random=True, steps=101, env="Pendulum-v1"))
    infos = stored(client, name)
    assert stats.steps == sum(i.length for i in infos) == 102
    assert {tuple(i.tags) for i in infos} == {("interrupted",)}


def test_a_broken_environment_is_flagged_and_does_not_end_the_run(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    gymnasium.register("Flaky-v0", lambda: FakeEnv((4,), broken_at=(2, 1)))
    try:
        config = settings(service, name, tmp_path, random=True, episodes=7, envs=1, env="Flaky-v0")
        stats = collect(config)
    finally:
        del gymnasium.registry["Flaky-v0"]
    infos = stored(client, name)
    assert [(i.length, i.tags) for i in infos] == [
        (4, []),
        (4, []),
        (1, ["broken"]),
        (4, []),
        (4, []),
        (1, ["broken"]),
        (4, []),
    ]
    assert stats.broken.total == 2 and "asked to fail" in stats.error
    assert client.run(config.run).status == "finished"


def start_collector(service: Any, name: str, tmp_path: Path, *more: str) -> Fork:
    words = ["--env", ENV, "--dataset", name, "--random", "--envs", "3", "--url", service.url]
    words += ["--outbox", str(tmp_path / "outbox"), "--run", f"run-{name}"]
    words += ["--heartbeat-every", "0.2", "--seed", "3", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Fork("tests.collector.telling", words, env=env, output=tmp_path / "said.txt")


def taken(process: Fork) -> dict[str, str]:
    """Ids and digests of what its outbox has taken."""
    return dict(re.findall(r"^([0-9a-f-]{36}) (\w+)$", process.said(), re.MULTILINE))


def test_killed_at_any_moment_nothing_taken_is_lost_or_doubled(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """SIGKILL at a random point: what the outbox had taken is stored, once each."""
    process = start_collector(service, name, tmp_path)
    some = random.Random().randint(40, 200)
    wait_until(lambda: len(taken(process)) >= some, WAIT, what="episodes", pause=0.001)
    process.kill()
    process.wait()
    ledger = taken(process)
    last = start_collector(service, name, tmp_path, "--episodes", "2")
    assert last.wait(300) == 0, last.said()
    ledger.update(taken(last))
    infos = stored(client, name)
    found = {info.id: info.digest for info in infos}
    assert len(found) == len(infos) and len(ledger) > 40
    assert {k: found.get(k) for k in ledger} == ledger
    # One that was on disk but not yet told may be there too; more than that would be a double.
    assert len(found) - len(ledger) <= 1
    seeds = [info.seed for info in infos]
    assert len(set(seeds)) == len(seeds), "no episode was played or stored twice"
    assert not list(tmp_path.rglob("*.arrow"))


def test_sigterm_ends_cleanly(service: Any, client: Client, name: str, tmp_path: Path) -> None:
    """Exit status 0, nothing left in the outbox, the run stopped, unfinished episodes kept."""
    process = start_collector(service, name, tmp_path)
    wait_until(lambda: len(taken(process)) >= 5, WAIT, what="episodes")
    process.terminate()
    assert process.wait(300) == 0, process.said()
    assert not list(tmp_path.rglob("*.arrow"))
    assert client.run(f"run-{name}").status == "stopped"
    assert any(i.tags == ["interrupted"] for i in stored(client, name))


def test_an_imported_dataset_takes_what_is_played_in_its_environment(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    """A D4RL file with a simulator's state, uploaded; then collected into under the same spec."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "swing.hdf5", "w") as file:
        file["observations"] = rng.normal(size=(40, 3)).astype(np.float32)
        file["actions"] = rng.uniform(-1.9, 1.9, (40, 1)).astype(np.float32)
        file["rewards"] = np.zeros(40, np.float32)
        file["terminals"] = np.zeros(40, np.bool_)
        file["timeouts"] = np.arange(40) % 20 == 19
        file["infos/qpos"] = rng.normal(size=(40, 2))
    client.upload(name, tmp_path / "swing.hdf5", env="pendulum")
    config = settings(service, name, tmp_path, random=True, episodes=2, env="Pendulum-v1")
    collect(config)
    infos = stored(client, name)
    assert [(i.partition, i.length, i.env) for i in infos] == [
        *[("protected", 20, "pendulum")] * 2,
        *[("fifo", 200, "Pendulum-v1")] * 2,
    ]
    client.flush(name)
    assert np.isnan(client.steps(infos[-1].id).infos["qpos"]).all()


def test_an_environment_that_does_not_return_is_told(
    service: Any, client: Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = threading.Event()

    class Hangs(FakeEnv):
        def step(self, action: Any) -> Any:
            assert returns.wait(WAIT)
            return super().step(action)

    env_id = f"Hangs{name[-6:]}-v0"
    gymnasium.register(env_id, entry_point=Hangs)
    monkeypatch.setattr("collector.stats.STUCK_SECONDS", 0.3)

    def error() -> str:
        worker = next((w for w in client.workers() if w.run == f"run-{name}"), None)
        return "nothing yet" if worker is None else worker.last_error

    with collecting(settings(service, name, tmp_path, env=env_id, random=True)):
        until(lambda: "an environment has not returned from its step" in error(), "the notice")
        monkeypatch.setattr("collector.stats.STUCK_SECONDS", WAIT)
        returns.set()
        until(lambda: error() == "" and stored(client, name), "the next episode")


def test_a_dataset_of_another_layout_is_refused_before_anything_is_played(
    service: Any, client: Client, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear line on the error stream and status 2; no run, no outbox."""
    client.create_dataset(name, EnvSpec.of(Box((9,)), Box((1,), low=-1.0, high=1.0)))
    arguments = ["--env", ENV, "--dataset", name, "--random", "--url", service.url]
    assert main([*arguments, "--run", f"run-{name}", "--outbox", str(tmp_path / "o")]) == 2
    printed = capsys.readouterr().err
    assert "does not fit dataset" in printed and "Traceback" not in printed
    assert f"run-{name}" not in {r.name for r in client.runs()}
    assert not (tmp_path / "o").exists()
    with pytest.raises(InvalidSpace):
        open_dataset(client, name, interface_of(make(ENV), ENV))


@pytest.mark.parametrize(
    ("env", "says", "status"),
    [(ENV, "there is no run", 1), ("Pendulum-v1", "cannot play Pendulum-v1", 2)],
)
def test_a_policy_that_cannot_play_is_found_out_before_anything_is_made(
    service: Any,
    client: Client,
    name: str,
    tmp_path: Path,
    env: str,
    says: str,
    status: int,
    capsys: Any,
) -> None:
    """No empty dataset, no failed run, no outbox: neither of a collector nor of an evaluation."""
    learner = f"learner-{name}"
    if env != ENV:
        client.create_run(learner, "train")
        client.publish_policy(learner, 0, policy_file(0))
    words = ["--env", env, "--dataset", name, "--policy", learner, "--url", service.url]
    words += ["--run", f"run-{name}"]
    assert main([*words, "--outbox", str(tmp_path / "o")]) == status
    collected = capsys.readouterr().err
    assert evaluate([*words, "--episodes", "1"]) == status
    for printed in (collected, capsys.readouterr().err):
        assert says in printed and printed.count("\n") == 1
    assert name not in {d.name for d in client.datasets()}
    assert f"run-{name}" not in {r.name for r in client.runs()}
    assert not (tmp_path / "o").exists()


def test_an_evaluation_is_kept_whole(service: Any, client: Client, name: str) -> None:
    """Episodes as purpose eval in the order of the seeds, the score as an evaluation, the run."""
    learner = f"learner-{name}"
    client.create_run(learner, "train")
    client.publish_policy(learner, 0, policy_file(0))
    config = EvaluateConfig(
        env=ENV,
        policy=learner,
        episodes=9,
        seeds=40,
        envs=4,
        dataset=name,
        run=f"eval-{name}",
        url=service.url,
    )
    result, notes = run_evaluation(config, Console(quiet=True))
    infos = stored(client, name)
    assert [i.seed for i in infos] == list(range(40, 49))
    assert {(i.purpose, i.policy, i.run) for i in infos} == {("eval", f"{learner}/0", config.run)}
    (evaluation,) = client.evaluations(run=config.run)
    assert evaluation.id == notes["evaluation"] and evaluation.policy == f"{learner}/0"
    assert evaluation.returns == result.returns == [i.total_reward for i in infos]
    assert (evaluation.mean, evaluation.iqm) == (result.mean, result.iqm)
    assert evaluation.details["bottom_quintile"] == result.bottom_quintile
    assert evaluation.details["successes"] == result.successes
    assert evaluation.seeds == list(range(40, 49)) and evaluation.dataset == name
    assert client.run(config.run).status == "finished" and client.run(config.run).kind == "eval"
    again = evaluate_policy(
        _load(client, learner), ENV, range(40, 49), envs=1, policy_id=f"{learner}/0"
    )
    assert again.returns == result.returns
    dataset = client.dataset(name)
    assert dataset.eval.trajectories == 9 and dataset.fifo.steps == 0
    assert dataset.capacity.trajectories == 10_000


def test_arguments_that_change_the_spaces_get_an_evaluation_dataset_of_their_own(
    service: Any, client: Client
) -> None:
    """Only where no dataset is named: the same environment with other arguments."""
    common = dict(env="stepwell/Recall-v0", random=True, episodes=1, url=service.url)
    datasets = []
    for symbols in (3, 5, 3):
        config = EvaluateConfig(**common, env_args=(f"symbols={symbols}",))
        _, notes = run_evaluation(config, Console(quiet=True))
        datasets.append(notes["dataset"])
    assert datasets[0] == datasets[2] != datasets[1]
    assert all(dataset.startswith("eval-stepwell-recall-v0") for dataset in datasets)
    with pytest.raises(InvalidSpace, match="does not fit dataset"):
        run_evaluation(config.replace(dataset=datasets[1]), Console(quiet=True))


def test_a_run_is_evaluated_in_the_environment_that_it_learned_in(
    service: Any, client: Client, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the arguments of its collector; a module that would be imported must be named."""
    learner, where = f"learner-{name}", ["--url", service.url, "--token", service.token or ""]
    client.create_run(learner, "train", config={"dataset": f"{name}@v1"})
    client.publish_policy(learner, 1, policy_file(1))
    words = [f"{learner}:1", "--episodes", "2", "--envs", "2", "--no-upload", "--json", *where]
    assert evaluate(words) == 1 and "404" in capsys.readouterr().err
    collected = ("--random", "--episodes", "1", "--dataset", name, "--outbox", str(tmp_path))
    assert main(["--env", ENV, "--env-args", "max_episode_steps=7", *collected, *where]) == 0
    assert evaluate(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["env"] == ENV and result["policy"] == f"{learner}/1"
    assert max(result["lengths"]) <= 7
    client.create_run(f"{name}-other", "collect", config={"dataset": name, "env": "evil:Env-v0"})
    assert evaluate(words) == 2
    assert "only imported if you name it: --env evil:Env-v0" in capsys.readouterr().err


def test_every_version_is_scored_once_and_the_best_is_named(
    service: Any, client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newest first; a second command plays only what is missing; --follow ends with the run."""
    learner = f"learner-{name}"
    client.create_run(learner, "train")
    values: dict[str, Any] = {"env": ENV, "episodes": 3, "envs": 3, "dataset": name}
    words = {**values, "url": service.url, "token": service.token}

    def evaluate(**more: Any) -> list[Any]:
        return evaluate_versions(EvaluateConfig(**words, **more), Console(quiet=True))[0]

    with pytest.raises(UsageError, match="has no policy yet"):
        evaluate(policy=f"{learner}/all")
    for version in (0, 3):
        client.publish_policy(learner, version, policy_file(version))
    scores = evaluate(policy=f"{learner}/all")
    assert [s.policy for s in scores] == [f"{learner}/0", f"{learner}/3"]
    assert [s.policy for s in client.evaluations(env=ENV) if s.policy.startswith(learner)] == [
        f"{learner}/0",
        f"{learner}/3",
    ], "listed newest first: version 3 was played before version 0"

    published = []

    def next_version(_: float) -> None:
        """In place of each wait for something new."""
        if len(published) < 2:
            published.append(5 + len(published))
            client.publish_policy(learner, published[-1], policy_file(published[-1]))
        else:
            client.patch_run(learner, status="finished")

    monkeypatch.setattr(evaluate_versions_module.time, "sleep", next_version)
    scores = evaluate(policy=learner, follow=True)
    assert [s.policy for s in scores] == [f"{learner}/{v}" for v in (0, 3, 5, 6)]
    scored = client.evaluations(env=ENV, policy=f"{learner}/3")
    assert len([one for one in scored if one.seeds == [0, 1, 2]]) == 1
    finalists = [one for one in scores if one.seeds == [3, 4, 5]]
    assert len(finalists) == 3, "the best of four versions play other seeds"
    best = max(finalists, key=lambda s: (s.mean, int(s.policy.rpartition("/")[2])))
    (policy,) = [p for p in client.policies(learner) if "best" in p.aliases]
    assert f"{learner}/{policy.version}" == best.policy
    for score in scores:
        again = evaluate_policy(
            load_policy(client.download_policy(learner, score.policy.rpartition("/")[2]).data),
            ENV,
            score.seeds,
        )
        assert again.returns == score.returns
    table = table_of(scores, policy.version, "all")
    assert table.row_count == 4 and list(table.columns[-1].cells).count("best") == 1


def test_videos_that_scored_versions_lack_are_made(service: Any, client: Client, name: str) -> None:
    """Without playing for another score; those that are there are left alone."""
    learner = f"learner-{name}"
    client.create_run(learner, "train")
    for version in (0, 3):
        client.publish_policy(learner, version, policy_file(version))
    words: dict[str, Any] = {"env": ENV, "episodes": 3, "envs": 3, "dataset": name}
    words |= {"policy": f"{learner}/all", "url": service.url, "token": service.token}

    def videos_after(number: int) -> dict[str, list[int]]:
        evaluate_versions(EvaluateConfig(**words, videos=number), Console(quiet=True))
        found = client.evaluations(env=ENV)
        its = [e for e in found if e.policy.startswith(learner)]
        return {e.policy.rpartition("/")[2]: [v.seed for v in client.videos(e.id)] for e in its}

    assert videos_after(0) == {"0": [], "3": []}
    assert videos_after(1) == {"0": [0], "3": [0]}
    scores = {e.policy: e for e in client.evaluations(env=ENV)}
    before = client.videos(scores[f"{learner}/0"].id)
    assert videos_after(2) == {"0": [0, 1], "3": [0, 1]}
    after = client.videos(scores[f"{learner}/0"].id)
    assert after[0] == before[0]
    assert [v.total_reward for v in after] == scores[f"{learner}/0"].returns[:2]


def test_following_a_run_survives_a_service_that_is_away(
    client: Client, service: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --follow the error is reported."""
    learner = f"learner-{name}"
    client.create_run(learner, "train")
    client.publish_policy(learner, 1, policy_file(1))
    client.patch_run(learner, status="finished")
    honest, calls = evaluate_versions_module._scores, []

    def away_at_first(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise ServiceUnreachable("nobody there")
        return honest(*args)

    monkeypatch.setattr(evaluate_versions_module, "_scores", away_at_first)
    monkeypatch.setattr(evaluate_versions_module.time, "sleep", lambda _: None)
    words: dict[str, Any] = {"env": ENV, "episodes": 2, "url": service.url, "token": service.token}
    config = EvaluateConfig(policy=f"{learner}/all", **words)
    with pytest.raises(ServiceUnreachable):
        evaluate_versions(config, Console(quiet=True))
    calls.clear()
    (score,), _, _ = evaluate_versions(
        config.replace(policy=learner, follow=True), Console(quiet=True)
    )
    assert score.policy == f"{learner}/1" and len(calls) == 3


def test_two_policies_are_compared_seed_by_seed(
    service: Any, client: Client, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are scored as usual; the difference has an interval of its own."""
    learner = f"learner-{name}"
    client.create_run(learner, "train")
    for version in (1, 2):
        client.publish_policy(learner, version, policy_file(version))
    words = ["--env", ENV, "--episodes", "6", "--dataset", name, "--url", service.url]
    words += ["--token", service.token] if service.token else []
    policies = ["--policy", f"{learner}:1", "--against", f"{learner}/2"]
    assert evaluate([*words, *policies, "--json"]) == 0
    paired = json.loads(capsys.readouterr().out)["paired"]
    (a,) = client.evaluations(env=ENV, policy=f"{learner}/1")
    (b,) = client.evaluations(env=ENV, policy=f"{learner}/2")
    differences = np.subtract(a.returns, b.returns)
    assert paired["difference"] == pytest.approx(differences.mean())
    assert paired["ci_low"] <= paired["difference"] <= paired["ci_high"]
    assert paired["better"] == (differences > 0).sum() and paired["seeds"] == 6
    assert evaluate([*words, *policies]) == 0
    assert f"{learner}/1 minus {learner}/2: " in capsys.readouterr().out
    with pytest.raises(UsageError, match="against"):
        EvaluateConfig(env=ENV, policy=f"{learner}/all", against=learner)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "r/3", "--follow"], "follow: needs --policy RUN"),
        (["--random", "--follow"], "follow: needs --policy RUN"),
        (["--policy", "r/all", "--no-upload"], "upload: scores of all versions"),
        (["--policy", "r", "--follow", "--run", "x"], "run: each version has"),
    ],
)
def test_what_all_versions_cannot_mean_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(["--env", ENV, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_command_stops_an_evaluation_without_end(
    service: Any, client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that no episode ends. Nothing is scored; the run and its worker were stopped."""
    monkeypatch.setattr("collector.evaluate.ENDLESS_STEPS", 50)
    env = f"Endless{name[-6:]}-v0"
    gymnasium.register(env, entry_point=lambda: Paced(FakeEnv([10**9])))
    config = EvaluateConfig(
        env=env, random=True, dataset=name, run=f"eval-{name}", url=service.url, envs=2
    )
    raised: list[BaseException] = []

    def run() -> None:
        try:
            run_evaluation(config, Console(quiet=True))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    found = until(
        lambda: [w for w in client.workers() if w.run == config.run and w.last_error], "a notice"
    )
    assert "no episode has ended for 50 steps" in found[0].last_error
    client.command(found[0].id, "stop")
    thread.join(WAIT)
    assert [type(error) for error in raised] == [KeyboardInterrupt]
    (worker,) = [w for w in client.workers() if w.run == config.run]
    assert worker.state == "stopped" and worker.role == "eval"
    assert client.run(config.run).status == "stopped"
    assert not client.evaluations(run=config.run)


def _load(client: Client, run: str) -> ActingPolicy:
    from amago_model.policy_file import load_policy

    fetched = client.download_policy(run)
    assert fetched is not None
    return load_policy(fetched.data)


@pytest.mark.parametrize("reward", [np.nan, np.inf, "much", np.zeros(2)], ids=repr)
def test_a_reward_that_is_none_breaks_the_episode_and_keeps_it(
    client: Client, name: str, tmp_path: Path, reward: Any
) -> None:
    class Odd(FakeEnv):
        def step(self, action: Any) -> Any:
            obs, good, *rest = super().step(action)
            return obs, reward if self.t == 3 else np.array([good]), *rest

    env = record(Odd((5,)), name, client, env_id="Fake-v0", outbox=tmp_path)
    env.reset()
    for _ in range(2):
        env.step(np.int64(1))
    with pytest.raises(BrokenEnv, match="reward"):
        env.step(np.int64(1))
    env.close()
    assert [(i.length, i.truncated, i.tags) for i in stored(client, name)] == [
        (2, True, ["broken"])
    ]


def test_whoever_plays_is_recorded(client: Client, name: str, tmp_path: Path) -> None:
    """record(): a plain gymnasium loop; ended, abandoned and broken episodes all arrive."""
    env = record(
        FakeEnv((3, 2, 9), broken_at=(3, 1)),
        name,
        client,
        policy="by hand",
        env_id="Fake-v0",
        tags=["demo"],
        outbox=tmp_path,
    )
    for _ in range(2):
        _, _ = env.reset(seed=5)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(np.int64(1))
            over = terminated or truncated
    env.reset()
    env.step(np.int64(2))
    env.reset()
    env.step(np.int64(3))
    with pytest.raises(RuntimeError, match="asked to fail"):
        env.step(np.int64(3))
    env.close()
    infos = stored(client, name)
    assert [(i.length, i.terminated, i.truncated, i.tags, i.seed) for i in infos] == [
        (3, True, False, ["demo"], 5),
        (2, False, True, ["demo"], 5),
        (1, False, True, ["demo", "interrupted"], None),
        (1, False, True, ["demo", "broken"], None),
    ]
    assert {(i.policy, i.env) for i in infos} == {("by hand", "Fake-v0")}
    client.flush(name)
    steps = client.steps(infos[0].id)
    np.testing.assert_array_equal(steps.obs["observation"][:, 1], [0, 1, 2, 3])
    np.testing.assert_array_equal(steps.actions["action"], [1, 1, 1])
    assert json.loads((tmp_path / "outbox.json").read_text())["dataset"] == name
