"""Windows from memory-mapped columns: one fancy index per field and batch.

Each shard's column is a mapped file at some address in memory. Row addresses are byte offsets from
the lowest mapping, so numpy can view all mappings as one array, in which element i is the `span`
bytes that begin at address i:

    lowest mapping          another mapping                 …
    |header r0 r1 r2 r3 …|        |header r0 r1 …|
    element i  = bytes i … i + span       one memcpy each, without a Python call each

Most elements are outside all mappings, where reading kills the process. Therefore every trajectory
is checked to be inside its mapping, and windows that extend past a mapping's end are copied one by
one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.alignment import LEADING_ROWS, stored_rows
from trainer.data.fields import Field
from trainer.data.sampler import Ints, Windows
from trainer.data.snapshot import Manifest


class MappedColumns:
    """One field of a snapshot: the mapped columns of its shards, [1 + rows, *shape] each.

    It holds the mappings, so they stay readable even if the files are deleted. `columns` has None
    for a shard without trajectories.
    """

    def __init__(self, field: Field, manifest: Manifest, columns: Sequence[NDArray[Any] | None]):
        self.field, self._manifest = field, manifest
        self._mapped = [None if c is None else np.asarray(c) for c in columns]
        begins = [c.ctypes.data if c is not None else 0 for c in columns]
        ends = [b + c.nbytes if c is not None else 0 for b, c in zip(begins, columns, strict=True)]
        lowest, highest = min(filter(None, begins)), max(ends)
        row_0 = (manifest.row_start + LEADING_ROWS + field.offset) * field.row_bytes
        self._begin = np.asarray(begins, np.int64)[manifest.shard] - lowest + row_0
        """Per trajectory: address of the first byte of a window that starts at its row 0."""
        self._end = np.asarray(ends, np.int64)[manifest.shard] - lowest
        _, last = stored_rows(field.offset, field.of_step, manifest.length)
        needed = (last - field.offset) * field.row_bytes
        if bool((row_0 < 0).any() or (self._begin + needed > self._end).any()):
            raise IndexError(f"{field.name}: trajectories lie outside their columns")
        space = (ctypes.c_uint8 * (highest - lowest)).from_address(lowest)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memoryview(space), np.uint8)
        self._overlapping: dict[int, NDArray[np.void]] = {}

    def rows_left(self) -> Ints:
        """Per trajectory: rows from a window at its row 0 to the end of its column."""
        return (self._end - self._begin) // self.field.row_bytes

    def trajectory(self, index: int) -> NDArray[Any]:
        """A whole trajectory (a row of the manifest), read-only and not copied: T+1 observations,
        or T numbers of its steps."""
        manifest, column = self._manifest, self._mapped[self._manifest.shard[index]]
        assert column is not None
        first, end = stored_rows(self.field.offset, self.field.of_step, int(manifest.length[index]))
        row_0 = int(manifest.row_start[index]) + LEADING_ROWS
        rows: NDArray[Any] = column[row_0 + first : row_0 + end]
        return rows

    def computed(
        self, field: Field, function: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> MappedColumns:
        """Another field of the same snapshot, in memory: `function` maps each trajectory's values
        of this field to those of the new one."""
        lengths = [0 if column is None else len(column) for column in self._mapped]
        # One array for all shards, so that all addresses are close to each other.
        values = np.split(
            np.zeros((sum(lengths), *field.shape), field.dtype), np.cumsum(lengths)[:-1]
        )
        manifest = self._manifest
        row_0 = manifest.row_start + LEADING_ROWS
        first, end = stored_rows(field.offset, field.of_step, manifest.length)
        begins, ends = (row_0 + first).tolist(), (row_0 + end).tolist()
        for i, shard in enumerate(manifest.shard.tolist()):
            values[shard][begins[i] : ends[i]] = function(self.trajectory(i))
        found = [v if length else None for v, length in zip(values, lengths, strict=True)]
        return MappedColumns(field, manifest, found)

    def windows(self, windows: Windows, n_rows: int, inside: bool) -> NDArray[Any]:
        """[B, n_rows, *shape]; rows after a column's end are zero.

        `inside`: no window extends past its column's end.
        """
        width = self.field.row_bytes
        span = n_rows * width
        begin = self._begin[windows.trajectory] + windows.start * width
        if inside:
            found = self._elements(span)[begin]
        else:
            found = np.zeros(len(begin), f"V{span}")
            end = self._end[windows.trajectory]
            fits = begin + span <= end
            found[fits] = self._elements(span)[begin[fits]]
            for i in np.flatnonzero(~fits):
                rest = self._bytes[begin[i] : end[i]]
                found[i : i + 1].view(np.uint8)[: len(rest)] = rest
        rows: NDArray[Any] = found.view(self.field.dtype)
        return rows.reshape(len(begin), n_rows, *self.field.shape)

    def _elements(self, span: int) -> NDArray[np.void]:
        found = self._overlapping.get(span)
        if found is None:
            count = max(self._bytes.nbytes - span + 1, 0)
            found = np.ndarray((count,), f"V{span}", buffer=self._bytes.data, strides=(1,))
            self._overlapping[span] = found
        return found


def gather(
    columns: Sequence[MappedColumns], windows: Windows, rows_left: Ints
) -> dict[str, Tensor]:
    """The rows of all windows by field name, [B, longest + 1, *shape]; zero after a window's end.

    `rows_left`: the minimum over the columns, per trajectory.
    """
    n_rows = int(windows.length.max()) + 1
    inside = int((rows_left[windows.trajectory] - windows.start).min()) >= n_rows
    short = np.flatnonzero(windows.length < n_rows - 1)
    ends = [*zip(short.tolist(), (windows.length[short] + 1).tolist(), strict=True)]
    found: dict[str, Tensor] = {}
    for column in columns:
        if column.field.relabel_only:
            continue
        rows = column.windows(windows, n_rows, inside)
        for window, end in ends:
            rows[window, end:] = 0
        found[column.field.name] = torch.from_numpy(rows)
    return found
