"""The files of a query, as DuckDB reads them in a SQL worker: stored://PATH, with verified bytes.

DuckDB verifies no checksums of Parquet, neither of pages nor of footers. This file system compares
every byte with its checksum before DuckDB gets it, and opens only files with known checksums.
"""

from __future__ import annotations

import base64
import datetime
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

import fsspec

from server.storage.checksums import CheckedFile

PREFIX = "stored://"
_NEVER = datetime.datetime.fromtimestamp(0, datetime.UTC)


class CheckedFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A read-only file system below the current folder."""

    protocol = "stored"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._checksums: dict[str, bytes] = {}
        self.damaged: set[str] = set()
        """Files in which this query found damage."""

    def learn(self, checksums: Mapping[str, str], forget: Iterable[str] = ()) -> None:
        """Add and remove checksums: base64 by path, relative to the data directory."""
        for path in forget:
            self._checksums.pop(path, None)
        for path, text in checksums.items():
            self._checksums[path] = base64.b64decode(text)

    # --- called by DuckDB -------------------------------------------------------------------------

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        name = self._known(path)
        if mode != "rb":
            raise PermissionError(f"{name} is read-only")
        try:
            file = _Noted(name, self._checksums[name], self.damaged)
            file.read_at(max(0, file.size - 1), 1)  # DuckDB reads nothing of one that is too small
            return file
        except OSError as error:
            self.damaged.add(name)
            raise OSError(f"{name} is damaged: {type(error).__name__}") from None

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._known(path)
        try:
            found = os.stat(name)
        except OSError:
            self.damaged.add(name)
            raise
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        return {"name": PREFIX + name, "size": size, "type": "file"}

    def exists(self, path: str, **_: Any) -> bool:
        return path.removeprefix(PREFIX) in self._checksums

    def isfile(self, path: str) -> bool:
        return self.exists(path)

    def glob(self, path: str, **_: Any) -> list[str]:
        return [PREFIX + self._known(path)]

    def modified(self, _path: str) -> datetime.datetime:
        return _NEVER  # files are immutable

    created = modified

    def _known(self, path: str) -> str:
        name = path.removeprefix(PREFIX)
        if name not in self._checksums:
            raise PermissionError(f"{name} is not a file of this query")
        return name


class _Noted(CheckedFile):
    """Records damage, whatever DuckDB does with the exception."""

    def __init__(self, name: str, checksums: bytes, damaged: set[str]):
        self._name, self._damaged = name, damaged
        super().__init__(name, -1, checksums)

    def read_at(self, start: int, count: int) -> bytes:
        try:
            return super().read_at(start, count)
        except OSError:  # Corrupt, or a read error of the disk
            self._damaged.add(self._name)
            raise
