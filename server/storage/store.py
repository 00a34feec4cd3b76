"""Files that are written atomically. No other module opens a data file for writing.

    put      DIR/tmp/<new> → fsync → rename to its folder → fsync the folder
    append   segments only: bytes at the end, fsync; the next start cuts off what a crash tears

The service makes the names (`new_name`), never a client: no path is built from a request. A file is
asked for by folder and name; its path is the store's own business, but for `Store.local_path`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import uuid_utils

from server.storage import hold
from server.storage.checksums import Checksummer, Checksums, Examined, Source, examine
from stepwell._locks import take_lock
from stepwell.failpoints import failpoint

FOLDERS = (
    "segments",
    "shards/fifo",
    "shards/protected",
    "snapshots",
    "policies",
    "videos",
    "versions",
    "annotations",
    "descriptions",
    "uploads",
    "mirror",
)
QUARANTINE = "quarantine"
"""DIR/quarantine/<folder>: files of that folder that no row of the index names. They are read as
files of the folder quarantine/<folder>."""
_IOV_MAX = 1024
"""Parts of one write, as Linux has it."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}(\.[a-z0-9]{1,16})?")


class DirectoryInUse(RuntimeError):
    """Another process uses this data directory; the message names it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that is complete and durable."""

    name: str
    bytes: int
    sha256: str
    checksums: Checksums
    """Checksums of its blocks (server/storage/checksums.py): with them each read is verified."""

    @property
    def columns(self) -> dict[str, Any]:
        """Of a row of one of `tables.FILES`."""
        rest = {"sha256": self.sha256, "bytes": self.bytes, "checksums": self.checksums}
        return {"file": self.name, **rest}


def new_name(prefix: str, suffix: str = "") -> str:
    """A fresh file name, ordered by time: `new_name("sh", ".parquet")`."""
    return f"{prefix}_{uuid_utils.uuid7()}{suffix}"


