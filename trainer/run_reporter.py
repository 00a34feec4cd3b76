"""Who hears of a run: its row, log, heartbeats, metrics and policies at the service; the screen.

Rank 0 alone; on other ranks every method does nothing. An absent service delays, and never stops.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amago_model.agent import Agent
from stepwell._files import whole_file
from stepwell.client import Client
from stepwell.errors import Conflict, OutboxError, OutboxInUse, ServiceUnreachable
from stepwell.failpoints import failpoint
from stepwell.heartbeat import Heartbeat
from stepwell.outbox import Outbox
from trainer.config import TrainConfig, to_json
from trainer.distributed import World
from trainer.errors import TrainerError
from trainer.publish import copy_path, publish
from trainer.run_log import RunLog
from trainer.snapshot_views import SnapshotViews

log = logging.getLogger(__name__)
GO, PAUSE, STOP = 0, 1, 2
LOGGERS = ("trainer", "stepwell._background", "stepwell.outbox")
"""Whose warnings are in the run's log."""
LINGER = 1.0
"""Seconds that metrics wait for company on their way to the service."""
PROGRESS_EVERY = 60.0
"""Seconds between lines of progress in the run's log; on the screen there are more."""
LONGEST_NOTES = 4096
LEARNERS = {"count/bc": ("actor", "actor_mask"), "count/critic": ("critics", "critic_mask")}
"""By metric that counts the steps it learns from: who, and the setting that leaves steps out."""


@dataclass(frozen=True)
class RunInfo:
    """What the run's row says besides its config."""

    origins: dict[str, str] = field(default_factory=dict)
    git_commit: str = ""
    command: str = ""


