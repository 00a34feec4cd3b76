"""DIR/mark: how far the index of this directory has come, so that an older index is noticed.

    index     counters.store   random, the directory's identity
              counters.serial  + 1 with every transaction
    DIR/mark  the same two numbers, written after each commit

The mark is never ahead of its own index: commits are durable before it is written, and it is not
synced itself, so a power loss leaves an older one. An index with a smaller serial than the mark was
put back from a backup, or is empty: it does not know what has been written since.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "mark"
LENGTH = 128
"""Bytes of the file: it is overwritten in place, in one write."""


@dataclass(frozen=True, slots=True)
class Mark:
    store: int
    serial: int


def read_mark(root: Path) -> Mark | None:
    """None if there is none, or if it is unreadable."""
    try:
        text = (root / NAME).read_text()
        found = json.loads(text)
        mark = Mark(int(found["store"]), int(found["serial"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if text == _text(mark) else None


def write_mark(root: Path, mark: Mark) -> None:
    """Write it durably; for a directory that no service uses."""
    with MarkFile(root) as file:
        file.write(mark)


class MarkFile:
    """The mark of a directory, open for writing."""

    def __init__(self, root: Path):
        self._fd = os.open(root / NAME, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def write(self, mark: Mark) -> None:
        """Has no effect after `close`: an older mark is true, too."""
        if self._fd >= 0:
            os.pwrite(self._fd, _text(mark).encode(), 0)

    def close(self) -> None:
        """Make it durable, and close it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.fsync(fd)
            os.close(fd)

    def __enter__(self) -> MarkFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(mark: Mark) -> str:
    body = json.dumps(asdict(mark))
    return json.dumps({**asdict(mark), "crc": zlib.crc32(body.encode())}).ljust(LENGTH - 1) + "\n"
