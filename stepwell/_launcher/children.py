"""Processes that a launcher has started, and how they ended; also those of an earlier launcher.

    waiting ──start──▶ running ──▶ ended, with status 0, another one, or None (nobody saw it end)

Each child inherits a locked file. The lock is held exactly as long as the child lives, whatever
becomes of the launcher: so a launcher that was killed finds, when it is back, what still runs, and
no process that happens to have an old number is ever taken for a child.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `evaluate` has no handler of its own for SIGTERM; as an interrupt it closes its run.
STOP_SIGNALS = {"evaluate": signal.SIGINT}
TAIL_BYTES, TAIL_LINES = 16_384, 20
USAGE = 2
_BOX = " \t╭╮╰╯│─"
_HELP = re.compile(r"Argument helptext|For full helptext|usage:")


@dataclass
class Child:
    """One process of a launch: what it is to do, and where it stands."""

    run: str
    command: list[str]
    role: str
    log: Path
    lock: Path
    state: str = "waiting"
    pid: int | None = None
    status: int | None = None
    stopped: bool = False
    """It was told to stop, or never to start."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _deadline: float | None = field(default=None, repr=False)

    # --- from and to the record on disk -----------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        kept = ("run", "command", "role", "state", "pid", "status", "stopped")
        return {name: getattr(self, name) for name in kept}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], log: Path, lock: Path) -> Child:
        return cls(log=log, lock=lock, **data)

    # --- life -------------------------------------------------------------------------------

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
                    # A session of its own: Ctrl-C reaches the launcher, which stops its children.
                    start_new_session=True,
                )
        finally:
            os.close(descriptor)
        self.pid, self.state = self._process.pid, "running"

    def poll(self) -> bool:
        """Whether it has ended; `status` is None where nobody saw how."""
        if self.state == "running":
            if self._process is not None:
                self.status = self._process.poll()
                if self.status is not None:
                    self._end()
            elif not self._locked():
                self._end()
        return self.state == "ended"

    def stop(self, grace: float) -> None:
        """Ask it to end; after `grace` seconds `press` no longer asks."""
        if self.state == "waiting":
            self.stopped = True
            self._end()
        elif self.state == "running" and self._deadline is None:
            self.stopped = True
            self._deadline = time.monotonic() + grace
            self._signal(STOP_SIGNALS.get(self.role, signal.SIGTERM))

    def press(self, *, now: bool = False) -> None:
        """Kill it, and all that it started, once its time to end by itself is over."""
        if self.state != "running":
            return
        if now or (self._deadline is not None and time.monotonic() > self._deadline):
            self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: int, *, group: bool = False) -> None:
        # Not yet reaped, or still holding its lock: so this number is still our child's.
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

    # --- how it went ------------------------------------------------------------------------

    def trouble(self) -> str:
        """Why it failed, for people: the end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"{self.run}: its log cannot be read: {error}"
        if self.status == USAGE:
            return f"{self.run}: refused by its own parser: {usage_error(lines)}"
        how = "nobody saw how" if self.status is None else f"status {self.status}"
        tail = "\n".join(line for line in lines[-TAIL_LINES:] if line.strip())
        return f"{self.run} ended ({how}); the end of its log:\n{tail}"


def usage_error(lines: Sequence[str]) -> str:
    """What a parser complained about, without the box that it draws and the help below."""
    last = next((i for i in reversed(range(len(lines))) if lines[i].startswith("$ ")), -1)
    said = []
    for line in lines[last + 1 :]:
        text = line.strip(_BOX)
        if _HELP.search(text):
            break
        if text:
            said.append(text)
    return " ".join(said) or "it did not say why"
