"""Trajectories ↔ bytes: one Arrow IPC stream, one record batch per trajectory.

The schema (schema.py) is written once. The metadata of each batch contains the header of its
trajectory (id, flags, metadata) as JSON. Decoding copies nothing: arrays are views of the received
bytes. This module checks the format; `Trajectory.check` checks that the arrays fit a dataset.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from stepwell._wording import pluralize
from stepwell.errors import CodecError, InvalidData, InvalidTrajectory
from stepwell.schema import (
    ACTION_KNOWN,
    IS_LAST,
    REWARD,
    TERMINATED,
    TRUNCATED,
    arrow_schema,
    arrow_type,
    column_names,
    row_bytes,
    spec_of,
)
from stepwell.spaces import Array, EnvSpec, Space
from stepwell.trajectory import Trajectory, TrajectoryMetadata

HEADER_KEY = b"stepwell.trajectory"
MAX_HEADER = 256 * 1024
CONTINUATION = b"\xff\xff\xff\xff"
"""The first bytes of every IPC message (since Arrow 0.15)."""
END_OF_STREAM = CONTINUATION + b"\x00\x00\x00\x00"

_compact = json.JSONEncoder(separators=(",", ":")).encode
_FLAG = pa.bool_()
_INT8 = pa.int8()


def encode(trajectories: Iterable[Trajectory], spec: EnvSpec) -> bytes:
    """One Arrow IPC stream holding all `trajectories`, each checked against `spec` first.

    Raises `InvalidTrajectory`.
    """
    sink = pa.BufferOutputStream()
    EncodedStream(trajectories, spec).write_arrow(sink)
    return bytes(sink.getvalue())


class EncodedStream:
    """What `encode` returns, written without a copy of the arrays. Raises `InvalidTrajectory`."""

    def __init__(self, trajectories: Iterable[Trajectory], spec: EnvSpec):
        self._schema = arrow_schema(spec)
        self._batches: list[tuple[pa.RecordBatch, dict[bytes, bytes]]] = []
        for trajectory in trajectories:
            trajectory.check(spec)
            header = _compact(trajectory.header()).encode()
            self._batches.append((to_batch(trajectory, spec, self._schema), {HEADER_KEY: header}))

    def __len__(self) -> int:
        counted = pa.MockOutputStream()
        self.write_arrow(counted)
        return int(counted.size())

    def write_to(self, sink: BinaryIO) -> None:
        """Write all bytes to a file of Python's."""
        self.write_arrow(pa.PythonFile(sink, mode="w"))

    def write_arrow(self, sink: Any) -> None:
        with pa.ipc.new_stream(sink, self._schema) as writer:
            for batch, metadata in self._batches:
                writer.write_batch(batch, custom_metadata=metadata)


def decode(data: bytes | memoryview) -> tuple[EnvSpec, list[Trajectory]]:
    """Decode a stream. Raises `CodecError` or `InvalidTrajectory`; never returns a partial list."""
    reader = TrajectoryStream(data)
    return reader.spec, [t for t in reader]


class TrajectoryStream:
    """Iterates over the trajectories of a stream; `spec` is known before the first one."""

    def __init__(self, data: bytes | memoryview):
        # A stream truncated exactly between two batches is a valid Arrow stream, so the
        # end-of-stream marker, which `encode` always writes, is required.
        if bytes(data[-8:]) != END_OF_STREAM:
            raise CodecError(
                "the stream is damaged or cut short",
                expected="the end-of-stream marker in the last 8 bytes",
                got=repr(bytes(data[-8:])),
            )
        try:
            buffer = pa.py_buffer(data)
            self._places = list(record_batches(buffer))
            self._reader = pa.ipc.open_stream(buffer)
            schema = self._reader.schema
        except CodecError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CodecError(
                f"not an Arrow IPC stream: {_first_line(error)}",
                expected="a body written by stepwell (application/vnd.apache.arrow.stream)",
                got=repr(bytes(data[:8])),
            ) from None
        try:
            self.spec = spec_of(schema)
        except InvalidData as error:
            raise error if isinstance(error, CodecError) else CodecError(str(error)) from None
        wanted = arrow_schema(self.spec)
        if not schema.equals(wanted):
            raise CodecError(
                "columns do not match the spec in the schema",
                expected=_columns(wanted),
                got=_columns(schema),
            )
        self._data = memoryview(data)
        self._size = len(buffer)

    @property
    def head(self) -> bytes:
        """The schema's message. Streams of one head can be joined: head, bodies, END_OF_STREAM."""
        return bytes(self._data[: self._places[0].start if self._places else -8])

    @property
    def body(self) -> memoryview:
        """The messages of the trajectories."""
        return self._data[len(self.head) : -len(END_OF_STREAM)]

    def messages(self) -> Iterator[tuple[pa.RecordBatch, dict[bytes, bytes], memoryview]]:
        """Like `batches`, and the bytes of each batch: one whole IPC message."""
        for (batch, metadata), place in zip(self.batches(), self._places, strict=True):
            yield batch, metadata, self._data[place]

    def batches(self) -> Iterator[tuple[pa.RecordBatch, dict[bytes, bytes]]]:
        """Rows and header bytes of each trajectory: valid Arrow, contents not yet checked."""
        while True:
            try:
                batch, metadata = self._reader.read_next_batch_with_custom_metadata()
                batch.validate(full=True)
            except StopIteration:
                return
            except (pa.ArrowException, OSError, ValueError) as error:
                raise CodecError(
                    f"the stream is damaged or cut short: {_first_line(error)}"
                ) from None
            # Columns may share bytes, so a small body can claim a huge number of rows.
            claimed = batch.num_rows * row_bytes(self.spec)
            if claimed > self._size:
                raise CodecError(
                    "columns share their bytes",
                    expected=f"at most the {self._size} bytes of the body",
                    got=f"{claimed} bytes of values",
                )
            yield batch, dict(metadata or {})

    def __iter__(self) -> Iterator[Trajectory]:
        for batch, metadata in self.batches():
            yield from_batch(batch, metadata, self.spec)


