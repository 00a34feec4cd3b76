"""A folder of Parquet files that pandas and DuckDB read directly; _exported.py reads it back.

    spec.json               the env spec: spaces, roles, vocabularies
    trajectories.parquet    one row per trajectory: traj_idx, id, length, return, env, policy, …
    steps-00000.parquet …   T+1 rows per trajectory: traj_idx, t, obs.<key>, action, reward, …
    README.md               tells Hugging Face's `load_dataset(FOLDER)` to take the steps

Loses nothing of the arrays; a trajectory read back has the digest of the one exported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepwell._exported import ABOUT, SPEC, STEPS, TRAJECTORIES
from stepwell.codec import to_batch
from stepwell.metadata import TrajectoryMetadata
from stepwell.schema import arrow_schema
from stepwell.trajectory import Trajectory
from workbench.export import licence
from workbench.export.selection import Selection

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


def _about(number: int, trajectory: Trajectory) -> dict[str, Any]:
    metadata = trajectory.metadata
    row = {field.name: getattr(metadata, field.name) for field in fields(TrajectoryMetadata)}
    row["metrics"] = list(metadata.metrics.items())
    header = trajectory.header()
    del header["about"]
    return row | header | {"traj_idx": number, "return": trajectory.total_reward}


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
