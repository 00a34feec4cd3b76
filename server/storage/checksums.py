"""Block checksums: every read of a stored file is checked against what was written.

    file        | block 0 | block 1 | … | block n-1, shorter |
    checksums   | crc32   | crc32   | … | crc32              |     4 bytes each, little-endian

The index stores them beside the sha256 of the whole file, which requires reading all of it.
Standard library only: SQL workers, which import nothing else of the project, use this module too.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BLOCK = 64 << 10
"""Bytes per checksum: the least that a read costs."""
Checksums = bytes
"""The checksums of a file, as the index stores them."""
STEP = 1 << 20
"""Bytes per read where a whole file is read."""


class Corrupt(OSError):
    """The bytes of the file `path` differ from those that were written."""

    def __init__(self, path: str | Path, what: str):
        super().__init__(f"{path}: {what}")
        self.path = str(path)


class Checksummer:
    """Computes the checksums of a file from its pieces."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._crc = self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            part = view[: BLOCK - self._filled]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            if self._filled == BLOCK:
                self._close_block()
            view = view[len(part) :]

    def result(self) -> bytes:
        """The checksums, after the last piece."""
        if self._filled:
            self._close_block()
        return bytes(self._done)

    def _close_block(self) -> None:
        self._done += struct.pack("<I", self._crc)
        self._crc = self._filled = 0


def checksums_of(data: bytes | memoryview) -> bytes:
    """The checksums of a whole file's content."""
    summer = Checksummer()
    summer.update(data)
    return summer.result()


@dataclass(frozen=True, slots=True)
class Source:
    """A file and its expected content. Without checksums its bytes are not verified."""

    path: Path
    size: int = -1
    """-1: unknown; the number of checksums still gives the number of blocks."""
    checksums: Checksums | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def open(self) -> CheckedFile | io.FileIO:
        """Open for reading. Raises `Corrupt` (wrong size), FileNotFoundError."""
        if self.checksums is None:
            return io.FileIO(self.path)
        return CheckedFile(str(self.path), self.size, self.checksums)

    def read(self) -> bytes:
        """The whole content. Raises as `open`."""
        with self.open() as file:
            content: bytes = file.read()
            return content


class CheckedFile(io.RawIOBase):
    """A file for reading that raises `Corrupt` instead of returning bytes that fail a checksum.

    Each thread has its own position: DuckDB reads one handle from several threads, with a seek and
    then a read, and threads may interleave.
    """

    _fd = -1

    def __init__(self, path: str, size: int, checksums: bytes):
        self.path = path
        self._sums = struct.unpack(f"<{len(checksums) // 4}I", checksums)
        self._at: dict[int, int] = {}
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd).st_size
        self.size = size = found if size < 0 else size
        if found != size or len(self._sums) != -(-size // BLOCK):
            self.close()
            raise Corrupt(path, f"{found} bytes instead of {size}")

    def read_at(self, start: int, count: int) -> bytes:
        """At most `count` bytes from `start` on. Raises `Corrupt`."""
        end = min(self.size, start + count)
        if end <= start:
            return b""
        first, last = start // BLOCK, -(-end // BLOCK)
        low, high = first * BLOCK, min(last * BLOCK, self.size)
        data = os.pread(self._fd, high - low, low)
        view = memoryview(data)
        for number in range(first, last):
            at = (number - first) * BLOCK
            if zlib.crc32(view[at : at + BLOCK]) != self._sums[number]:
                raise Corrupt(self.path, f"block {number} is not what was written")
        return data if (start, end) == (low, high) else bytes(view[start - low : end - low])

    # --- as a file object, for pyarrow and DuckDB -------------------------------------------------

    def read(self, count: int | None = -1) -> bytes:
        start = self.tell()
        whole = count is None or count < 0
        data = self.read_at(start, self.size - start if whole or count is None else count)
        self._at[threading.get_ident()] = start + len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.size}[whence]
        self._at[threading.get_ident()] = base + offset
        return base + offset

    def tell(self) -> int:
        return self._at.get(threading.get_ident(), 0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


@dataclass(frozen=True, slots=True)
class Examined:
    """Size, sha256 and checksums of a whole file."""

    size: int
    sha256: str
    checksums: Checksums


def examine(
    path: Path, step: Callable[[int, int, int], None] | None = None, *, digest: bool = True
) -> Examined:
    """Read a whole file. Calls `step` with (descriptor, offset, bytes) after each part is read.
    Without `digest` no sha256 is computed.

    Raises OSError, including FileNotFoundError.
    """
    sha, summer, size = hashlib.sha256(), Checksummer(), 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(STEP):
            if digest:
                sha.update(data)
            summer.update(data)
            if step is not None:
                step(file.fileno(), size, len(data))
            size += len(data)
    return Examined(size, sha.hexdigest() if digest else "", summer.result())
