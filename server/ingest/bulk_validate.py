"""Checks many short trajectories of a body at once: their rows are joined, and each rule is applied
to a column of all of them instead of to each.

The rules are those of `stepwell.codec.from_batch`, `Trajectory` and `Trajectory.check`. Wherever
one is not met, or a column is not as `to_batch` writes it, the answer is None: the caller then
reads the trajectories one by one, which finds the culprit and says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import uuid_utils
from numpy.typing import NDArray

from stepwell.codec import read_header
from stepwell.errors import InvalidData
from stepwell.metadata import TrajectoryMetadata
from stepwell.schema import ACTION_KNOWN, IS_LAST, REWARD, TERMINATED, TRUNCATED, column_names
from stepwell.spaces import Array, EnvSpec, Space, all_finite, why_outside
from stepwell.trajectory import Trajectory

Batch = tuple[pa.RecordBatch, dict[bytes, bytes], memoryview]
SHORT_ROWS = 64
"""Longer trajectories take little longer one by one."""
GROUP_BYTES, GROUP = 1 << 20, 1024
"""Limits of one group, whose rows are held in memory twice during validation."""


def from_batches(batches: Sequence[Batch], spec: EnvSpec) -> list[Trajectory] | None:
    """The trajectories of `batches`, which are valid Arrow of the spec's schema; None if any of
    them must be looked at alone."""
    try:
        headers = [read_header(metadata) for _, metadata, _ in batches]
        about = [TrajectoryMetadata.from_json(header.get("about", {})) for header in headers]
        ids = [header.get("id", "") for header in headers]
        if not all(isinstance(i, str) and str(uuid_utils.UUID(i)) == i for i in ids):
            return None
    except (InvalidData, ValueError):
        return None
    rows = np.array([batch.num_rows for batch, _, _ in batches])
    if [header.get("length") for header in headers] != (rows - 1).tolist() or rows.min() < 2:
        return None
    columns = _Columns([batch for batch, _, _ in batches], rows)
    flags = [columns.ends(name, headers) for name in (TERMINATED, TRUNCATED)]
    if not all(flags) or not columns.is_last_at_ends():
        return None
    if any(header["terminated"] and header["truncated"] for header in headers):
        return None
    obs, actions, infos = (columns.arrays(spec, group) for group in ("obs", "action", "info"))
    rewards = columns.scalars(REWARD, nullable=True)
    known = columns.scalars(ACTION_KNOWN, nullable=True) if spec.action_known else None
    if rewards is None or obs is None or actions is None or infos is None:
        return None
    if (spec.action_known and known is None) or not _fit(spec, obs, actions, rewards, columns.last):
        return None
    made = []
    for number, (start, stop) in enumerate(zip(columns.starts, columns.stops, strict=True)):
        header, end = headers[number], stop - 1
        made.append(
            Trajectory.checked(
                obs={key: array[start:stop] for key, array in obs.items()},
                actions={key: array[start:end] for key, array in actions.items()},
                rewards=rewards[start:end],
                terminated=header["terminated"],
                truncated=header["truncated"],
                final_obs_valid=header.get("final_obs_valid") is not False,
                action_known=None if known is None else known[start:end],
                infos={key: array[start:stop] for key, array in infos.items()},
                metadata=about[number],
                id=ids[number],
            )
        )
    return made


def _fit(
    spec: EnvSpec,
    obs: dict[str, Array],
    actions: dict[str, Array],
    rewards: Array,
    last: NDArray[np.bool_],
) -> bool:
    """What `Trajectory` and `Trajectory.check` ask of values. In the last rows are no actions."""
    if not all_finite(rewards[~last]):
        return False
    for key, array in obs.items():
        if array.dtype.kind == "f":
            if not all_finite(array):
                return False
        elif why_outside(spec.observations[key], array):
            return False
    for key, array in actions.items():
        taken = array[~last]
        if taken.dtype.kind == "f" and not all_finite(taken):
            return False
        if why_outside(spec.actions[key], taken):
            return False
    return True


class _Columns:
    """The joined rows of several trajectories; None and False for what is not as expected."""

    def __init__(self, batches: list[pa.RecordBatch], rows: NDArray[np.int64]):
        self._joined = pa.concat_batches(batches)
        stops = np.cumsum(rows)
        self.starts, self.stops = (stops - rows).tolist(), stops.tolist()
        self._last = stops - 1
        self.last = np.zeros(self._joined.num_rows, np.bool_)
        """The last row of each, which holds only an observation."""
        self.last[self._last] = True

    def ends(self, name: str, headers: list[dict[str, Any]]) -> bool:
        """Whether a flag is set in the last transition of those whose header says so alone."""
        said = [header.get(name) for header in headers]
        if not all(isinstance(flag, bool) for flag in said):
            return False
        wanted = np.zeros(len(self.last), np.bool_)
        wanted[self._last[np.array(said, np.bool_)] - 1] = True
        found = self.scalars(name, nullable=False)
        return found is not None and np.array_equal(found, wanted)

    def is_last_at_ends(self) -> bool:
        found = self.scalars(IS_LAST, nullable=False)
        return found is not None and np.array_equal(found, self.last)

    def scalars(self, name: str, *, nullable: bool) -> Array | None:
        column = self._joined.column(name)
        if not self._nulls_fit(column, nullable):
            return None
        if pa.types.is_boolean(column.type):
            bits = np.frombuffer(column.buffers()[1], np.uint8)
            flags = np.unpackbits(bits, count=column.offset + len(column), bitorder="little")
            return flags[column.offset :].view(np.bool_)
        return self._values(column, column.type.to_pandas_dtype(), 1)

    def arrays(self, spec: EnvSpec, group: str) -> dict[str, Array] | None:
        found: dict[str, Array] = {}
        for name, key, space in column_names(spec)[group]:
            array = self._array(name, space, nullable=group == "action")
            if array is None:
                return None
            found[key] = array
        return found

    def _array(self, name: str, space: Space, *, nullable: bool) -> Array | None:
        if space.shape == ():
            return self.scalars(name, nullable=nullable)
        column, size = self._joined.column(name), math.prod(space.shape)
        if not self._nulls_fit(column, nullable):
            return None
        values = column
        if space.dtype != "uint8":
            values = column.values
            if values.null_count or column.offset or len(values) != len(column) * size:
                return None
        array = self._values(values, np.dtype(space.dtype), size)
        if array is None or (space.dtype == "bool" and bool((array.view(np.uint8) > 1).any())):
            return None
        return array.reshape(len(column), *space.shape)

    def _values(self, column: pa.Array, dtype: Any, size: int) -> Array | None:
        """The numbers of the rows, without a copy."""
        count = len(self.last) * size
        data, itemsize = column.buffers()[1], np.dtype(dtype).itemsize
        if data is None or column.offset or data.size < count * itemsize:
            return None
        return np.frombuffer(data, dtype, count)

    def _nulls_fit(self, column: pa.Array, nullable: bool) -> bool:
        """No NULLs; in a nullable column, exactly in the last rows."""
        if not nullable:
            return bool(column.null_count == 0)
        if column.null_count != len(self._last):
            return False
        return bool(column.is_null().to_numpy(zero_copy_only=False)[self._last].all())
