"""A process started by this launcher or by an earlier one, and its exit status.

    waiting ──start──▶ running ──▶ ended, with status 0, another one, or None (unknown)

Each process inherits a locked file. The process holds the lock until it ends, even if the launcher
is killed. A restarted launcher thus finds the processes that still run, and never mistakes an
unrelated process with a reused pid for its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from stepwell._locks import held_by, take_lock
from workbench.processes import end_of_log, spawn

TAIL_LINES = 20
USAGE = 2


class LaunchedProcess(BaseModel):
    """One process of a launch: its command and its state."""

    run: str
    command: list[str]
    """Arguments after `stepwell`."""
    role: str
    log: Path = Field(Path(), exclude=True)
    lock: Path = Field(Path(), exclude=True)
    """Not in the record, because the folder of the launcher may be moved."""
    state: str = "waiting"
    pid: int | None = None
    status: int | None = None
    stopped: bool = False
    """A stop was requested, before or after the start."""
    _process: subprocess.Popen[bytes] | None = None
    _deadline: float | None = None

    def start(self, prefix: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process. Raises OSError if the machine cannot start it."""
        with take_lock(self.lock, lambda _: BlockingIOError(f"{self.lock} is locked")) as lock:
            self._process = spawn(
                [*prefix, *self.command],
                env=env,
                log=self.log,
                lock=lock,
                shown=["stepwell", *self.command],
            )
        self.pid, self.state = self._process.pid, "running"

    def poll(self) -> None:
        """Check whether it has ended; `status` stays None if the exit status is unknown."""
        if self.state != "running":
            return
        if self._process is not None:
            self.status = self._process.poll()
        if self.status is not None or (self._process is None and not self._locked()):
            self._end()

    def stop(self, grace: float) -> None:
        """Request that it end; after `grace` seconds `kill_if_overdue` kills it."""
        if self.state == "waiting":
            self.stopped = True
            self._end()
        elif self.state == "running" and self._deadline is None:
            self.stopped = True
            self._deadline = time.monotonic() + grace
            self._signal(signal.SIGTERM)

    def kill_if_overdue(self, *, now: bool = False) -> None:
        """Kill it and its child processes once the grace period is over."""
        overdue = self._deadline is not None and time.monotonic() > self._deadline
        if self.state == "running" and (now or overdue):
            self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: int, *, group: bool = False) -> None:
        # The pid is still valid if the process is not yet reaped or still holds its lock.
        if self.pid is None or (self._process is None and not self._locked()):
            return
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except ProcessLookupError:
            pass

    def _locked(self) -> bool:
        return held_by(self.lock) is not None

    def _end(self) -> None:
        self.state = "ended"
        self.lock.unlink(missing_ok=True)

    def log_tail(self, characters: int) -> str:
        """Whole lines at the end of its log; empty if it has none."""
        try:
            with self.log.open("rb") as file:
                start = max(0, self.log.stat().st_size - characters)
                file.seek(start)
                text = file.read().decode(errors="replace")[-characters:]
        except OSError:
            return ""
        return text.partition("\n")[2] if start else text

    def failure(self) -> str:
        """Human-readable reason of the failure: the end of its log."""
        try:
            lines = end_of_log(self.log)
        except OSError as error:
            return f"{self.run}: its log cannot be read: {error}"
        if self.status == USAGE:
            started = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1)
            message = " ".join(lines[started + 1 :]) or "no message"
            return f"{self.run}: refused by its own parser: {message}"
        how = "nobody saw how" if self.status is None else f"status {self.status}"
        tail = "\n".join(lines[-TAIL_LINES:])
        return f"{self.run} ended ({how}); the end of its log:\n{tail}"
