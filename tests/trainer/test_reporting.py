"""Metrics, policies and heartbeats on their way to a service that comes and goes."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest

from stepwell import Box, Discrete, EnvSpec, Trajectory
from stepwell.errors import ServiceUnreachable
from stepwell.heartbeat import Heartbeat
from stepwell.outbox import Outbox
from stepwell.testing import make_trajectory, wait_until
from trainer.loop import RunInfo, train
from trainer.options import resolve
from trainer.run_log import RunLog


@pytest.fixture
def service(fake):
    return fake(None, [[3]])


@pytest.fixture
def opened(service, tmp_path):
    """A function that opens the run's outbox, as each life of the run does."""
    made = []

    def open_one(linger=0.01):
        made.append(Outbox(tmp_path / "outbox", service, run="r", linger=linger))
        return made[-1]

    yield open_one
    for outbox in made:
        outbox.close(0.0)


def test_metrics_have_no_gap_after_an_outage(service, opened):
    """The service goes away in the middle; every point is there in the end, once."""
    outbox = opened()
    for step in range(300):
        service.down = 100 <= step < 200
        outbox.put_metrics("r", step, {"loss": step / 2, "bad": None})
        if step == 150:
            wait_until(lambda: service.refused, what="an attempt")
    assert outbox.close(10.0) and outbox.pending == 0
    assert [service.metrics["loss", step] for step in range(300)] == [s / 2 for s in range(300)]
    assert service.metrics["bad", 0] is None


@pytest.mark.parametrize("sources", [1, 2])
def test_a_run_shows_how_its_mixture_moves(fake, tmp_path, sources):
    """From nothing of the first source to half, in windows of the batch; one source has none."""
    config = tmp_path / "mixture.toml"
    ramp = "share = 0.0\nshare_end = 0.5\n", "share = 1.0\nshare_end = 0.5\n"
    text = "data.ramp_updates = 4\n" if sources == 2 else ""
    for share in ramp if sources == 2 else ("share = 1.0\n",):
        text += f'[[sources]]\nselect = "fake"\n{share}'
    config.write_text(text)
    service = fake(None, [[5, 6], [7, 8]])
    words = [
        "pendulum_stitch",
        f"--config={config}",
        "--updates=6",
        "--data.batch=8",
        "--data.window=4",
    ]
    words += ["--schedule.log-every=1", "--schedule.drain-timeout=5", "--device=cpu", "--run=mixed"]
    words += [f"--output={tmp_path}", f"--data.cache={tmp_path / 'cache'}"]
    resolved = resolve(words)
    train(resolved.config, service, RunInfo(origins=resolved.origins), lambda _: None)
    shown = {key: value for key, value in service.metrics.items() if "share" in key[0]}
    if sources == 1:
        assert shown == {}
        return
    first = [shown["data/share_0", step] for step in range(1, 7)]
    assert first == [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]
    assert [shown["data/share_1", step] for step in range(1, 7)] == [1 - share for share in first]


def test_a_learner_without_anything_to_learn_from_is_told_once(fake, tmp_path, caplog):
    """An info that is never above 0, because nobody reports it say, would go unnoticed."""
    spec = EnvSpec.of(Box((2,)), Discrete(3), infos={"by_hand": Box(())})
    service = fake(spec)
    found = [make_trajectory(spec, length=5, seed=seed) for seed in range(3)]
    nobody = {"by_hand": np.full(6, np.nan, np.float32)}
    plays = [{"obs": t.obs, "actions": t.actions, "rewards": t.rewards} for t in found]
    service.add_shard(
        [Trajectory.from_arrays(**play, terminated=True, infos=nobody, spec=spec) for play in plays]
    )
    words = ["bc", "--derive=off", "--dataset=fake", "--updates=4", "--data.batch=2", "--run=idle"]
    words += ["--schedule.log-every=1", "--schedule.drain-timeout=5", "--device=cpu"]
    words += ["--data.actor-mask=by_hand", f"--output={tmp_path}", f"--data.cache={tmp_path / 'c'}"]
    resolved = resolve(words)
    with caplog.at_level(logging.WARNING, "trainer"):
        train(resolved.config, service, RunInfo(origins=resolved.origins), lambda _: None)
    told = [x.message for x in caplog.records if "learn from" in x.message]
    assert len(told) == 1 and "actor" in told[0] and "data.actor_mask=by_hand" in told[0]