def to_batch(trajectory: Trajectory, spec: EnvSpec, schema: pa.Schema) -> pa.RecordBatch:
    """The T+1 rows of one trajectory that fits `spec`."""
    steps = len(trajectory)
    rows = steps + 1
    valid = _bits(rows, 0, steps)  # every row but the last, whose action and reward are NULL
    names = column_names(spec)
    columns = [_to_arrow(trajectory.obs[key], space) for _, key, space in names["obs"]]
    for _, key, space in names["action"]:
        columns.append(_to_arrow(_pad(trajectory.actions[key]), space, valid))
    columns.append(_values(pa.float32(), _pad(trajectory.rewards), valid))
    for flag in (trajectory.terminated, trajectory.truncated):
        columns.append(_flags(rows, _bits(rows, steps - 1 if flag else steps, steps)))
    columns.append(_flags(rows, _bits(rows, steps, rows)))
    if spec.action_known:
        known = trajectory.action_known
        known = np.ones(steps, np.bool_) if known is None else known
        columns.append(_flags(rows, _pack(_pad(known)), valid))
    for _, key, space in names["info"]:
        columns.append(_to_arrow(trajectory.infos[key], space))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def from_batch(batch: pa.RecordBatch, metadata: dict[bytes, bytes], spec: EnvSpec) -> Trajectory:
    """One trajectory from its rows and its header. Raises `CodecError` or `InvalidTrajectory`."""
    header = read_header(metadata)
    steps = batch.num_rows - 1
    if steps < 1 or header.get("length") != steps:
        raise CodecError(
            "row count and header disagree",
            expected=f"{header.get('length')} + 1 rows",
            got=pluralize(batch.num_rows, "row"),
        )
    terminated, truncated = header.get("terminated"), header.get("truncated")
    for name, flag in ((TERMINATED, terminated), (TRUNCATED, truncated)):
        flags = batch.column(name)
        _refuse_nulls(flags, batch.num_rows, name)
        if (
            not isinstance(flag, bool)
            or flags[steps - 1].as_py() != flag
            or flags.true_count != flag
        ):
            raise InvalidTrajectory(
                name,
                expected="True at the last transition only, as the header says",
                got=f"{flags.true_count} True",
            )
    last = batch.column(IS_LAST)
    _refuse_nulls(last, batch.num_rows, IS_LAST)
    if not last[steps].as_py() or last.true_count != 1:
        raise InvalidTrajectory(
            "is_last", expected="True in the last row only", got=f"{last.true_count} True"
        )
    names = column_names(spec)
    known: Array | None = None
    if spec.action_known:
        known = _no_nulls(batch.column(ACTION_KNOWN), steps, ACTION_KNOWN)
    return Trajectory(
        obs={k: to_array(batch.column(c), s, steps + 1, c) for c, k, s in names["obs"]},
        actions={k: to_array(batch.column(c), s, steps, c) for c, k, s in names["action"]},
        rewards=_no_nulls(batch.column(REWARD), steps, REWARD),
        terminated=bool(terminated),
        truncated=bool(truncated),
        final_obs_valid=header.get("final_obs_valid") is not False,
        action_known=known,
        infos={k: to_array(batch.column(c), s, steps + 1, c) for c, k, s in names["info"]},
        metadata=TrajectoryMetadata.from_json(header.get("about", {})),
        id=header.get("id", ""),
    )


