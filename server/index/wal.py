"""The write-ahead log beside the index; and what a killed service left in it, before SQLite looks.

    header   magic, version, page size, number, salt 1, salt 2, checksum of these
    frame    page number, size of the database at a commit or 0, salts, checksum, then the page

SQLite reads the log up to the first frame whose checksum is wrong and takes the rest for a
transaction that was not finished: a flipped bit would silently undo every commit behind it. Which
it is can be told. Salts are those of the header in all frames of one log, and a commit is on disk
before the next transaction begins: a transaction behind the bad frame proves that it was whole. And
the checksum is linear, so one flipped bit leaves a difference that names the bit: it is put back.
Where it names several (the high bits of words), the page stays as it is and its rows are judged by
their own checksums, as if the flip were in the index itself.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from server.storage.sealed import replace_file

log = structlog.get_logger("stepwell.wal")
HEADER, FRAME = 32, 24
AT_ONCE = 1024
"""Frames."""
MAGIC = 0x377F0682
"""Magic number for checksums over little-endian words; with the lowest bit set, big-endian."""
_MASK = np.uint64(0xFFFFFFFF)
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Log:
    """What was found."""

    trouble: str = ""
    """What cannot be undone, in words; "" if the log is whole now, or ends in a transaction that
    was never finished."""
    commits: int = 0
    """Transactions in it."""


def log_of(index: Path) -> Path:
    return index.with_name(f"{index.name}-wal")


def absorb_log(index: Path) -> None:
    """Copy what the log holds into the index, and empty it."""
    with contextlib.closing(sqlite3.connect(index)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def into_one_file(index: Path) -> None:
    """Make the log of an index that no process uses part of its file, durable."""
    with contextlib.closing(sqlite3.connect(index)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    with index.open("rb") as file:
        os.fsync(file.fileno())


def rename_log(index: Path, kept: Path, *, foreign: bool) -> None:
    """Let what is left of the log follow an index that is now `kept`; a foreign one is not to be
    found beside it."""
    for suffix, name in (("-wal", ".log" if foreign else "-wal"), ("-shm", "-shm")):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{index}{suffix}", f"{kept}{name}")


def mend_wal(index: Path) -> Log:
    """Undo what a flipped bit does to the log of `index`. Only while nothing has it open."""
    path = log_of(index)
    try:
        with open(path, "rb") as file:  # an import makes it large: one copy in memory
            content = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(content)
    except FileNotFoundError:
        return Log()
    if len(content) <= HEADER or not any(content):
        return Log()
    before = zlib.crc32(content)
    header = _Header.of(content) or _mended_header(content)
    if header is None:
        return Log(f"{path.name}: its header is not what was written")
    damaged, commits = _mend_frames(content, header)
    if zlib.crc32(content) != before:
        log.error("the log of the index was damaged", file=path.name, put_back=not damaged)
        # Not in place: a log whose checksums fit in part ends there.
        replace_file(path, content, ("wal.before_rename", "wal.after_rename"))
    return Log(commits=commits)


class _Header:
    """What the header says, and how its checksums are computed."""

    def __init__(self, page: int, salts: bytes, order: str, checksum: Words):
        self.page, self.salts, self.checksum = page, salts, checksum
        self.words = np.dtype(f"{order}u4")
        self.frame = FRAME + page
        # The sums are s0 += a + s1; s1 += b + s0 for each pair of words (a, b).
        count = (8 + page) // 8
        weights = np.empty((count, 2, 2), np.uint64)
        power = np.eye(2, dtype=np.uint64)
        step = np.array([[1, 1], [1, 2]], np.uint64)
        for place in reversed(range(count)):
            # The part of (a, b) in the sums after its own step: (a, a + b).
            weights[place] = power @ np.array([[1, 0], [1, 1]], np.uint64) & _MASK
            power = power @ step & _MASK
        self.weights, self.whole = weights, power
        # (pair, sum, word) → (word, sum)
        self._by_word = weights.transpose(0, 2, 1).reshape(-1, 2).astype(np.uint32)

    @classmethod
    def of(cls, content: bytes | bytearray) -> _Header | None:
        """None if the header's own checksum is wrong."""
        magic, version, page = struct.unpack(">3I", content[:12])
        if magic & ~1 != MAGIC or version != 3007000 or page not in {1 << n for n in range(9, 17)}:
            return None
        order = ">" if magic & 1 else "<"
        s0 = s1 = 0
        words = struct.unpack(f"{order}6I", content[:24])
        for a, b in zip(words[::2], words[1::2], strict=True):
            s0 = (s0 + a + s1) & 0xFFFFFFFF
            s1 = (s1 + b + s0) & 0xFFFFFFFF
        if (s0, s1) != struct.unpack(">2I", content[24:32]):
            return None
        return cls(page, bytes(content[16:24]), order, np.array([s0, s1], np.uint64))

    def data(self, frame: bytes | bytearray | memoryview) -> Words:
        """The words of a frame that its checksum covers, in pairs."""
        covered = bytes(frame[:8]) + bytes(frame[FRAME:])
        return np.frombuffer(covered, self.words).astype(np.uint64).reshape(-1, 2)

    def own(self, frames: bytes | memoryview) -> Words:
        """What each of the frames adds to the sums."""
        words = np.frombuffer(frames, self.words).reshape(-1, self.frame // 4).astype(np.uint32)
        # Without salts and checksum; modulo 2^32, as they wrap.
        own = words[:, :2] @ self._by_word[:2] + words[:, FRAME // 4 :] @ self._by_word[2:]
        return own.astype(np.uint64)

    def sums(self, before: Words, own: Words) -> Words:
        """The checksum after a frame, from that before it."""
        found: Words = (self.whole @ before + own) & _MASK
        return found

    def sums_after(self, before: Words, frame: bytes | memoryview) -> Words:
        return self.sums(before, self.own(frame)[0])


def _mended_header(content: bytearray) -> _Header | None:
    """The header with the one bit put back with which the first frame is whole, too."""
    found = []
    for bit in range(HEADER * 8):
        _flip(content, bit)
        header = _Header.of(content)
        if header is not None and _first_is_whole(content, header):
            found.append((bit, header))
        _flip(content, bit)
    if len(found) != 1:
        return None
    _flip(content, found[0][0])
    return found[0][1]


def _first_is_whole(content: bytearray, header: _Header) -> bool:
    frame = bytes(content[HEADER : HEADER + header.frame])
    if len(frame) < header.frame or frame[8:16] != header.salts:
        return False
    return frame[16:24] == _stored(header.sums_after(header.checksum, frame))


def _mend_frames(content: bytearray, header: _Header) -> tuple[bool, int]:
    """Returns whether a frame stays damaged, and the number of transactions. The checksum of such a
    frame, and those behind it that continue it, are made to fit: the rows in it have checksums of
    their own."""
    view = memoryview(content)
    starts = range(HEADER, len(content) - header.frame + 1, header.frame)
    sums = header.checksum
    damaged: Words | None = None
    """The sums that were written before the first damaged frame."""
    fitting: list[int] = []
    commits = 0
    for number, start in enumerate(starts):
        frame = view[start : start + header.frame]
        if number % AT_ONCE == 0:
            owns = header.own(view[start : starts[number : number + AT_ONCE][-1] + header.frame])
        after = header.sums(sums, owns[number % AT_ONCE])
        if bytes(frame[8:16]) != header.salts or bytes(frame[16:24]) != _stored(after):
            bits = _flipped_bits(header, after, frame)
            if len(bits) == 1:
                _flip(content, start * 8 + bits[0])
                after = header.sums_after(sums, frame)
            elif bits or _goes_on(view, header, range(start, starts.stop, header.frame)):
                damaged = sums if damaged is None else damaged
                after = np.array(struct.unpack(">2I", frame[16:24]), np.uint64)
            else:
                break
        if damaged is not None:
            fitting.append(start)
        commits += _commits(frame)
        sums = after
    for start in fitting:
        assert damaged is not None, "there are such frames"
        frame = view[start : start + header.frame]
        damaged = header.sums_after(damaged, frame)
        frame[8:24] = header.salts + _stored(damaged)
    return bool(fitting), commits


def _stored(sums: Words) -> bytes:
    return struct.pack(">2I", int(sums[0]), int(sums[1]))


def _flipped_bits(header: _Header, after: Words, frame: memoryview) -> list[int]:
    """The bits of a frame of which any one flip explains its checksum and salts.

    Several, where they are the high bits of words: the sums hold little of these. None of a frame
    that was never written whole: its 64 bits of checksum are noise.
    """
    stored = np.array(struct.unpack(">2I", frame[16:24]), np.uint64)
    in_salts = _one_bit(bytes(frame[8:16]), header.salts)
    if (stored == after).all():
        return [] if in_salts is None else [8 * 8 + in_salts]
    if bytes(frame[8:16]) != header.salts:
        return []
    found = []
    if (in_sum := _one_bit(bytes(frame[16:24]), _stored(after))) is not None:
        found.append(16 * 8 + in_sum)
    data = header.data(frame)
    wanted = (stored - after) & _MASK
    for bit in range(32):
        power = np.uint64(1 << bit)
        is_set = (data >> np.uint64(bit)) & np.uint64(1) == 1
        # (pair, sum, word) → (pair, word, sum)
        change = (header.weights * power & _MASK).transpose(0, 2, 1)
        change = np.where(is_set[:, :, None], (~change + np.uint64(1)) & _MASK, change)
        for pair, word in np.argwhere((change == wanted).all(axis=2)):
            byte = bit // 8 if header.words.str.startswith("<") else 3 - bit // 8
            place = int(pair) * 8 + int(word) * 4 + byte  # among the covered bytes
            place += 0 if place < 8 else FRAME - 8
            found.append(place * 8 + bit % 8)
    return found


def _one_bit(found: bytes, wanted: bytes) -> int | None:
    """The number of the only bit in which they differ."""
    differs = int.from_bytes(found, "little") ^ int.from_bytes(wanted, "little")
    return differs.bit_length() - 1 if differs.bit_count() == 1 else None


def _goes_on(view: memoryview, header: _Header, starts: range) -> bool:
    """Whether another transaction follows a commit at or behind the first of these frames."""
    committed = False
    for start in starts:
        if bytes(view[start + 8 : start + 16]) != header.salts:
            continue
        if committed:
            return True
        committed = _commits(view[start:])
    return False


def _commits(frame: memoryview) -> bool:
    """Whether a transaction ends with this frame."""
    return bytes(frame[4:8]) != bytes(4)


def _flip(content: bytearray, bit: int) -> None:
    content[bit // 8] ^= 1 << bit % 8
