"""Trajectories out of a shard's Parquet file (server/storage/shards.py draws its layout)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stepwell.codec import HEADER_KEY, from_batch
from stepwell.errors import CodecError
from stepwell.schema import arrow_schema, spec_of
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

SHARD_FORMAT = 2
"""1: the footer holds the table of trajectories itself."""
TRAJECTORIES_KEY = b"stepwell.trajectories"
"""Footer: where the file holds the table of trajectories, {"offset", "bytes"}."""


def read_shard(path: Path, traj_idx: Sequence[int]) -> Iterator[Trajectory]:
    """The chosen trajectories in ascending order of `traj_idx`, bit for bit as they were posted.

    Holds the row groups of one trajectory in memory. Raises `CodecError` for a damaged file.
    """
    try:
        with open(path, "rb") as raw, pq.ParquetFile(raw, page_checksum_verification=True) as file:
            described = file.metadata.metadata
            spec = shard_spec(described)
            entries = json.loads(trajectory_table(raw, described))
            schema = arrow_schema(spec)
            edges = [0]
            for index in range(file.num_row_groups):
                edges.append(edges[-1] + file.metadata.row_group(index).num_rows)
            loaded: range | None = None
            table = None
            for number in sorted(traj_idx):
                entry = entries[number]
                header, start = entry["header"], entry["row_start"]
                stop = start + header["length"] + 1
                first = max(i for i, edge in enumerate(edges) if edge <= start)
                wanted = range(first, next(i for i, edge in enumerate(edges) if edge >= stop))
                if wanted != loaded:
                    loaded, table = wanted, file.read_row_groups(list(wanted), use_threads=False)
                assert table is not None
                batch = plain_batch(table.slice(start - edges[first], stop - start), schema)
                yield from_batch(batch, {HEADER_KEY: json.dumps(header).encode()}, spec)
    except (pa.ArrowException, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"{path.name} is damaged: {error}") from None


def shard_spec(described: Mapping[bytes, bytes]) -> EnvSpec:
    """The spec that a shard's footer names. Raises `CodecError`."""
    return spec_of(pa.schema([], metadata=described), newest=SHARD_FORMAT)


def trajectory_table(file: Any, described: Mapping[bytes, bytes]) -> bytes:
    """The table of trajectories of the open shard with this footer: JSON, one object for each."""
    said = described[TRAJECTORIES_KEY]
    if said.startswith(b"["):  # format 1
        return said
    place = json.loads(said)
    file.seek(place["offset"])
    table: bytes = file.read(place["bytes"])
    return table


def plain_batch(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a shard in the wire format: without the numbering, in one piece."""
    columns = [_whole(column) for column in table.select(schema.names).columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """One array. Where a vector is NULL, Parquet also returns NULL elements; these are removed."""
    array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    # Also a NULL outside of these rows makes elements NULL, which are in `values`.
    if not pa.types.is_fixed_size_list(array.type) or not array.values.null_count:
        return array
    size = array.type.list_size
    values = array.values.slice(array.offset * size, len(array) * size)
    plain = pa.Array.from_buffers(
        values.type, len(values), [None, values.buffers()[1]], offset=values.offset
    )
    return pa.FixedSizeListArray.from_arrays(plain, type=array.type, mask=array.is_null())
