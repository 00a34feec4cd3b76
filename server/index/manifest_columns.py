"""Trajectories as a manifest lists them: columns of a few bytes each, beside the mirror's pieces.

    pk   usable   train   id   dataset   seq   shard   traj_idx   row_start   length   …

`usable`: it lies in a shard. `train`: its purpose is not evaluation. The others are those of
stepwell/manifest.py, in its types: selecting is a mask, and a manifest's block is a slice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from stepwell.manifest import SCHEMA as MANIFEST

OF_SELECTION = ("component", "weight")
"""Columns of a manifest that the selection gives, and not the trajectory."""
COLUMNS = [field for field in MANIFEST if field.name not in OF_SELECTION]
SCHEMA = pa.schema([("pk", pa.int64()), ("usable", pa.bool_()), ("train", pa.bool_()), *COLUMNS])
CHANGED = (
    "FROM trajectories AS t INDEXED BY ix_trajectories_change_id"
    " WHERE t.change_id > ? AND t.state <> 'evicted'"
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
_TEXTS = {
    "id": "group_concat(t.id, '')",
    "content": "group_concat(substr(t.digest, 1, 16), '')",
    "env": "json_group_array(t.env)",
}
_COLUMNS = [*(f"group_concat({sql})" for sql in _INTEGERS.values()), *_TEXTS.values()]


def changed_rows(db: sqlite3.Connection, since: int) -> dict[str, Any]:
    """Rows with a newer `change_id`, in columns: int64 arrays; `return` as float64; ids, contents
    as hexadecimal digits; `env` as a list. Call it inside a transaction.

    SQLite joins each column into one text, which NumPy reads in half the time that a Python object
    per value takes. All columns come in the order of the index.
    """
    found = db.execute(f"SELECT {', '.join(_COLUMNS)} {CHANGED}", (since,)).fetchone()
    columns = dict(zip((*_INTEGERS, *_TEXTS), found, strict=True))
    rows: dict[str, Any] = {
        name: np.fromstring(columns[name] or "", np.int64, sep=",") for name in _INTEGERS
    }
    rows |= {"id": (columns["id"] or "").replace("-", ""), "content": columns["content"] or ""}
    rows["env"] = orjson.loads(columns["env"])
    # As text to the last bit they would take as long as all the others together.
    returns = db.execute(f'SELECT t."return" {CHANGED}', (since,)).fetchall()
    rows["return"] = np.array(returns, np.float64).reshape(-1)
    return rows


def locations_of_rows(
    rows: Mapping[str, Any], datasets: Mapping[int, str], shards: Mapping[int, str | None]
) -> pa.RecordBatch:
    """`changed_rows` as a batch of SCHEMA; the names belong to `dataset_pk` and `shard_pk`."""
    count = len(rows["pk"])
    shard = _named(rows["shard_pk"], shards)
    made: dict[str, Any] = {
        **rows,
        "usable": shard.is_valid(),
        "id": _uuids(rows["id"], count),
        "dataset": _named(rows["dataset_pk"], datasets),
        "shard": shard,
        "env": _dictionary(rows["env"]),
        "content": _contents(rows["content"], count),
    }
    columns = (made[field.name] for field in SCHEMA)
    arrays = [c if isinstance(c, pa.Array) else pa.array(c) for c in columns]
    arrays = [array.cast(field.type) for array, field in zip(arrays, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _named(column: NDArray[np.int64], names: Mapping[int, str | None]) -> pa.DictionaryArray:
    codes, place = np.unique(column, return_inverse=True)
    texts = [names[code] for code in codes.tolist()]
    valid = np.asarray([text is not None for text in texts], bool)[place]
    return pa.DictionaryArray.from_arrays(
        pa.array(place.astype(np.int32), mask=~valid),
        pa.array([text or "" for text in texts], pa.string()),
    )


def locations_of(
    columns: Mapping[str, Sequence[Any]], pks: Sequence[int], row_start: Sequence[int | None]
) -> pa.RecordBatch:
    """Values as SQLite gives them, by column of `trajectories`, as a batch of SCHEMA."""
    count = len(pks)
    shard = _dictionary(columns["shard"])
    made: dict[str, Any] = {
        "pk": np.asarray(pks, np.int64),
        "usable": shard.is_valid(),
        "train": np.asarray([purpose != "eval" for purpose in columns["purpose"]], bool),
        "id": _uuids("".join(columns["id"]).replace("-", ""), count),
        "dataset": _dictionary(columns["dataset"]),
        "shard": shard,
        "env": _dictionary(columns["env"]),
        "row_start": _integers(row_start, pa.int64()),
        "content": _contents("".join(text[:16] for text in columns["digest"]), count),
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
    """Nulls become 0: such a row is not `usable`, so the value is never read."""
    return pa.array(values, kind).fill_null(0)


def _uuids(digits: str, count: int) -> pa.Array:
    """Of 32 hexadecimal digits each."""
    raw = pa.py_buffer(bytes.fromhex(digits))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, raw])


def _contents(digits: str, count: int) -> NDArray[np.uint64]:
    """Of 16 hexadecimal digits each."""
    return np.frombuffer(bytes.fromhex(digits), ">u8", count).astype(np.uint64)
