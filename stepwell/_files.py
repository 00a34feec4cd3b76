"""Files that are whole or absent: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".part"
BLOCK = 64 * 1024


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when the block ends without an error.

    Until then, and after an error, whatever was at `path` before stays there. Without `durable`
    (no fsync) the file survives a crash of the process, but not of the machine.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def remove_unfinished(*folders: Path) -> None:
    """Remove what a killed process was writing directly in `folders`, which the caller owns."""
    for folder in folders:
        for path in folder.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)


def cut_incomplete_line(path: Path) -> None:
    """Remove what follows the last newline of a file that is appended to, if it exists.

    A process that is killed within a write may leave the start of a line.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def sync_folder(folder: Path) -> None:
    """Make renames and deletions inside `folder` durable. Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
