"""A trainer and a collector that keep a ratio: each waits for the other, whatever is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import NotFound, ServiceUnreachable
from stepwell.messages import Consumer, SampleRatio
from stepwell.testing import make_spec, make_trajectory, wait_until
from tests.forks import Fork
from trainer.config import DataConfig, RatioConfig, TrainConfig
from trainer.errors import SettingError
from trainer.rate_limit import RateLimiter, sample_ratio

PATIENCE = 900.0
pytestmark = pytest.mark.timeout(2 * PATIENCE)


def config(batch: int = 8, **ratio: Any) -> TrainConfig:
    data = DataConfig(batch=batch, refresh_every=5, ratio=RatioConfig(**ratio))
    return TrainConfig(dataset="d", run="r", data=data)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"updates_per_step": 0.5}, (4.0, 4000.0, 1000, None)),
        ({"updates_per_step": 0.001}, (0.008, 16.0, 1000, None)),
        ({"updates_per_step": 0.5, "min_updates_per_step": 0.25}, (4.0, 4000.0, 1000, 2.0)),
        ({"samples_per_insert": 0.5, "buffer": 9.0, "min_size": 3}, (0.5, 9.0, 3, None)),
    ],
)
def test_updates_per_step_are_windows_per_step(
    given: dict[str, float], expected: tuple[float, float, int, float | None]
) -> None:
    per_insert, buffer, min_size, least = expected
    assert sample_ratio(config(**given)) == SampleRatio(
        samples_per_insert=per_insert,
        buffer=buffer,
        min_size=min_size,
        min_samples_per_insert=least,
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: config(buffer=7.0), r"ratio\.buffer: expected at least .* = 8, got 7"),
        (
            lambda: config(samples_per_insert=30.0, buffer=29.0),
            r"ratio\.buffer: expected at least .* = 30, got 29",
        ),
        (lambda: config(updates_per_step=1.0, samples_per_insert=2.0), "not both"),
        (lambda: config(updates_per_step=0.1, min_updates_per_step=0.2), "at most that, got 0.2"),
        (lambda: config(min_updates_per_step=0.2), "expected updates_per_step"),
        (lambda: DataConfig(ratio=RatioConfig()), r"ratio: needs .* data\.refresh_every"),
        (
            lambda: TrainConfig(
                snapshot="s", data=DataConfig(refresh_every=1, ratio=RatioConfig())
            ),
            r"data\.r",
        ),
    ],
)
def test_a_ratio_that_would_never_work_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make()


class Service:
    """Answers reports; remembers who is registered."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.until, self.registered, self.down, self.deleted = 16, False, False, 0

    def with_options(self, **_: Any) -> Service:
        return self

    def report_samples(
        self, name: str, run: str, samples: int, ratio: SampleRatio | None = None
    ) -> Consumer:
        assert (name, run) == ("d", "r")
        if self.down:
            raise ServiceUnreachable("down")
        if ratio is None and not self.registered:
            raise NotFound({"status": 404, "code": "not_found"})
        self.calls.append((samples, ratio is not None))
        self.registered = True
        return Consumer(
            dataset=name,
            name=run,
            ratio=ratio or SampleRatio(samples_per_insert=1, buffer=9),
            samples=samples,
            inserted=50,
            samples_until=self.until,
            inserts_until=100,
            may_sample=True,
            may_insert=True,
            alive=True,
            created_at=0.0,
            updated_at=0.0,
        )

    def delete_consumer(self, name: str, run: str) -> None:
        self.deleted += 1


@pytest.fixture
def limiter() -> Iterator[Callable[..., tuple[Service, RateLimiter]]]:
    made: list[RateLimiter] = []

    def make(keep: bool = False, registered: bool = False) -> tuple[Service, RateLimiter]:
        service = Service()
        service.registered = registered
        made.append(RateLimiter(service, config(), 1, keep=keep))  # type: ignore[arg-type]
        return service, made[-1]

    yield make
    for one in made:
        one.close()


def test_a_batch_is_drawn_if_all_of_it_may_be(limiter: Any, monkeypatch: Any) -> None:
    service, held = limiter()
    assert service.calls[0] == (8, True)
    assert held.may_draw(), "16 of 16"
    held.update = 2
    assert not held.may_draw(), "24 of 16"
    assert "50 of 1,000 steps" in held.reason
    service.until = 24
    wait_until(held.may_draw, 30.0, what="the next report")
    assert (16, False) in service.calls, "registered once"
    assert held.metrics()["ratio/samples_ahead"] == -8
    held.close()
    assert service.deleted == 1


