"""Columns of a manifest per trajectory, a few bytes each, stored beside the mirror's pieces.

    pk   usable   train   id   dataset   seq   shard   traj_idx   row_start   length   …

`usable`: the trajectory is in a shard. `train`: its purpose is not evaluation. The other columns
have the names and types of stepwell/manifest.py: selecting is a mask, and a manifest's block is a
slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from server.index.dialect import Raw, joined_sql, json_list_sql
from stepwell.manifest import SCHEMA as MANIFEST

SCHEMA = pa.schema(
    [
        *(("pk", pa.int64()), ("usable", pa.bool_()), ("train", pa.bool_())),
        # The selection adds those two.
        *(field for field in MANIFEST if field.name not in ("component", "weight")),
    ]
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
    "id": joined_sql("t.id", ""),
    "content": joined_sql("substr(t.digest, 1, 16)", ""),
    "env": json_list_sql("t.env"),
}
_COLUMNS = [*map(joined_sql, _INTEGERS.values()), *_TEXTS.values()]


def read_columns(db: Raw, rows: str, *given: int) -> pa.RecordBatch:
    """Rows of the index as a batch of SCHEMA; `rows` is the FROM clause (`trajectories AS t` …),
    with its order. Call it inside a transaction.

    The database joins each column into one text, which NumPy parses in half the time that one
    Python object per value takes.
    """
    found = db.execute(f"SELECT {', '.join(_COLUMNS)} FROM {rows}", given).fetchone()
    columns = dict(zip((*_INTEGERS, *_TEXTS), found, strict=True))
    made: dict[str, Any] = {
        name: np.fromstring(columns[name] or "", np.int64, sep=",") for name in _INTEGERS
    }
    count = len(made["pk"])
    shards: dict[int, str | None] = {0: None}
    for pk in np.unique(made["shard_pk"]).tolist():
        if pk:
            row = db.execute("SELECT id FROM shards WHERE pk = ?", (pk,)).fetchone()
            shards[pk] = row and row[0]  # None: its row is lost
    made["shard"] = _named(made["shard_pk"], shards)
    made["dataset"] = _named(made["dataset_pk"], dict(db.execute("SELECT pk, name FROM datasets")))
    made["usable"] = pc.and_(made["shard"].is_valid(), made["dataset"].is_valid())
    # As exact text this column would take as long as all the others together.
    returns = db.execute(f'SELECT t."return" FROM {rows}', given).fetchall()
    made["return"] = np.array(returns, np.float64).reshape(-1)
    ids = pa.py_buffer(bytes.fromhex((columns["id"] or "").replace("-", "")))
    made["id"] = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, ids])
    contents = bytes.fromhex(columns["content"] or "")
    made["content"] = np.frombuffer(contents, ">u8", count).astype(np.uint64)
    made["env"] = pa.array(orjson.loads(columns["env"]), pa.string()).dictionary_encode()
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column)
        for column in (made[field.name] for field in SCHEMA)
    ]
    arrays = [array.cast(field.type) for array, field in zip(arrays, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _named(column: NDArray[np.int64], names: Mapping[int, str | None]) -> pa.DictionaryArray:
    codes, place = np.unique(column, return_inverse=True)
    texts = [names.get(code) for code in codes.tolist()]
    valid = np.asarray([text is not None for text in texts], bool)[place]
    return pa.DictionaryArray.from_arrays(
        pa.array(place.astype(np.int32), mask=~valid),
        pa.array([text or "" for text in texts], pa.string()),
    )
