"""A folder of Parquet files that pandas and DuckDB read directly, and back into trajectories.

    spec.json               the env spec: spaces, roles, vocabularies
    trajectories.parquet    one row per trajectory: traj_idx, id, length, return, env, policy, …
    steps-00000.parquet …   T+1 rows per trajectory: traj_idx, t, obs.<key>, action, reward, …
    README.md               tells Hugging Face's `load_dataset(FOLDER)` to take the steps

Loses nothing of the arrays; a trajectory read back has the digest of the one exported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepwell._export import licence
from stepwell._export.selection import Selection
from stepwell._folders import EXPORT
from stepwell.codec import HEADER_KEY, from_batch, to_batch
from stepwell.errors import InvalidData
from stepwell.metadata import TrajectoryMetadata
from stepwell.schema import arrow_schema
from stepwell.shard_rows import plain_batch
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

SPEC, TRAJECTORIES = EXPORT
STEPS = "steps-{:05d}.parquet"
CARD = """\
---
{header}configs:
- config_name: steps
  data_files: steps-*.parquet
  default: true
---

{trajectories} trajectories of {dataset}, {steps} steps, exported by Stepwell. `steps-*.parquet` has
T+1 rows for each, `trajectories.parquet` one; both have `traj_idx`. `spec.json` has the spaces.
"""
GROUP_ROWS, GROUP_BYTES, FILE_BYTES = 20_000, 16 << 20, 256 << 20
_TEXTS = ("env", "episode_id", "policy", "collector", "run", "purpose", "source")
ABOUT = pa.schema(
    [
        ("traj_idx", pa.int64()),
        ("id", pa.string()),
        ("length", pa.int64()),
        ("return", pa.float64()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("final_obs_valid", pa.bool_()),
        *((name, pa.string()) for name in _TEXTS),
        ("first_step", pa.int64()),
        ("seed", pa.int64()),
        ("success", pa.bool_()),
        ("tags", pa.list_(pa.string())),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("started_at", pa.float64()),
    ]
)


def write(folder: Path, chosen: Selection, trajectories: Iterable[Trajectory]) -> None:
    """Write the three kinds of files. Holds one row group, and one row per trajectory."""
    folder.mkdir()
    spec = chosen.spec
    (folder / SPEC).write_text(json.dumps(spec.to_json(), indent=1) + "\n")
    counts = {"trajectories": chosen.trajectories, "steps": chosen.steps}
    card = CARD.format(dataset=chosen.dataset, header=licence.header(chosen), **counts)
    card += licence.text(chosen)
    (folder / "README.md").write_text(card)
    rows = arrow_schema(spec)
    numbers = [pa.field("traj_idx", pa.int64(), nullable=False), pa.field("t", pa.int32(), False)]
    schema = pa.schema([*numbers, *rows], metadata=rows.metadata)
    about: list[dict[str, Any]] = []
    group: list[pa.RecordBatch] = []
    writer: pq.ParquetWriter | None = None
    files = file_bytes = size = 0
    try:
        for number, trajectory in enumerate(trajectories):
            batch = to_batch(trajectory, spec, rows)
            counted = [
                pa.array(np.full(batch.num_rows, number, np.int64)),
                pa.array(np.arange(batch.num_rows, dtype=np.int32)),
            ]
            group.append(pa.RecordBatch.from_arrays([*counted, *batch.columns], schema=schema))
            about.append(_about(number, trajectory))
            size += batch.nbytes
            if sum(b.num_rows for b in group) < GROUP_ROWS and size < GROUP_BYTES:
                continue
            if writer is None:
                writer, files = _open(folder / STEPS.format(files), schema), files + 1
            writer.write_table(pa.Table.from_batches(group), row_group_size=1 << 30)
            file_bytes += size
            group, size = [], 0
            if file_bytes >= FILE_BYTES:
                writer.close()
                writer, file_bytes = None, 0
        if group:
            writer = writer or _open(folder / STEPS.format(files), schema)
            writer.write_table(pa.Table.from_batches(group), row_group_size=1 << 30)
    finally:
        if writer is not None:
            writer.close()
    pq.write_table(pa.Table.from_pylist(about, schema=ABOUT), folder / TRAJECTORIES)
    chosen.losses.always.append("flags, notes, and tags changed after a trajectory was stored")


def read(folder: Path) -> tuple[EnvSpec, int, Iterator[Trajectory]]:
    """(spec, number, trajectories) of a folder that `write` wrote, with the ids they had.

    Raises `InvalidData` for another or a damaged folder, also while iterating.
    """
    try:
        spec = EnvSpec.from_json(json.loads((folder / SPEC).read_text()))
        about = pq.read_table(folder / TRAJECTORIES)
        if not about.schema.equals(ABOUT):
            raise ValueError(f"{TRAJECTORIES} has other columns")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _refused(folder, error) from None
    return spec, about.num_rows, _trajectories(folder, spec, about)


def _trajectories(folder: Path, spec: EnvSpec, about: pa.Table) -> Iterator[Trajectory]:
    schema = arrow_schema(spec)
    pieces = _row_groups(folder)
    rest: pa.Table | None = None
    try:
        for start in range(0, about.num_rows, 1024):
            for row in about.slice(start, 1024).to_pylist():
                rows = row["length"] + 1
                while rest is None or rest.num_rows < rows:
                    more = next(pieces)
                    rest = more if rest is None else pa.concat_tables([rest, more])
                if rest["traj_idx"][0].as_py() != row["traj_idx"]:
                    raise ValueError(f"the steps of trajectory {row['traj_idx']} are missing")
                header = {HEADER_KEY: json.dumps(_header(row)).encode()}
                yield from_batch(plain_batch(rest.slice(0, rows), schema), header, spec)
                rest = rest.slice(rows) if rest.num_rows > rows else None
    except StopIteration:
        raise _refused(folder, "rows are missing in its steps files") from None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise _refused(folder, error) from None


def _row_groups(folder: Path) -> Iterator[pa.Table]:
    number = 0
    while (path := folder / STEPS.format(number)).exists():
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)
        number += 1


def _refused(folder: Path, error: object) -> InvalidData:
    return InvalidData(
        f"{folder} cannot be read: {error}",
        expected="a folder written by stepwell export --format parquet",
    )


def _about(number: int, trajectory: Trajectory) -> dict[str, Any]:
    metadata = trajectory.metadata
    row = {field.name: getattr(metadata, field.name) for field in fields(TrajectoryMetadata)}
    row["metrics"] = list(metadata.metrics.items())
    header = trajectory.header()
    del header["about"]
    return row | header | {"traj_idx": number, "return": trajectory.total_reward}


def _header(row: dict[str, Any]) -> dict[str, Any]:
    """The trajectory's header, as `Trajectory.header` has it."""
    names = [field.name for field in fields(TrajectoryMetadata)]
    about = {name: row[name] for name in names if row[name] is not None}
    metadata = TrajectoryMetadata(**about | {"metrics": dict(row["metrics"])})
    flags = ("id", "length", "terminated", "truncated", "final_obs_valid")
    return {name: row[name] for name in flags} | {"about": metadata.to_json()}


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    lists = [
        f"{field.name}.list.item"
        for field in schema
        if pa.types.is_fixed_size_list(field.type)
        and field.type.value_type in (pa.float32(), pa.float64())
    ]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(lists, "BYTE_STREAM_SPLIT"),
        use_compliant_nested_type=False,
    )
