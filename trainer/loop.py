"""A training run, told from beginning to end. Periodic work begins with "once in a while" and says
who takes part."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import amago_model
from amago_model.agent import Agent, make_agent
from amago_model.encoders.timestep import TimestepEncoder
from stepwell._plugins import import_plugins
from stepwell.client import Client
from stepwell.errors import NotFound
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig, flatten, to_json
from trainer.data.fields import spaces_of
from trainer.data.loader import Loaded, Loader
from trainer.data.snapshot import take
from trainer.distributed import World, make_accelerator
from trainer.errors import SettingError
from trainer.learner import Learner, TrainingDiverged, Update, over_processes
from trainer.nan_diagnostics import explain_skip
from trainer.run_reporter import GO, PAUSE, STOP, RunInfo, RunReporter
from trainer.snapshot_views import SnapshotViews
from trainer.unused import for_spaces

log = logging.getLogger(__name__)

SYNC_EVERY = 10
"""Several processes: updates between their agreements on stop, pause and newer data."""
MAY_CHANGE = ("output", "resume", "schedule.", "data.cache", "data.prefetch", "processes")
"""Settings that another part of a run's life may have otherwise."""


def train(config: TrainConfig, client: Client, info: RunInfo, say: Callable[[str], None]) -> str:
    """Train to the end, or until told to stop; "finished" or "stopped".

    Every process of the run calls this. Raises `TrainerError` or `StepwellError`; whatever ends it,
    the run's row says so.
    """
    with ExitStack() as closing:
        # --- act one: who are we, and where do we keep things -------------------------------
        torch.set_num_threads(config.threads)
        accelerator = make_accelerator(config)
        world = World(accelerator)
        home = config.output / config.run
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"output: {home} cannot be used: {error}") from error
        say = say if world.is_main else _say_nothing
        report = RunReporter(config, client if world.is_main else None, info, home, world, say)
        say = report.say  # on the screen, and in the run's log
        known_here = world.share((home / "run.json").exists())
        resumed = _resume(config, home, world, say)
        if resumed is None and config.resume == "auto":
            world.once(lambda: refuse_a_second_beginning(config.run, home, client))
        asked_to_stop = _Signals(closing)

        # --- act two: the data ------------------------------------------------------------------
        import_plugins(config.plugin, SettingError)
        # A resumed run takes up the snapshots it had, also if the service is away or forgot them.
        holder = f"train/{config.run}"
        data = SnapshotViews(config, client, world, home, holder, say)
        closing.callback(data.close)
        if resumed is None:
            data.begin(world.once(lambda: take(client, config, holder)))
        else:
            client.retry_for = 0.0
            data.take_up(resumed.state["views"], int(resumed.state["update"]))
        manifest = data.manifest
        say(
            f"{len(manifest)} trajectories, {manifest.steps} steps, {len(manifest.shards)} shards"
            f" of snapshot {manifest.snapshot}"
        )

        # --- act three: the agent ---------------------------------------------------------------
        spaces, before = spaces_of(manifest.spec), config
        config = report.config = for_spaces(config, info.origins, spaces)
        for line in _differences(before, config):
            say(f"{line}: of no use here, what the recipe said falls away")
        if resumed is not None:
            for line in _differences(resumed.state["config"], config, quiet=MAY_CHANGE):
                say(f"warning: {line} from here on")
        torch.manual_seed(config.seed)
        agent = make_agent(config.agent, spaces).to(accelerator.device)
        if isinstance(rows := agent.policy.timestep_encoder, TimestepEncoder):
            say(f"the agent sees {'; '.join(rows.describe())}")
        report.kernels = agent.policy.kernels(accelerator.device, _computing_in(config))
        for what, name in report.kernels.items():
            say(f"{what} by {name}, on {accelerator.device.type}")
        learner = Learner(
            agent,
            config.optimizer,
            accelerator,
            seed=config.seed,
            updates=config.updates,
            compiling=config.compile,
            window=config.data.window,
        )
        update = 0
        if resumed is not None:
            checkpoints.restore(resumed, agent, learner.optimizer)
            update = int(resumed.state["update"])
            learner.skipped = int(resumed.state["skipped"])
            say(f"resumed after {update} updates, from {resumed.path}")
        loader = data.loader(update, accelerator.device)
        closing.callback(loader.close)

        # --- act four: who hears of it (rank 0 alone) -------------------------------------------
        world.once(lambda: report.open(data, resumed=known_here))
        # From here on an absent service costs no time: what it should hear is told later.
        client.retry_for = 0.0
        status = "failed"
        try:
            status = _loop(
                config, world, data, learner, agent, loader, report, asked_to_stop, home, update
            )
        except BaseException as error:
            report.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            report.close(status)
        return status


