"""Which shards the living processes of this node use, so that nobody deletes another's columns.

FOLDER/<pid>-<random>    names of shards, one per line, "-name" where it is used no more; its maker
                             holds its lock while it lives
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
import weakref
from pathlib import Path


class Users:
    """One of these per cache object; what it says is in use is so until the object is no more."""

    def __init__(self, folder: Path):
        self._folder, self._names = folder, set[str]()
        self._lock = threading.Lock()
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        weakref.finalize(self, _close, self._file, self._path)

    def add(self, shard: str) -> None:
        with self._lock:
            if shard not in self._names:
                os.write(self._file, f"{shard}\n".encode())
                self._names.add(shard)

    def remove(self, shard: str) -> None:
        with self._lock:
            if shard in self._names:
                os.write(self._file, f"-{shard}\n".encode())
                self._names.discard(shard)

    def mine(self) -> set[str]:
        """Shards that this one uses."""
        with self._lock:
            return set(self._names)

    def all(self) -> set[str]:
        """Shards in use. Files of processes that are gone are deleted."""
        names = self.mine()
        for path in self._folder.iterdir():
            if path != self._path:
                names |= _names_in(path)
        return names


def _names_in(path: Path) -> set[str]:
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # its maker lives
                return _in_use(file.read())
            # Gone; or not yet locked by its maker, who then has not written a name either.
            if os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return set()


def _in_use(text: str) -> set[str]:
    names: set[str] = set()
    for name in text.split():  # no shard's name begins so
        if name.startswith("-"):
            names.discard(name[1:])
        else:
            names.add(name)
    return names


def _close(file: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(file)
