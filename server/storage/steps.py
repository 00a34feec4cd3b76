"""The steps of one stored trajectory as an Arrow stream or as JSON, without holding all of them.

    Steps            rows of some columns, block by block: of a shard, or of a batch in memory
    arrow_parts      the bytes that stepwell.codec.encode makes of the trajectory, column by column
    json_parts       {"columns": […], "rows": [[…], …]}, some rows at a time

Each part is small, so that a thread that makes one lets others run soon.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from server.storage.checksums import Source
from server.storage.shards import (
    TRAJ_IDX,
    ShardDamaged,
    contents_of,
    entry_of,
    groups_of,
    value_bytes,
)
from stepwell.codec import HEADER_KEY, complete_header, to_array
from stepwell.schema import arrow_schema, column_names
from stepwell.shard_rows import plain_batch
from stepwell.spaces import Array, EnvSpec, Space

BLOCK = 128 << 10
"""Bytes of rows that are decoded at once."""
BUFFER = 256 << 10
"""Bytes of a column that are read at once."""
ITEMS = 16_384
"""Numbers that are written as JSON at once: a millisecond."""
LONG = 32
"""Numbers of a row from which on it is written as an array and not as a list."""
PAGE_ROWS = 1024
"""Rows of a Parquet page, at least, in shards of earlier versions."""


class Steps(ABC):
    """The T+1 rows of one trajectory."""

    def __init__(self, header: dict[str, Any], spec: EnvSpec):
        self.header, self.spec = complete_header(header), spec
        self.rows = int(header["length"]) + 1

    @abstractmethod
    def blocks(self, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """All rows of some columns in order, at most `rows` at a time."""


class HeldSteps(Steps):
    """In memory."""

    def __init__(self, header: dict[str, Any], spec: EnvSpec, batch: pa.RecordBatch):
        super().__init__(header, spec)
        self._batch = batch

    def blocks(self, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        chosen = self._batch.select(columns)
        for at in range(0, self.rows, rows):
            yield chosen.slice(at, rows)


class ShardSteps(Steps):
    """In a shard. Raises `ShardDamaged` wherever its bytes are not what was written."""

    def __init__(self, source: Source, file: pq.ParquetFile, traj_idx: int):
        entry, spec = entry_of(source, traj_idx)
        super().__init__(entry.header, spec)
        self._name, self._file, self._traj_idx = source.name, file, traj_idx
        self._start, self._stop = entry.row_start, entry.row_start + self.rows
        self._groups, self._first = groups_of(file.metadata, self._start, self._stop)
        for batch in self.blocks([TRAJ_IDX], BLOCK):
            if not bool((batch.column(0).to_numpy() == traj_idx).all()):
                raise self._foreign()

    def blocks(self, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        row, found = self._first, 0
        try:
            for batch in self._file.iter_batches(
                batch_size=rows, row_groups=self._groups, columns=columns, use_threads=False
            ):
                low = max(self._start - row, 0)
                high = min(self._stop - row, batch.num_rows)
                row += batch.num_rows
                if low < high:
                    found += high - low
                    yield batch.slice(low, high - low)
                if row >= self._stop:
                    break
        except (OSError, pa.ArrowException) as error:
            raise ShardDamaged(f"{self._name}: {error}") from None
        if found != self.rows:
            raise self._foreign()

    def _foreign(self) -> ShardDamaged:
        rows = f"rows {self._start} … {self._stop}"
        return ShardDamaged(f"{self._name}: {rows} are not trajectory {self._traj_idx}")


@contextmanager
def shard_steps(source: Source, traj_idx: int) -> Iterator[ShardSteps]:
    """Open one trajectory of a shard. Raises `ShardDamaged`."""
    metadata = contents_of(source).metadata
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(source.open())
            file = pq.ParquetFile(
                raw,
                metadata=metadata,
                # Page by page; by default the whole column of a row group is read at once.
                pre_buffer=False,
                buffer_size=BUFFER,
                page_checksum_verification=True,
            )
        except (OSError, pa.ArrowException) as error:
            raise ShardDamaged(f"{source.name}: {error}") from None
        stack.enter_context(file)
        yield ShardSteps(source, file, traj_idx)


def steps_memory(source: Source, traj_idx: int, *, rows_at_once: bool) -> int:
    """Bytes that reading a trajectory of a shard holds: of each column a page and what is read of
    it; of all columns together if whole rows are needed. Raises `ShardDamaged`."""
    entry, spec = entry_of(source, traj_idx)
    metadata = contents_of(source).metadata
    groups, _ = groups_of(metadata, entry.row_start, entry.row_start + entry.rows)
    each: dict[str, int] = {}
    for group in map(metadata.row_group, groups):
        for number in range(group.num_columns):
            column = group.column(number)
            name = column.path_in_schema
            each[name] = max(each.get(name, 0), column.total_uncompressed_size)
    widest = max(value_bytes(field) for field in arrow_schema(spec))
    page = max(1 << 20, PAGE_ROWS * widest)
    sizes = [2 * min(size, page) + min(size, BUFFER) for size in each.values()]
    return 4 * BLOCK + (sum(sizes) if rows_at_once else max(sizes, default=0))


# --- Arrow ----------------------------------------------------------------------------------------


def arrow_parts(steps: Steps) -> Iterator[bytes | memoryview]:
    """The stream of this one trajectory, byte for byte as `stepwell.codec.encode` writes it."""
    for part in arrow_layout(steps):
        if isinstance(part, bytes):
            yield part
        elif pa.types.is_boolean(part.type):
            yield from _bits(steps, part)
        else:
            yield from _values(steps, part)


def arrow_layout(steps: Steps) -> list[bytes | pa.Field]:
    """The stream's bytes but for the values of its columns, each of which its field stands for.

    Written by Arrow itself, of columns whose values are memory that nobody has touched, which takes
    none: the writer passes each buffer on unread.
    """
    schema, rows = arrow_schema(steps.spec), steps.rows
    valid = np.zeros(-(-rows // 8) * 8, np.bool_)
    valid[: rows - 1] = True  # every row but the last, whose action and reward are NULL
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    places: dict[int, pa.Field] = {}
    columns = []
    for field in schema:
        flag = pa.types.is_boolean(field.type)
        size = -(-rows // 8) if flag else rows * value_bytes(field)
        buffer = pa.py_buffer(np.zeros(size, np.uint8))
        if buffer.size:
            places[buffer.address] = field
        nulls = bitmap if field.nullable else None
        columns.append(_column(field.type, rows, nulls, buffer))
    sink = _Layout(places)
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema) as writer:
        header = json.dumps(steps.header, separators=(",", ":")).encode()
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        writer.write_batch(batch, custom_metadata={HEADER_KEY: header})
    return sink.parts


def _column(kind: pa.DataType, rows: int, nulls: pa.Buffer | None, buffer: pa.Buffer) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, rows, [nulls, buffer])
    values = pa.Array.from_buffers(kind.value_type, rows * kind.list_size, [None, buffer])
    return pa.Array.from_buffers(kind, rows, [nulls], children=[values])


class _Layout:
    """A file that notes what is written to it."""

    closed = False

    def __init__(self, places: dict[int, pa.Field]):
        self._places = places
        self.parts: list[bytes | pa.Field] = []

    def write(self, data: Any) -> int:
        if isinstance(data, pa.Buffer):
            field = self._places.get(data.address)
            self.parts.append(data.to_pybytes() if field is None else field)
            return int(data.size)
        self.parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def writable(self) -> bool:
        return True


def _values(steps: Steps, field: pa.Field) -> Iterator[bytes | memoryview]:
    width = value_bytes(field)
    left = steps.rows - 1 if field.nullable else steps.rows
    for batch in steps.blocks([field.name], max(1, BLOCK // width)):
        column = batch.column(field.name)
        rows = min(left, len(column))
        start = column.offset * width
        if pa.types.is_fixed_size_list(field.type):
            column = column.values
            start += column.offset * field.type.value_type.bit_width // 8
        left -= rows
        yield memoryview(column.buffers()[1])[start : start + rows * width]
    if field.nullable:
        yield bytes(width)  # the values under the NULLs of the last row


def _bits(steps: Steps, field: pa.Field) -> Iterator[bytes]:
    waiting: Array = np.zeros(0, np.bool_)
    for batch in steps.blocks([field.name], BLOCK):
        column = batch.column(field.name)
        if column.null_count:
            column = column.fill_null(False)
        waiting = np.concatenate([waiting, column.to_numpy(zero_copy_only=False)])
        whole = len(waiting) // 8 * 8
        yield np.packbits(waiting[:whole], bitorder="little").tobytes()
        waiting = waiting[whole:]
    yield np.packbits(waiting, bitorder="little").tobytes()


# --- JSON -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _JsonColumn:
    name: str
    space: Space | None
    """None for a flag or the reward."""
    last_is_null: bool


def json_parts(steps: Steps) -> Iterator[bytes]:
    """{columns, rows}, one row per observation; the last row has no action and no reward."""
    schema = arrow_schema(steps.spec)
    spaces = {n: s for group in column_names(steps.spec).values() for n, _, s in group}
    columns = [_JsonColumn(f.name, spaces.get(f.name), f.nullable) for f in schema]
    yield b'{"columns":' + orjson.dumps(["t", *schema.names]) + b',"rows":['
    items = 1 + sum(math.prod(c.space.shape) if c.space else 1 for c in columns)
    at_once = max(1, ITEMS // items)
    at = 0
    for batch in steps.blocks(schema.names, max(1, BLOCK // max(map(value_bytes, schema)))):
        plain = plain_batch(pa.Table.from_batches([batch]), schema)
        for low in range(0, plain.num_rows, at_once):
            block = plain.slice(low, at_once)
            ends = at + block.num_rows == steps.rows
            values = [_json_values(block.column(c.name), c, ends) for c in columns]
            yield b"," if at else b""
            if items > ITEMS:
                yield from _json_row(at, values, columns, ends)
            else:
                yield _json_rows(at, values, columns, ends)
            at += block.num_rows
    yield b"]}"


def _json_values(column: pa.Array, about: _JsonColumn, ends: bool) -> Array:
    """The values of a block, without the NULL of the last row."""
    rows = len(column) - (about.last_is_null and ends)
    if not rows:
        return np.zeros(0)
    if about.space is not None:
        values = to_array(column, about.space, rows, about.name)
    else:
        values = column.slice(0, rows).to_numpy(zero_copy_only=False)
    # As Python's numbers are: orjson would write fewer digits.
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def _json_lists(array: Array) -> list[Any]:
    """The rows as something that orjson writes: long ones are faster as arrays."""
    return list(array) if array[:1].size >= LONG else array.tolist()


def _json_rows(at: int, values: list[Array], columns: list[_JsonColumn], ends: bool) -> bytes:
    lists = [
        [*_json_lists(array), None] if ends and about.last_is_null else _json_lists(array)
        for array, about in zip(values, columns, strict=True)
    ]
    numbers = range(at, at + len(lists[0]))
    # orjson writes NaN, valid in infos, as null.
    return _dumps(list(zip(numbers, *lists, strict=True)))[1:-1]


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _json_row(
    at: int, values: list[Array], columns: list[_JsonColumn], ends: bool
) -> Iterator[bytes]:
    """One row that is too long to be written at once."""
    yield b"[%d" % at
    for array, about in zip(values, columns, strict=True):
        yield b","
        if ends and about.last_is_null:
            yield b"null"
        else:
            yield from _json_array(array[0])
    yield b"]"


def _json_array(array: Any) -> Iterator[bytes]:
    if array.size <= ITEMS:
        yield _dumps(array)
        return
    yield b"["
    size = ITEMS if array.ndim == 1 else 1
    for at in range(0, len(array), size):
        yield b"," if at else b""
        if array.ndim == 1:
            yield _dumps(array[at : at + size])[1:-1]
        else:
            yield from _json_array(array[at])
    yield b"]"
