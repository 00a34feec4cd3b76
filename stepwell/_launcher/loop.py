"""The launcher at work: one thread that watches its children and, every few seconds, the service.

    watch   reap, kill what was asked to end and did not, start what waits for a free slot
    sync    heartbeat → commands · reports · cancelled ones · claim while there is room

Children need neither the service nor the launcher: what could not be reported is reported later.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepwell._launcher import rules
from stepwell._launcher.rules import Places, Refused
from stepwell._launcher.work import Work, load
from stepwell._outbox_folder import entries, find_outboxes
from stepwell.client import Client
from stepwell.errors import (
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

log = logging.getLogger("stepwell.launcher")

TICK = 0.1
HEARTBEAT_EVERY = 5.0
LOOK_AROUND_EVERY = 30.0
LAST_REPORT_SECONDS = 10.0
STEPWELL = [sys.executable, "-m", "stepwell.cli"]
_LAUNCH_ID = re.compile(r"la_[0-9a-f-]{8,64}")

State = Literal["starting", "running", "paused", "draining", "stopped"]


class LauncherError(StepwellError):
    """This launcher cannot work here; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    name: str
    places: Places
    roles: tuple[str, ...]
    capacity: int
    plugins: tuple[str, ...]
    poll: float
    grace: float


class Launcher:
    """See the head of this file. `client` should be impatient: the loop is its retry."""

    def __init__(self, options: Options, client: Client, token: str | None = None):
        self.options, self.client = options, client
        self.state: State = "starting"
        self._env = {**os.environ, "STEPWELL_URL": client.url, "PYTHONUNBUFFERED": "1"}
        # Parsers wrap their complaints at the width of a terminal, and there is none.
        self._env["COLUMNS"] = "400"
        if token:
            self._env["STEPWELL_TOKEN"] = token
        self._works: dict[str, Work] = {w.launch_id: w for w in load(options.places)}
        self._counts = {"claimed": 0, "finished": 0, "failed": 0, "cancelled": 0}
        self._trouble = self._last_error = ""
        self._asked: Literal["", "stop", "kill"] = ""
        self._arrived = False
        self._next_sync = self._next_beat = self._next_look = 0.0

    # --- for whoever runs it ----------------------------------------------------------------

    def run(self) -> None:
        """Until it is told to stop, or has drained. Raises `LauncherError`, `Unauthorized`."""
        for work in self._works.values():
            log.info("taking up launch %s again (run %s)", work.launch_id, work.runs)
        while self.state not in ("draining", "stopped") or self._busy:
            time.sleep(TICK)
            self._obey()
            self._watch()
            if time.monotonic() >= self._next_sync:
                self._next_sync = time.monotonic() + self.options.poll
                self._sync()
        self.state = "stopped"
        self._last_report()

    def ask(self, word: Literal["stop", "kill"]) -> None:
        """What a signal wants: stop, or not even wait for children. Done with the next tick."""
        self._asked = word

    def _obey(self) -> None:
        if self._asked:
            self._command("stop")
        if self._asked == "kill":
            for work in self._works.values():
                for child in work.children:
                    child.press(now=True)

    def _command(self, word: str) -> None:
        """pause: claim nothing more · resume · drain: end with what runs · stop: end it now."""
        moves: dict[str, tuple[State, tuple[State, ...]]] = {
            "pause": ("paused", ("running",)),
            "resume": ("running", ("paused",)),
            "drain": ("draining", ("running", "paused")),
            "stop": ("stopped", ("starting", "running", "paused", "draining")),
        }
        if word not in moves or self.state not in moves[word][1]:
            return
        self.state = moves[word][0]
        self._next_beat = self._next_sync = 0.0
        log.info("told to %s", word)
        if word == "stop":
            for work in self._works.values():
                if work.busy:
                    work.stop(f"stopped with its launcher, {self.options.name}", self.options.grace)

    # --- watch ------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return any(work.busy for work in self._works.values())

    @property
    def _free(self) -> int:
        """Slots that neither run nor are promised to a child that waits."""
        taken = sum(w.used + w.slots * len(w.with_state("waiting")) for w in self._works.values())
        return self.options.capacity - taken

    def _watch(self) -> None:
        used = 0
        for work in self._works.values():
            before = len(work.with_state("ended"))
            for child in work.with_state("running"):
                child.press()
                child.poll()
            if work.decide(None) or len(work.with_state("ended")) != before:
                work.save(self.options.places)
                self._next_sync = 0.0
            used += work.used
        # Oldest first, and nobody overtakes one that needs several slots.
        for work in self._works.values():
            for child in work.with_state("waiting"):
                if used + work.slots > self.options.capacity:
                    return
                used += work.slots
                self._start(work, work.children.index(child))

    def _start(self, work: Work, index: int) -> None:
        child = work.children[index]
        # Noted first: a launcher killed between the two lines must not start it a second time.
        child.state = "running"
        work.save(self.options.places)
        try:
            child.start(STEPWELL, self._env)
        except (OSError, ValueError) as error:  # too long, not encodable, no memory
            child.state = "ended"
            work.problems[child.run] = f"{child.run}: cannot be started: {error}"
        log.info("launch %s: %s, log %s", work.launch_id, child.run, child.log)
        work.save(self.options.places)

    # --- sync -------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Everything that needs the service; what fails is tried again with the next one."""
        try:
            if not self._arrived:
                self._arrive()
            if time.monotonic() >= self._next_beat:
                self._beat()
            self._report()
            self._hear_of_cancelled()
            if time.monotonic() >= self._next_look:
                self._look_around()
                self._next_look = time.monotonic() + LOOK_AROUND_EVERY
            while self.state == "running" and self._free > 0 and self._claim():
                pass
        except LauncherError:
            raise
        except StepwellError as error:
            if isinstance(error, Unauthorized) and not self._arrived:
                raise
            if not self._trouble:
                log.warning("%s; what runs goes on", error)
            self._trouble = str(error)
        else:
            if self._trouble:
                log.info("the service answers again")
            self._trouble = ""

    def _arrive(self) -> None:
        """First contact. Two launchers of one name would take each other's launches."""
        here = socket.gethostname()
        for worker in self.client.workers():
            if worker.id != self.options.name or not worker.alive:
                continue
            if worker.host != here or (worker.pid != os.getpid() and _process(worker.pid)):
                raise LauncherError(
                    f"a launcher named {worker.id} is alive on {worker.host} (pid {worker.pid}); "
                    "give this one another --name, or wait a minute if that one was killed"
                )
        if self.state == "starting":
            self.state = "running"
        self._beat()
        self._arrived = True
        log.info("launcher %s waits for work at %s", self.options.name, self.client.url)
        for launch in self.client.launches(state="running"):
            if launch.claimed_by == self.options.name and launch.id not in self._works:
                lost = f"launcher {self.options.name} has lost its record of this launch"
                self.client.patch_launch(launch.id, state="failed", error=lost, run=launch.run)

    def _beat(self) -> None:
        running = sum(len(w.with_state("running")) for w in self._works.values())
        waiting = sum(len(w.with_state("waiting")) for w in self._works.values())
        counters = {"capacity": self.options.capacity, "running": running, "waiting": waiting}
        answer = report_worker(
            self.client,
            self.options.name,
            role="launcher",
            # Until its children have ended it can still be heard and asked.
            state="draining" if self.state == "stopped" and running else self.state,
            counters={**counters, **self._counts},
            last_error=self._last_error or self._trouble,
        )
        self._next_beat = time.monotonic() + HEARTBEAT_EVERY
        self._command(answer.command)

    def _report(self) -> None:
        for work in list(self._works.values()):
            if work.decide(self.client):
                work.save(self.options.places)
            report = work.report()
            if report != work.told and not work.cancelled:
                try:
                    self.client.patch_launch(work.launch_id, **report)
                except Conflict:
                    self._cancelled(work)
                except NotFound:  # another service, or one that has lost its index
                    log.warning("the service knows no launch %s", work.launch_id)
                work.told = report
                work.save(self.options.places)
            if work.ended:
                self._over(work)

    def _over(self, work: Work) -> None:
        self._counts[work.state] += 1
        if work.state == "failed":
            self._last_error = f"launch {work.launch_id}: {work.error}"
        self._next_beat = 0.0
        log.info("launch %s: %s", work.launch_id, work.state)
        work.forget(self.options.places)
        del self._works[work.launch_id]

    def _hear_of_cancelled(self) -> None:
        for work in [w for w in self._works.values() if not w.cancelled]:
            try:
                if self.client.launch(work.launch_id).state == "cancelled":
                    self._cancelled(work)
            except NotFound:
                continue

    def _cancelled(self, work: Work) -> None:
        if not work.cancelled:
            log.info("launch %s was cancelled", work.launch_id)
            work.cancelled = True
            work.stop("cancelled", self.options.grace)
            work.save(self.options.places)

    def _claim(self) -> bool:
        launch = self.client.claim_launch(self.options.name, roles=self.options.roles)
        if launch is not None:
            self._take(launch)
        return launch is not None

    def _take(self, launch: Launch) -> None:
        if not _LAUNCH_ID.fullmatch(launch.id):  # it becomes the name of files here
            raise LauncherError(f"{self.client.url} gave a launch with a strange id: {launch.id!r}")
        self._counts["claimed"] += 1
        slots, capacity = rules.slots(launch), self.options.capacity
        try:
            starts = rules.starts(launch, self.options.places, self.options.plugins)
            if slots > capacity:
                raise Refused("option 'processes'", expected=f"at most {capacity}", got=str(slots))
        except Refused as error:
            log.warning("launch %s: refused: %s", launch.id, error)
            work = Work(launch.id, launch.role, 1, [], refusal=f"refused: {error}")
        else:
            log.info("launch %s: %s × %d", launch.id, launch.role, launch.count)
            work = Work.begin(launch, slots, starts, self.options.places)
        work.save(self.options.places)
        self._works[launch.id] = work
        self._next_sync = 0.0

    def _look_around(self) -> None:
        """Claims whose answer was lost on the way, and what a child left undelivered."""
        if self.state in ("running", "draining"):
            for launch in reversed(self.client.launches(state="claimed")):
                if launch.claimed_by == self.options.name and launch.id not in self._works:
                    self._take(launch)
        busy = {c.run for w in self._works.values() for c in w.children if c.state != "ended"}
        places = self.options.places
        for folder in (*find_outboxes(places.outboxes, 1), *find_outboxes(places.data / "runs", 2)):
            run = folder.name if folder.parent == places.outboxes else folder.parent.name
            if run not in busy and entries(folder):
                send_leftovers(self.client, folder)

    def _last_report(self) -> None:
        """Say how everything ended; what cannot be said waits on disk for the next start."""
        deadline = time.monotonic() + LAST_REPORT_SECONDS
        while True:
            try:
                if self._arrived:
                    self._report()
                    self._beat()
                return
            except StepwellError as error:
                if time.monotonic() > deadline:
                    log.warning(
                        "the next launcher with this --data reports what remains: %s", error
                    )
                    return
                time.sleep(0.5)


def send_leftovers(client: Client, folder: Path) -> None:
    """Send what a child could not, for a few seconds; the rest stays for the next time."""
    try:
        outbox = reopen(folder, client)
    except OutboxInUse:
        return  # by a process that sends it
    except OutboxError as error:
        log.warning("the outbox %s cannot be sent: %s", folder, error)
        return
    outbox.close(5.0)
    if outbox.sent:
        log.info("sent %d items that waited in %s", outbox.sent, folder)
    if undelivered := outbox.undelivered():
        log.warning("%s", undelivered)


def _process(pid: int | None) -> bool:
    """Whether a process of that number exists on this machine."""
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return pid is not None