class RunReporter:
    """Run row, log, heartbeat, metrics and policies: on rank 0, and nothing at all elsewhere.

    What is said before `open` is kept for the log, which only then has a run to belong to.
    """

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
        self.world, self._print = world, say
        self.update, self.error, self._state = 0, "", "running"
        self.status = "failed"
        """How the run ends, if without an error."""
        self.kernels: dict[str, str] = {}
        """By what the agent's memory is computed, such as {"attention": "sdpa"}."""
        self._newest: dict[str, float] = {}
        self._said = self._noted = 0.0
        self._ended = False
        self._idle: set[str] = set()
        self._early: list[tuple[str, float]] = []
        self._run_log: RunLog | None = None
        self.note(f"started on {world.host} (processes: {world.size}): {info.command}")

    def say(self, text: str) -> None:
        """On the screen and in the run's log."""
        self._print(text)
        self.note(text)

    def note(self, text: str) -> None:
        """In the run's log alone."""
        if self._run_log is not None:
            self._run_log.write(text)
        elif self.client is not None:
            self._early.append((text, time.time()))

    def open(self, data: SnapshotViews, *, resumed: bool) -> None:
        if self.client is None:
            return
        self.outbox = _open_outbox(self.home, self.client, self.config.run)
        row: dict[str, Any] = {
            "config": {
                **to_json(self.config),
                "origins": self.info.origins,
                "kernels": self.kernels,
            },
            "seed": self.config.seed,
            "git_commit": self.info.git_commit,
            "host": self.world.host,
            "snapshots": data.snapshots,
            "command": self.info.command,
        }
        claim = _claim(self.home)
        row["config"]["claim"] = claim
        try:
            # The folder says whether a run of this name is ours to take up, or somebody else's.
            self._create(row, claim, resumed)
            failpoint("run.after_create")
            if resumed:
                self.client.patch_run(self.config.run, status="running")
        except ServiceUnreachable as error:
            if not resumed:
                self.outbox.close(0.0)
                raise
            log.warning("the service is away; the run goes on without it: %s", error)
        except BaseException:
            self.outbox.close(0.0)  # the run is not ours, so neither is its folder
            raise
        with whole_file(self.home / "run.json") as file:
            file.write(json.dumps({"name": self.config.run, **row}, indent=1).encode())
        failpoint("run.after_note")
        self._open_log()
        self._data = data
        self.heartbeat = Heartbeat(
            self.client,
            f"train-{self.config.run}",
            role="train",
            run=self.config.run,
            status=self._status,
        )
        self.snapshots(data)

    @property
    def trouble(self) -> str:
        """What is wrong with the threads that work for this run; empty where all is well."""
        return "; ".join(filter(None, (self.outbox.trouble, self._data.trouble)))

    def _open_log(self) -> None:
        run_log = self._run_log = RunLog(self.home, self.outbox, self.config.run)
        for name in LOGGERS:
            logging.getLogger(name).addHandler(run_log)
        for text, said_at in self._early:
            run_log.write(text, said_at)
        self._early.clear()

    def _create(self, row: dict[str, Any], claim: str, resumed: bool) -> None:
        assert self.client is not None
        try:
            self.client.create_run(self.config.run, "train", exist_ok=resumed, **row)
        except Conflict:
            # Ours after all, if a life of this run died between making the row and noting it.
            if (self.client.run(self.config.run).config or {}).get("claim") != claim:
                raise TrainerError(
                    f"there is already a run {self.config.run!r}, and no checkpoint of it was taken"
                    f" up from {self.home}; to resume it: --resume auto, with the --output that"
                    " holds its checkpoints; for another run: --run NAME"
                ) from None

    def has_policy(self, update: int) -> bool:
        """Whether the policy of this update was published; so it is where nobody publishes."""
        return self.client is None or copy_path(self.home, update).exists()

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
        self._queue_metrics(update, values)
        self._warn_of_idleness(update, values)
        last, now = update == self.config.updates, time.monotonic()
        text = (
            f"update {update}/{self.config.updates}  loss {values.get('loss/total', 0.0):.4g}"
            f"  {values['progress/updates_per_second']:.1f} updates/s"
        )
        if now - self._said > 2.0 or last:
            self._said = now
            self._print(text)
        if now - self._noted > PROGRESS_EVERY or last:
            self._noted = now
            self.note(text)

    def _queue_metrics(self, update: int, values: Mapping[str, float]) -> None:
        """For the service, and as lines {"key", "step", "value", "time"} of metrics.jsonl."""
        finite, now = {k: v if math.isfinite(v) else None for k, v in values.items()}, time.time()
        lines = [
            json.dumps({"key": k, "step": update, "value": v, "time": now}) + "\n"
            for k, v in finite.items()
        ]
        try:
            # One write: a process that is killed leaves no half line.
            with (self.home / "metrics.jsonl").open("ab", buffering=0) as file:
                file.write("".join(lines).encode())
            self.outbox.put_metrics(self.config.run, update, finite)
        except (OutboxError, OSError) as error:
            raise TrainerError(
                f"metrics of run {self.config.run} cannot be written to {self.home}: {error}; make "
                "room, then run the same command again: it resumes from its newest checkpoint"
            ) from error

    def _warn_of_idleness(self, update: int, values: Mapping[str, float]) -> None:
        for name, (who, setting) in LEARNERS.items():
            if values.get(name) == 0 and name not in self._idle:
                self._idle.add(name)
                mask = getattr(self.config.data, setting)
                why = f"; data.{setting}={mask}: is this info ever above 0?" if mask else ""
                log.warning(
                    "update %d: no step of its batch is one for the %s to learn from%s",
                    *(update, who, why),
                )

    def publish(self, agent: Agent, update: int, data: SnapshotViews) -> int:
        if self.client is not None:
            metadata = {
                "run": self.config.run,
                "snapshot": data.manifest.snapshot,
                "git_commit": self.info.git_commit,
            }
            extra = {"training": to_json(self.config)}
            publish(self.home, self.outbox, self.config.run, agent, update, metadata, extra)
            self.note(f"policy {self.config.run}/{update}")
        return update

    def snapshots(self, data: SnapshotViews) -> None:
        if self.client is None:
            return
        spoiled = sorted(data.left_out)
        changes: dict[str, Any] = {"snapshots": data.snapshots}
        if spoiled:
            changes["notes"] = f"left out, unreadable: {', '.join(spoiled)}"[:LONGEST_NOTES]
            changes["tags"] = ["unreadable-shards"]
        self.heartbeat.change_run(**changes)

    def say_state(self, state: str) -> None:
        if self.client is not None and state != self._state:
            self._state = state
            self.note(state)
            self.heartbeat.wake()

    def end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """`close`, with what ended the run: made for `ExitStack.push`."""
        del kind, trace
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
        self.close("failed" if error is not None else self.status)

    def close(self, status: str) -> None:
        if self.client is None or self._ended or not hasattr(self, "heartbeat"):
            return
        self._ended = True
        assert self._run_log is not None
        self.note(f"{status} after {self.update} updates" + f": {self.error}" * bool(self.error))
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._run_log)
        self.outbox.flush(self.config.schedule.drain_timeout)
        state = {"finished": "stopped", "stopped": "stopped"}.get(status, "failed")
        self.heartbeat.close(state=state, last_error=self.error)
        self.outbox.end_run(self.config.run, status, self.error)
        if undelivered := self.outbox.undelivered():
            log.warning("%s", undelivered)
        self.outbox.close(0.0)

    def _status(self) -> dict[str, Any]:
        """What a heartbeat reports."""
        return {
            "state": self._state,
            "counters": self._counters(),
            "last_error": self.error or self.trouble,
        }

    def _counters(self) -> dict[str, float]:
        rate = self._newest.get("progress/updates_per_second", 0.0)
        return {"updates": float(self.update), "updates_per_second": rate}


def _open_outbox(home: Path, client: Client, run: str) -> Outbox:
    """The queue in the folder of a run; it also keeps a second trainer out of that folder.

    Raises `TrainerError` where another process trains there, or an older version did.
    """
    if (home / "metrics.sent").exists() or any((home / "policies").glob("*.json")):
        raise TrainerError(
            f"{home} was written by an earlier stepwell, which queued metrics and policies in "
            "another way: finish the run with that version, or train under another --run"
        )
    try:
        return Outbox(home / "outbox", client, run=run, linger=LINGER)
    except OutboxInUse as error:
        raise TrainerError(
            f"run {run}: {error}; wait for it to end, or train under another --run"
        ) from None
    except OutboxError as error:
        raise TrainerError(f"run {run}: {error}") from error


def _claim(home: Path) -> str:
    """A random word that this folder alone knows, by which it finds its own row again."""
    path = home / "claim"
    if not path.exists():
        with whole_file(path) as file:
            file.write(uuid.uuid4().hex.encode())
    return path.read_text()