def is_canonical(
    batch: pa.RecordBatch,
    metadata: dict[bytes, bytes],
    message: memoryview,
    shapes: list[tuple[bool, int]],
) -> bool:
    """Whether a batch that `from_batch` accepted equals what `to_batch` would write, so that its
    `message` can be stored as it is: it holds nothing unchecked, and little padding.

    NULLs only in the last row of nullable columns; the header and no other metadata; no values
    beyond the rows; no columns that share bytes (`TrajectoryStream` checks that) or lie far apart.
    `shapes`: those of the batch's schema.
    """
    rows = batch.num_rows
    for column, (nullable, size) in zip(batch.columns, shapes, strict=True):
        if column.null_count != nullable or (size and len(column.values) != rows * size):
            return False
    if len(metadata) != 1 or message[:4] != CONTINUATION:
        return False
    return len(message) <= MAX_HEADER or len(message) <= MAX_HEADER + 2 * batch.nbytes


def shapes_of(schema: pa.Schema) -> list[tuple[bool, int]]:
    """Return for each column whether it is nullable, and the size of its lists (0: no lists)."""
    return [
        (field.nullable, field.type.list_size if pa.types.is_fixed_size_list(field.type) else 0)
        for field in schema
    ]


def read_header(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """The JSON of a batch's header. Raises `CodecError`."""
    raw = metadata.get(HEADER_KEY)
    if raw is None or len(raw) > MAX_HEADER:
        raise CodecError(
            "a batch without its header",
            expected=f"batch metadata {HEADER_KEY.decode()} of at most {MAX_HEADER} bytes",
            got="none" if raw is None else f"{len(raw)} bytes",
        )
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise CodecError("a trajectory's header is not JSON", got=repr(raw[:40])) from None
    if not isinstance(header, dict):
        raise CodecError("a trajectory's header", expected="an object", got=type(header).__name__)
    known = {"id", "length", "terminated", "truncated", "final_obs_valid", "about"}
    if unknown := set(header) - known:
        raise CodecError(
            "a trajectory's header", expected=str(sorted(known)), got=str(sorted(unknown))
        )
    return header


def complete_header(header: dict[str, Any]) -> dict[str, Any]:
    """A header of any version as `Trajectory.header` gives it."""
    return {
        "id": header["id"],
        "length": header["length"],
        "terminated": header["terminated"],
        "truncated": header["truncated"],
        "final_obs_valid": header.get("final_obs_valid") is not False,
        "about": TrajectoryMetadata.from_json(header.get("about", {})).to_json(),
    }


def _pad(array: Array) -> Array:
    """Append a row of zeros, the values under the NULL of the last row."""
    padded = np.zeros((len(array) + 1, *array.shape[1:]), array.dtype)
    padded[:-1] = array
    return padded


def _to_arrow(array: Array, space: Space, valid: Any = None) -> pa.Array:
    """Rows as a column, without a copy. `valid` is the validity bitmap, None for no NULL."""
    rows = len(array)
    kind = arrow_type(space)
    flat = np.ascontiguousarray(array)
    if space.shape == ():
        if space.dtype == "bool":
            return _flags(rows, _pack(flat), valid)
        return _values(kind, flat, valid)
    if space.dtype == "uint8":
        return _values(kind, flat, valid)
    size = flat.size // rows
    values = pa.Array.from_buffers(
        _INT8 if space.dtype == "bool" else kind.value_type,
        rows * size,
        [None, pa.py_buffer(flat.view(np.int8) if space.dtype == "bool" else flat)],
    )
    return pa.Array.from_buffers(kind, rows, [valid], children=[values])


def _values(kind: pa.DataType, flat: Array, valid: Any) -> pa.Array:
    return pa.Array.from_buffers(kind, len(flat), [valid, pa.py_buffer(flat)])


def _flags(rows: int, bits: Any, valid: Any = None) -> pa.Array:
    return pa.Array.from_buffers(_FLAG, rows, [valid, bits])


def _bits(rows: int, start: int, stop: int) -> Any:
    """A bitmap of `rows` bits as Arrow packs them, with those from `start` to `stop` set."""
    return _short_bits(rows, start, stop) if rows <= 64 else _make_bits(rows, start, stop)


def _make_bits(rows: int, start: int, stop: int) -> Any:
    flags = np.zeros(rows, np.bool_)
    flags[start:stop] = True
    return _pack(flags)


# Of short trajectories these are a third of the time of `to_batch`.
_short_bits = functools.lru_cache(maxsize=1024)(_make_bits)


def _pack(flags: Array) -> Any:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def to_array(column: pa.Array, space: Space, rows: int, name: str) -> Array:
    """The first `rows` rows of a column as [rows, *shape], without a copy where the layout
    allows. Raises `InvalidTrajectory`, `CodecError`."""
    if space.shape == ():
        return _no_nulls(column, rows, name)
    _refuse_nulls(column, rows, name)
    dtype = np.dtype(space.dtype)
    size = math.prod(space.shape)
    if space.dtype == "uint8":
        data, start = column.buffers()[1], column.offset * size
    else:
        values = column.values
        if values.null_count:
            raise InvalidTrajectory(
                name, expected="numbers", got=f"{values.null_count} NULL inside of rows"
            )
        data, start = values.buffers()[1], column.offset * size + values.offset
    try:
        array = np.frombuffer(data, dtype, rows * size, start * dtype.itemsize)
    except (ValueError, TypeError):
        raise CodecError(
            f"{name} is damaged",
            expected=f"{rows * size} values",
            got=f"{0 if data is None else data.size} bytes",
        ) from None
    if dtype == np.bool_ and bool((array.view(np.uint8) > 1).any()):
        raise InvalidTrajectory(name, expected="0 or 1", got="other numbers")
    return array.reshape(rows, *space.shape)


def _no_nulls(column: pa.Array, rows: int, name: str) -> Array:
    """The first `rows` values of a column of scalars."""
    _refuse_nulls(column, rows, name)
    result: Array = (
        column.to_numpy(zero_copy_only=False)
        if not column.null_count
        else (column.slice(0, rows).to_numpy(zero_copy_only=False))
    )
    return result[:rows]


def _refuse_nulls(column: pa.Array, rows: int, name: str) -> None:
    if column.null_count and (nulls := column.slice(0, rows).null_count):
        raise InvalidTrajectory(
            name, expected=f"values in rows 0 … {rows - 1}", got=f"{nulls} NULL"
        )


def record_batches(buffer: Any) -> Iterator[slice]:
    """Yield the position of each record batch; refuse any other message after the schema.

    Compressed bodies are refused, because a megabyte could unpack to a terabyte; `encode` never
    compresses. Big-endian data is refused, because Arrow would swap its bytes while reading.
    """
    source = pa.BufferReader(buffer)
    start = 0
    for message in pa.ipc.MessageReader.open_stream(source):
        stop = source.tell()
        kind = message.type
        if kind == "schema":
            if _is_big_endian(message.metadata):
                raise CodecError("a big-endian stream", expected="little-endian numbers")
        elif kind != "record batch":
            raise CodecError("a foreign message", expected="record batches", got=kind)
        elif _header_field(message.metadata, _COMPRESSION):
            raise CodecError(
                "a compressed record batch", expected="batches without body compression"
            )
        else:
            yield slice(start, stop)
        start = stop


_ENDIANNESS = 0
"""Field of a Schema (Schema.fbs): 0 or absent for little."""
_COMPRESSION = 3
"""Field of a RecordBatch (Message.fbs): absent for none."""


def _is_big_endian(metadata: Any) -> bool:
    place = _header_field(metadata, _ENDIANNESS)
    try:
        return place != 0 and struct.unpack_from("<h", metadata, place)[0] != 0
    except struct.error:
        raise CodecError("a damaged message") from None


def _header_field(metadata: Any, number: int) -> int:
    """Return the position of field `number` in the header of a Message flatbuffer; 0 if absent."""
    data = memoryview(metadata)

    def field(table: int, index: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        if 4 + 2 * index >= struct.unpack_from("<H", data, vtable)[0]:
            return 0
        offset: int = struct.unpack_from("<H", data, vtable + 4 + 2 * index)[0]
        return table + offset if offset else 0

    def target(position: int) -> int:
        return position + int(struct.unpack_from("<I", data, position)[0])

    try:
        header = field(target(0), 2)
        if header == 0:
            raise CodecError("a message without a header")
        return field(target(header), number)
    except struct.error:
        raise CodecError("a damaged message") from None


def _columns(schema: pa.Schema) -> str:
    try:
        return ", ".join(f"{f.name}: {f.type}" for f in schema)[:500]
    except UnicodeDecodeError:
        return "names that are not UTF-8"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
