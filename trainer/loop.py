"""A training run, told from beginning to end. Periodic work begins with "once in a while" and says
who takes part."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import amago_model
from amago_model.agent import Agent
from stepwell._files import whole_file
from stepwell.client import Client
from stepwell.errors import ServiceUnreachable, StepwellError
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig, flatten, to_json
from trainer.data.cache import Cache
from trainer.data.fields import Field, fields_of, spaces_of
from trainer.data.loader import Loaded, Loader, View
from trainer.data.order import Order
from trainer.data.snapshot import DataError, LeaseKeeper, Manifest, load, take
from trainer.learner import Learner, TrainingDiverged
from trainer.metrics import Heartbeat, MetricLog
from trainer.processes import World, make_accelerator
from trainer.publish import Publisher

log = logging.getLogger(__name__)
GO, PAUSE, STOP = 0, 1, 2


@dataclass(frozen=True)
class RunInfo:
    """What the run's row says besides its config."""

    origins: dict[str, str] = field(default_factory=dict)
    git_commit: str = ""
    command: str = ""


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
        say = say if world.is_main else _say_nothing
        home = config.output / config.run
        known_here = world.share((home / "run.json").exists())
        resumed = _resume(config, home, world)
        asked_to_stop = _Signals(closing)

        # --- act two: the data ------------------------------------------------------------------
        # A resumed run takes up the snapshots it had, also if the service is away or forgot them.
        holder = f"train/{config.run}"
        data = _Data(config, client, world, home, holder, say)
        closing.callback(data.close)
        if resumed is None:
            name = take(client, config, holder) if world.is_main else ""
            data.use(world.share(name), start=0, left_out=())
        else:
            client.retry_for = 0.0
            for view in resumed.state["views"]:
                data.use(view["snapshot"], view["start"], tuple(view["left_out"]))
        manifest = data.views[-1].manifest
        say(
            f"{len(manifest)} trajectories, {manifest.steps} steps, {len(manifest.shards)} shards"
            f" of snapshot {manifest.snapshot}"
        )

        # --- act three: the agent ---------------------------------------------------------------
        torch.manual_seed(config.seed)
        agent = Agent(config.agent, spaces_of(manifest.spec)).to(accelerator.device)
        learner = Learner(
            agent, config.optimizer, accelerator, seed=config.seed, updates=config.updates
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
        # From here on an absent service costs no time: what it should hear is told later.
        client.retry_for = 0.0
        report = _Report(config, client if world.is_main else None, info, home, world, say)
        report.open(data, resumed=known_here)
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
    data: _Data,
    learner: Learner,
    agent: Agent,
    loader: Loader,
    report: _Report,
    asked_to_stop: _Signals,
    home: Path,
    update: int,
) -> str:
    every = config.schedule
    clock = _Clock(update)
    saved = published = -1

    def save() -> int:
        if world.is_main:
            state = {
                "views": data.describe(),
                "skipped": learner.skipped,
                "samples": update * config.data.batch,
                "config": to_json(config),
                "world": world.size,
                "threads": config.threads,
                "versions": {"torch": torch.__version__, "stepwell": amago_model.__version__},
            }
            checkpoints.save(
                home / "checkpoints",
                update,
                agent,
                learner.optimizer,
                state,
                every.keep_checkpoints,
            )
        return update

    while update < config.updates:
        # The update itself: all ranks, each with its slice of the batch.
        began = time.perf_counter()
        loaded = next(loader)
        clock.waited += time.perf_counter() - began
        logging_now = _due(every.log_every, update + 1) or update + 1 == config.updates
        result = learner.update(update, loaded.batch, detailed=logging_now)
        if result.skipped:
            _name_samples(update, loaded)
        update += 1
        report.update = update

        # Once in a while, all ranks: numbers. Reading them waits for the device.
        if logging_now:
            values = world.mean({k: float(v) for k, v in result.metrics.items()})
            values |= {
                "progress/updates": update,
                "progress/total": config.updates,
                "progress/updates_per_second": clock.rate(update),
                "progress/skipped": learner.skipped,
                "optimizer/learning_rate": learner.learning_rate(update - 1),
                "data/wait_fraction": clock.wait_fraction(),
                "data/trajectories": len(loaded.manifest),
                "data/steps": loaded.manifest.steps,
                "data/sample_checksum": loader.view(loaded.step).order.checksum(loaded.step),
            }
            report.log(update, values)
            clock.restart(update)

        # Once in a while, rank 0: a policy for whoever wants to act.
        if _due(every.publish_every, update):
            published = report.publish(agent, update, data)

        # Once in a while, rank 0 writes: a checkpoint at home.
        if _due(every.checkpoint_every, update):
            saved = save()

        # Once in a while, all ranks: look for new data. Rank 0 asks, all switch at the same step.
        if _due(config.data.refresh_every, update) and update < config.updates:
            data.refresh(loader, update)
            report.snapshots(data)

        # Always, but agreed upon only now and then when we are many: did somebody say stop?
        if world.size == 1 or update % every.agree_every == 0:
            wish = world.largest(max(asked_to_stop.wish, report.wish))
            while wish == PAUSE:
                report.say_state("paused")
                time.sleep(0.5)
                wish = world.largest(max(asked_to_stop.wish, report.wish))
                clock.restart(update)
            report.say_state("running")
            if wish == STOP:
                save()
                return "stopped"
    if saved != update:
        save()
    if published != update:
        report.publish(agent, update, data)
    return "finished"


