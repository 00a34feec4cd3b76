"""Values of steps as an Arrow stream: what `Client.annotate` sends, one row for each trajectory.

    trajectory   q   v   advantage   weight      lists of T float32

The value of a step whose action is unknown is null.

A tenth of their size as JSON, and checked without an object for each number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stepwell.codec import record_batches
from stepwell.errors import CodecError

VALUES = ("q", "v", "advantage", "weight")
SCHEMA = pa.schema(
    [("trajectory", pa.string()), *((name, pa.list_(pa.float32())) for name in VALUES)]
)
MOST, LONGEST_ID = 20_000, 64


def table_of(values: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Raises `CodecError` for other keys or types."""
    try:
        columns = [pa.array([one[f.name] for one in values], f.type) for f in SCHEMA]
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise CodecError(f"no values of steps: {error!r}"[:300], expected=str(SCHEMA)) from None
    return pa.table(columns, schema=SCHEMA)


def encode(values: Sequence[Mapping[str, Any]]) -> bytes:
    table = table_of(values)
    check(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode(data: bytes | memoryview) -> pa.Table:
    """Raises `CodecError`."""
    try:
        buffer = pa.py_buffer(data)
        list(record_batches(buffer))  # none is compressed
        with pa.ipc.open_stream(buffer) as reader:
            if not reader.schema.equals(SCHEMA):
                got = str(reader.schema)[:300]
                raise CodecError("other columns than values of steps have", expected=str(SCHEMA),
                                 got=got)  # fmt: skip
            table = reader.read_all()
        table.validate(full=True)
    except CodecError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CodecError(f"not an Arrow IPC stream: {str(error)[:200]}") from None
    check(table)
    return table


def check(table: pa.Table) -> None:
    """Raises `CodecError` for what a number or a row may not be."""
    if not 1 <= table.num_rows <= MOST:
        raise CodecError("too many or no rows", expected=f"1 … {MOST}", got=str(table.num_rows))
    longest = pc.max(pc.utf8_length(table["trajectory"])).as_py() or 0
    if any(table[name].null_count for name in SCHEMA.names) or not 0 < longest <= LONGEST_ID:
        raise CodecError("a row without an id or a list", expected="each of them in every row")
    for name in VALUES:
        flat = pc.list_flatten(table[name])
        if pc.all(pc.is_finite(flat)).as_py() is False:
            raise CodecError(f"{name} has NaN or infinity", expected="numbers, or null")
