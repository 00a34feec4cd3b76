"""The main loop: one thread that checks its processes and, every few seconds, the service.

    watch   reap processes, kill overdue ones, start waiting ones in free slots
    sync    heartbeat and commands · reports · cancelled launches · claim while slots are free

Processes depend on neither the service nor the launcher: a report that fails is repeated later.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepwell._background import BackgroundLoop
from stepwell._locks import pid_exists
from stepwell._outbox_folder import entries, find_outboxes
from stepwell.client import Client
from stepwell.errors import (
    NOT_OWNER,
    Conflict,
    NotFound,
    OutboxError,
    OutboxInUse,
    StepwellError,
    Unauthorized,
)
from stepwell.heartbeat import report_worker
from stepwell.messages import Launch
from stepwell.outbox import reopen
from workbench.launcher import launch_permissions
from workbench.launcher.claimed_launch import ClaimedLaunch, load
from workbench.launcher.launch_permissions import LauncherFolder, Refused
from workbench.launcher.programs import start_publishing

log = logging.getLogger("stepwell.launcher")

TICK = 0.1
HEARTBEAT_EVERY = 5.0
LOG_EVERY = 4.0
RECOVER_EVERY = 30.0
LAST_REPORT_SECONDS = 10.0
STEPWELL = launch_permissions.STEPWELL
_LAUNCH_ID = re.compile(r"la_[0-9a-f-]{8,64}")

State = Literal["starting", "running", "paused", "draining", "stopped"]
COMMANDS: dict[str, tuple[State, tuple[State, ...]]] = {
    "pause": ("paused", ("running",)),
    "resume": ("running", ("paused",)),
    "drain": ("draining", ("running", "paused")),
    "stop": ("stopped", ("starting", "running", "paused", "draining")),
}
"""Command → state, and the states in which the command is accepted. Paused: claims no launches.
Draining: exits when its processes have ended. Stopped: stops its processes and exits."""


class LauncherError(StepwellError):
    """The launcher cannot run here; the message states what to do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options from the command line."""

    name: str
    folder: LauncherFolder
    roles: tuple[str, ...]
    capacity: int
    plugins: tuple[str, ...]
    poll: float
    grace: float


class Launcher:
    """Runs the loop that the module docstring describes.

    `client` should have short timeouts, because the loop repeats failed calls.
    """

    def __init__(self, options: Options, client: Client, token: str | None = None):
        self.options, self.client = options, client
        self.state: State = "starting"
        self._env = {**os.environ, "STEPWELL_URL": client.url, "PYTHONUNBUFFERED": "1"}
        if token:
            self._env["STEPWELL_TOKEN"] = token
        self._launches: dict[str, ClaimedLaunch] = {x.launch_id: x for x in load(options.folder)}
        self._counts = {"claimed": 0, "finished": 0, "failed": 0, "cancelled": 0}
        self._sync_error = self._last_error = ""
        self._requested: Literal["", "stop", "kill"] = ""
        self._registered = False
        self._next_sync = self._next_heartbeat = self._next_recovery = self._next_logs = 0.0
        self._programs: BackgroundLoop | None = None
        self._sent_logs: dict[str, str] = {}

    def run(self) -> None:
        """Run until stopped or drained. Raises `LauncherError`, `Unauthorized`."""
        for launch in self._launches.values():
            log.info("found launch %s again (run %s)", launch.launch_id, launch.runs)
        while self.state not in ("draining", "stopped") or self._active:
            time.sleep(TICK)
            if self._requested:
                self._command("stop")
            self._watch()
            if time.monotonic() >= self._next_sync:
                self._next_sync = time.monotonic() + self.options.poll
                self._sync()
        self.state = "stopped"
        if self._programs is not None:
            self._programs.stop(LAST_REPORT_SECONDS)
        self._report_the_end()

    def request(self, word: Literal["stop", "kill"]) -> None:
        """Request a stop or an immediate kill (for signal handlers). The next tick executes it."""
        self._requested = word

    def _command(self, word: str) -> None:
        if word not in COMMANDS or self.state not in COMMANDS[word][1]:
            return
        self.state = COMMANDS[word][0]
        self._next_heartbeat = self._next_sync = 0.0
        log.info("command: %s", word)
        if word == "stop":
            for launch in self._launches.values():
                if launch.active:
                    reason = f"stopped with its launcher, {self.options.name}"
                    launch.stop(reason, self.options.grace)

    # --- watch ------------------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return any(launch.active for launch in self._launches.values())

    def _slots(self, *states: str) -> int:
        """Slots of processes in these states."""
        launches = self._launches.values()
        return sum(x.slots * len(x.with_state(state)) for x in launches for state in states)

    def _watch(self) -> None:
        for launch in self._launches.values():
            running = launch.with_state("running")
            for process in running:
                process.kill_if_overdue(now=self._requested == "kill")
                process.poll()
            if launch.note_exits(None) or launch.with_state("running") != running:
                launch.save(self.options.folder)
                self._next_sync = 0.0
        # Oldest first. A later process does not overtake one that needs several slots.
        used = self._slots("running")
        for launch in self._launches.values():
            for process in launch.with_state("waiting"):
                used += launch.slots
                if used > self.options.capacity:
                    return
                self._start(launch, launch.processes.index(process))

    def _start(self, launch: ClaimedLaunch, index: int) -> None:
        process = launch.processes[index]
        # Recorded first, so that a launcher killed in between does not start it a second time.
        process.state = "running"
        launch.save(self.options.folder)
        try:
            process.start(STEPWELL, self._env)
        except (OSError, ValueError) as error:  # too long, not encodable, no memory
            process.state = "ended"
            launch.failures[process.run] = f"{process.run}: cannot be started: {error}"
        log.info("launch %s: %s, log %s", launch.launch_id, process.run, process.log)
        launch.save(self.options.folder)

    # --- sync -------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Run all steps that need the service. The next sync repeats those that fail."""
        try:
            if not self._registered:
                self._register()
            if time.monotonic() >= self._next_heartbeat:
                self._heartbeat()
            self._report()
            self._check_cancelled()
            if time.monotonic() >= self._next_recovery:
                self._recover()
                self._next_recovery = time.monotonic() + RECOVER_EVERY
            while self.state == "running" and self._claim():
                pass
        except LauncherError:
            raise
        except StepwellError as error:
            if isinstance(error, Unauthorized) and not self._registered:
                raise
            if not self._sync_error:
                log.warning("%s; what runs goes on", error)
            self._sync_error = str(error)
        else:
            if self._sync_error:
                log.info("the service answers again")
            self._sync_error = ""

    def _register(self) -> None:
        """Register at first contact. Raises `LauncherError` if another launcher uses this name,
        because two launchers with one name would take over each other's launches."""
        here = socket.gethostname()
        for worker in self.client.workers():
            if worker.id != self.options.name or not worker.alive:
                continue
            if worker.host != here or (worker.pid != os.getpid() and pid_exists(worker.pid or 0)):
                raise LauncherError(
                    f"a launcher named {worker.id} is alive on {worker.host} (pid {worker.pid}); "
                    "give this one another --name, or wait a minute if that one was killed"
                )
        if self.state == "starting":
            self.state = "running"
        self._heartbeat()
        self._registered = True
        options = self.options
        self._programs = start_publishing(self.client, options.name, options.roles, options.plugins)
        log.info("launcher %s waits for work at %s", self.options.name, self.client.url)
        for launch in self.client.launches(state="running"):
            if launch.claimed_by == self.options.name and launch.id not in self._launches:
                lost = f"launcher {self.options.name} has lost its record of this launch"
                self.client.patch_launch(launch.id, state="failed", error=lost, run=launch.run)

    def _heartbeat(self) -> None:
        processes = [p for launch in self._launches.values() for p in launch.processes]
        states = [process.state for process in processes]
        running, waiting = states.count("running"), states.count("waiting")
        counters = {"capacity": self.options.capacity, "running": running, "waiting": waiting}
        answer = report_worker(
            self.client,
            self.options.name,
            role="launcher",
            # While processes still run, the launcher still receives commands.
            state="draining" if self.state == "stopped" and running else self.state,
            counters={**counters, **self._counts},
            last_error=self._last_error or self._sync_error or self._trouble,
        )
        self._next_heartbeat = time.monotonic() + HEARTBEAT_EVERY
        self._command(answer.command)

    @property
    def _trouble(self) -> str:
        return "" if self._programs is None else self._programs.trouble

    def _report(self) -> None:
        with_logs = time.monotonic() >= self._next_logs
        if with_logs:
            self._next_logs = time.monotonic() + LOG_EVERY
        for launch in list(self._launches.values()):
            if launch.note_exits(self.client):
                launch.save(self.options.folder)
            report = launch.report()
            tail = self._sent_logs.get(launch.launch_id, "")
            if with_logs or launch.ended:
                tail = launch.log_tail()
            news = report != launch.reported or tail != self._sent_logs.get(launch.launch_id, "")
            if news and not launch.cancelled:
                try:
                    self.client.patch_launch(launch.launch_id, **report, log=tail)
                    self._sent_logs[launch.launch_id] = tail
                except Conflict:
                    self._cancel(launch)
                except NotFound:  # another service, or one that has lost its index
                    log.warning("the service knows no launch %s", launch.launch_id)
                except Unauthorized as error:  # its token was replaced since
                    if error.code != NOT_OWNER:
                        raise
                    log.warning("launch %s goes on unreported: %s", launch.launch_id, error)
                launch.reported = report
                launch.save(self.options.folder)
            if launch.ended:
                self._finish(launch)

    def _finish(self, launch: ClaimedLaunch) -> None:
        self._counts[launch.state] += 1
        if launch.state == "failed":
            self._last_error = f"launch {launch.launch_id}: {launch.error}"
        self._next_heartbeat = 0.0
        log.info("launch %s: %s", launch.launch_id, launch.state)
        launch.delete(self.options.folder)
        del self._launches[launch.launch_id]
        self._sent_logs.pop(launch.launch_id, None)

    def _check_cancelled(self) -> None:
        for launch in [x for x in self._launches.values() if not x.cancelled]:
            try:
                if self.client.launch(launch.launch_id).state == "cancelled":
                    self._cancel(launch)
            except NotFound:
                continue

    def _cancel(self, launch: ClaimedLaunch) -> None:
        log.info("launch %s was cancelled", launch.launch_id)
        launch.cancelled = True
        launch.stop("cancelled", self.options.grace)
        launch.save(self.options.folder)

    def _claim(self) -> bool:
        """Claim one launch. Returns whether a launch and a free slot were available."""
        if self._slots("running", "waiting") >= self.options.capacity:
            return False
        launch = self.client.claim_launch(self.options.name, roles=self.options.roles)
        if launch is not None:
            self._accept(launch)
        return launch is not None

    def _accept(self, launch: Launch) -> None:
        if not _LAUNCH_ID.fullmatch(launch.id):  # it becomes the name of files here
            raise LauncherError(f"{self.client.url} gave a launch with a bad id: {launch.id!r}")
        self._counts["claimed"] += 1
        options, slots = self.options, launch_permissions.slots(launch)
        try:
            schema = launch_permissions.schema_of(launch.role)
            lines = launch_permissions.command_lines(
                launch, schema, options.folder, options.plugins
            )
            if slots > options.capacity:
                expected = f"at most {options.capacity}"
                raise Refused("option 'processes'", expected=expected, got=str(slots))
        except Refused as error:
            log.warning("launch %s: refused: %s", launch.id, error)
            claimed = ClaimedLaunch.create(launch, 1, [], options.folder)
            claimed.refusal = f"refused: {error}"
        else:
            log.info("launch %s: %s × %d", launch.id, launch.role, launch.count)
            claimed = ClaimedLaunch.create(launch, slots, lines, options.folder)
        claimed.save(options.folder)
        self._launches[launch.id] = claimed
        self._next_sync = 0.0

    def _recover(self) -> None:
        """Recover claims whose response was lost, and send items left by processes."""
        if self.state in ("running", "draining"):
            for launch in reversed(self.client.launches(state="claimed")):
                if launch.claimed_by == self.options.name and launch.id not in self._launches:
                    self._accept(launch)
        launched = [p for launch in self._launches.values() for p in launch.processes]
        in_use = {process.run for process in launched if process.state != "ended"}
        folder = self.options.folder
        of_collectors = find_outboxes(folder.outboxes, 1)
        of_trainers = find_outboxes(folder.data / "runs", 2)
        outboxes = [
            *((x.name, x) for x in of_collectors),
            *((x.parent.name, x) for x in of_trainers),
        ]
        for run, outbox in outboxes:
            if run not in in_use and entries(outbox):
                self._send_leftovers(outbox)

    def _send_leftovers(self, folder: Path) -> None:
        """Send items that a process left, for a few seconds; the next call sends the rest."""
        try:
            outbox = reopen(folder, self.client)
        except OutboxInUse:
            return  # in use by a process that sends the items itself
        except OutboxError as error:
            log.warning("the outbox %s cannot be sent: %s", folder, error)
            return
        outbox.close(5.0)
        if outbox.sent:
            log.info("sent %d items that waited in %s", outbox.sent, folder)
        if undelivered := outbox.undelivered():
            log.warning("%s", undelivered)

    def _report_the_end(self) -> None:
        """Report how all launches ended. Failed reports stay on disk for the next start."""
        deadline = time.monotonic() + LAST_REPORT_SECONDS
        while self._registered:
            try:
                self._report()
                self._heartbeat()
                return
            except StepwellError as error:
                if time.monotonic() > deadline:
                    log.warning("the next launcher with this --data reports the rest: %s", error)
                    return
                time.sleep(0.5)