def _loop(
    config: TrainConfig,
    world: World,
    data: SnapshotViews,
    learner: Learner,
    agent: Agent,
    loader: Loader,
    report: RunReporter,
    asked_to_stop: _Signals,
    home: Path,
    update: int,
) -> str:
    every = config.schedule
    clock = _Clock(update)
    # A run that was resumed stands where its checkpoint does; the policy may not have been written.
    saved, published = update or -1, -1
    # Update of the oldest checkpoint: of what is older, nothing needs to be kept.
    oldest = checkpoints.oldest_update(home / "checkpoints")
    if update and _due(every.publish_every, update) and not report.has_policy(update):
        published = report.publish(agent, update, data)

    pending: deque[tuple[int, Loaded, Update]] = deque()

    def check_pending(leave: int) -> None:
        """All updates but the last few, of which a GPU may not know yet what came of them."""
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
                "views": data.history,
                "skipped": learner.skipped,
                "samples": update * config.data.batch,
                "config": to_json(config),
                "spaces": agent.spaces.to_dict(),
                "world": world.size,
                "threads": config.threads,
                "versions": {"torch": torch.__version__, "stepwell": amago_model.__version__},
            }
            folder = home / "checkpoints"
            checkpoints.save(
                folder, update, agent, learner.optimizer, state, every.keep_checkpoints
            )
            oldest = checkpoints.oldest_update(folder)
        return update

    while update < config.updates:
        # The update itself: all ranks, each with its slice of the batch.
        began = time.perf_counter()
        loaded = next(loader)
        clock.waited += time.perf_counter() - began
        logging_now = _due(every.log_every, update + 1) or update + 1 == config.updates
        result = learner.update(update, loaded.batch, detailed=logging_now)
        pending.append((update, loaded, result))
        check_pending(leave=int(learner.defers_check and not logging_now))
        update += 1
        report.update = update

        # Once in a while, all ranks: numbers. Reading them waits for the device.
        if logging_now:
            sampler = loader.view(loaded.step).sampler
            seen: dict[str, Any] = {**result.metrics, **loaded.metrics}
            values = over_processes(world.numbers({k: float(v) for k, v in seen.items()}))
            values |= {
                "progress/updates": update,
                "progress/total": config.updates,
                "progress/updates_per_second": clock.rate(update),
                "progress/skipped": learner.skipped,
                "optimizer/learning_rate": learner.learning_rate(update - 1),
                "data/wait_fraction": clock.wait_fraction(),
                "data/trajectories": len(loaded.manifest),
                "data/steps": loaded.manifest.steps,
                "data/sample_checksum": sampler.checksum(loaded.step),
            }
            if len(shares := sampler.shares(loaded.step)) > 1:
                values |= {f"data/share_{source}": share for source, share in enumerate(shares)}
            report.log(update, values)
            clock.restart(update)

        # Once in a while, rank 0 looks for new data, in the background.
        if _due(config.data.refresh_every, update) and update < config.updates:
            data.look()

        # Always, but agreed upon only now and then when we are many: did somebody say stop? Is new
        # data ready on all nodes? Then all ranks switch to it at the same step.
        wish = GO
        if _due(SYNC_EVERY, update) or world.size == 1:
            asked = max(asked_to_stop.wish, report.wish)
            needed = (update if oldest is None else oldest) if world.is_main else 0
            wish, switching = data.agree(loader, update, asked, needed)
            if switching:
                report.snapshots(data)

        # Once in a while, rank 0 writes: a checkpoint at home. After the agreement, so that a run
        # resumed from here knows what was decided. And before each policy: what others have seen
        # of a run is never ahead of what the run itself can go on from.
        publishing = _due(every.publish_every, update)
        if publishing or _due(every.checkpoint_every, update):
            saved = save()

        # Once in a while, rank 0: a policy for whoever wants to act.
        if publishing:
            published = report.publish(agent, update, data)

        # What was agreed upon.
        while wish == PAUSE:
            report.say_state("paused")
            time.sleep(0.5)
            wish = world.largest(max(asked_to_stop.wish, report.wish))
            clock.restart(update)
        report.say_state("running")
        if wish == STOP:
            if saved != update:
                save()
            return "stopped"
    if saved != update:
        save()
    if published != update:
        report.publish(agent, update, data)
    return "finished"