@pytest.mark.parametrize(
    ("keep", "registered", "sets"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_a_resumed_run_keeps_a_ratio_that_was_changed_on_the_way(
    limiter: Any, keep: bool, registered: bool, sets: bool
) -> None:
    service, _ = limiter(keep=keep, registered=registered)
    assert service.calls[0] == (8, sets)


def test_an_outage_neither_stops_at_once_nor_permits_more(limiter: Any) -> None:
    service, held = limiter()
    service.down = True
    assert held.may_draw()
    held.update = 2
    wait_until(lambda: "down" in held._loop.trouble, 30.0, what="the outage")
    assert not held.may_draw()
    service.down, service.until = False, 99
    wait_until(held.may_draw, 30.0, what="it is back")


# --- real processes -----------------------------------------------------------------------------

NAME, ENV = "ratio", "CartPole-v1"
PER_INSERT, BUFFER, MIN_SIZE, BATCH, UPDATES = 0.5, 60.0, 300, 8, 50
TRAIN = [
    *("pendulum_stitch", "--dataset", NAME, "--run", NAME, "--device", "cpu"),
    *("--data.wait-for-data", "600", "--data.refresh-every", "5", "--data.window", "8"),
    *("--data.batch", str(BATCH), "--data.ratio.samples-per-insert", str(PER_INSERT)),
    *("--data.ratio.buffer", str(BUFFER), "--data.ratio.min-size", str(MIN_SIZE)),
    *("--schedule.log-every", "1", "--schedule.checkpoint-every", "10"),
    *("--updates", str(UPDATES)),
]
COLLECT = ["--env", ENV, "--dataset", NAME, "--policy", NAME, "--wait-for-policy", "--envs", "2"]
LONGEST = 2 * 500  # steps that two environments may finish after they should wait


@pytest.fixture
def start(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Fork]]:
    running: list[Fork] = []
    monkeypatch.chdir(tmp_path)

    def run(module: str, *words: str) -> Fork:
        env = {**os.environ, "STEPWELL_URL": service.url, "OMP_NUM_THREADS": "1"}
        env["STEPWELL_OUTBOX"] = str(tmp_path / "outbox")
        process = Fork(module, words, env=env, output=tmp_path / f"{len(running)}.log")
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate(timeout=PATIENCE)


def test_trainer_and_collector_keep_step_from_nothing(
    service: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    """Neither dataset nor policy exists, and the trainer is killed on the way: the collector waits
    for it. At every update both are within the buffer of the ratio."""
    output = ("--output", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "cache"))
    trainer = start("trainer.main", *TRAIN, *output)
    collector = start("collector.main", *COLLECT)
    with service.client() as client:

        def ahead() -> dict[int, float]:
            """By update: samples that the collector is ahead of the ratio."""
            series = client.metrics(NAME, ["ratio/inserted_steps"])["ratio/inserted_steps"]
            assert min(series.values) >= MIN_SIZE
            return {
                update: PER_INSERT * (steps - MIN_SIZE) - update * BATCH
                for update, steps in zip(series.steps, series.values, strict=True)
            }

        wait_until(
            lambda: (
                NAME in {r.name for r in client.runs()}
                and client.run(NAME).latest.get("progress/updates", 0) >= 15
            ),
            PATIENCE,
            what="updates",
        )
        # A killed trainer is waited for only for a while, so later there may be more.
        assert max(ahead().values()) <= BUFFER + PER_INSERT * LONGEST, ahead()
        (consumer,) = client.consumers(NAME)
        assert consumer.alive and consumer.ratio.samples_per_insert == PER_INSERT
        trainer.kill()
        trainer.communicate(timeout=PATIENCE)
        wait_until(
            lambda: not client.consumers(NAME)[0].may_insert, PATIENCE, what="the collector waits"
        )
        trainer = start("trainer.main", *TRAIN, *output)
        text, _ = trainer.communicate(timeout=PATIENCE)
        assert trainer.returncode == 0 and "resumed after" in text, text
        assert client.consumers(NAME) == [], "it no longer makes anyone wait"
        collector.terminate()
        text, _ = collector.communicate(timeout=PATIENCE)
        assert collector.returncode == 0, text
        assert max(ahead()) == UPDATES and min(ahead().values()) >= -BUFFER - BATCH, ahead()


def test_a_trainer_that_waits_says_for_what_and_can_be_stopped(
    service: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    spec = make_spec(env="Tiny-v0")
    with service.client() as client:

        def post(*lengths: int) -> None:
            made = [make_trajectory(spec, length=length) for length in lengths]
            client.post("slow", made, wait_sealed=True)

        def waits() -> bool:
            return [w.state for w in client.workers() if w.run == "slow"] == ["waiting"]

        client.create_dataset("slow", spec)
        post(9)
        words = [w if w != NAME else "slow" for w in TRAIN]
        output = ("--output", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "cache"))
        trainer = start("trainer.main", *words, *output)
        said = "waiting: 9 of 300 steps are there (data.ratio.min_size)"
        trainer.wait_for(re.escape(said), PATIENCE)
        wait_until(waits, PATIENCE, what="its state, before the first update")
        post(200, 191)
        said = "waiting: 400 steps were collected, and 0.5 samples per step allow 110"
        trainer.wait_for(re.escape(said), PATIENCE)
        wait_until(waits, PATIENCE, what="its state, between updates")
        made = 110 // BATCH
        wait_until(lambda: client.run("slow").latest["progress/updates"] >= made, PATIENCE)
        client.command("train-slow", "stop")
        text, _ = trainer.communicate(timeout=PATIENCE)
        assert trainer.returncode == 0 and "run slow stopped" in text, text
        assert client.run("slow").latest["progress/updates"] == made
        assert client.consumers("slow") == []