# ---------------------------------------------------------------------------------- the characters


class _Data:
    """The snapshots in use, their columns on this node, and the lease that keeps them."""

    def __init__(
        self,
        config: TrainConfig,
        client: Client,
        world: World,
        home: Path,
        holder: str,
        say: Callable[[str], None],
    ):
        self.config, self.client, self.world, self.say = config, client, world, say
        self.folder, self.holder = home / "snapshots", holder
        self.cache = Cache(config.data.cache, config.data.cache_gb * 1e9, client)
        self.views: list[View] = []
        self.left_out: list[tuple[str, ...]] = []
        self._newest_digest = ""
        self.leases = LeaseKeeper(client, holder) if world.is_main else None

    def use(self, snapshot: str, start: int, left_out: tuple[str, ...]) -> View:
        """Draw from a snapshot from step `start` on. All ranks; the node's first one fetches.

        Raises `DataError` on all ranks alike when one node cannot get it.
        """
        world = self.world
        if self.leases is not None:
            self.leases.hold(snapshot)
        error, spoiled = "", set(left_out)
        manifest: Manifest | None = None
        if world.is_node_main:
            try:
                manifest = load(self.client, snapshot, self.folder)
                rest = manifest.without(left_out)
                spoiled |= set(self.cache.ensure(rest, fields_of(manifest.spec), self._progress))
            except StepwellError as caught:
                error = f"snapshot {snapshot} cannot be had on {world.host}: {caught}"
        # A shard that one node cannot read is left out on all: the order must be the same.
        answers = world.gather([error, sorted(spoiled)])
        if errors := [text for text, _ in answers if text]:
            raise DataError(errors[0])
        everywhere = tuple(sorted(set().union(*(names for _, names in answers))))
        manifest = manifest or load(self.client, snapshot, self.folder)
        self._newest_digest = manifest.digest
        manifest = manifest.without(everywhere)
        order = Order(manifest, self.config.data, self.config.seed, world.size)
        view = View(start, manifest, order)
        self.views.append(view)
        self.left_out.append(everywhere)
        return view

    def refresh(self, loader: Loader, update: int) -> None:
        """Switch to a newer snapshot, a few steps from now, if there is anything new."""
        name = digest = ""
        if self.world.is_main:
            try:
                name = take(self.client, self.config, self.holder)
                digest = load(self.client, name, self.folder).digest
            except StepwellError as error:
                log.warning("no newer snapshot, training goes on with the last: %s", error)
                name = ""
        name, digest = self.world.share([name, digest])
        if not name:
            return
        old = self.views[-1].manifest
        if digest == self._newest_digest:
            self._drop(name)
            return
        try:
            view = self.use(name, update + loader.lookahead, ())
        except DataError as error:
            log.warning("training goes on with the last snapshot: %s", error)
            self._drop(name)
            return
        loader.add_view(view)
        self._drop(old.snapshot)
        self.say(
            f"from update {view.start} on: {len(view.manifest)} trajectories, "
            f"{view.manifest.steps} steps (were {len(old)}, {old.steps})"
        )

    def loader(self, update: int, device: torch.device) -> Loader:
        return Loader(
            self.cache,
            self.fields,
            self.views,
            self.config.data,
            step=update,
            rank=self.world.rank,
            device=device,
        )

    def describe(self) -> list[dict[str, Any]]:
        """For the checkpoint: which snapshot from which step, and what could not be read of it."""
        return [
            {"snapshot": v.manifest.snapshot, "start": v.start, "left_out": list(out)}
            for v, out in zip(self.views, self.left_out, strict=True)
        ]

    def close(self) -> None:
        if self.leases is not None:
            self.leases.close()

    @property
    def fields(self) -> tuple[Field, ...]:
        return fields_of(self.views[0].manifest.spec)

    def _drop(self, snapshot: str) -> None:
        if self.leases is not None:
            self.leases.drop(snapshot)

    def _progress(self, done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            self.say(f"columns of {done} of {total} shards are on this node")


class _Report:
    """Run row, heartbeat, metrics and policies: on rank 0, and nothing at all elsewhere."""

    def __init__(
        self,
        config: TrainConfig,
        client: Client | None,
        info: RunInfo,
        home: Path,
        world: World,
        say: Callable[[str], None],
    ):
        self.config, self.client, self.info, self.home = config, client, info, home
        self.world, self.say = world, say
        self.update, self.error, self._state = 0, "", "running"
        self._newest: dict[str, float] = {}
        self._said = 0.0
        self._ended = False

    def open(self, data: _Data, *, resumed: bool) -> None:
        if self.client is None:
            return
        self.home.mkdir(parents=True, exist_ok=True)
        row = {
            "config": {**to_json(self.config), "origins": self.info.origins},
            "seed": self.config.seed,
            "git_commit": self.info.git_commit,
            "host": self.world.host,
            "snapshots": [view.manifest.snapshot for view in data.views],
            "command": self.info.command,
        }
        try:
            # The folder says whether a run of this name is ours to take up, or somebody else's.
            self.client.create_run(self.config.run, "train", exist_ok=resumed, **row)
            if resumed:
                self.client.patch_run(self.config.run, status="running")
        except ServiceUnreachable as error:
            if not resumed:
                raise
            log.warning("the service is away; the run goes on without it: %s", error)
        with whole_file(self.home / "run.json") as file:
            file.write(json.dumps({"name": self.config.run, **row}, indent=1).encode())
        self.metrics = MetricLog(self.home, self.client, self.config.run)
        self.publisher = Publisher(self.home / "policies", self.client, self.config.run)
        fields = {
            "role": "train",
            "run": self.config.run,
            "host": self.world.host,
            "pid": os.getpid(),
            "state": "running",
        }
        self.heartbeat = Heartbeat(self.client, f"train-{self.config.run}", fields, self._counters)
        self.snapshots(data)

    @property
    def wish(self) -> int:
        """What somebody asks of this run through the service."""
        if self.client is None:
            return GO
        return {"stop": STOP, "drain": STOP, "pause": PAUSE}.get(self.heartbeat.command, GO)

    def log(self, update: int, values: Mapping[str, float]) -> None:
        if self.client is None:
            return
        self._newest = dict(values)
        self.metrics.log(update, values)
        last = update == self.config.updates
        if time.monotonic() - self._said > 2.0 or last:
            self._said = time.monotonic()
            self.say(
                f"update {update}/{self.config.updates}  loss {values.get('loss/total', 0.0):.4g}"
                f"  {values['progress/updates_per_second']:.1f} updates/s"
            )

    def publish(self, agent: Agent, update: int, data: _Data) -> int:
        if self.client is not None:
            metadata = {
                "run": self.config.run,
                "snapshot": data.views[-1].manifest.snapshot,
                "git_commit": self.info.git_commit,
            }
            self.publisher.publish(agent, update, metadata, {"training": to_json(self.config)})
        return update

    def snapshots(self, data: _Data) -> None:
        if self.client is None:
            return
        spoiled = sorted(set().union(*data.left_out))
        changes: dict[str, Any] = {"snapshots": [v.manifest.snapshot for v in data.views]}
        if spoiled:
            changes["notes"] = f"left out, unreadable: {', '.join(spoiled)}"
            changes["tags"] = ["unreadable-shards"]
        try:
            self.client.patch_run(self.config.run, **changes)
        except StepwellError as error:
            log.warning("the run's row does not know the new snapshot yet: %s", error)

    def say_state(self, state: str) -> None:
        if self.client is not None and state != self._state:
            self._state = state
            self.heartbeat.say(state=state)

    def close(self, status: str) -> None:
        if self.client is None or self._ended or not hasattr(self, "heartbeat"):
            return
        self._ended = True
        patience = self.config.schedule.farewell
        delivered = self.metrics.close(patience)
        delivered = self.publisher.close(patience) and delivered
        state = {"finished": "stopped", "stopped": "stopped"}.get(status, "failed")
        self.heartbeat.close(state=state, last_error=self.error[:20_000])
        try:
            self.client.patch_run(self.config.run, status=status, error=self.error[:20_000] or None)
        except StepwellError as error:
            log.warning("the run's row does not say yet that it %s: %s", status, error)
        if not delivered:
            log.warning("not all was delivered; run the same command again once the service is up")

    def _counters(self) -> dict[str, float]:
        rate = self._newest.get("progress/updates_per_second", 0.0)
        return {"updates": float(self.update), "updates_per_second": rate}


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
        self.signal = 0
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                old = signal.signal(number, self._hear)
                closing.callback(signal.signal, number, old)
        except ValueError:  # not the main thread, as in a notebook: nothing to hear
            return

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.wish == STOP:
            raise KeyboardInterrupt
        self.wish, self.signal = STOP, number


def _resume(config: TrainConfig, home: Path, world: World) -> checkpoints.Checkpoint | None:
    """The checkpoint to take up, the same one on every rank."""
    if config.resume == "never":
        return None
    found = checkpoints.newest(home / "checkpoints") if world.is_main else None
    name = world.share(found.path.name if found else "")
    if not name:
        if config.resume == "must":
            raise checkpoints.CheckpointError(
                f"no whole checkpoint in {home / 'checkpoints'}; train with --resume auto"
            )
        return None
    found = found or checkpoints.read(home / "checkpoints" / name)
    before, now = flatten(found.state["config"]), flatten(to_json(config))
    quiet = ("output", "resume", "schedule.", "data.cache", "data.prefetch", "processes")
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not key.startswith(quiet) and world.is_main:
            log.warning("%s was %r, is %r from here on", key, before.get(key), now.get(key))
    return found


def _name_samples(update: int, loaded: Loaded) -> None:
    names = ", ".join(loaded.ids[:64])
    log.error("update %d skipped: its gradient is not finite; its windows: %s", update, names)


def _due(every: int, update: int) -> bool:
    return every > 0 and update % every == 0


def _say_nothing(text: str) -> None:
    del text


__all__ = ["RunInfo", "TrainingDiverged", "train"]
