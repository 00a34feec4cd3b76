"""Trajectories as a manifest lists them: columns of a few bytes each, beside the mirror's pieces.

    pk   usable   train   id   dataset   seq   shard   traj_idx   row_start   length   …

`usable`: it lies in a shard. `train`: its purpose is not evaluation. The others are those of
stepwell/manifest.py, in its types: selecting is a mask, and a manifest's block is a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from stepwell.manifest import SCHEMA as MANIFEST

OF_SELECTION = ("component", "weight")
"""Columns of a manifest that the selection gives, and not the trajectory."""
COLUMNS = [field for field in MANIFEST if field.name not in OF_SELECTION]
SCHEMA = pa.schema([("pk", pa.int64()), ("usable", pa.bool_()), ("train", pa.bool_()), *COLUMNS])
NEEDED: tuple[str, ...] = (
    *("id", "seq", "traj_idx", "length", "first_step", "return", "terminated", "truncated"),
    *("final_obs_valid", "env", "digest", "purpose"),
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
