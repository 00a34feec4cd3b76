"""The parent's side of an import: starts the confined child and takes its frames one by one.

Everything that comes out of the child is a stranger's bytes: sizes are bounded, JSON is read as
data, trajectories go through the same checks as any POST. Killed when it is late, fat or unwanted.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from server.problems import ProblemError
from server.sandbox import environment

MAX_HEADER = 8 << 20
MAX_PAYLOAD = 1 << 30
_TICK = 0.1

log = structlog.get_logger("stepwell.imports")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of the child."""

    header: dict[str, Any]
    payload: bytes

    @property
    def kind(self) -> str:
        return str(self.header.get("kind", ""))


def frames(
    path: Path,
    request: dict[str, Any],
    *,
    seconds: float,
    resident: int,
    check: Callable[[], None],
) -> Generator[Frame]:
    """The child's frames, up to and without "end". `check` is called often and may raise.

    Raises `ProblemError` for a refusal, a child that died, was late, or grew beyond `resident`.
    """
    # What it says when it dies is for our log; a child that never stops talking is not waited for.
    words, mouth = os.pipe()
    os.set_blocking(mouth, False)
    with open(path, "rb") as file, open(words, "rb", buffering=0) as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", "server.imports.parser", str(file.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=mouth,
            pass_fds=(file.fileno(),),
            env=environment(),
            cwd="/",
            start_new_session=True,
        )
        os.close(mouth)
        assert process.stdin is not None and process.stdout is not None
        try:
            raw = orjson.dumps({**request, "bytes": 0})
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(struct.pack(">I", len(raw)) + raw)
                process.stdin.flush()
            reader = _Reader(process, time.monotonic() + seconds, resident, check)
            while True:
                frame = reader.next()
                if frame.kind == "end":
                    return
                if frame.kind == "refused":
                    raise _refusal(frame.header)
                yield frame
        except EOFError:
            process.wait()
            last = (said.read(1 << 16) or b"")[-4000:].decode(errors="replace")
            # By what is in a stranger's file: who sent it is told.
            log.warning("an import process died", status=process.returncode, said=last)
            raise _broken("the process that read it died") from None
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(OSError):
                process.stdin.close()


class _Reader:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        deadline: float,
        resident: int,
        check: Callable[[], None],
    ):
        assert process.stdout is not None
        self._process = process
        self._fd = process.stdout.fileno()
        self._deadline, self._resident, self._check = deadline, resident, check
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def next(self) -> Frame:
        size = struct.unpack(">I", self._exactly(4))[0]
        if size > MAX_HEADER:
            raise _broken("a header is too large")
        try:
            header = orjson.loads(self._exactly(size))
        except ValueError:
            raise _broken("a header is not JSON") from None
        length = header.get("bytes", 0) if isinstance(header, dict) else -1
        if not isinstance(length, int) or not 0 <= length <= MAX_PAYLOAD:
            raise _broken("a frame is too large")
        return Frame(header, self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._check()
            if time.monotonic() > self._deadline:
                raise ProblemError(
                    422,
                    "import_refused",
                    "reading the file took too long (STEPWELL_IMPORT_SECONDS)",
                )
            if not self._poll.poll(_TICK * 1e3):
                if _resident(self._process.pid) > self._resident:
                    raise ProblemError(
                        413,
                        "body_too_large",
                        "reading the file took too much memory (STEPWELL_IMPORT_MEMORY)",
                    )
                continue
            chunk = os.read(self._fd, 1 << 20)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _broken(why: str) -> ProblemError:
    return ProblemError(
        422,
        "import_refused",
        f"the file could not be read ({why}); it is damaged, or made to do harm",
    )


def _refusal(header: dict[str, Any]) -> ProblemError:
    status = header.get("status")
    return ProblemError(
        status if status in (409, 413, 422) else 422,
        str(header.get("code", "import_refused"))[:64],
        str(header.get("detail", ""))[:2000],
        expected=header.get("expected"),
        got=header.get("got"),
    )