class Store:
    """The data directory."""

    def __init__(self, root: Path):
        self._root = root
        for folder in (*FOLDERS, "tmp"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        # A file is only as durable as the names of the folders above it.
        for above in (root / "shards", root, root.resolve().parent):
            with contextlib.suppress(PermissionError):  # the parent may belong to another user
                sync_directory(above)

    def __str__(self) -> str:
        """Where it is, for people."""
        return str(self._root)

    def local_path(self, folder: str, name: str) -> Path:
        """A path of the file on this machine, for what needs one and cannot read a `Source`."""
        if folder.removeprefix(f"{QUARANTINE}/") not in FOLDERS or not NAME.fullmatch(name):
            raise ValueError(f"not a file of the store: {folder}/{name}")
        return self._root / folder / name

    def source(
        self, folder: str, name: str, size: int = -1, checksums: Checksums | None = None
    ) -> Source:
        """The file for reading, verified with `checksums`."""
        return Source(self.local_path(folder, name), size, checksums)

    def examine(
        self, folder: str, name: str, step: Callable[[int, int, int], None] | None = None
    ) -> Stored:
        """What a file holds: all of it is read, as by checksums.py:examine."""
        found = examine(self.local_path(folder, name), step)
        return Stored(name, found.size, found.sha256, found.checksums)

    def exists(self, folder: str, name: str) -> bool:
        return self.local_path(folder, name).exists()

    def size(self, folder: str, name: str) -> int:
        return self.local_path(folder, name).stat().st_size

    def modified_at(self, folder: str, name: str) -> float:
        return self.local_path(folder, name).stat().st_mtime

    def names(self, folder: str) -> list[str]:
        """Files of a folder, oldest name first."""
        return sorted(e.name for e in os.scandir(self._root / folder) if e.is_file())

    def new(self, folder: str, name: str, *, points: tuple[str, str] | None = None) -> Writer:
        """A new file; it exists after `commit()`. `points`: failpoints before and after rename."""
        return Writer(self, self.local_path(folder, name), points)

    def put(self, folder: str, name: str, data: bytes | memoryview) -> Stored:
        """Write a file with the content `data`."""
        with self.new(folder, name) as writer:
            writer.write(data)
            return writer.commit()

    def append_to(self, folder: str, name: str) -> Appender:
        """A new file that grows; durable up to its last `sync()`."""
        return Appender(self.local_path(folder, name))

    def scratch(self) -> BinaryIO:
        """A file without a name, which is gone when it is closed."""
        return tempfile.TemporaryFile(dir=self._root / "tmp", buffering=0)

    def truncate(self, folder: str, name: str, size: int) -> None:
        """Cut off a torn tail."""
        with open(self.local_path(folder, name), "r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())

    def delete(self, folder: str, name: str) -> bool:
        """Delete a file; returns False if it did not exist."""
        path = self.local_path(folder, name)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_directory(path.parent)
        return True

    def deleting(self) -> AbstractContextManager[bool]:
        """Whether files may be deleted in this block: not while a backup runs (hold.py)."""
        return hold.deleting(self._root)

    def quarantine(self, folder: str, name: str) -> None:
        """Move a file to DIR/quarantine/<folder>, where nothing reads or deletes it."""
        path = self.local_path(folder, name)
        target = self._root / QUARANTINE / folder / name
        while target.exists():  # of another time: nothing is overwritten
            target = target.with_name(f"{target.stem}_{target.suffix}")
        target.parent.mkdir(parents=True, exist_ok=True)
        for made in (self._root / QUARANTINE / folder, self._root / QUARANTINE, self._root):
            sync_directory(made)
        os.rename(path, target)
        sync_directory(target.parent)
        sync_directory(path.parent)
        failpoint("unknown.after_move")

    def quarantined(self, folder: str) -> list[str]:
        """Files of a folder that are in quarantine, oldest name first."""
        place = self._root / QUARANTINE / folder
        if not place.is_dir():
            return []
        return sorted(e.name for e in os.scandir(place) if e.is_file() and NAME.fullmatch(e.name))

    def take_back(self, folder: str, name: str) -> None:
        """Move a file out of quarantine."""
        path = self.local_path(folder, name)
        if path.exists():
            raise FileExistsError(f"{folder}/{name} exists; data files are never overwritten")
        os.rename(self._root / QUARANTINE / folder / name, path)
        sync_directory(path.parent)

    def scratch_path(self, name: str) -> Path:
        """A path for a temporary file; whatever is left of it, the next start removes."""
        return self._root / "tmp" / f"{uuid_utils.uuid7()}-{name}"

    def clear_tmp(self) -> int:
        """Remove unfinished files of a crash. Only while nothing else writes."""
        leftovers = list((self._root / "tmp").iterdir())
        for path in leftovers:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        return len(leftovers)

    def free(self) -> int:
        """Free bytes on the disk."""
        return shutil.disk_usage(self._root).free


class Writer:
    """One file being written; leaving the `with` without `commit()` removes it."""

    def __init__(self, store: Store, target: Path, points: tuple[str, str] | None):
        self.target = target
        self.tmp = store.scratch_path(target.name)
        self._points = points
        self._file = open(self.tmp, "xb")
        self._sha, self._checksums = hashlib.sha256(), Checksummer()
        self._bytes = 0
        self._filled: Examined | None = None

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._sha.update(data)
        self._checksums.update(data)
        self._bytes += len(data)

    def fill(self, write: Callable[[Path], object], *, digest: bool = True) -> None:
        """Let a library write the content to a path; `digest`: `Stored` has its sha256."""
        assert self._bytes == 0, "either write() or fill()"
        write(self.tmp)
        self._filled = examine(self.tmp, digest=digest)

    def commit(self) -> Stored:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._points:
            failpoint(self._points[0])
        if self.target.exists():
            raise FileExistsError(f"{self.target.name} exists; data files are never overwritten")
        os.rename(self.tmp, self.target)
        sync_directory(self.target.parent)
        if self._points:
            failpoint(self._points[1])
        name = self.target.name
        if (found := self._filled) is not None:
            return Stored(name, found.size, found.sha256, found.checksums)
        return Stored(name, self._bytes, self._sha.hexdigest(), self._checksums.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self._file.close()
        self.tmp.unlink(missing_ok=True)


class Appender:
    """A file that only grows. After a failed `append` or `sync` it must not be used again."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        try:
            sync_directory(path.parent)
        except OSError:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    def append(self, *parts: bytes | memoryview) -> None:
        """Write `parts` in order, without a copy that holds them all."""
        views = deque(memoryview(part) for part in parts if len(part))
        while views:
            done = os.writev(self._fd, list(islice(views, _IOV_MAX)))
            self.size += done
            while done and len(views[0]) <= done:
                done -= len(views.popleft())
            if done:
                views[0] = views[0][done:]

    def sync(self) -> None:
        """Make everything appended so far durable.

        A failed sync is never retried: the kernel may have dropped the pages that it could not
        write, and a second call would then report success although data is missing.
        """
        os.fdatasync(self._fd)

    def cut(self, size: int) -> None:
        """Remove the bytes beyond `size`."""
        os.ftruncate(self._fd, size)
        os.fdatasync(self._fd)
        self.size = size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DirectoryLock:
    """One process per data directory: held until `close()` or the end of the process."""

    def __init__(self, root: Path):
        root.mkdir(parents=True, exist_ok=True)
        self._file = take_lock(
            root / "lock",
            lambda pid: DirectoryInUse(
                f"{root} is in use by process {pid or 'unknown'}; stop that one first, or choose "
                "another --data"
            ),
        )

    def close(self) -> None:
        self._file.close()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
