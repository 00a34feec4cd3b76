"""Reports a run to the service and the screen: its row, log, heartbeats, metrics and policies.

On rank 0; on other ranks every method does nothing. An unreachable service delays reports and never
stops the run.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amago_model.agent import Agent
from stepwell._files import cut_incomplete_line, remove_unfinished, whole_file
from stepwell._wording import duration, pluralize
from stepwell.client import Client
from stepwell.errors import Conflict, OutboxError, OutboxInUse, ServiceUnreachable
from stepwell.failpoints import failpoint
from stepwell.heartbeat import Heartbeat
from stepwell.outbox import Outbox
from trainer.config import TrainConfig
from trainer.data.snapshot_views import SnapshotViews
from trainer.derive.derived import Derived
from trainer.distributed import World, hardware, package_versions
from trainer.errors import TrainerError
from trainer.health import Alarm
from trainer.publish import copy_path, publish
from trainer.run_log import RunLog

log = logging.getLogger(__name__)
CONTINUE, WAIT, PAUSE, STOP = 0, 1, 2, 3
"""Requests to a run. If there are several, the largest number takes precedence."""
LOGGERS = ("trainer", "stepwell._background", "stepwell.outbox")
"""Loggers whose warnings are added to the run's log."""
LINGER = 1.0
"""Seconds that metrics wait so that they are sent in one request."""
PROGRESS_ON_TERMINAL, PROGRESS_IN_LOG = 2.0, 60.0
"""Seconds between progress lines; a screen that is no terminal is a log."""
MAX_NOTES = 4096
LOSS_COUNTS = {"count/bc": ("actor", "actor_mask"), "count/critic": ("critics", "critic_mask")}
"""Metric that counts the transitions in a loss → (what learns from it, setting of its mask)."""


@dataclass(frozen=True)
class RunInfo:
    """The contents of the run's database row besides its config."""

    origins: dict[str, str] = field(default_factory=dict)
    git_commit: str = ""
    command: str = ""
    parent: str = ""
    """The run that this one reproduces."""
    snapshot: str = ""
    """Train on this snapshot instead of the selection of the config."""
    verbose: bool = False
    """Whether the screen, too, has the reason of each derived setting."""


