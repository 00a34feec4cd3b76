"""A confined worker process, as the pool holds it: asked, waited for, measured and killed."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from server.sql.confine import environment

START_SECONDS = 60.0
_POLL_MS = 50


class Late(Exception):
    """The worker did not answer in time."""


class Fat(Exception):
    """The worker's resident memory passed the limit."""


class Worker:
    """One child process, used by one query at a time."""

    def __init__(self, data: Path, memory: int):
        self.catalog_version = -1
        self.layers: dict[str, bool] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", "server.sql.worker", str(data), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the service, which stops them itself
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer = bytearray()

    def wait_ready(self) -> None:
        """Until it can be asked. Raises as `ask`."""
        header, _ = self._read(time.monotonic() + START_SECONDS, 8 << 30)
        self.layers = header["confined"]

    def ask(
        self, request: dict[str, Any], seconds: float, resident: int
    ) -> tuple[dict[str, Any], bytes]:
        """The answer. Raises `Late`, `Fat`, or EOFError when the process died."""
        raw = orjson.dumps({**request, "bytes": 0})
        self._stdin.write(struct.pack(">I", len(raw)) + raw)
        self._stdin.flush()
        return self._read(time.monotonic() + seconds, resident)

    def alive(self) -> bool:
        return self._process.poll() is None

    def resident(self) -> int:
        """Bytes of memory that the process holds now."""
        try:
            with open(f"/proc/{self._process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _read(self, deadline: float, resident: int) -> tuple[dict[str, Any], bytes]:
        size = struct.unpack(">I", self._exactly(4, deadline, resident))[0]
        header = orjson.loads(self._exactly(size, deadline, resident))
        return header, self._exactly(int(header["bytes"]), deadline, resident)

    def _exactly(self, size: int, deadline: float, resident: int) -> bytes:
        descriptor = self._stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(self._buffer) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late
            if not poll.poll(min(_POLL_MS, left * 1e3 + 1)):
                if self.resident() > resident:
                    raise Fat
                continue
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError("the worker died")
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
