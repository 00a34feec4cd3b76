"""Files of annotations: a critic's values of the steps of some trajectories, as Parquet.

    dataset  trajectory  step  name  policy  q  v  advantage  weight      one row per step, T each
    NULL     where the action of a step is unknown

Pages have checksums, so `fsck --rebuild` restores annotations from these files alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from server.storage.store import Store, Stored, new_name
from stepwell.messages import TrajectoryValues

KEY = b"stepwell.annotation"
POINTS = ("annotation.after_tmp_fsync", "annotation.after_rename")
VALUES = ("q", "v", "advantage", "weight")
_TEXT = ("dataset", "trajectory", "name", "policy")
SCHEMA = pa.schema(
    [
        *(("dataset", pa.string()), ("trajectory", pa.string()), ("step", pa.int32())),
        *(("name", pa.string()), ("policy", pa.string())),
        *((name, pa.float32()) for name in VALUES),
    ]
)


class AnnotationHeader(BaseModel):
    """What describes a file, besides its rows."""

    dataset: str
    name: str
    policy: str
    trajectories: int
    steps: int
    created_at: float


@dataclass(frozen=True, slots=True)
class AnnotationFile:
    """A file as read."""

    header: AnnotationHeader
    trajectories: list[str]


class AnnotationDamaged(ValueError):
    """A file that cannot be read."""


def write_annotation(
    store: Store, header: AnnotationHeader, found: Sequence[TrajectoryValues]
) -> Stored:
    lengths = [len(one.q) for one in found]
    columns: dict[str, pa.Array] = {
        "dataset": pa.repeat(header.dataset, header.steps),
        "trajectory": pa.array(np.repeat([one.trajectory for one in found], lengths), pa.string()),
        "step": pa.array(np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])),
        "name": pa.repeat(header.name, header.steps),
        "policy": pa.repeat(header.policy, header.steps),
    }
    for name in VALUES:
        values = [value for one in found for value in getattr(one, name)]
        columns[name] = pa.array(values, pa.float32())
    schema = SCHEMA.with_metadata({KEY: header.model_dump_json()})
    table = pa.table(columns, schema=schema)

    def write(path: Path) -> None:
        pq.write_table(
            table, path, compression="zstd", use_dictionary=list(_TEXT), write_page_checksum=True
        )

    with store.new("annotations", new_name("an", ".parquet"), points=POINTS) as writer:
        writer.fill(write)
        return writer.commit()


def read_annotation(path: Path) -> AnnotationFile:
    """Raises `AnnotationDamaged`."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        header = AnnotationHeader.model_validate_json((table.schema.metadata or {})[KEY])
        ids = table["trajectory"].unique().to_pylist()
        if (len(ids), table.num_rows) != (header.trajectories, header.steps):
            raise AnnotationDamaged(f"{path.name}: other rows than its header says")
    except (OSError, pa.ArrowException, KeyError, ValidationError) as error:
        raise AnnotationDamaged(f"{path.name}: {error}") from None
    return AnnotationFile(header, ids)
