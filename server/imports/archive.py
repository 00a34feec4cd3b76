"""The zip of a folder: its members as files. Untrusted: runs only in the sandbox.

`stepwell import FOLDER` stores members as they are, so they are read in place. A compressed member,
of a zip that somebody made by hand, is unpacked into memory within the limit of the import. Names
are keys, never paths.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from functools import cached_property
from typing import Any, BinaryIO

from server.imports.column_map import natural
from server.imports.raw_file import ImportRefused, check_size

MAX_MEMBERS = 500_000
MAX_JSON = 16 << 20
NOT_DATA = ("__MACOSX", ".DS_Store", "Thumbs.db", "desktop.ini")
"""What systems add to folders."""
DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError)


class Archive:
    """The members of a zip by name, those of one folder in it. Raises `ImportRefused`."""

    def __init__(self, file: BinaryIO, size: int, memory: int):
        self._file, self._memory = file, memory
        try:
            # Kept open: it reads the compressed members.
            self._zip = zipfile.ZipFile(file)
        except DAMAGE as error:
            raise _damaged(error) from None
        self._members = checked_members(self._zip.infolist(), MAX_MEMBERS)
        check_size(sum(info.file_size for info in self._members.values()), size, 1 << 62)
        self._root = ""

    def enter(self, landmark: str) -> bool:
        """Make names relative to the folder of the member called `landmark`, the outermost one.

        False, without a change, if there is none.
        """
        found = [n for n in self._members if n == landmark or n.endswith(f"/{landmark}")]
        if not found:
            return False
        self._root = min(found, key=lambda n: (n.count("/"), n)).removesuffix(landmark)
        self.__dict__.pop("names", None)
        return True

    @cached_property
    def names(self) -> list[str]:
        """In the order of the numbers in them: part-2 before part-10."""
        below = (n for n in self._members if n.startswith(self._root))
        return sorted((n.removeprefix(self._root) for n in below), key=natural)

    def has(self, name: str) -> bool:
        return self._root + name in self._members

    def size(self, name: str) -> int:
        """Bytes of a member unpacked, as the archive claims."""
        return self._info(name).file_size

    def open(self, name: str) -> BinaryIO:
        """One member, to read from any position."""
        info = self._info(name)
        if info.compress_type == zipfile.ZIP_STORED:
            return io.BufferedReader(self._stored(info), 1 << 16)
        check_size(info.file_size, info.compress_size, self._memory)
        try:
            with self._zip.open(info) as member:
                return io.BytesIO(member.read(info.file_size + 1))
        except (*DAMAGE, RuntimeError) as error:
            raise _damaged(error) from None

    def json(self, name: str) -> dict[str, Any]:
        """One member that is a JSON object."""
        if (size := self.size(name)) > MAX_JSON:
            raise ImportRefused(
                f"{name[:200]} is too large", expected=f"at most {MAX_JSON} bytes", got=size
            )
        try:
            found = json.loads(self.open(name).read())
        except (ValueError, RecursionError) as error:
            raise ImportRefused(f"{name[:200]} is not JSON: {str(error)[:200]}") from None
        if not isinstance(found, dict):
            raise ImportRefused(
                f"{name[:200]} is not a JSON object", expected="{…}", got=str(found)[:100]
            )
        return found

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._members.get(self._root + name)
        if info is None:
            raise ImportRefused(
                f"{name[:200]} is missing", got=", ".join(self.names[:20])[:300] or "no files"
            )
        return info

    def _stored(self, info: zipfile.ZipInfo) -> io.RawIOBase:
        # The local header has lengths of its own before the data.
        self._file.seek(info.header_offset)
        header = self._file.read(30)
        if len(header) != 30 or not header.startswith(b"PK\x03\x04"):
            raise _damaged(f"no header of {info.filename[:100]}")
        name, extra = struct.unpack("<HH", header[26:30])
        return _Part(self._file, info.header_offset + 30 + name + extra, info.file_size)


class _Part(io.RawIOBase):
    """Bytes `start … start + size` of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int):
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._size - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def checked_members(infos: list[zipfile.ZipInfo], most: int) -> dict[str, zipfile.ZipInfo]:
    """By name, without folders and what systems add. Raises `ImportRefused` for a bad one."""
    if len(infos) > most:
        raise ImportRefused("too many members", expected=f"≤ {most}", got=len(infos))
    found: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename
        parts = name.split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or ".." in parts:
            raise ImportRefused(
                "a member's name leads out of the folder", expected="plain names", got=name[:200]
            )
        if info.is_dir() or any(part in NOT_DATA for part in parts):
            continue
        if name in found:
            raise ImportRefused(
                "a name occurs twice in the archive", expected="once", got=name[:200]
            )
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ImportRefused(
                f"{name[:200]} uses an unknown compression method",
                expected="stored or deflate",
                got=str(info.compress_type),
            )
        if info.flag_bits & 1:
            raise ImportRefused(f"{name[:200]} is encrypted", expected="plain members")
        found[name] = info
    return found


def _damaged(error: object) -> ImportRefused:
    return ImportRefused(f"the zip archive is damaged: {str(error)[:200]}")
