"""A snapshot's digest covers which trajectories, with which content and weights; not where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from server.snapshots.selection import Block, Blocks, difference, digest_of
from stepwell.manifest import SCHEMA

ROWS = 3
WHAT = ("seq", "id", "weight", "content")
"""Columns of a manifest that the digest covers; those of a block's key are in it, too."""
WHERE = ("shard", "traj_idx", "row_start")
"""Compaction changes these."""


def batch(**changed: Any) -> pa.RecordBatch:
    """Rows whose values all differ; `changed` replaces those of a column."""
    values: dict[str, Any] = {
        "id": [bytes([n] * 16) for n in range(ROWS)],
        "dataset": ["d"] * ROWS,
        "shard": [f"s{n}" for n in range(ROWS)],
        "env": ["E-v0"] * ROWS,
        "weight": np.array([0.5, 1.0, 2.0]),
        **{name: [True, False, True] for name in ("terminated", "truncated", "final_obs_valid")},
    }
    for number, field in enumerate(SCHEMA):
        values.setdefault(field.name, [100 * number + n for n in range(ROWS)])
    values |= changed
    arrays = []
    for field in SCHEMA:
        encoded = pa.types.is_dictionary(field.type)
        array = pa.array(values[field.name], pa.string() if encoded else field.type)
        arrays.append(array.dictionary_encode() if encoded else array)
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def blocks(**changed: Any) -> Blocks:
    return {(0, "d", 0): Block(batch(**changed))}


OTHER = {
    "seq": [201, 202, 299], "id": [bytes([n + 1] * 16) for n in range(ROWS)],
    "weight": [0.5, 1.0, 2.5], "content": [2**64 - 1, 1, 2], "shard": ["s0", "s1", "other"],
    "traj_idx": [7, 8, 9], "row_start": [7, 8, 9],
}  # fmt: skip


@pytest.mark.parametrize("column", WHAT)
def test_other_trajectories_weights_or_contents_are_another_digest(column: str) -> None:
    """Also where one row of many differs in it, and nothing else."""
    same, other = blocks(), blocks(**{column: OTHER[column]})
    assert digest_of(same, [1.0]) == digest_of(blocks(), [1.0])
    assert digest_of(other, [1.0]) != digest_of(same, [1.0])
    assert difference(same, other).changed == other


@pytest.mark.parametrize("column", WHERE)
def test_another_location_is_the_same_digest_and_is_told(column: str) -> None:
    same, moved = blocks(), blocks(**{column: OTHER[column]})
    assert digest_of(moved, [1.0]) == digest_of(same, [1.0])
    assert difference(same, moved).changed == moved, "a client must fetch it from there"
    assert not difference(same, blocks()).changed


def test_component_dataset_and_shares_are_part_of_it() -> None:
    found = {digest_of({key: Block(batch())}, [1.0]) for key in ((0, "d", 0), (1, "d", 0))}
    found |= {digest_of({(0, "e", 0): Block(batch())}, [1.0]), digest_of(blocks(), [0.5, 0.5])}
    assert len(found) == 4


def test_a_slice_is_digested_as_a_copy_of_it() -> None:
    """Blocks are cut from batches without copying."""
    whole = batch()
    for start in range(ROWS):
        cut = whole.slice(start, 1)
        copied = pa.RecordBatch.from_pylist(cut.to_pylist(), schema=SCHEMA)
        assert Block(cut).digest == Block(copied).digest