# ---------------------------------------------------------------------------------- the characters


class _Clock:
    """Updates per second, and the share of time spent waiting for data, since the last look."""

    def __init__(self, update: int):
        self.restart(update)

    def restart(self, update: int) -> None:
        self.began, self.first, self.waited = time.perf_counter(), update, 0.0

    def rate(self, update: int) -> float:
        return (update - self.first) / max(time.perf_counter() - self.began, 1e-9)

    def wait_fraction(self) -> float:
        return self.waited / max(time.perf_counter() - self.began, 1e-9)


class _Signals:
    """SIGTERM and SIGINT ask for a checkpoint and an orderly end; the second one ends at once."""

    def __init__(self, closing: ExitStack):
        self.wish = GO
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                old = signal.signal(number, self._hear)
                closing.callback(signal.signal, number, old)
        except ValueError:  # not the main thread, as in a notebook: nothing to hear
            return

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.wish == STOP:
            raise KeyboardInterrupt
        self.wish = STOP


def _resume(
    config: TrainConfig, home: Path, world: World, say: Callable[[str], None]
) -> checkpoints.Checkpoint | None:
    """The checkpoint to take up, the same one on every rank."""
    if config.resume == "never":
        # Else a later --resume auto would take up that other life, which has come further.
        aside = checkpoints.put_aside(home / "checkpoints") if world.is_main else None
        if aside is not None:
            say(f"warning: --resume never: the earlier checkpoints are in {aside} now")
        world.wait()
        return None
    found = checkpoints.newest(home / "checkpoints") if world.is_main else None
    name = world.share(found.path.name if found else "")
    if not name:
        if config.resume == "must":
            raise checkpoints.CheckpointError(
                f"no whole checkpoint in {home / 'checkpoints'}; train with --resume auto"
            )
        return None
    return found or checkpoints.read(home / "checkpoints" / name)


def refuse_a_second_beginning(run: str, home: Path, client: Client) -> None:
    """Raise `CheckpointError` for a run that came further than update 0 and cannot be taken up."""
    lost = len(checkpoints.folders(home / "checkpoints"))
    versions = [int(p.stem) for p in (home / "policies").glob("*.safetensors") if p.stem.isdigit()]
    if not versions and (home / "run.json").exists():  # the service knows it as ours
        with contextlib.suppress(NotFound):
            versions = [policy.version for policy in client.policies(run)]
    if not versions and not lost:
        return
    what = [f"{lost} checkpoints that are not whole"] if lost else []
    what += [f"published policies, the newest {run}/{max(versions)}"] if versions else []
    raise checkpoints.CheckpointError(
        f"run {run} has {' and '.join(what)}, but no whole checkpoint in "
        f"{home / 'checkpoints'}: it would begin again under the same name. Train under another "
        "--run; or with --resume never, which begins anew and leaves what is published as it is"
    )


def _differences(
    before: TrainConfig | dict[str, object], now: TrainConfig, quiet: tuple[str, ...] = ()
) -> list[str]:
    """A line "KEY was OLD, is NEW" for every change, but of keys that begin with one of `quiet`."""
    old, new = flatten(to_json(before)), flatten(to_json(now))
    return [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(quiet)
    ]


def _computing_in(config: TrainConfig) -> torch.dtype:
    """The type of the forward pass's large operations."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return half.get(config.precision, torch.float32)


def _due(every: int, update: int) -> bool:
    return every > 0 and update % every == 0


def _say_nothing(text: str) -> None:
    del text


__all__ = ["RunInfo", "TrainingDiverged", "train"]
