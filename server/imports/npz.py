"""An .npz of flat arrays → RawFile (flat_arrays.py): observations, actions, rewards, terminals, …

Untrusted: runs only in the sandbox. A zip member is unpacked only after its directory entry and its
.npy header are checked; nothing is unpickled; names are keys, never paths.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import numpy as np

from server.imports.archive import checked_members
from server.imports.flat_arrays import RawFile, info_name, read_arrays
from server.imports.raw_file import (
    Array,
    ImportRefused,
    check_dtype,
    check_magic,
    check_size,
    why_dropped,
)

MAX_MEMBERS_ZIP = 64
MAX_HEADER = 4096
MAX_TEXT = 1 << 16
_TEXTS = ("licence", "citation")


@dataclass(frozen=True, slots=True)
class Member:
    """One array of the archive (flat_arrays.py)."""

    name: str
    archive: zipfile.ZipFile
    info: zipfile.ZipInfo

    @property
    def shape(self) -> tuple[int, ...]:
        return self._header()[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._header()[2]

    @property
    def nbytes(self) -> int:
        return self.info.file_size

    def read(self, *, texts: bool = False) -> Array:
        return array_of(self.archive, self.info, self.name, texts=texts)

    def _header(self) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        with self.archive.open(self.info) as member:
            return _header(member, self.name)


def read(
    file: BinaryIO,
    size: int,
    memory: int,
    drop: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> RawFile:
    """Read what has a role. Raises `ImportRefused`."""
    check_magic(file, b"PK\x03\x04", "an .npz file", "a numpy .npz archive")
    try:
        with zipfile.ZipFile(file) as archive:
            members = members_of(archive)
            source = RawFile()
            for name, member in [*members.items()]:
                info = info_name(name)
                if info is not None and (why := _unfit(archive, member, info, drop)):
                    source.dropped[info] = why
                    del members[name]
            source.metadata = {k: t for k in _TEXTS if (t := _text(archive, members, k))}
            check_size(sum(m.file_size for m in members.values()), size, 1 << 62)
            found = {name: Member(name, archive, info) for name, info in members.items()}
            read_arrays(source, found, columns, size, memory)
            return source
    except ImportRefused:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise ImportRefused(
            f"the .npz file is damaged or cut short: {str(error)[:200]}",
            expected="an archive written by numpy.savez",
            got=f"{size} bytes",
        ) from None
    except RuntimeError as error:
        raise ImportRefused(f"the .npz file cannot be read: {str(error)[:200]}") from None


def _text(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str) -> str:
    """A short text in metadata, which is no array to read; "" for none."""
    info = members.get(f"metadata/{name}")
    if info is None or info.file_size > MAX_TEXT:
        return ""
    with archive.open(info) as member:
        shape, _, dtype = _header(member, name)
    if dtype.kind != "U" or shape != ():
        return ""
    del members[f"metadata/{name}"]
    with archive.open(info) as member:
        return str(np.lib.format.read_array(member, allow_pickle=False))[:1024]


def members_of(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """By key (the name without .npy); checks every entry, also those that are not read."""
    found: dict[str, zipfile.ZipInfo] = {}
    for name, info in checked_members(archive.infolist(), MAX_MEMBERS_ZIP).items():
        if not name.endswith(".npy"):
            raise ImportRefused(
                "a member is not an array", expected="members that end in .npy", got=name[:200]
            )
        found[name.removesuffix(".npy")] = info
    return found


def _unfit(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, drop: Sequence[str]) -> str:
    """Why an info is not read, from its header alone; "" for one that is."""
    if why := why_dropped(name, drop):
        return why
    with archive.open(info) as member:
        try:
            dtype = _header(member, name)[2]
        except (ImportRefused, ValueError) as error:
            return f"its header cannot be read ({str(error)[:60]})"
        return why_dropped(name, drop, dtype)


def _header(member: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    magic = np.lib.format.read_magic(member)
    reader = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(magic)
    if reader is None:
        raise ImportRefused(f"{name}: unknown .npy version", expected="1.0 or 2.0", got=str(magic))
    shape, fortran, dtype = reader(member, max_header_size=MAX_HEADER)
    return shape, fortran, dtype


def array_of(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, *, texts: bool = False
) -> Array:
    """One array; checks the size in its header against the size in the directory."""
    with archive.open(info) as member:
        shape, _, dtype = _header(member, name)
    if not texts or dtype.kind not in "US":
        check_dtype(name, dtype)
    if any(n < 0 for n in shape) or len(shape) > 8:
        raise ImportRefused(f"{name}: bad shape", expected="sizes ≥ 0", got=str(shape))
    wanted = math.prod(shape) * dtype.itemsize
    if wanted > info.file_size:
        raise ImportRefused(
            f"{name} is cut short", expected=f"{wanted} bytes", got=f"{info.file_size} bytes"
        )
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False, max_header_size=MAX_HEADER)
