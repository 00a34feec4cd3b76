"""The parent's side of one SQL worker process: send a query, wait, measure, kill.

No call waits for the child beyond the deadline: neither for the response, nor while a long query is
written to the pipe, nor for the exit of a killed process.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from server.index.mirror import MirrorState
from server.pipe_frames import FrameReader, frame_head, last_words, memory_of, stderr_pipe
from server.sandbox import environment

START_SECONDS = 60.0
MAX_HEADER = 64 << 20
NICE, NICER = 10, 19
"""Priority of a worker, and of one whose query has used more than `PATIENCE` seconds of CPU: it
gets CPU that no other process needs (SCHED_IDLE if available: with a nice value alone it finishes
its slice before a process that wakes up). The kernel derives I/O priority from it."""
PATIENCE = 0.5
SLACK = 32 << 20
"""Resident memory beyond its share at which a worker is killed because the kernel's limit failed
(RLIMIT_DATA, worker.py)."""
_POLL = 0.05
_PROGRAM = ("-m", "server.sql.worker")
_ALLOCATORS = {
    # RLIMIT_DATA (worker.py) counts mapped memory: Arrow's own allocator would reserve a GiB, and
    # DuckDB's would keep what a query has freed.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "DUCKDB_JE_MALLOC_CONF": "retain:false",
}
_TICKS = os.sysconf("SC_CLK_TCK")


class DeadlineExceeded(Exception):
    """The worker did not respond in time."""


class MemoryExceeded(Exception):
    """The worker's resident memory exceeded the limit."""


class WorkerProcess:
    """One child process, used by one query at a time. `share` is its memory limit."""

    def __init__(self, data: Path, share: int, *, nice: bool = False):
        self.known: MirrorState | None = None
        """The state of the mirror whose catalog and checksums it has; None if that is not known."""
        self.layers: dict[str, bool] = {}
        self.share = share
        self._spent = False
        self._base = 0
        self._pipes = threading.Lock()
        """Held while the pipes are used: the number of a closed descriptor may be reused for
        another file at once."""
        with stderr_pipe() as (self._stderr, stderr):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", *_PROGRAM, str(data), str(share)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(**_ALLOCATORS),
                cwd="/",
                bufsize=0,
                # The service handles Ctrl-C and stops the workers itself. Not a new session: Linux
                # shares CPU among sessions first (autogroup), so nice values would have no effect.
                process_group=0,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        if nice:
            self._renice(NICE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it accepts requests; from then on it is niced. Raises as `ask`, with the last
        line that it said."""
        try:
            header, _ = self._read(time.monotonic() + START_SECONDS, lambda _size: None)
        except EOFError as error:
            last = last_words(self._stderr).rpartition("\n")[2]
            raise EOFError(f"{error}: {last}" if last else str(error)) from None
        finally:
            self._stderr.close()
        self.layers = header["confined"]
        self._renice(NICE)
        self._base = memory_of(self.pid, 5)

    def ask(
        self,
        request: dict[str, Any],
        deadline: float,
        count_bytes: Callable[[int], None],
        payload: bytes = b"",
    ) -> tuple[dict[str, Any], bytearray]:
        """The response. Raises `DeadlineExceeded`, `MemoryExceeded`; EOFError or OSError if the
        process died.

        Calls `count_bytes` with the size of the response before reading it; its exceptions
        propagate and the worker stays usable.
        """
        head = frame_head(orjson.dumps({**request, "bytes": len(payload)}))
        with self._pipes:
            if self._stdin.closed:
                raise EOFError("the worker was ended")
            cpu = self.cpu_seconds()
            self._write(head + payload, deadline)
            return self._read(deadline, count_bytes, cpu + PATIENCE)

    def alive(self) -> bool:
        return self._process.poll() is None

    def reusable(self) -> bool:
        """Whether the next query gets the same conditions as in a new worker. An allocator may keep
        memory, and only root can lower a nice value."""
        if self._spent:
            with contextlib.suppress(OSError):
                self._schedule("SCHED_OTHER")
                os.setpriority(os.PRIO_PGRP, self.pid, NICE)
                self._spent = False
        return not self._spent and memory_of(self.pid, 5) - self._base < self.share // 2

    def resident(self) -> int:
        """Resident bytes of the process."""
        return memory_of(self.pid)

    def cpu_seconds(self) -> float:
        """CPU time that the process has used; 0 on systems that do not report it."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICKS
        except (OSError, IndexError, ValueError):
            return 0.0

    def check(self, cpu_limit: float) -> None:
        """Raise `MemoryExceeded`, or lower the priority of a query that has used its CPU share."""
        if self.resident() > self.share + SLACK:
            raise MemoryExceeded
        if not self._spent and self.cpu_seconds() > cpu_limit:
            self._spent = True
            self._renice(NICER)
            with contextlib.suppress(OSError):
                self._schedule("SCHED_IDLE")

    def kill(self) -> None:
        """Kill it without waiting; `wait` does."""
        self._process.kill()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended and freed its memory."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        with self._pipes:  # a later `ask` finds them closed
            for pipe in (self._stdin, self._stdout, self._stderr):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _renice(self, value: int) -> None:
        # Its process group contains all its threads: a nice value belongs to a thread.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, self.pid, value)

    def _schedule(self, policy: str) -> None:
        """Set it for all threads; later ones inherit it."""
        if hasattr(os, policy) and sys.platform == "linux":
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                os.sched_setscheduler(int(thread), getattr(os, policy), os.sched_param(0))

    def _write(self, data: bytes, deadline: float) -> None:
        """Write all of it, though the worker may be stopped and a pipe holds only 64 KiB."""
        left = memoryview(data)
        poll = select.poll()
        poll.register(self._stdin.fileno(), select.POLLOUT)
        while left:
            if (wait := deadline - time.monotonic()) <= 0:
                raise DeadlineExceeded
            if poll.poll(min(_POLL, wait) * 1e3):
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(self._stdin.fileno(), left) :]

    def _read(
        self, deadline: float, count_bytes: Callable[[int], None], cpu_limit: float = float("inf")
    ) -> tuple[dict[str, Any], bytearray]:
        next_check = 0.0

        def look() -> float:
            """Check clock, memory and CPU time; returns seconds until the next check."""
            nonlocal next_check
            now = time.monotonic()
            if (left := deadline - now) <= 0:
                raise DeadlineExceeded
            if now >= next_check:
                next_check = now + _POLL
                self.check(cpu_limit)
            return min(_POLL, left)

        reader = FrameReader(self._stdout.fileno(), look, MAX_HEADER)
        try:
            header = reader.header()
        except ValueError as error:
            raise EOFError(f"the worker sent no frame: {error}") from None
        size = int(header["bytes"])
        try:
            count_bytes(size)
        except Exception:
            while size:  # drain the pipe, so that it next contains the next response
                size -= len(reader.exactly(min(size, 1 << 20)))
            raise
        return header, reader.exactly(size)
