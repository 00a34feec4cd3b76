"""The files of a query, as DuckDB reads them in a SQL worker: stored://PATH, with verified bytes.

DuckDB verifies no checksums of Parquet, neither of pages nor of footers. This file system compares
every byte with its checksum before DuckDB gets it, and opens only files with known checksums.

The footer of a shard holds the headers of its trajectories (server/storage/shards.py), about 400
bytes to a kilobyte each. No query reads them, but DuckDB would hold several copies of each footer,
and the memory of a query has no room for those of 100,000 trajectories. So it is shown each shard
without them:

    stored   | row groups | footer … key, length, table of trajectories, rest | length | PAR1 |
    shown    | row groups | footer … key, 0,                             rest | length | PAR1 |
"""

from __future__ import annotations

import base64
import datetime
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec

from server.storage.checksums import CheckedFile, Corrupt

PREFIX = "stored://"
SMALL_FOOTER = 64 << 10
"""Bytes of a footer that is shown as it is."""
_TABLE = b"\x18\x15stepwell.trajectories\x18"
"""In Thrift's compact protocol: a text of 21 bytes, the key, and the head of its value."""
_END = b"PAR1"
_NEVER = datetime.datetime.fromtimestamp(0, datetime.UTC)


class CheckedFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A read-only file system below the current folder."""

    protocol = "stored"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._checksums: dict[str, bytes] = {}
        self._cuts: dict[str, Cut | None] = {}
        self.damaged: set[str] = set()
        """Files in which this query found damage."""

    def learn(self, checksums: Mapping[str, str], forget: Iterable[str] = ()) -> None:
        """Add and remove checksums: base64 by path, relative to the data directory."""
        for path in (*forget, *checksums):
            self._cuts.pop(path, None)
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
            return _Shown(name, self._checksums[name], self._cut(name), self.damaged)
        except (OSError, Corrupt) as error:
            self.damaged.add(name)
            raise OSError(f"{name} is damaged: {type(error).__name__}") from None

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._known(path)
        try:
            found = os.stat(name)
            cut = self._cut(name) if stat.S_ISREG(found.st_mode) else None
        except OSError:
            self.damaged.add(name)
            raise
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        if cut is not None:
            size -= cut.end - cut.start - 1
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

    def _cut(self, name: str) -> Cut | None:
        if name not in self._cuts:
            with CheckedFile(name, -1, self._checksums[name]) as file:
                self._cuts[name] = find_table(file)
        return self._cuts[name]


@dataclass(frozen=True, slots=True)
class Cut:
    """The bytes of a file that are not shown: the length of a text, and the text."""

    start: int
    end: int


def find_table(file: CheckedFile) -> Cut | None:
    """Where the table of trajectories is in a shard's footer; None: it is small, or not there.

    Reads the footer up to the table only. Raises `Corrupt`.
    """
    end = file.size - 8
    tail = file.read_at(max(0, end), 8)
    start = end - int.from_bytes(tail[:4], "little")
    if tail[4:] != _END or start < 0 or end - start <= SMALL_FOOTER:
        return None
    head = b""
    while start + len(head) < end:
        searched = max(0, len(head) - len(_TABLE))
        head += file.read_at(start + len(head), min(SMALL_FOOTER, end - start - len(head)))
        if (at := head.find(_TABLE, searched)) >= 0:
            at += len(_TABLE)
            length, digits = _varint(file.read_at(start + at, 10))
            cut = Cut(start + at, start + at + digits + length)
            # A structure ends after the value with a 0.
            return cut if digits and file.read_at(cut.end, 1) == b"\0" and cut.end < end else None
    return None


def _varint(data: bytes) -> tuple[int, int]:
    """A number in Thrift's compact protocol, and of how many bytes; of none if it does not end."""
    value = 0
    for place, byte in enumerate(data):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, place + 1
    return 0, 0


class _Shown(CheckedFile):
    """A file without its `cut`. Records damage, whatever DuckDB does with the exception."""

    def __init__(self, name: str, checksums: bytes, cut: Cut | None, damaged: set[str]):
        self._name, self._damaged = name, damaged
        super().__init__(name, -1, checksums)
        self._start, self._rest = self._stored, b""
        if cut is not None:
            rest = b"\0" + self.read_at(cut.end, self._stored - cut.end - 8)
            length = self._footer_length() - (cut.end - cut.start) + 1
            self._start, self._rest = cut.start, rest + length.to_bytes(4, "little") + _END
            self.size = self._start + len(self._rest)

    def read_at(self, start: int, count: int) -> bytes:
        try:
            if start + count <= self._start:
                return super().read_at(start, count)
            head = super().read_at(start, self._start - start)
        except OSError:  # Corrupt, or a read error of the disk
            self._damaged.add(self._name)
            raise
        return head + self._rest[max(0, start - self._start) : start + count - self._start]

    def _footer_length(self) -> int:
        return int.from_bytes(self.read_at(self._stored - 8, 4), "little")
