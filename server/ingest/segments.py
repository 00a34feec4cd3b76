"""Segments: append-only files of acknowledged trajectories that are not sealed yet.

    segment   MAGIC, then records
    record    length u32 | crc32 u32 | head length u32 | 0 u32 | head JSON (padded to 8) | body
              length counts from the third word on; crc32 covers the same bytes
    heads     {"spec": {…}, "dataset": name}                     once per dataset and segment
              {"entry": {…}, "dataset": name}  body = one Arrow record batch, without schema,
                                               as received where it has our layout

A record counts once it is fsynced and its index row is committed, in this order. After a crash, the
records beyond that are torn (cut off) or whole (the next start writes their index rows).
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from server.storage.checksums import Source
from server.storage.shards import Entry
from server.storage.store import Appender, Store, new_name
from stepwell.failpoints import failpoint
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec

MAGIC = b"STEPWELL-SEG\x00\x00\x00\x01"
_WORDS = struct.Struct("<IIII")


class SegmentDamaged(RuntimeError):
    """An acknowledged record cannot be read."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a segment."""

    head: dict[str, Any]
    body: pa.Buffer
    offset: int
    end: int

    @property
    def dataset(self) -> str:
        return str(self.head["dataset"])

    @property
    def entry(self) -> Entry:
        return Entry(**self.head["entry"])

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        return pa.ipc.read_record_batch(self.body, schema)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record to be written. The body is a view of the received bytes, not a copy."""

    head: bytes
    body: memoryview
    padding: bytes

    @property
    def size(self) -> int:
        return len(self.head) + len(self.body) + len(self.padding)


def encode_record(head: dict[str, Any], body: memoryview | pa.Buffer | bytes = b"") -> Encoded:
    text = orjson.dumps(head)
    text += b" " * (-len(text) % 8)
    view = memoryview(body)
    padding = b"\0" * (-len(view) % 8)
    crc = zlib.crc32(struct.pack("<II", len(text), 0))
    for part in (text, view, padding):
        crc = zlib.crc32(part, crc)
    length = 8 + len(text) + len(view) + len(padding)
    return Encoded(_WORDS.pack(length, crc, len(text), 0) + text, view, padding)


def encode_entry(dataset: str, entry: Entry, message: memoryview | pa.Buffer) -> Encoded:
    """`message`: the rows as one Arrow message (RecordBatch.serialize())."""
    return encode_record({"dataset": dataset, "entry": entry.to_json()}, message)


@dataclass(slots=True)
class Segment:
    """One file. `pk` is None until its first group is in the index."""

    name: str
    pk: int | None = None
    file: Appender | None = None
    described: set[str] = field(default_factory=set)
    """Datasets whose spec the segment contains."""
    records: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    sealed: threading.Event = field(default_factory=threading.Event)
    moved: list[tuple[int, int]] = field(default_factory=list)
    """Once sealed: (dataset pk, trajectories) of each shard."""
    failure: BaseException | None = None


class Spool:
    """The segment that is being written. Used by one thread at a time (the committer's)."""

    def __init__(self, store: Store):
        self._store = store
        self.current: Segment | None = None
        self.closed: list[Segment] = []
        """Closed segments that wait to be sealed, oldest first."""
        self._start = 0
        """Offset at which the latest `append` started."""

    def append(self, groups: list[tuple[str, EnvSpec, list[Encoded]]]) -> list[int]:
        """Write all records of (dataset, spec, records), one fsync; returns their offsets.

        Raises OSError: then none of the records count, and the segment must be rotated.
        """
        segment = self.open()
        file = segment.file
        assert file is not None
        self._start = file.size
        all_records: list[Encoded] = []
        offsets: list[int] = []
        position = self._start
        described: set[str] = set()
        for dataset, spec, records in groups:
            if dataset not in segment.described and dataset not in described:
                described.add(dataset)
                record = encode_record({"dataset": dataset, "spec": spec.to_json()})
                all_records.append(record)
                position += record.size
            for record in records:
                offsets.append(position)
                all_records.append(record)
                position += record.size
        failpoint("append.before_write")
        try:
            file.append(*(part for r in all_records for part in (r.head, r.body, r.padding)))
            failpoint("append.after_write")
            file.sync()
        except OSError:
            self.undo()  # a restart must not recover whole records of a refused request
            raise
        failpoint("append.after_fsync")
        segment.described |= described
        segment.records += len(offsets)
        segment.last_at = time.monotonic()
        segment.first_at = segment.first_at or segment.last_at
        return offsets

    def open(self) -> Segment:
        """The segment that is being written; creates a durable file if there is none.

        Raises OSError if the disk does not store it.
        """
        if self.current is not None:
            return self.current
        name = new_name("sg", ".seg")
        file = self._store.append_to("segments", name)
        try:
            file.append(MAGIC)
            file.sync()
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                self._store.delete("segments", name)
            raise
        failpoint("segment.after_create")
        self.current = Segment(name, file=file)
        return self.current

    def undo(self) -> None:
        """Remove the records of the latest `append`, if the disk allows it.

        The segment must be rotated afterwards.
        """
        assert self.current is not None and self.current.file is not None
        with contextlib.suppress(OSError):
            self.current.file.cut(self._start)

    def rotate(self) -> Segment | None:
        """Close the current segment; None if there is none."""
        segment = self.current
        if segment is None or segment.file is None:
            return None
        segment.file.close()
        self.current = None
        self.closed.append(segment)
        return segment


class SegmentFile:
    """Reads a segment: by offset, or from the start to the end."""

    def __init__(self, path: Path):
        self.path = path
        with pa.memory_map(str(path)) as source:
            self._data = source.read_buffer()
        # Damage to the magic bytes loses nothing: whole records behind them identify the file.
        if (
            self._data.size >= len(MAGIC)
            and bytes(self._data[: len(MAGIC)]) != MAGIC
            and self._read(len(MAGIC)) is None
        ):
            raise SegmentDamaged(f"{path.name} does not start with the magic bytes of a segment")

    def record(self, offset: int) -> Record:
        """The record at `offset`. Raises `SegmentDamaged`."""
        found = self._read(offset)
        if found is None:
            raise SegmentDamaged(f"{self.path.name}: the record at byte {offset} is damaged")
        return found

    def scan(self, start: int = len(MAGIC)) -> Iterator[Record]:
        """Whole records from `start` on; stops at the first torn one."""
        while (found := self._read(start)) is not None:
            yield found
            start = found.end

    def all_records(self, start: int = len(MAGIC)) -> Iterator[Record]:
        """Whole records from `start` on, also those behind damaged ones."""
        place: int | None = start
        while place is not None:
            for record in self.scan(place):
                place = record.end
                yield record
            place = self.next_record(place + 1) if place < self.size else None

    def next_record(self, start: int) -> int | None:
        """Offset of the first whole record from `start` on, past damaged ones; None if none."""
        content: bytes = self._data.to_pybytes()
        # The fourth word and the start of a head: only matching bytes are read as a record.
        found = content.find(b'\0\0\0\0{"', start + 12)
        while found >= 0:
            offset = found - 12
            if offset % 8 == 0 and self._read(offset) is not None:
                return offset
            found = content.find(b'\0\0\0\0{"', found + 1)
        return None

    @property
    def size(self) -> int:
        return int(self._data.size)

    def _read(self, offset: int) -> Record | None:
        data = self._data
        if offset + _WORDS.size > data.size:
            return None
        length, crc, head_length, _ = _WORDS.unpack(data[offset : offset + _WORDS.size])
        end = offset + 8 + length
        if length < 8 or end > data.size or head_length > length - 8:
            return None
        if zlib.crc32(data[offset + 8 : end]) != crc:
            return None
        body_at = offset + _WORDS.size + head_length
        head = orjson.loads(memoryview(data)[offset + _WORDS.size : body_at])  # which wrote it
        return Record(head, data.slice(body_at, end - body_at), offset, end)


def open_segment(store: Store, name: str, folder: str = "segments") -> SegmentFile:
    """Raises `SegmentDamaged`, OSError."""
    # Memory-mapped: a segment is read again and again, record by record.
    return SegmentFile(store.local_path(folder, name))


def read_spooled(source: Source, offset: int, spec: EnvSpec) -> tuple[Entry, pa.RecordBatch]:
    """One trajectory of a segment; reads only its bytes. Raises `SegmentDamaged`."""
    with source.open() as file:
        words = os.pread(file.fileno(), _WORDS.size, offset)
        if len(words) < _WORDS.size:
            raise SegmentDamaged(f"{source.name}: the record at byte {offset} is missing")
        length, crc, head_length, _ = _WORDS.unpack(words)
        raw = os.pread(file.fileno(), length, offset + 8)
    if len(raw) != length or zlib.crc32(raw) != crc:
        raise SegmentDamaged(f"{source.name}: the record at byte {offset} is damaged")
    head = json.loads(raw[8 : 8 + head_length])
    body = pa.py_buffer(raw)[8 + head_length :]
    return Entry(**head["entry"]), pa.ipc.read_record_batch(body, arrow_schema(spec))
