"""Trajectories as a manifest lists them: columns of a few bytes each, beside the mirror's pieces.

    pk   usable   train   id   dataset   seq   shard   traj_idx   row_start   length   …

`usable`: it lies in a shard. `train`: its purpose is not evaluation. The others are those of
stepwell/manifest.py, in its types: selecting is a mask, and a manifest's block is a slice.
"""

from __future__ import annotations

import binascii
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from stepwell.manifest import SCHEMA as MANIFEST

OF_SELECTION = ("component", "weight")
"""Columns of a manifest that the selection gives, and not the trajectory."""
COLUMNS = [field for field in MANIFEST if field.name not in OF_SELECTION]
SCHEMA = pa.schema([("pk", pa.int64()), ("usable", pa.bool_()), ("train", pa.bool_()), *COLUMNS])
CHANGED = (
    "FROM trajectories AS t INDEXED BY ix_trajectories_mark"
    " WHERE t.mark > ? AND t.state <> 'evicted'"
)
_INTEGERS = {
    **{"pk": "t.pk", "dataset_pk": "t.dataset_pk", "seq": "t.seq"},
    "shard_pk": "coalesce(t.shard_pk, 0)",
    "traj_idx": "coalesce(t.traj_idx, 0)",
    "row_start": "coalesce(t.row_start, 0)",
    **{"length": "t.length", "first_step": "t.first_step", "terminated": "t.terminated"},
    **{"truncated": "t.truncated", "final_obs_valid": "t.final_obs_valid"},
    "train": "t.purpose <> 'eval'",
}
_FORMAT = ",".join(["%d"] * len(_INTEGERS)) + ',%s,%.16s,"%s"'
_LINE = (
    f"printf('{_FORMAT}', {', '.join(_INTEGERS.values())},"
    " t.id, t.digest, replace(t.env, '\"', '\"\"'))"
)
_KINDS = {name: pa.int64() for name in _INTEGERS}
_KINDS |= {"id": pa.string(), "digest": pa.string(), "env": pa.string()}


def changed_rows(db: sqlite3.Connection, since: int) -> pa.Table:
    """Rows with a newer mark, in columns. As one text: SQLite writes it and Arrow reads it in half
    the time that a Python object per value takes."""
    text = db.execute(f"SELECT group_concat({_LINE}, char(10)) {CHANGED}", (since,)).fetchone()[0]
    if text is None:
        kinds = {**_KINDS, "return": pa.float64()}
        return pa.table({name: pa.array([], kind) for name, kind in kinds.items()})
    found = csv.read_csv(
        pa.BufferReader(text.encode()),
        csv.ReadOptions(column_names=list(_KINDS), use_threads=False),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(column_types=_KINDS, null_values=[]),
    )
    # As text to the last bit they would take as long as all the others together.
    returns = dict(db.execute(f'SELECT t.pk, t."return" {CHANGED}', (since,)).fetchall())
    values = [returns[pk] for pk in found["pk"].to_pylist()]
    return found.append_column("return", pa.array(values, pa.float64())).combine_chunks()


def places_of_rows(
    rows: pa.Table, datasets: Mapping[int, str], shards: Mapping[int, str | None]
) -> pa.RecordBatch:
    """`changed_rows` as a batch of SCHEMA; the names belong to `dataset_pk` and `shard_pk`."""
    count = rows.num_rows
    shard = _named(rows["shard_pk"], shards)
    made: dict[str, Any] = {
        "usable": shard.is_valid(),
        "id": _uuids_of(rows["id"], count),
        "dataset": _named(rows["dataset_pk"], datasets),
        "shard": shard,
        "env": rows["env"].combine_chunks().dictionary_encode(),
        "content": _contents(rows["digest"].to_pylist(), count),
    }
    arrays = []
    for field in SCHEMA:
        column = made[field.name] if field.name in made else _one(rows[field.name])
        arrays.append(pa.array(column, field.type) if isinstance(column, np.ndarray) else column)
    arrays = [array.cast(field.type) for array, field in zip(arrays, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def _named(column: pa.ChunkedArray, names: Mapping[int, str | None]) -> pa.DictionaryArray:
    codes, place = np.unique(column.to_numpy(), return_inverse=True)
    texts = [names[code] for code in codes.tolist()]
    valid = np.asarray([text is not None for text in texts], bool)[place]
    return pa.DictionaryArray.from_arrays(
        pa.array(place.astype(np.int32), mask=~valid),
        pa.array([text or "" for text in texts], pa.string()),
    )


def _uuids_of(column: pa.ChunkedArray, count: int) -> pa.Array:
    """Texts of 36 characters, as they lie in memory."""
    text = _one(column)
    at = text.offset * 36
    raw = np.frombuffer(text.buffers()[2] or b"", np.uint8)[at : at + 36 * count].reshape(-1, 36)
    digits = np.delete(raw, (8, 13, 18, 23), axis=1).tobytes()
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), count, [None, pa.py_buffer(binascii.unhexlify(digits))]
    )


def places_of(
    columns: Mapping[str, Sequence[Any]], pks: Sequence[int], row_start: Sequence[int | None]
) -> pa.RecordBatch:
    """Values as SQLite gives them, by column of `trajectories`, as a batch of SCHEMA."""
    count = len(pks)
    shard = _dictionary(columns["shard"])
    made: dict[str, Any] = {
        "pk": np.asarray(pks, np.int64),
        "usable": shard.is_valid(),
        "train": np.asarray([purpose != "eval" for purpose in columns["purpose"]], bool),
        "id": _uuids(columns["id"], count),
        "dataset": _dictionary(columns["dataset"]),
        "shard": shard,
        "env": _dictionary(columns["env"]),
        "row_start": _integers(row_start, pa.int64()),
        "content": _contents(columns["digest"], count),
    }
    for field in COLUMNS:
        if field.name in made:
            continue
        values = columns[field.name]
        if pa.types.is_boolean(field.type):
            made[field.name] = np.asarray(values, bool)
        elif pa.types.is_floating(field.type):
            made[field.name] = np.asarray(values, np.float64)
        else:
            made[field.name] = _integers(values, field.type)
    arrays = [pa.array(made[field.name], type=field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _dictionary(values: Sequence[str | None]) -> pa.DictionaryArray:
    return pa.array(values, pa.string()).dictionary_encode()


def _integers(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    """Without nulls: what has none is not usable, and nobody looks."""
    return pa.array(values, kind).fill_null(0)


def _uuids(texts: Sequence[str], count: int) -> pa.Array:
    raw = bytes.fromhex("".join(texts).replace("-", ""))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(raw)])


def _contents(digests: Sequence[str], count: int) -> Any:
    if not count:
        return np.zeros(0, np.uint64)
    raw = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(count, -1)
    return np.ascontiguousarray(raw[:, :8]).view(">u8").astype(np.uint64).reshape(count)