def test_what_was_not_sent_is_sent_by_the_next_life(service, opened):
    """And what the service has acknowledged is not sent again."""
    service.down = True
    outbox = opened()
    for step in range(5):
        outbox.put_metrics("r", step, {"loss": float(step)})
    assert not outbox.close(0.1)
    service.down = False
    outbox = opened()
    outbox.put_metrics("r", 5, {"loss": 5.0})
    assert outbox.close(10.0)
    assert [service.metrics["loss", step] for step in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    service.metrics.clear()
    outbox = opened()
    outbox.put_metrics("r", 6, {"loss": 2.0})
    assert outbox.close(10.0)
    assert service.metrics == {("loss", 6): 2.0}


# --- the run's log --------------------------------------------------------------------------------


@pytest.fixture
def run_log(service, opened, tmp_path):
    """A function that opens the log of the run's next life; `close` closes its outbox."""
    service.runs["r"] = {}

    def open_one():
        log = RunLog(tmp_path, opened(), "r")
        log.deliver = log._outbox.close
        return log

    return open_one


def said(service) -> list[str]:
    """What the service has of the log, without the times."""
    return [line[len("2026-11-21 16:40:12 ") :] for line in service.logs.get("r", "").splitlines()]


def test_log_lines_arrive_in_order_and_once_after_an_outage(service, run_log):
    log = run_log()
    for number in range(100):
        service.down = 30 <= number < 60
        log.write(f"line {number}")
        if number == 45:
            wait_until(lambda: service.refused, what="an attempt")
    assert log.deliver(10.0)
    assert said(service) == [f"line {number}" for number in range(100)]
    assert service.logs["r"].startswith(time.strftime("%Y-", time.gmtime()))


def test_lines_whose_answer_was_lost_are_not_sent_twice(service, run_log, monkeypatch):
    """Appending cannot be repeated: what the service has of them is asked first."""
    store, lost = service.patch_run, []

    def patch(name: str, **fields: object) -> None:
        store(name, **fields)
        if len(lost) < 2:
            lost.append(fields)
            service._up()
            raise ServiceUnreachable("the answer was lost")

    monkeypatch.setattr(service, "patch_run", patch)
    log = run_log()
    log.write("one\ntwo")
    wait_until(lambda: lost)
    log.write("three")
    assert log.deliver(10.0) and len(lost) == 2
    assert said(service) == ["one", "two", "three"]


def test_a_killed_life_leaves_its_lines_to_the_next(service, run_log, tmp_path):
    """Neither lost nor twice, also where it died between the answer and noting it."""
    service.down = True
    log = run_log()
    log.write("first life")
    assert not log.deliver(0.05)
    service.down = False
    service.logs["r"] = (tmp_path / "run.log").read_text()  # it had arrived after all
    log = run_log()
    log.write("second life")
    assert log.deliver(10.0)
    assert said(service) == ["first life", "second life"]


def test_the_log_is_bounded_and_never_in_the_way(service, run_log, monkeypatch):
    """An outage without end keeps so many bytes, and says how many lines it left out."""
    monkeypatch.setattr("trainer.run_log.MAX_WAITING", 500)
    service.down = True
    log = run_log()
    for number in range(50):
        log.write(f"line {number}: {'x' * 10_000}"[:60])
    service.down = False
    wait_until(lambda: not log._outbox.pending)
    log.write("after")
    log.write("y" * 10_000)
    assert log.deliver(10.0)
    lines = said(service)
    kept = [line for line in lines if line.startswith("line")]
    assert 2 <= len(kept) < 10 and lines[len(kept)] == f"({50 - len(kept)} lines left out)"
    assert lines[-2] == "after" and len(lines[-1]) == 4000
    log.write("closed: no error")


def test_warnings_of_our_modules_are_in_the_log(service, run_log):
    log, logger = run_log(), logging.getLogger("trainer.some_module")
    logging.getLogger("trainer").addHandler(log)
    try:
        logger.info("for the screen alone")
        logger.error("update %d skipped", 7)
    finally:
        logging.getLogger("trainer").removeHandler(log)
    assert log.deliver(10.0)
    assert said(service) == ["error: update 7 skipped"]


def test_heartbeats_carry_numbers_out_and_commands_in(service):
    """A command reaches the run with the next answer; an outage only delays it."""
    service.runs["r"] = {}
    seen: list[dict] = []

    def answer(worker: str, **fields: object) -> SimpleNamespace:
        service._up()
        seen.append(fields)
        return SimpleNamespace(command=service.command)

    service.heartbeat = answer
    beat = Heartbeat(
        *(service, "w"),
        role="train",
        run="r",
        status=lambda: {"counters": {"updates": 3.0}},
        every=0.01,
    )
    wait_until(lambda: seen)
    service.down, service.command = True, "pause"
    wait_until(lambda: service.refused, what="an attempt")
    assert beat.command == "none"
    service.down = False
    wait_until(lambda: beat.command == "pause")
    service.command = "resume"
    wait_until(lambda: beat.command == "resume")
    beat.close(state="stopped")
    assert seen[-1]["state"] == "stopped" and seen[0]["counters"] == {"updates": 3.0}
