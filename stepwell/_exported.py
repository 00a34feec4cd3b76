"""A folder of `stepwell export --format parquet` (_export/parquet.py), back into trajectories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stepwell._folders import EXPORT
from stepwell.codec import HEADER_KEY, from_batch
from stepwell.errors import InvalidData
from stepwell.metadata import TrajectoryMetadata
from stepwell.schema import arrow_schema
from stepwell.shard_rows import plain_batch
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

SPEC, TRAJECTORIES = EXPORT
STEPS = "steps-{:05d}.parquet"
README = "README.md"
HEADER = re.compile(r'\A---\n(?:.*\n)*?license_name: (".*")\n(?:.*\n)*?---\n')
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


def licence_of(folder: Path) -> str:
    """The licence in the README of an exported folder; "" without one."""
    try:
        found = HEADER.match((folder / README).read_text())
        return str(json.loads(found[1])) if found else ""
    except (OSError, ValueError):
        return ""


def _header(row: dict[str, Any]) -> dict[str, Any]:
    """The trajectory's header, as `Trajectory.header` has it."""
    names = [field.name for field in fields(TrajectoryMetadata)]
    about = {name: row[name] for name in names if row[name] is not None}
    metadata = TrajectoryMetadata(**about | {"metrics": dict(row["metrics"])})
    flags = ("id", "length", "terminated", "truncated", "final_obs_valid")
    return {name: row[name] for name in flags} | {"about": metadata.to_json()}