class RunReporter:
    """The run's row, log, heartbeat, metrics and policies.

    `client` is None on ranks other than 0. `echo` prints a line on the screen. Lines logged before
    `open` are kept until then, when the run exists at the service.
    """

    def __init__(
        self,
        config: TrainConfig,
        client: Client | None,
        info: RunInfo,
        home: Path,
        world: World,
        echo: Callable[[str], None],
    ):
        self.config, self.client, self.info, self.home = config, client, info, home
        self.world, self._echo = world, echo
        self.update, self.error, self._state = 0, "", "running"
        self.status = "failed"
        """How the run ends without an error: "finished" or "stopped"."""
        self.kernels: dict[str, str] = {}
        """The agent's compute kernels, such as {"attention": "sdpa"}."""
        self._newest: dict[str, float] = {}
        self._shown_at = self._logged_at = self._rate = 0.0
        self._alarms: list[Alarm] = []
        self._reported: list[dict[str, Any]] | None = None
        self._env = ""
        self._warned: set[str] = set()
        self._early: list[tuple[str, float]] = []
        self._run_log: RunLog | None = None
        self._log(f"started on {world.host} (processes: {world.size}): {info.command}")

    def add_derived(self, config: TrainConfig, settings: Sequence[Derived]) -> None:
        """Report settings that were derived from the dataset, now part of `config`."""
        self.config = config
        reasons = {d.key: f"derived: {d.reason}" for d in settings}
        self.info = replace(self.info, origins=self.info.origins | reasons)
        say = self.log if self.info.verbose else self._log
        for d in settings:
            say(f"  {d.key} = {d.value!r}    ({d.reason})")
        if settings and not self.info.verbose:
            count = pluralize(len(settings), "setting")
            self._echo(f"{count} derived from the data; --verbose and the run's log say why")

    def log(self, text: str) -> None:
        """Print a line on the screen and append it to the run's log."""
        self._echo(text)
        self._log(text)

    def _log(self, text: str) -> None:
        if self._run_log is not None:
            self._run_log.write(text)
        elif self.client is not None:
            self._early.append((text, time.time()))

    def open(self, data: SnapshotViews, env: str, *, resumed: bool) -> None:
        """Create the run, or continue it. `data` need not have a snapshot yet; `env` names the
        environment in the closing lines."""
        if self.client is None:
            return
        self.outbox = _open_outbox(self.home, self.client, self.config.run)
        # The outbox is locked, so no other process writes here; it cleans up its own folder.
        folders = (self.home / name for name in ("checkpoints", "policies", "snapshots"))
        remove_unfinished(self.home, *folders)
        for name in ("metrics.jsonl", "run.log"):
            cut_incomplete_line(self.home / name)
        row: dict[str, Any] = {
            "config": {
                **self.config.to_dict(),
                "origins": self.info.origins,
                "kernels": self.kernels,
                "versions": package_versions(),
                "hardware": hardware(self.world.device, self.world.size),
            },
            "seed": self.config.seed,
            "git_commit": self.info.git_commit,
            "host": self.world.host,
            "snapshots": data.snapshots,
            "command": self.info.command,
            "tags": list(self.config.tags),
        }
        if self.info.parent:
            row["parent"] = self.info.parent
        claim = _claim(self.home)
        row["config"]["claim"] = claim
        try:
            # The folder decides whether this process may resume a run of this name.
            self._create(row, claim, resumed)
            failpoint("run.after_create")
            if resumed:
                self.client.patch_run(self.config.run, status="running")
        except ServiceUnreachable as error:
            if not resumed:
                self.outbox.close(0.0)
                raise
            log.warning("the service is unreachable; training continues without it: %s", error)
        except BaseException:
            self.outbox.close(0.0)  # another process owns the run and its folder
            raise
        with whole_file(self.home / "run.json") as file:
            file.write(json.dumps({"name": self.config.run, **row}, indent=1).encode())
        failpoint("run.after_note")
        self._open_log()
        self._data, self._env = data, env or "ENV"
        self.heartbeat = Heartbeat(
            self.client,
            f"train-{self.config.run}",
            role="train",
            run=self.config.run,
            status=self._status,
        )
        self.report_snapshots(data)

    @property
    def trouble(self) -> str:
        """The problem in the run's background threads; empty if there is none."""
        return "; ".join(filter(None, (self.outbox.trouble, self._data.trouble)))

    def _open_log(self) -> None:
        run_log = self._run_log = RunLog(self.home, self.outbox, self.config.run)
        for name in LOGGERS:
            logging.getLogger(name).addHandler(run_log)
        for text, logged_at in self._early:
            run_log.write(text, logged_at)
        self._early.clear()

    def _create(self, row: dict[str, Any], claim: str, resumed: bool) -> None:
        assert self.client is not None
        try:
            self.client.create_run(self.config.run, "train", exist_ok=resumed, **row)
        except Conflict:
            # The row may belong to this run: it may have been killed after creating the row and
            # before writing run.json.
            if (self.client.run(self.config.run).config or {}).get("claim") != claim:
                raise TrainerError(
                    f"there is already a run {self.config.run!r}, and {self.home} holds no "
                    "checkpoint of it; to resume it: --resume auto, with the --output that holds "
                    "its checkpoints; for another run: --run NAME"
                ) from None

    def has_policy(self, update: int) -> bool:
        """Whether the policy of this update was published; True on ranks other than 0."""
        return self.client is None or copy_path(self.home, update).exists()

    @property
    def request(self) -> int:
        """The service's current command for this run; CONTINUE before `open`."""
        if self.client is None or self._run_log is None:
            return CONTINUE
        commands = {"stop": STOP, "drain": STOP, "pause": PAUSE}
        return commands.get(self.heartbeat.command, CONTINUE)

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        if self.client is None:
            return
        self._newest = dict(values)
        self._queue_metrics(update, values)
        self._warn_of_empty_losses(update, values)
        last, now = update == self.config.updates, time.monotonic()
        rate = values["progress/updates_per_second"]
        self._rate = 0.7 * (self._rate or rate) + 0.3 * rate  # smooth, so the estimate is calm
        text = (
            f"update {update}/{self.config.updates}  loss {values.get('loss/total', 0.0):.4g}"
            f"  {rate:.1f} updates/s"
        )
        if not last and self._rate > 0:
            text += f"  {duration((self.config.updates - update) / self._rate)} left"
        every = PROGRESS_ON_TERMINAL if sys.stdout.isatty() else PROGRESS_IN_LOG
        if now - self._shown_at > every or last:
            self._shown_at = now
            self._echo(text)
        if now - self._logged_at > PROGRESS_IN_LOG or last:
            self._logged_at = now
            self._log(text)

    def report_alarms(
        self, update: int, standing: Iterable[Alarm], begun: Iterable[Alarm], ended: Iterable[Alarm]
    ) -> None:
        """Log the alarms that began or ended at an update; write the standing ones into the run's
        row."""
        if self.client is None:
            return
        self._alarms = list(standing)
        now = [alarm.to_json() for alarm in self._alarms]
        if now != self._reported:
            self._reported = now
            self.heartbeat.change_run(alarms=now)
        for alarm in begun:
            self.log(f"warning: {alarm.key} at update {update}: {alarm.message}")
        for alarm in ended:
            self.log(f"{alarm.key}: the alarm of update {alarm.update} is over at update {update}")

    def closing_lines(self, unchecked: str) -> list[str]:
        """The last lines on the screen: status, standing alarms or why there can be none, how to
        evaluate the policies."""
        lines = [f"run {self.config.run} {self.status}"]
        if unchecked:
            lines.append(f"its health was not checked: {unchecked}")
        if self._alarms:
            count = pluralize(len(self._alarms), "alarm")
            lines.append(f"warning: {count}: {self._alarms[0].summary}")
        if self.status == "finished":
            command = ["stepwell", "evaluate", "--policy", self.config.run, "--env", self._env]
            command += [word for name in self.config.plugin for word in ("--plugin", name)]
            lines.append(f"evaluate: {shlex.join(command)}")
            command = ["stepwell", "estimate", self.config.run, *command[6:]]
            lines.append(f"without the environment: {shlex.join(command)}")
        return lines

    def _queue_metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Queue metrics, and append lines {"key", "step", "value", "time"} to metrics.jsonl."""
        finite, now = {k: v if math.isfinite(v) else None for k, v in values.items()}, time.time()
        lines = [
            json.dumps({"key": k, "step": update, "value": v, "time": now}) + "\n"
            for k, v in finite.items()
        ]
        try:
            with (self.home / "metrics.jsonl").open("ab", buffering=0) as file:
                file.write("".join(lines).encode())
            self.outbox.put_metrics(self.config.run, update, finite)
        except (OutboxError, OSError) as error:
            raise TrainerError(
                f"metrics of run {self.config.run} cannot be written to {self.home}: {error}; make "
                "room, then run the same command again: it resumes from its newest checkpoint"
            ) from error

    def _warn_of_empty_losses(self, update: int, values: Mapping[str, float]) -> None:
        for name, (who, setting) in LOSS_COUNTS.items():
            if values.get(name) == 0 and name not in self._warned:
                self._warned.add(name)
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
                "snapshot": data.snapshots[-1] if data.snapshots else None,
                "git_commit": self.info.git_commit,
            }
            extra = {"training": self.config.to_dict()}
            publish(self.home, self.outbox, self.config.run, agent, update, metadata, extra)
            self._log(f"policy {self.config.run}/{update}")
        return update

    def report_snapshots(self, data: SnapshotViews) -> None:
        """Write the snapshots in use, and the shards excluded from them, into the run's row."""
        if self.client is None:
            return
        changes: dict[str, Any] = {"snapshots": data.snapshots}
        if data.left_out:
            notes = f"left out, unreadable: {', '.join(sorted(data.left_out))}"
            changes["notes"] = notes[:MAX_NOTES]
            changes["tags"] = [*self.config.tags, "unreadable-shards"]
        self.heartbeat.change_run(**changes)

    def set_state(self, state: str, reason: str = "") -> None:
        """Set the state that the next heartbeat reports: "running", "waiting" or "paused"."""
        if self.client is not None and state != self._state:
            self._state = state
            line = f"{state}: {reason}" if reason else state
            (self.log if reason else self._log)(line)
            self.heartbeat.wake()

    def close(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Report how the run ended. Call it after `open`, with the exception that ended the run, if
        any; the signature is that of a callback for `ExitStack.push`."""
        del kind, trace
        if self.client is None:
            return
        assert self._run_log is not None
        status = self.status
        if error is not None:
            status, self.error = "failed", f"{type(error).__name__}: {error}"
        reason = f": {self.error}" * bool(self.error)
        self._log(f"{status} after {pluralize(self.update, 'update')}{reason}")
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._run_log)
        self.outbox.drain(self.config.schedule.drain_timeout)
        state = "failed" if status == "failed" else "stopped"
        self.heartbeat.close(state=state, last_error=self.error)
        self.outbox.end_run(self.config.run, status, self.error)
        if undelivered := self.outbox.undelivered():
            log.warning("%s", undelivered)
        self.outbox.close(0.0)

    def _status(self) -> dict[str, Any]:
        """What a heartbeat reports."""
        return {
            "state": self._state,
            "counters": {
                "updates": float(self.update),
                "updates_per_second": self._newest.get("progress/updates_per_second", 0.0),
            },
            "last_error": self.error or self.trouble,
        }


def _open_outbox(home: Path, client: Client, run: str) -> Outbox:
    """Open the queue in a run's folder. Its lock also prevents a second trainer in that folder.

    Raises `TrainerError` where another process trains there.
    """
    try:
        return Outbox(home / "outbox", client, run=run, linger=LINGER)
    except OutboxInUse as error:
        raise TrainerError(
            f"run {run}: {error}; wait for it to end, or train under another --run"
        ) from None
    except OutboxError as error:
        raise TrainerError(f"run {run}: {error}") from error


def _claim(home: Path) -> str:
    """A random word stored only in this folder. It identifies the row that this run created."""
    path = home / "claim"
    if not path.exists():
        with whole_file(path) as file:
            file.write(uuid.uuid4().hex.encode())
    return path.read_text()
