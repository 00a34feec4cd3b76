"""Frames between the service and its sandboxed child processes, over pipes. Standard library only.

    frame     4 bytes header length (big-endian) | header JSON | `bytes` bytes of payload

A child reads and writes blocking files (`read_frame`, `write_frame`). The service reads its end of
the pipe with `FrameReader`, which watches clock and memory while it waits. What a child says on
stderr before it dies comes through `stderr_pipe`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import struct
from collections.abc import Callable, Generator
from io import FileIO
from typing import Any, BinaryIO

STEP = 1 << 20
"""Bytes that are copied to a file at once."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_frame(source: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next (header, payload), or None at the end. Raises `EOFError` inside a frame."""
    size = source.read(4)
    if not size:
        return None
    if len(size) < 4:
        raise EOFError("the stream ended inside a frame")
    header = json.loads(_exactly(source, struct.unpack(">I", size)[0]))
    return header, _exactly(source, int(header.get("bytes", 0)))


def write_frame(sink: BinaryIO, header: dict[str, Any], payload: Any = b"") -> None:
    """`payload`: bytes, or an object with `__len__` and `write_to(sink)`."""
    sink.write(frame_head(json.dumps({**header, "bytes": len(payload)}).encode()))
    if hasattr(payload, "write_to"):
        payload.write_to(sink)
    elif len(payload):
        sink.write(payload)
    sink.flush()


def frame_head(header: bytes) -> bytes:
    """A frame up to its payload, whose length the header (JSON) gives as `bytes`."""
    return struct.pack(">I", len(header)) + header


@contextlib.contextmanager
def stderr_pipe() -> Generator[tuple[FileIO, int]]:
    """A pipe for the stderr of a child that is started inside: (the end to read, the child's).

    Neither end blocks: what does not fit into the pipe is lost. The end to read stays open, for
    whoever keeps it, unless starting the child fails.
    """
    source, sink = os.pipe()
    for end in (source, sink):
        os.set_blocking(end, False)
    file = FileIO(source)
    try:
        yield file, sink
    except BaseException:
        file.close()
        raise
    finally:
        os.close(sink)


def last_words(stderr: FileIO) -> str:
    """The end of what a child has said on stderr."""
    return (stderr.read(1 << 16) or b"")[-4000:].decode(errors="replace").strip()


def _exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise EOFError("the stream ended inside a frame")
    return data


class FrameReader:
    """Reads frames of a child that may be late, hostile or dead.

    Calls `look` while a read waits; `look` returns the seconds until its next call. An exception
    from `look` ends the read.
    """

    def __init__(self, descriptor: int, look: Callable[[], float], max_header: int):
        self._descriptor, self._look, self._max_header = descriptor, look, max_header
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def header(self) -> dict[str, Any]:
        """The next header. Raises ValueError if it is invalid, EOFError if the child died."""
        size = struct.unpack(">I", self.exactly(4))[0]
        if size > self._max_header:
            raise ValueError(f"a header of {size} bytes")
        found = json.loads(self.exactly(size))
        if not isinstance(found, dict) or not isinstance(found.get("bytes"), int):
            raise ValueError("a header without the size of its payload")
        return found

    def exactly(self, size: int) -> bytearray:
        """Exactly `size` bytes. Raises EOFError if the child died."""
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            rest = rest[self._some(rest) :]
        return data

    def mapped(self, size: int, file: BinaryIO) -> mmap.mmap:
        """Exactly `size` bytes, through a file. Raises EOFError if the child died."""
        buffer = memoryview(bytearray(min(size, STEP)))
        left = size
        while left:
            count = self._some(buffer[:left])
            file.write(buffer[:count])
            left -= count
        file.flush()
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)

    def _some(self, target: memoryview) -> int:
        """Read at least a byte; returns how many."""
        while not self._poll.poll(self._look() * 1e3):
            pass
        count = os.readv(self._descriptor, [target])
        if not count:
            raise EOFError("the process died")
        return count


def memory_of(pid: int, field: int = 1) -> int:
    """Bytes of a field of /proc/PID/statm (1: resident, 5: data); 0 on systems without it."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[field]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
