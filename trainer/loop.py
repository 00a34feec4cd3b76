"""A training run: setup in four parts, then the loop.

Comments on periodic work in the loop begin with "Periodically" and name the ranks that take part.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

import amago_model
from amago_model.agent import make_agent
from amago_model.config import Spaces
from amago_model.encoders.modalities import unused_settings
from amago_model.encoders.timestep import TimestepEncoder
from stepwell import EnvSpec
from stepwell._plugins import import_plugins
from stepwell._plural import pluralize
from stepwell._settings import flatten
from stepwell._signals import stop_signals
from stepwell.client import Client
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig
from trainer.data.loader import Loaded
from trainer.data.snapshot import create_snapshot
from trainer.data.snapshot_views import SnapshotViews
from trainer.data.validation import validation_interval
from trainer.dataset_profile import read_profile
from trainer.derived import Derived, apply_settings
from trainer.derived_settings import derive_settings
from trainer.distributed import World
from trainer.errors import SettingError
from trainer.first_data import starts_untrained, wait_for_data
from trainer.health import Health
from trainer.learner import Learner, TrainingDiverged, Update, make_accelerator, merge_ranks
from trainer.nan_diagnostics import explain_skip
from trainer.rate_limit import RateLimiter
from trainer.recipes import own_settings
from trainer.run_reporter import CONTINUE, PAUSE, STOP, WAIT, RunInfo, RunReporter

log = logging.getLogger(__name__)

SAY_WAITING = 10.0
"""Seconds after which a run that waits for collectors says so."""
SYNC_EVERY = 10
"""Updates between synchronisations of stop, pause and new data over several processes."""
MAY_CHANGE = ("output", "resume", "schedule.", "data.cache", "data.prefetch", "processes")
"""Settings that a resumed run may change without a warning."""


def train(config: TrainConfig, client: Client, info: RunInfo, echo: Callable[[str], None]) -> str:
    """Train until the last update or a stop request; returns "finished" or "stopped".

    Every process of the run calls this function. The run's status at the service also records
    errors.

    Raises:
        TrainerError, StepwellError: training failed.
    """
    with ExitStack() as closing:
        # --- part 1: processes, the run's folder, and the checkpoint of an earlier attempt ------
        torch.set_num_threads(config.threads)
        accelerator = make_accelerator(config)
        world = World(accelerator)
        home = config.output / config.run
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"output: {home} cannot be used: {error}") from error
        echo = echo if world.is_main else (lambda _: None)
        reporter = RunReporter(config, client if world.is_main else None, info, home, world, echo)
        show, echo = echo, reporter.log  # on the screen; also in the run's log
        known_here = world.broadcast((home / "run.json").exists())
        resumed = checkpoints.find(config.resume, home, world, echo)
        if resumed is None and config.resume == "auto":
            world.on_main(lambda: checkpoints.refuse_second_start(config.run, home, client))
        stopped = threading.Event()
        limiter: RateLimiter | None = None
        closing.enter_context(stop_signals(stopped.set))

        def newest_request() -> int:
            """The newest request of the service or of a signal, which requests STOP; else WAIT if
            the ratio to collected steps permits no further update."""
            if stopped.is_set():
                return STOP
            return reporter.request or (WAIT if may_not_draw() else CONTINUE)

        def may_not_draw() -> bool:
            return limiter is not None and not limiter.may_draw()

        # --- part 2: the data -------------------------------------------------------------------
        import_plugins(config.plugin, SettingError)
        holder = f"train/{config.run}"

        def wait_for(attempt: Callable[[], Any]) -> Any:
            """The result of `attempt` once there is data; None after a request to stop."""
            seconds = config.data.wait_for_data
            found = wait_for_data(attempt, seconds, world, lambda: newest_request() == STOP)
            if found is None:
                reporter.status = "stopped"
                show(f"run {config.run} stopped before there was data")
            return found

        def select() -> str:
            return info.snapshot or create_snapshot(client, config, holder)

        said = False

        def select_first() -> str | None:
            """The selection that settings are derived from: not before data.ratio.min_size."""
            nonlocal said
            if config.data.ratio is not None and config.dataset:
                found, enough = client.dataset(config.dataset), config.data.ratio.min_size
                if (steps := found.fifo.steps + found.protected.steps) < enough:
                    if not said:
                        wanted = pluralize(enough, "step")
                        show(f"waiting for {wanted} to derive settings from: {steps:,} now")
                        said = True
                    return None
            return select()

        if resumed is not None:
            _refuse_other_data(resumed.state["config"], config)
        # The numbers of a resumed run are those of before, whatever the dataset is now.
        derived = resumed.state.get("derived", []) if resumed is not None else []
        if resumed is None and config.derive != "off":
            if config.data.wait_for_data and wait_for(select_first) is None:
                return reporter.status
            derived = world.on_main(lambda: _derive(config, info.origins, client, echo))
        settings = [Derived(**d) for d in derived]
        config, settings = apply_settings(
            config, info.origins, own_settings(config.recipe), settings, echo
        )
        config.require_target_return()
        reporter.add_derived(config, settings)
        data = SnapshotViews(config, client, world, home, holder, echo)
        closing.callback(data.close)

        untrained = resumed is None and starts_untrained(config)
        if resumed is not None:
            # Resume from the recorded snapshots, even if the service is unreachable.
            client.retry_for = 0.0
            data.resume(resumed.state["snapshot_views"], int(resumed.state["update"]))
        elif not untrained:
            if (snapshot := wait_for(select)) is None:
                return reporter.status
            data.begin(snapshot)
        if untrained:
            if (document := wait_for(lambda: client.spec(config.dataset).to_json())) is None:
                return reporter.status
            spec = EnvSpec.from_json(document)
        else:
            spec = data.manifest.spec

        # --- part 3: the agent ------------------------------------------------------------------
        spaces = Spaces.of_spec(spec.to_json())
        if unused := unused_settings(config.agent, spaces):
            echo(f"warning: settings without effect for these spaces: {', '.join(unused)}")
        if resumed is not None:
            for line in _differences(resumed.state["config"], config, quiet=MAY_CHANGE):
                echo(f"warning: {line} from here on")
        torch.manual_seed(config.seed)
        agent = make_agent(config.agent, spaces).to(accelerator.device)
        if isinstance(rows := agent.policy.timestep_encoder, TimestepEncoder):
            echo(f"observations: {'; '.join(rows.describe())}")
        reporter.kernels = agent.policy.kernels(accelerator.device, _compute_dtype(config))
        for what, name in reporter.kernels.items():
            echo(f"{what} by {name}, on {accelerator.device.type}")
        learner = Learner(
            agent,
            config.optimizer,
            accelerator,
            seed=config.seed,
            updates=config.updates,
            compiling=config.compile,
            window=config.data.window,
            echo=echo,
        )
        if learner.graphs is not None:
            echo("updates are replayed as CUDA graphs")
        update, health, same_ratio = 0, Health(config), False
        if resumed is not None:
            checkpoints.restore(resumed, agent, learner.optimizer)
            update = int(resumed.state["update"])
            learner.skipped = int(resumed.state["skipped"])
            health = Health(
                config, resumed.state.get("alarms", ()), resumed.state.get("first_medians")
            )
            echo(f"resumed after {pluralize(update, 'update')}, from {resumed.path}")
            before = resumed.state["config"]["data"].get("ratio")
            same_ratio = before == config.to_dict()["data"]["ratio"]
        del resumed  # frees its tensors

        # --- part 4: the run, log, metrics and policies at the service (rank 0) -----------------
        world.on_main(lambda: reporter.open(data, spec.env, resumed=known_here))
        closing.push(reporter.close)  # receives the exception, if there is one
        if config.data.ratio is not None and world.is_main:
            limiter = RateLimiter(client, config, update, keep=same_ratio)
            closing.callback(limiter.close)
        if not update and config.data.wait_for_data and not reporter.has_policy(0):
            reporter.publish(agent, 0, data)  # with `derive`: once its shape is known
        if untrained:

            def select_enough() -> str | None:
                if limiter is None or limiter.may_draw():
                    return select()
                reporter.set_state("waiting", limiter.reason)
                return None

            if (snapshot := wait_for(select_enough)) is None:
                return reporter.status
            data.begin(snapshot)
            reporter.report_snapshots(data)
        for line in data.summary():
            echo(line)
        reporter.report_alarms(update, health.standing.values(), (), ())
        client.retry_for = 0.0  # from here on an unreachable service does not block training
        loader = data.loader(update, accelerator.device)
        closing.callback(loader.close)

        # --- the loop ---------------------------------------------------------------------------
        every, folder = config.schedule, home / "checkpoints"
        clock = _Clock(update)
        pending: deque[tuple[int, Loaded, Update]] = deque()
        oldest = checkpoints.oldest_update(folder)
        # The process may have stopped after the checkpoint, before the policy was published.
        saved, published = update or -1, -1
        if update and _due(every.publish_every, update) and not reporter.has_policy(update):
            published = reporter.publish(agent, update, data)

        def check_pending(leave: int) -> None:
            """Check all updates except the last `leave`, whose results a GPU may not have yet."""
            while len(pending) > leave:
                number, its, result = pending.popleft()
                skipped, ending = learner.check_finite(number, result)
                if skipped:
                    explain_skip(number, its, world, ending)

        def save() -> int:
            nonlocal oldest
            check_pending(leave=0)
            if world.is_main:
                state = {
                    "snapshot_views": data.history,
                    "skipped": learner.skipped,
                    "alarms": [alarm.to_json() for alarm in health.standing.values()],
                    "first_medians": health.first,
                    "samples": update * config.data.batch,
                    "config": config.to_dict(),
                    "derived": derived,
                    "spaces": agent.spaces.to_dict(),
                    "world": world.size,
                    "threads": config.threads,
                    "versions": {"torch": torch.__version__, "stepwell": amago_model.__version__},
                }
                optimizer, keep = learner.optimizer, every.keep_checkpoints
                checkpoints.save(folder, update, agent, optimizer, state, keep)
                oldest = checkpoints.oldest_update(folder)
            return update

        def hold(request: int) -> int:
            """Wait while the run is paused or the ratio permits no update. All ranks call this."""
            began = time.monotonic()
            with clock.waiting():
                while request in (WAIT, PAUSE):
                    if request == PAUSE:
                        reporter.set_state("paused")
                    elif limiter is not None and time.monotonic() - began > SAY_WAITING:
                        reporter.set_state("waiting", limiter.reason)
                    time.sleep(0.5 if request == PAUSE else 0.02)
                    request = world.maximum([newest_request()])[0]
            reporter.set_state("running")
            return request

        request = hold(world.maximum([newest_request()])[0])
        while update < config.updates and request != STOP:
            # The update itself: all ranks, each with its slice of the batch.
            with clock.waiting():
                loaded = next(loader)
            logging_now = _due(every.log_every, update + 1) or update + 1 == config.updates
            result = learner.update(update, loaded.batch, detailed=logging_now)
            pending.append((update, loaded, result))
            check_pending(leave=int(learner.defers_check and not logging_now))
            update += 1
            reporter.update = update
            if limiter is not None:
                limiter.update = update

            # Periodically, all ranks: metrics. Reading them synchronises with the device.
            if logging_now:
                both: dict[str, Any] = {**result.metrics, **loaded.metrics}
                shown = {k: float(v) for k, v in both.items()}
                values = merge_ranks(world.all_gather(shown)) | {
                    "progress/updates": update,
                    "progress/total": config.updates,
                    "progress/updates_per_second": clock.rate(update),
                    "progress/skipped": learner.skipped,
                    "optimizer/learning_rate": learner.learning_rate(update - 1),
                    "data/wait_fraction": clock.wait_fraction(),
                    "data/trajectories": len(loaded.manifest.distinct),
                    "data/steps": loaded.manifest.distinct_steps,
                    **(view := loader.view(loaded.step)).sampler.metrics(loaded.step),
                    **(limiter.metrics() if limiter is not None else {}),
                }
                # Rank 0: the losses of held-back trajectories, which change no state.
                validating = _due(validation_interval(every), update) or update == config.updates
                if validating and view.validation:
                    batches = [batch.to(accelerator.device) for batch in view.validation]
                    losses = learner.validate(batches)
                    values |= {f"validation/{name}": loss for name, loss in losses.items()}
                reporter.log_metrics(update, values)
                if world.is_main:
                    begun, ended = health.check(update, values, view.returns)
                    reporter.report_alarms(update, health.standing.values(), begun, ended)
                clock.restart(update)

            # Periodically, rank 0: check for new data, in the background.
            if _due(config.data.refresh_every, update) and update < config.updates:
                data.refresh()

            # Periodically, all ranks: exchange stop and pause requests, and whether new data is
            # ready on all nodes. If it is, all switch to it at the same step.
            request = CONTINUE
            if world.size == 1 or _due(SYNC_EVERY, update):
                request, switched = data.sync(
                    loader,
                    update,
                    newest_request(),
                    oldest=(update if oldest is None else oldest) if world.is_main else 0,
                )
                if switched:
                    reporter.report_snapshots(data)

            # Periodically, rank 0: a checkpoint. After the sync, so that it contains the current
            # snapshots; before publishing, so that no published policy is newer than the newest
            # checkpoint.
            publishing = _due(every.publish_every, update)
            if publishing or _due(every.checkpoint_every, update):
                saved = save()

            # Periodically, rank 0: publish a policy.
            if publishing:
                published = reporter.publish(agent, update, data)

            request = hold(request)

        if saved != update:
            save()
        reporter.status = "finished" if update >= config.updates else "stopped"
        if reporter.status == "finished" and published != update:
            reporter.publish(agent, update, data)
    if world.is_main:
        for line in reporter.closing_lines(health.unchecked):
            show(line)
    return reporter.status


def _derive(
    config: TrainConfig,
    origins: Mapping[str, str],
    client: Client,
    echo: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The settings derived from the dataset, as JSON."""
    if not config.dataset:
        echo("note: settings are only derived from one dataset; the recipe's own values are used")
        return []
    profile, own = read_profile(client, config), own_settings(config.recipe)
    return [asdict(d) for d in derive_settings(profile, config, origins, own, echo)]


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


def _differences(
    before: dict[str, object], now: TrainConfig, quiet: tuple[str, ...] = ()
) -> list[str]:
    """A line "KEY was OLD, is NEW" for each change of a key that begins with none of `quiet`."""
    old, new = flatten(before), flatten(now.to_dict())
    return [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(quiet)
    ]


def _refuse_other_data(before: dict[str, object], config: TrainConfig) -> None:
    """Raise `SettingError` for settings that a resumed run would not follow: it keeps its data,
    unless it looks for new data, and what was derived from them."""
    keys = ("derive", "memory", "snapshot", "dataset", "where", "sources")
    now = config.to_dict()
    for key in keys[: 3 if config.data.refresh_every else None]:
        if before.get(key) != now[key]:
            raise SettingError(
                f"{key}: run {config.run} began with {before.get(key)!r}, which cannot change to "
                f"{now[key]!r} when it is resumed; train under another --run, or begin this one "
                "anew with --resume never"
            )


def _compute_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the forward pass's large operations."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return half.get(config.precision, torch.float32)


def _due(every: int, update: int) -> bool:
    return every > 0 and update % every == 0


__all__ = ["RunInfo", "TrainingDiverged", "train"]
