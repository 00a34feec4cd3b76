"""The Parquet layout of a shard. This module writes it; the trainer and DuckDB read it too.

    traj_idx  t  | obs.<key> …  action …  reward  terminated  truncated  is_last  info.<key> …
    0         0  |
    0         …  |   the columns of stepwell.schema, T+1 rows per trajectory (trajectory.py)
    0         T  |
    1         0  |   sorted by (traj_idx, t); row groups hold whole trajectories

    PAR1 | table of trajectories | row groups | footer

The table has the headers and digests of the trajectories, as JSON; the footer says where it is, and
names format, spec and dataset. An index can be rebuilt from the files alone
(maintenance/rebuild.py). Readers of rows alone skip the table. In shards of format 1 it is in the
footer, which all readers hold, DuckDB more than once; compaction rewrites those with many
trajectories.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from server.storage.checksums import Source
from stepwell.codec import HEADER_KEY, from_batch
from stepwell.schema import FORMAT_KEY, SPEC_KEY, arrow_schema
from stepwell.shard_rows import (
    SHARD_FORMAT,
    TRAJECTORIES_KEY,
    plain_batch,
    shard_spec,
    trajectory_table,
)
from stepwell.spaces import EnvSpec

TRAJ_IDX, T = "traj_idx", "t"
DATASET_KEY = b"stepwell.dataset"
DIGEST_KEY = b"stepwell.digest"
"""Digest of dataset, spec and table: a rebuild must not use damaged ones."""
SMALL_FOOTER = 64 << 10
"""Bytes of a footer that may hold the table."""
MAX_GROUP_ROWS = 65_536
"""Only a longer trajectory, or one of more bytes than a group, is split over row groups."""
PAGE_BYTES = 2 << 20
"""Most bytes of a page, so that one is read in as much memory; but at least a row."""


class ShardDamaged(RuntimeError):
    """A shard whose content cannot be read or differs from the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of the shard's table: a trajectory without its arrays."""

    header: dict[str, Any]
    """Trajectory.header(): id, length, flags, about; as received, without labels patched later."""
    digest: str
    seq: int
    partition: str
    total_reward: float
    bytes: int
    created_at: float
    row_start: int = 0

    @property
    def id(self) -> str:
        return str(self.header["id"])

    @property
    def rows(self) -> int:
        return int(self.header["length"]) + 1

    def to_json(self) -> dict[str, Any]:
        # Not dataclasses.asdict: its deep copy of headers takes ten times as long as all the rest.
        return {name: getattr(self, name) for name in self.__slots__}

    def having(self, **changes: Any) -> Entry:
        """Like dataclasses.replace, in a fifth of its time."""
        return Entry(**(self.to_json() | changes))


@dataclass(frozen=True, slots=True)
class Footer:
    """A shard's description of itself."""

    dataset: str
    spec: EnvSpec
    entries: tuple[Entry, ...]


def shard_schema(spec: EnvSpec) -> pa.Schema:
    rows = arrow_schema(spec)
    head = [pa.field(TRAJ_IDX, pa.int32(), nullable=False), pa.field(T, pa.int32(), nullable=False)]
    metadata = {**rows.metadata, FORMAT_KEY: str(SHARD_FORMAT).encode()}
    return pa.schema([*head, *rows], metadata=metadata)


def shard_file(partition: str, shard_id: str) -> tuple[str, str]:
    """The folder and the name of a shard's file in the store."""
    return f"shards/{partition}", f"{shard_id}.parquet"


