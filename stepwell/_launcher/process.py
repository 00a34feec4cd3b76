"""A process that a launcher has started, and how it ended; also one that an earlier launcher left.

    waiting ──start──▶ running ──▶ ended, with status 0, another one, or None (nobody saw it end)

Each process inherits a locked file. The lock is held exactly as long as the process lives, whatever
becomes of the launcher: so a launcher that was killed finds, when it is back, what still runs, and
never takes an unrelated process with an old number for its own.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

# `evaluate` has no handler of its own for SIGTERM; as an interrupt it closes its run.
STOP_SIGNALS = {"evaluate": signal.SIGINT}
TAIL_BYTES, TAIL_LINES = 16_384, 20
USAGE = 2


class LaunchedProcess(BaseModel):
    """One process of a launch: its command, and where it stands."""

    run: str
    command: list[str]
    """After `stepwell`."""
    role: str
    log: Path = Field(Path(), exclude=True)
    lock: Path = Field(Path(), exclude=True)
    """Not in the record: the launcher's folder may be moved."""
    state: str = "waiting"
    pid: int | None = None
    status: int | None = None
    stopped: bool = False
    """It was told to stop, or never to start."""
    _process: subprocess.Popen[bytes] | None = None
    _deadline: float | None = None

    def start(self, prefix: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises OSError where the machine cannot."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self.log.open("ab") as log:
                log.write(f"$ stepwell {shlex.join(self.command)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [*prefix, *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    pass_fds=(descriptor,),
                    # A session of its own: Ctrl-C reaches the launcher, which stops its processes.
                    start_new_session=True,
                )
        finally:
            os.close(descriptor)
        self.pid, self.state = self._process.pid, "running"

    def poll(self) -> None:
        """Notice that it has ended; `status` stays None where nobody saw how."""
        if self.state != "running":
            return
        if self._process is not None:
            self.status = self._process.poll()
        if self.status is not None or (self._process is None and not self._locked()):
            self._end()

    def stop(self, grace: float) -> None:
        """Tell it to end; after `grace` seconds `kill_if_overdue` kills it."""
        if self.state == "waiting":
            self.stopped = True
            self._end()
        elif self.state == "running" and self._deadline is None:
            self.stopped = True
            self._deadline = time.monotonic() + grace
            self._signal(STOP_SIGNALS.get(self.role, signal.SIGTERM))

    def kill_if_overdue(self, *, now: bool = False) -> None:
        """Kill it, and all that it started, once its time to end by itself is over."""
        overdue = self._deadline is not None and time.monotonic() > self._deadline
        if self.state == "running" and (now or overdue):
            self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: int, *, group: bool = False) -> None:
        # Not yet reaped, or still holding its lock: so this number is still our process's.
        if self.pid is None or (self._process is None and not self._locked()):
            return
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except ProcessLookupError:
            pass

    def _locked(self) -> bool:
        try:
            with self.lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def _end(self) -> None:
        self.state = "ended"
        self.lock.unlink(missing_ok=True)

    def failure(self) -> str:
        """Why it failed, for people: the end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"{self.run}: its log cannot be read: {error}"
        lines = [line for line in lines if line.strip()]
        if self.status == USAGE:
            started = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1)
            message = " ".join(lines[started + 1 :]) or "no message"
            return f"{self.run}: refused by its own parser: {message}"
        how = "nobody saw how" if self.status is None else f"status {self.status}"
        tail = "\n".join(lines[-TAIL_LINES:])
        return f"{self.run} ended ({how}); the end of its log:\n{tail}"
