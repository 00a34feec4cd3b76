"""Trajectories ↔ bytes: one Arrow IPC stream, one record batch per trajectory.

The schema (schema.py) stands once at the head; each batch's own metadata carries the trajectory's
header (id, flags, About) as JSON. Decoding copies nothing: arrays are views of the received bytes.
What comes in is checked here for form; whether it fits a dataset is `Trajectory.check`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from stepwell.errors import CodecError, InvalidData, InvalidTrajectory
from stepwell.schema import (
    ACTION_KNOWN,
    IS_LAST,
    REWARD,
    TERMINATED,
    TRUNCATED,
    arrow_schema,
    column_names,
    spec_of,
)
from stepwell.spaces import Array, EnvSpec, Space
from stepwell.trajectory import About, Trajectory

HEADER_KEY = b"stepwell.trajectory"
MAX_HEADER = 256 * 1024
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def encode(trajectories: Iterable[Trajectory], spec: EnvSpec) -> bytes:
    """One Arrow IPC stream holding all `trajectories`, each checked against `spec` first.

    Raises `InvalidTrajectory`.
    """
    schema = arrow_schema(spec)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for trajectory in trajectories:
            trajectory.check(spec)
            header = json.dumps(trajectory.header(), separators=(",", ":")).encode()
            writer.write_batch(
                to_batch(trajectory, spec, schema), custom_metadata={HEADER_KEY: header}
            )
    return bytes(sink.getvalue())


def decode(data: bytes | memoryview) -> tuple[EnvSpec, list[Trajectory]]:
    """Inverse of `encode`. Raises `CodecError` or `InvalidTrajectory`; never returns a part."""
    reader = read_stream(data)
    return reader.spec, [t for t in reader]


class read_stream:  # noqa: N801 - reads as a function: `for t in read_stream(data)`
    """Iterate over the trajectories of a stream; `spec` is known before the first one."""

    def __init__(self, data: bytes | memoryview):
        # A stream cut exactly between two batches is a legal Arrow stream, and a loss: so the
        # end-of-stream marker that every writer of ours leaves is required.
        if bytes(data[-8:]) != END_OF_STREAM:
            raise CodecError(
                "the stream is damaged or cut short",
                expected="the end-of-stream marker in the last 8 bytes",
                got=repr(bytes(data[-8:])),
            )
        try:
            self._reader = pa.ipc.open_stream(pa.py_buffer(data))
        except (
            pa.ArrowInvalid,
            pa.ArrowNotImplementedError,
            pa.ArrowSerializationError,
            OSError,
        ) as error:
            raise CodecError(
                f"not an Arrow IPC stream: {_first_line(error)}",
                expected="a body written by stepwell (application/vnd.apache.arrow.stream)",
                got=repr(bytes(data[:8])),
            ) from None
        try:
            self.spec = spec_of(self._reader.schema)
        except InvalidData as error:
            raise error if isinstance(error, CodecError) else CodecError(str(error)) from None
        wanted = arrow_schema(self.spec)
        if not self._reader.schema.equals(wanted):
            raise CodecError(
                "columns do not match the spec in the schema",
                expected=_columns(wanted),
                got=_columns(self._reader.schema),
            )

    def __iter__(self) -> Iterator[Trajectory]:
        while True:
            try:
                batch, metadata = self._reader.read_next_batch_with_custom_metadata()
                if batch is not None:
                    batch.validate(full=True)
            except StopIteration:
                return
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise CodecError(
                    f"the stream is damaged or cut short: {_first_line(error)}"
                ) from None
            yield from_batch(batch, dict(metadata or {}), self.spec)


def to_batch(trajectory: Trajectory, spec: EnvSpec, schema: pa.Schema) -> pa.RecordBatch:
    """The T+1 rows of one trajectory that fits `spec`."""
    steps = len(trajectory)
    last = np.zeros(steps + 1, np.bool_)
    last[-1] = True
    columns: list[pa.Array] = []
    names = column_names(spec)
    for _, key, space in names["obs"]:
        columns.append(_to_arrow(trajectory.obs[key], space))
    for _, key, space in names["action"]:
        columns.append(_to_arrow(_pad(trajectory.actions[key]), space, last))
    columns.append(pa.array(_pad(trajectory.rewards), mask=last))
    for flag in (trajectory.terminated, trajectory.truncated):
        flags = np.zeros(steps + 1, np.bool_)
        flags[-2] = flag
        columns.append(pa.array(flags))
    columns.append(pa.array(last))
    if spec.action_known:
        known = trajectory.action_known
        known = np.ones(steps, np.bool_) if known is None else known
        columns.append(pa.array(_pad(known), mask=last))
    for _, key, space in names["info"]:
        columns.append(_to_arrow(trajectory.infos[key], space))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def from_batch(batch: pa.RecordBatch, metadata: dict[bytes, bytes], spec: EnvSpec) -> Trajectory:
    """One trajectory from its rows and its header. Raises `CodecError` or `InvalidTrajectory`."""
    header = _header(metadata)
    steps = batch.num_rows - 1
    if steps < 1 or header.get("length") != steps:
        raise CodecError(
            "row count and header disagree",
            expected=f"{header.get('length')} + 1 rows",
            got=f"{batch.num_rows} rows",
        )
    terminated, truncated = header.get("terminated"), header.get("truncated")
    for name, flag in ((TERMINATED, terminated), (TRUNCATED, truncated)):
        flags = batch.column(name).to_numpy(zero_copy_only=False)
        if not isinstance(flag, bool) or bool(flags[steps - 1]) != flag or int(flags.sum()) != flag:
            raise InvalidTrajectory(
                name,
                expected="True at the last transition only, as the header says",
                got=f"{flags.sum()} True",
            )
    last = batch.column(IS_LAST).to_numpy(zero_copy_only=False)
    if not bool(last[-1]) or int(last.sum()) != 1:
        raise InvalidTrajectory(
            "is_last", expected="True in the last row only", got=f"{last.sum()} True"
        )
    names = column_names(spec)
    known: Array | None = None
    if spec.action_known:
        known = _no_nulls(batch.column(ACTION_KNOWN), steps, ACTION_KNOWN)
    return Trajectory(
        obs={k: _from_arrow(batch.column(c), s, steps + 1, c) for c, k, s in names["obs"]},
        actions={k: _from_arrow(batch.column(c), s, steps, c) for c, k, s in names["action"]},
        rewards=_no_nulls(batch.column(REWARD), steps, REWARD),
        terminated=bool(terminated),
        truncated=bool(truncated),
        final_obs_valid=header.get("final_obs_valid") is not False,
        action_known=known,
        infos={k: _from_arrow(batch.column(c), s, steps + 1, c) for c, k, s in names["info"]},
        about=About.from_json(header.get("about", {})),
        id=header.get("id", ""),
    )


def _header(metadata: dict[bytes, bytes]) -> dict[str, Any]:
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


def _pad(array: Array) -> Array:
    """One zero row more: what stands under the NULL of the last row."""
    padded = np.zeros((len(array) + 1, *array.shape[1:]), array.dtype)
    padded[:-1] = array
    return padded


def _to_arrow(array: Array, space: Space, null: Array | None = None) -> pa.Array:
    rows = len(array)
    if space.shape == ():
        return pa.array(array.reshape(rows), mask=null)
    flat = np.ascontiguousarray(array).reshape(-1)
    if space.dtype == "uint8":
        size = flat.size // rows
        validity = None if null is None else pa.array(~null).buffers()[1]
        return pa.Array.from_buffers(pa.binary(size), rows, [validity, pa.py_buffer(flat)])
    if space.dtype == "bool":
        flat = flat.view(np.int8)
    values = pa.array(flat)
    field = pa.field("item", values.type, nullable=False)
    kind = pa.list_(field, flat.size // rows)
    mask = None if null is None else pa.array(null)
    return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)


def _from_arrow(column: pa.Array, space: Space, rows: int, name: str) -> Array:
    """The first `rows` rows as [rows, *shape], without a copy where the layout allows."""
    if space.shape == ():
        return _no_nulls(column, rows, name)
    head = column.slice(0, rows)
    if head.null_count:
        raise InvalidTrajectory(
            name, expected=f"values in rows 0 … {rows - 1}", got=f"{head.null_count} NULL"
        )
    dtype = np.dtype(space.dtype)
    size = int(np.prod(space.shape))
    if space.dtype == "uint8":
        data = head.buffers()[1]
        values = np.frombuffer(data, np.uint8, rows * size, head.offset * size)
    else:
        values = head.flatten().to_numpy(zero_copy_only=True)
        if dtype == np.bool_:
            if bool(((values != 0) & (values != 1)).any()):
                raise InvalidTrajectory(name, expected="0 or 1", got="other numbers")
            values = values.view(np.bool_)
    if values.size != rows * size:
        raise CodecError(
            f"{name} is damaged", expected=f"{rows * size} values", got=str(values.size)
        )
    return values.reshape(rows, *space.shape)


def _no_nulls(column: pa.Array, rows: int, name: str) -> Array:
    head = column.slice(0, rows)
    if head.null_count:
        raise InvalidTrajectory(
            name, expected=f"values in rows 0 … {rows - 1}", got=f"{head.null_count} NULL"
        )
    result: Array = head.to_numpy(zero_copy_only=False)
    return result


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name}: {f.type}" for f in schema)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