def write_shard(
    path: Path,
    dataset: str,
    spec: EnvSpec,
    entries: Sequence[Entry],
    batches: Iterator[pa.RecordBatch],
    *,
    group_rows: int = 20_000,
    group_bytes: int = 16 << 20,
) -> list[Entry]:
    """Write `entries` with their `batches` (in step) to `path`; returns them with `row_start`.

    Holds one row group in memory at a time. Not atomic: the store makes it so.
    """
    schema = shard_schema(spec)
    starts = accumulate((entry.rows for entry in entries), initial=0)
    placed = [
        entry if entry.row_start == row else entry.having(row_start=row)
        for entry, row in zip(entries, starts, strict=False)
    ]
    page_rows = max(1, min(1024, PAGE_BYTES // max(map(value_bytes, schema))))
    with (
        pa.OSFile(str(path), "wb") as file,
        pq.ParquetWriter(file, schema, write_batch_size=page_rows, **_options(schema)) as writer,
    ):
        said = _write_table(file, dataset, schema.metadata[SPEC_KEY], placed)
        writer.add_key_value_metadata({key.decode(): text.decode() for key, text in said.items()})
        group: list[pa.RecordBatch] = []
        rows = size = done = 0

        def close_group() -> None:
            nonlocal rows, size, done
            batch = _numbered(group, done, schema)
            longest = group_bytes * batch.num_rows // max(1, size)
            writer.write_batch(batch, row_group_size=max(1, min(MAX_GROUP_ROWS, longest)))
            done += len(group)
            group.clear()
            rows = size = 0

        for entry, batch in zip(entries, batches, strict=True):
            count = batch.num_rows
            assert entry.rows == count, "entry and batch differ in length"
            nbytes = batch.nbytes
            if group and (rows + count > group_rows or size + nbytes > group_bytes):
                close_group()
            group.append(batch)
            rows += count
            size += nbytes
        close_group()
    return placed


def _write_table(
    file: pa.NativeFile, dataset: str, spec: bytes, placed: list[Entry]
) -> dict[bytes, bytes]:
    """Write the table of trajectories; returns what the footer says of the shard."""
    table = orjson.dumps(placed)
    place = {"offset": file.tell(), "bytes": len(table)}
    file.write(table)
    described = {DATASET_KEY: dataset.encode(), SPEC_KEY: spec, TRAJECTORIES_KEY: table}
    return {
        **described,
        TRAJECTORIES_KEY: orjson.dumps(place),
        DIGEST_KEY: _digest(described),
    }


def _numbered(group: list[pa.RecordBatch], first: int, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of `group` as one batch, with traj_idx (from `first` on) and t before them."""
    lengths = [batch.num_rows for batch in group]
    numbers = np.repeat(np.arange(first, first + len(group), dtype=np.int32), lengths)
    times = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    columns = (group[0] if len(group) == 1 else pa.concat_batches(group)).columns  # a copy of many
    return pa.RecordBatch.from_arrays([pa.array(numbers), pa.array(times), *columns], schema=schema)


def value_bytes(field: pa.Field) -> int:
    """Bytes of a value; 1 for a flag, of which eight take a byte."""
    kind = field.type
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size * kind.value_type.bit_width // 8)
    return max(1, int(kind.bit_width) // 8)


def _options(schema: pa.Schema) -> dict[str, Any]:
    """Parquet settings for these columns: measured to be small and fast in DuckDB.

    Float vectors are split by byte (their high bytes repeat); no dictionaries, since there are no
    strings; min and max only of scalars, since those of vectors are of no use. float16 and integers
    stay plain: DuckDB refuses byte-stream-split on them.
    """
    encoding = {TRAJ_IDX: "DELTA_BINARY_PACKED", T: "DELTA_BINARY_PACKED"}
    statistics: list[str] = []
    for field in schema:
        if pa.types.is_fixed_size_list(field.type):
            if field.type.value_type in (pa.float32(), pa.float64()):
                encoding[f"{field.name}.list.item"] = "BYTE_STREAM_SPLIT"
        elif not pa.types.is_fixed_size_binary(field.type):
            statistics.append(field.name)
    return {
        "version": "2.6",
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": False,
        "column_encoding": encoding,
        "write_statistics": statistics,
        "write_page_checksum": True,
        "write_page_index": True,
        "sorting_columns": [pq.SortingColumn(0), pq.SortingColumn(1)],
        "store_schema": True,
        # Keeps the name of the inner field, so that the type read equals the type written.
        "use_compliant_nested_type": False,
    }


def read_footer(source: Source) -> Footer:
    """The shard's description of itself. Raises `ShardDamaged`."""
    with _readable(source):
        _, found = _described(source)
        entries = tuple(Entry(**entry) for entry in _loads(found[TRAJECTORIES_KEY]))
        return Footer(found[DATASET_KEY].decode(), shard_spec(found), entries)


@lru_cache(maxsize=1 << 14)
def table_in_footer(source: Source) -> bool:
    """Whether an immutable shard file is of format 1 and its footer not a small one."""
    with suppress(OSError, pa.ArrowException, KeyError, TypeError), source.open() as file:
        file.seek(-8, io.SEEK_END)
        if int.from_bytes(file.read(4), "little") > SMALL_FOOTER:
            metadata: dict[bytes, bytes] = pq.read_metadata(file).metadata
            return metadata[TRAJECTORIES_KEY].startswith(b"[")
    return False


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise ShardDamaged(f"{source.name}: its footer cannot be read ({error})") from None


def _described(source: Source) -> tuple[pq.FileMetaData, dict[bytes, bytes]]:
    """Parquet's own metadata, and what the shard says of itself, with the table itself."""
    with source.open() as file:
        metadata = pq.read_metadata(file)
        found: dict[bytes, bytes] = metadata.metadata
        found[TRAJECTORIES_KEY] = trajectory_table(file, found)
    described = {key: found[key] for key in (DATASET_KEY, SPEC_KEY, TRAJECTORIES_KEY)}
    # Shards of earlier versions have no digest.
    if found.get(DIGEST_KEY, b"") not in (b"", _digest(described)):
        raise ValueError("its digest differs")
    return metadata, found


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)  # five times as fast as json
    except orjson.JSONDecodeError:
        return json.loads(text)  # which reads the NaN that it writes


def _digest(described: dict[bytes, bytes]) -> bytes:
    """sha256 of the shard's description, in hexadecimal."""
    sha = hashlib.sha256()
    for key in sorted(described):
        sha.update(b"%s %d\n" % (key, len(described[key])))
        sha.update(described[key])
    return sha.hexdigest().encode()


@dataclass(frozen=True, slots=True)
class Contents:
    """What finds one trajectory of a shard."""

    metadata: pq.FileMetaData
    spec: EnvSpec
    entries: tuple[bytes, ...]
    """Each as JSON, which takes less memory than objects."""


@lru_cache(maxsize=8)
def contents_of(source: Source) -> Contents:
    """Read the contents of an immutable shard file. Raises `ShardDamaged`."""
    with _readable(source):
        metadata, found = _described(source)
        # Not orjson.dumps, whose bytes keep kilobytes more than they need.
        entries = tuple(json.dumps(one).encode() for one in _loads(found[TRAJECTORIES_KEY]))
        return Contents(metadata, shard_spec(found), entries)


def read_batches(source: Source) -> Iterator[tuple[Entry, pa.RecordBatch]]:
    """Every trajectory of a shard in order, one row group in memory at a time."""
    footer = read_footer(source)
    schema = arrow_schema(footer.spec)
    try:
        with (
            source.open() as raw,
            pq.ParquetFile(raw, page_checksum_verification=True) as file,
        ):
            # Not iter_batches: its batches cross the ends of row groups, so wide rows that
            # compress well would be decoded by the gigabyte.
            groups = map(file.read_row_group, range(file.num_row_groups))
            rest: pa.Table | None = None
            for entry in footer.entries:
                while rest is None or rest.num_rows < entry.rows:
                    more = next(groups)
                    rest = more if rest is None else pa.concat_tables([rest, more])
                yield entry, plain_batch(rest.slice(0, entry.rows), schema)
                rest = rest.slice(entry.rows) if rest.num_rows > entry.rows else None
    except (OSError, pa.ArrowException, StopIteration) as error:
        raise ShardDamaged(f"{source.name}: {error}") from None


def entry_of(source: Source, traj_idx: int) -> tuple[Entry, EnvSpec]:
    """One row of the shard's table. Raises `ShardDamaged`."""
    contents = contents_of(source)
    with _readable(source):
        return Entry(**_loads(contents.entries[traj_idx])), contents.spec


def groups_of(metadata: pq.FileMetaData, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold rows `start` … `stop`, and the number of their first row."""
    groups: list[int] = []
    first = row = 0
    for index in range(metadata.num_row_groups):
        rows = metadata.row_group(index).num_rows
        if row < stop and row + rows > start:
            first = row if not groups else first
            groups.append(index)
        row += rows
    return groups, first


def check_digest(entry: Entry, batch: pa.RecordBatch, spec: EnvSpec) -> None:
    """Compare with the digest that was acknowledged. Raises `ShardDamaged`, `InvalidData`."""
    header = {HEADER_KEY: json.dumps(entry.header).encode()}
    if from_batch(batch, header, spec).digest != entry.digest:
        raise ShardDamaged(f"{entry.id}: its content is not what was acknowledged")
