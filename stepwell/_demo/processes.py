"""The demo's children: started, watched, and stopped in an order that loses nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from stepwell.errors import StepwellError

STOP_GRACE = 15.0


class DemoError(StepwellError):
    """A process of the demo failed; the message ends with the last lines of its log."""


@dataclass
class Processes:
    """Children by name; each in a session of its own, so that Ctrl-C reaches only the demo,
    which then stops them in an order that loses nothing."""

    logs: Path
    env: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    interrupted: bool = False
    _starting: bool = False

    def interrupt(self, *_: object) -> None:
        """What Ctrl-C and SIGTERM call. It is remembered, too: an exception that falls into a
        destructor is lost, and one that falls between a child and its name would lose the child."""
        self.interrupted = True
        if not self._starting:
            raise KeyboardInterrupt

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        self._starting = True
        try:
            if not self.interrupted:
                self.running[name] = self._child(name, command)
        finally:
            self._starting = False
        if self.interrupted:
            raise KeyboardInterrupt
        return self.running[name]

    def _child(self, name: str, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        log: IO[bytes] = open(self.logs / f"{name}.log", "ab")
        with log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )

    def finish(self, name: str, timeout: float) -> None:
        """Wait until `name` ends by itself; `DemoError` if it fails or takes too long."""
        try:
            status = self.running[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise DemoError(self._failure(name, f"did not end within {timeout:.0f} s")) from None
        if status != 0:
            raise DemoError(self._failure(name, f"ended with status {status}"))
        del self.running[name]

    def check(self) -> None:
        """`DemoError` if a process that should still run has ended; `KeyboardInterrupt` if Ctrl-C
        was pressed and nobody noticed."""
        if self.interrupted:
            raise KeyboardInterrupt
        for name, process in self.running.items():
            if process.poll() not in (None, 0):
                raise DemoError(self._failure(name, f"ended with status {process.returncode}"))

    def stop(self, *names: str) -> None:
        """SIGTERM to each in turn and wait; SIGKILL only to one that does not listen."""
        for name in names:
            process = self.running.pop(name, None)
            if process is None or process.poll() is not None:
                continue
            _signal_group(process, signal.SIGTERM)
            try:
                process.wait(STOP_GRACE)
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
                process.wait()

    def stop_all(self) -> None:
        """Those that send before those that receive: the service goes last."""
        self.stop(*[n for n in reversed(self.running) if n != "service"], "service")

    def _failure(self, name: str, what: str) -> str:
        path = self.logs / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines()
        # An earlier demo may have written to the same file: only this start is of interest.
        begin = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=0)
        tail = "\n".join(lines[begin:][-15:])
        return f"{name} {what}; its log is {path}:\n{tail}"


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def environment() -> dict[str, str]:
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env["PYTHONUNBUFFERED"] = "1"
    return env


def free_port(wanted: int = 0) -> int:
    """`wanted`, or any. A service that is there already must not get the demo's data."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError) as error:
            raise DemoError(
                f"--port {wanted}: {error}; choose another, or leave it out for a free one"
            ) from None
        return int(probe.getsockname()[1])
