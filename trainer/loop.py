"""A training run: set-up (`trainer/setup.py`), then the loop.

Comments on periodic work in the loop begin with "Periodically" and name the ranks that take part.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import amago_model
from stepwell.client import Client
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig
from trainer.data.loader import Loaded
from trainer.data.validation import validation_interval
from trainer.learner import TrainingDiverged, UpdateResult, merge_ranks
from trainer.nan_diagnostics import explain_skip
from trainer.run_reporter import CONTINUE, PAUSE, STOP, WAIT, RunInfo
from trainer.setup import Setup, TrainingRun

SAY_WAITING = 10.0
"""Seconds after which a run that waits for collectors says so."""
SYNC_EVERY = 10
"""Updates between synchronisations of stop, pause and new data over several processes."""


def train(config: TrainConfig, client: Client, info: RunInfo, echo: Callable[[str], None]) -> str:
    """Train until the last update or a stop request; returns "finished" or "stopped".

    Every process of the run calls this function. The run's status at the service also records
    errors.

    Raises:
        TrainerError, StepwellError: training failed.
    """
    with ExitStack() as closing:
        setup = Setup(config, client, info, echo, closing)
        if (run := setup.run()) is None:
            return setup.reporter.status
        Loop(run).run()
    for line in run.reporter.closing_lines(run.health.unchecked) if run.world.is_main else ():
        setup.show(line)
    return run.reporter.status


class Loop:
    """Updates of a run, with metrics, new data, checkpoints and policies every so many of them."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._world, self._reporter = run, run.world, run.reporter
        self._limiter = run.requests.limiter
        self._schedule, self._folder = run.config.schedule, run.reporter.home / "checkpoints"
        self._update = run.update
        """Completed updates."""
        self._clock = _Clock(self._update)
        self._pending: deque[tuple[int, Loaded, UpdateResult]] = deque()
        """Updates whose results are not checked yet."""
        self._oldest = checkpoints.oldest_update(self._folder)
        self._saved, self._published = self._update or -1, -1

    def run(self) -> None:
        """Run until the last update or a request to stop. All ranks call this."""
        run, update = self._run, self._update
        # The process may have stopped after the checkpoint, before the policy was published.
        missing = update and _due(self._schedule.publish_every, update)
        if missing and not self._reporter.has_policy(update):
            self._publish()
        request = self._hold(self._world.maximum([run.requests.newest()])[0])
        while self._update < run.config.updates and request != STOP:
            request = self._hold(self._step())
        if self._saved != self._update:
            self._save()
        finished = self._update >= run.config.updates
        self._reporter.status = "finished" if finished else "stopped"
        if finished and self._published != self._update:
            self._publish()

    def _step(self) -> int:
        """One update, and what is due after it; the newest request."""
        run, world = self._run, self._world
        # The update itself: all ranks, each with its slice of the batch.
        with self._clock.waiting():
            loaded = next(run.loader)
        following = self._update + 1
        logging_now = _due(self._schedule.log_every, following) or following == run.config.updates
        result = run.learner.update(self._update, loaded.batch, detailed=logging_now)
        self._pending.append((self._update, loaded, result))
        self._check_pending(leave=int(run.learner.defers_check and not logging_now))
        update = self._update = self._reporter.update = following
        if self._limiter is not None:
            self._limiter.update = update

        # Periodically, all ranks: metrics. Reading them synchronises with the device.
        if logging_now:
            self._log_metrics(loaded, result)

        # Periodically, rank 0: check for new data, in the background.
        if _due(run.config.data.refresh_every, update) and update < run.config.updates:
            run.data.refresh()

        # Periodically, all ranks: exchange stop and pause requests, and whether new data is ready
        # on all nodes. If it is, all switch to it at the same step.
        request = CONTINUE
        if world.size == 1 or _due(SYNC_EVERY, update):
            request, switched = run.data.sync(
                run.loader,
                update,
                run.requests.newest(),
                oldest=(update if self._oldest is None else self._oldest) if world.is_main else 0,
            )
            if switched:
                self._reporter.report_snapshots(run.data)

        # Periodically, rank 0: a checkpoint. After the sync, so that it contains the current
        # snapshots; before publishing, so that no published policy is newer than the newest
        # checkpoint.
        publishing = _due(self._schedule.publish_every, update)
        if publishing or _due(self._schedule.checkpoint_every, update):
            self._save()

        # Periodically, rank 0: publish a policy.
        if publishing:
            self._publish()
        return request

    def _check_pending(self, leave: int) -> None:
        """Check all updates except the last `leave`, whose results a GPU may not have yet."""
        while len(self._pending) > leave:
            number, its, result = self._pending.popleft()
            skipped, ending = self._run.learner.check_finite(number, result)
            if skipped:
                explain_skip(number, its, self._world, ending)

    def _log_metrics(self, loaded: Loaded, result: UpdateResult) -> None:
        run, update, clock = self._run, self._update, self._clock
        both: dict[str, Any] = {**result.metrics, **loaded.metrics}
        shown = {k: float(v) for k, v in both.items()}
        view = run.loader.view(loaded.step)
        values = merge_ranks(self._world.all_gather(shown)) | {
            "progress/updates": update,
            "progress/total": run.config.updates,
            "progress/updates_per_second": clock.rate(update),
            "progress/skipped": run.learner.skipped,
            "optimizer/learning_rate": run.learner.learning_rate(update - 1),
            "data/wait_fraction": clock.wait_fraction(),
            "data/trajectories": len(loaded.manifest.distinct),
            "data/steps": loaded.manifest.distinct_steps,
            **view.sampler.metrics(loaded.step),
            **(self._limiter.metrics() if self._limiter is not None else {}),
        }
        # Rank 0: the losses of held-back trajectories, which change no state.
        due = _due(validation_interval(self._schedule), update) or update == run.config.updates
        if due and view.validation:
            batches = [batch.to(run.learner.accelerator.device) for batch in view.validation]
            losses = run.learner.validate(batches)
            values |= {f"validation/{name}": loss for name, loss in losses.items()}
        self._reporter.log_metrics(update, values)
        if self._world.is_main:
            begun, ended = run.health.check(update, values, view.returns)
            self._reporter.report_alarms(update, run.health.standing.values(), begun, ended)
        clock.restart(update)

    def _save(self) -> None:
        """Check what is pending, then write a checkpoint on rank 0."""
        run = self._run
        self._check_pending(leave=0)
        if self._world.is_main:
            state = {
                "snapshot_views": run.data.history,
                "skipped": run.learner.skipped,
                "alarms": [alarm.to_json() for alarm in run.health.standing.values()],
                "first_medians": run.health.first,
                "samples": self._update * run.config.data.batch,
                "config": run.config.to_dict(),
                "derived": run.derived,
                "spaces": run.agent.spaces.to_dict(),
                "world": self._world.size,
                "threads": run.config.threads,
                "versions": {"torch": torch.__version__, "stepwell": amago_model.__version__},
            }
            optimizer, keep = run.learner.optimizer, self._schedule.keep_checkpoints
            checkpoints.save(self._folder, self._update, run.agent, optimizer, state, keep)
            self._oldest = checkpoints.oldest_update(self._folder)
        self._saved = self._update

    def _publish(self) -> None:
        run = self._run
        self._published = self._reporter.publish(run.agent, self._update, run.data)

    def _hold(self, request: int) -> int:
        """Wait while the run is paused or the ratio permits no update. All ranks call this."""
        began = time.monotonic()
        with self._clock.waiting():
            while request in (WAIT, PAUSE):
                if request == PAUSE:
                    self._reporter.set_state("paused")
                elif self._limiter is not None and time.monotonic() - began > SAY_WAITING:
                    self._reporter.set_state("waiting", self._limiter.reason)
                time.sleep(0.5 if request == PAUSE else 0.02)
                request = self._world.maximum([self._run.requests.newest()])[0]
        self._reporter.set_state("running")
        return request


class _Clock:
    """Updates per second, and the fraction of time spent waiting for data, since `restart`."""

    def __init__(self, update: int):
        self.restart(update)

    def restart(self, update: int) -> None:
        self.began, self.first, self.waited = time.perf_counter(), update, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def rate(self, update: int) -> float:
        return (update - self.first) / max(time.perf_counter() - self.began, 1e-9)

    def wait_fraction(self) -> float:
        return self.waited / max(time.perf_counter() - self.began, 1e-9)


def _due(every: int, update: int) -> bool:
    return every > 0 and update % every == 0


__all__ = ["RunInfo", "TrainingDiverged", "train"]
