"""DIR/backup.lock: while a backup holds it, no file that the index knows is deleted.

    backup     DeletionHold(root)       exclusive, until the process ends
    service    with deleting(root) …    shared, for the moment of a deletion; skipped if held

The kernel releases the lock when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "backup.lock"
PATIENCE = 60.0
"""Seconds that a backup waits for deletions that have begun."""


class HeldByAnother(RuntimeError):
    """Another backup of the same directory is running."""


class DeletionHold:
    """Deletions of a directory wait until `close()`, or until this process ends."""

    def __init__(self, root: Path):
        self._fd = _open(root)
        deadline = time.monotonic() + PATIENCE
        while not _lock(self._fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(self._fd)
                raise HeldByAnother(f"another backup of {root} is running; wait for its end")
            time.sleep(0.01)

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def deleting(root: Path) -> Iterator[bool]:
    """Whether files may be deleted in this block; a backup that begins waits for its end."""
    fd = _open(root)
    try:
        yield _lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _open(root: Path) -> int:
    return os.open(root / NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
