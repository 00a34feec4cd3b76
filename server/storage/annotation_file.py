"""Files of annotations: a critic's values of the steps of some trajectories, as Parquet.

    dataset  trajectory  step  name  policy  q  v  advantage  weight      one row per step, T each
    NULL     where the action of a step is unknown

Pages have checksums, so `fsck --rebuild` restores annotations from these files alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from server.storage.checksums import Source
from server.storage.store import Store, Stored, new_name
from stepwell.step_values import VALUES

KEY = b"stepwell.annotation"
POINTS = ("annotation.after_tmp_fsync", "annotation.after_rename")
GROUP_STEPS = 1 << 17
"""Rows of which texts are in memory at a time."""
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


def write_annotation(store: Store, header: AnnotationHeader, found: pa.Table) -> Stored:
    """`found`: a row for each trajectory, as stepwell/step_values.py has them."""
    lengths = pc.list_value_length(found[VALUES[0]]).to_numpy()
    row = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    flat = {name: pc.list_flatten(found[name]) for name in VALUES}
    schema = SCHEMA.with_metadata({KEY: header.model_dump_json()})

    def group(start: int) -> pa.Table:
        of = row[start : start + GROUP_STEPS]
        steps = np.arange(start, start + len(of)) - first[of]
        columns = {
            "dataset": pa.repeat(header.dataset, len(of)),
            "trajectory": found["trajectory"].take(pa.array(of)),
            "step": pa.array(steps.astype(np.int32)),
            "name": pa.repeat(header.name, len(of)),
            "policy": pa.repeat(header.policy, len(of)),
        }
        values = {name: array.slice(start, len(of)) for name, array in flat.items()}
        return pa.table(columns | values, schema=schema)

    def write(path: Path) -> None:
        with pq.ParquetWriter(
            path, schema, compression="zstd", use_dictionary=list(_TEXT), write_page_checksum=True
        ) as writer:
            for start in range(0, len(row), GROUP_STEPS):
                writer.write_table(group(start))

    with store.new("annotations", new_name("an", ".parquet"), points=POINTS) as writer:
        writer.fill(write)
        return writer.commit()


def read_annotation(source: Source) -> AnnotationFile:
    """Raises `AnnotationDamaged`."""
    try:
        with source.open() as file:
            table = pq.ParquetFile(file, page_checksum_verification=True).read()
        header = AnnotationHeader.model_validate_json((table.schema.metadata or {})[KEY])
        ids = table["trajectory"].unique().to_pylist()
        if (len(ids), table.num_rows) != (header.trajectories, header.steps):
            raise AnnotationDamaged(f"{source.name}: other rows than its header says")
    except (OSError, pa.ArrowException, KeyError, ValidationError) as error:
        raise AnnotationDamaged(f"{source.name}: {error}") from None
    return AnnotationFile(header, ids)
