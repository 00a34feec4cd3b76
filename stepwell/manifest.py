"""Manifests: tables of the trajectories in a snapshot, one row each, without Python objects.

    component  dataset  seq   id   weight  shard  traj_idx  row_start  length …
    0          maze     1     …    1.0     sh_…   0         0          200      ┐ block (0, maze, 0)
    0          maze     2     …    1.0     sh_…   1         201        180      ┘
    0          maze     8200  …    1.0     sh_…   7         1407       200        block (0, maze, 1)

Rows are ordered by (component, dataset, seq). A *block* is the rows of one component and dataset
whose `seq // BLOCK` agree: two manifests of a growing dataset share nearly all of their blocks. So
the changes from one to the other are whole blocks: those that are new or different, and the names
of those that are gone. `GET /v1/snapshots/{id}/manifest?since=…` sends just these.

    table = client.manifest(first)
    table = apply(table, client.manifest(second, since=first))     # == client.manifest(second)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

BLOCK = 8192
"""Sequence numbers per block."""

_NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("id", pa.binary(16)),  # the UUID's bytes; `id_texts` writes them out
        ("dataset", _NAME),
        ("seq", pa.int64()),
        ("component", pa.int16()),  # which `from`
        ("weight", pa.float64()),
        ("shard", _NAME),
        ("traj_idx", pa.int32()),
        ("row_start", pa.int64()),  # first row in the shard
        ("length", pa.int32()),  # T; the shard has T+1 rows
        ("first_step", pa.int32()),
        ("return", pa.float64()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("final_obs_valid", pa.bool_()),
        ("env", _NAME),
        ("content", pa.uint64()),  # first 8 bytes of the content's sha256
    ]
)
ID_KEY, DIGEST_KEY, SHARES_KEY = b"snapshot", b"digest", b"shares"
SINCE_KEY, GONE_KEY = b"since", b"gone"
"""In changes only: the earlier snapshot, and its blocks that are not in this one."""

Key = tuple[int, str, int]
"""(component, dataset, seq // BLOCK)."""

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_DASHES = (8, 13, 18, 23)
_DIGITS = [i for i in range(36) if i not in _DASHES]


def blocks(table: pa.Table) -> dict[Key, pa.RecordBatch]:
    """Return the rows of each block, in order. A record batch of one block is used unchanged."""
    found: dict[Key, list[pa.RecordBatch]] = {}
    for batch in table.to_batches():
        for piece in _pieces(batch):
            found.setdefault(key_of(piece), []).append(piece)
    return {
        key: pieces[0] if len(pieces) == 1 else _joined(pieces) for key, pieces in found.items()
    }


def key_of(batch: pa.RecordBatch, row: int = 0) -> Key:
    """The block that a row belongs to."""
    component, dataset = batch["component"][row].as_py(), batch["dataset"][row].as_py()
    return int(component), str(dataset), int(batch["seq"][row].as_py()) // BLOCK


def table_of(batches: Iterable[pa.RecordBatch], metadata: Mapping[bytes, bytes]) -> pa.Table:
    """Return a manifest of blocks, each of which remains a separate chunk."""
    schema = SCHEMA.with_metadata(dict(metadata))
    return pa.Table.from_batches(
        [b.replace_schema_metadata(dict(metadata)) for b in batches], schema
    )


def is_changes(table: pa.Table) -> bool:
    """Whether a table holds changes from an earlier manifest, and not a whole one."""
    return SINCE_KEY in (table.schema.metadata or {})


def gone(changes: pa.Table) -> list[Key]:
    """The blocks that the earlier manifest has and the later one has not."""
    listed = json.loads((changes.schema.metadata or {}).get(GONE_KEY, b"[]"))
    return [(int(component), str(dataset), int(number)) for component, dataset, number in listed]


def apply(before: pa.Table, changes: pa.Table) -> pa.Table:
    """Return the later manifest: `before` with the changes applied. Raises ValueError if they
    belong to another snapshot than `before`."""
    metadata = dict(changes.schema.metadata or {})
    since, gone_keys = metadata.pop(SINCE_KEY, b""), gone(changes)
    metadata.pop(GONE_KEY, None)
    have = (before.schema.metadata or {}).get(ID_KEY, b"")
    if since != have:
        raise ValueError(f"changes since snapshot {since!r} do not apply to {have!r}")
    merged = blocks(before)
    for key in gone_keys:
        merged.pop(key, None)
    merged |= blocks(changes)
    return table_of((merged[key] for key in sorted(merged)), metadata)


def id_texts(ids: NDArray[np.void] | NDArray[np.uint8]) -> list[str]:
    """Return UUIDs as text; `ids` has 16 bytes for each."""
    raw = np.ascontiguousarray(ids).view(np.uint8).reshape(-1, 16)
    text = np.full((len(raw), 36), ord("-"), np.uint8)
    digits = np.empty((len(raw), 32), np.uint8)
    digits[:, 0::2], digits[:, 1::2] = _HEX[raw >> 4], _HEX[raw & 15]
    text[:, _DIGITS] = digits
    whole = text.tobytes().decode("ascii")
    return [whole[at : at + 36] for at in range(0, len(whole), 36)]


def id_bytes(column: pa.ChunkedArray | pa.Array) -> NDArray[np.void]:
    """A column of UUIDs, 16 bytes or text, as an array of 16 bytes each."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_fixed_size_binary(array.type):
        start = array.offset * 16
        buffer = array.buffers()[1]
        return np.frombuffer(buffer, np.uint8)[start : start + 16 * len(array)].view("V16")
    texts = array.cast(pa.string()).to_pylist()
    return np.frombuffer(bytes.fromhex("".join(texts).replace("-", "")), "V16")


def _pieces(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """A batch cut where one block ends and the next begins."""
    if not batch.num_rows:
        return []
    if key_of(batch) == key_of(batch, batch.num_rows - 1):  # they are in order
        return [batch]
    number = batch["seq"].to_numpy() // BLOCK
    component = batch["component"].to_numpy()
    dataset = batch["dataset"].indices.to_numpy()
    edge = np.flatnonzero(
        (np.diff(number) != 0) | (np.diff(component) != 0) | (np.diff(dataset) != 0)
    )
    cuts = [0, *(edge + 1).tolist(), batch.num_rows]
    return [batch.slice(a, b - a) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def _joined(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(pieces).combine_chunks().to_batches()[0]
