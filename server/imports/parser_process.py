"""The parent's side of an import: starts the sandboxed child and reads its frames.

The child's output is untrusted: sizes are bounded, JSON is parsed as data, trajectories go through
the same checks as any POST. The child is killed when it is late, uses too much memory, or its job
is cancelled.
"""

from __future__ import annotations

import contextlib
import mmap
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import structlog

from server.pipe_frames import FrameReader, frame_head, last_words, memory_of, stderr_pipe
from server.problems import ProblemError
from server.sandbox import environment

MAX_HEADER = 8 << 20
MAX_PAYLOAD = 1 << 30
"""Largest header and payload of one frame."""
HELD = 16 << 20
"""A larger payload (one long trajectory) is not held in memory: it is a mapped file, whose pages
are the kernel's to take back."""
TRIM = 0.004
"""Seconds between two times at which such pages are given back."""
_TICK = 0.1

log = structlog.get_logger("stepwell.imports")
Frame = tuple[dict[str, Any], memoryview]


def frames(
    path: Path,
    request: dict[str, Any],
    scratch: Callable[[], BinaryIO],
    *,
    seconds: float,
    resident: int,
    check: Callable[[], None],
) -> Generator[Frame]:
    """The child's frames, without the final "end". Calls `check` often; it may raise. `scratch`
    makes a file for a payload that is not held in memory.

    Raises `ProblemError` for a refusal, or a child that died, was late, or grew beyond `resident`.
    """
    deadline = time.monotonic() + seconds

    def look() -> float:
        """Check the job, the clock and the memory; returns seconds until the next check."""
        check()
        if time.monotonic() > deadline:
            detail = "reading the file took too long (STEPWELL_IMPORT_SECONDS)"
            raise ProblemError(422, "import_refused", detail)
        if memory_of(process.pid) > resident:
            detail = "reading the file took too much memory (STEPWELL_IMPORT_MEMORY)"
            raise ProblemError(413, "body_too_large", detail)
        return _TICK

    with open(path, "rb") as file:
        with stderr_pipe() as (stderr, stderr_write):
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-m", "server.imports.parser", str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr_write,
                pass_fds=(file.fileno(),),
                env=environment(),
                cwd="/",
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(frame_head(orjson.dumps({**request, "bytes": 0})))
                process.stdin.flush()
            reader = FrameReader(process.stdout.fileno(), look, MAX_HEADER)
            while True:
                header = reader.header()
                if not 0 <= header["bytes"] <= MAX_PAYLOAD:
                    raise ValueError("a frame is too large")
                payload = _payload(reader, header["bytes"], scratch)
                if header.get("kind") == "end":
                    return
                if header.get("kind") == "refused":
                    raise _refusal(header)
                yield header, payload
                del payload  # before the next is read
        except ValueError as error:
            raise _broken(str(error)) from None
        except EOFError:
            process.wait()
            # The content of the file is the likely cause, so the sender gets a problem.
            last = last_words(stderr)
            log.warning("an import process died", status=process.returncode, stderr=last)
            raise _broken("the process that read it died") from None
        finally:
            process.kill()
            process.wait()
            stderr.close()
            process.stdout.close()
            with contextlib.suppress(OSError):
                process.stdin.close()


def _payload(reader: FrameReader, size: int, scratch: Callable[[], BinaryIO]) -> memoryview:
    if size <= HELD:
        return memoryview(reader.exactly(size))
    with scratch() as file:
        mapped = reader.mapped(size, file)
    threading.Thread(target=_trim, args=(weakref.ref(mapped),), daemon=True).start()
    return memoryview(mapped)


def _trim(mapped: weakref.ref[mmap.mmap]) -> None:
    """While the payload is in use, keep few of its pages in this process."""
    while (pages := mapped()) is not None:
        pages.madvise(mmap.MADV_DONTNEED)  # they are read from the file again
        del pages
        time.sleep(TRIM)


def _broken(why: str) -> ProblemError:
    return ProblemError(
        422,
        "import_refused",
        f"the file could not be read ({why}); it is damaged or malicious",
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
