"""A field's columns of all shards as one array, from which a batch of windows is one fancy index.

Each shard's column is a mapped file, somewhere in memory. Counted in bytes from the lowest of them,
every row has a place, so numpy can see all of them as one array `windows`, in which element i is
the `span` bytes from place i on:

    lowest mapping          another mapping                 …
    |header r0 r1 r2 r3 …|        |header r0 r1 …|
    windows[i]  = bytes i … i + span       one memcpy each, without a Python call each

Most elements would lie outside any mapping, where reading kills the process: so every window is
proved to lie inside its own mapping, and those that reach over its end are copied by themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.alignment import first_row
from trainer.data.fields import Field
from trainer.data.sampler import Ints, Windows
from trainer.data.snapshot import Manifest

Column = NDArray[Any]


class Place:
    """Where a batch's windows lie in the columns of any field: the same rows for all of them."""

    __slots__ = ("fits", "rows", "start", "which")

    def __init__(self, windows: Windows, rows: int, room: Ints):
        self.which, self.start, self.rows = windows.trajectory, windows.start, rows
        left = room[self.which] - self.start
        self.fits = int(left.min()) >= rows
        """Whether no window reaches over its column's end. (It may reach over its own.)"""


class Columns:
    """The mapped columns of one field for a manifest: one per shard, [1 + rows, *shape] each.

    Holds the mappings, so what it gathers from stays readable whatever happens to the files.
    `columns` has None where no trajectory lies in a shard.
    """

    def __init__(self, field: Field, manifest: Manifest, columns: Sequence[Column | None]):
        self.field, self._manifest = field, manifest
        self._mapped = [None if c is None else np.asarray(c) for c in columns]
        begins = [c.ctypes.data if c is not None else 0 for c in columns]
        ends = [b + c.nbytes if c is not None else 0 for b, c in zip(begins, columns, strict=True)]
        lowest, highest = min(filter(None, begins)), max(ends)
        begin = np.asarray(begins, np.int64)[manifest.shard] - lowest
        # + 1: a column begins with one row of "nothing", which only a shift of -1 reaches.
        at = (manifest.row_start + 1 + field.arrives + first_row(field)) * field.row_bytes
        self._begin = begin + at
        """Per trajectory: place of the first byte of a window that starts at its row 0."""
        self._end = np.asarray(ends, np.int64)[manifest.shard] - lowest
        after = (manifest.length + 1 + first_row(field)) * field.row_bytes
        if bool((at < 0).any() or (self._begin + after > self._end).any()):
            raise IndexError(f"{field.name}: trajectories lie outside their columns")
        space = (ctypes.c_uint8 * (highest - lowest)).from_address(lowest)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memoryview(space), np.uint8)
        self._raw = memoryview(self._bytes.data)
        self._windows: dict[int, NDArray[np.void]] = {}

    def room(self) -> Ints:
        """Per trajectory: rows from a window at its row 0 to the end of its column."""
        return (self._end - self._begin) // self.field.row_bytes

    def whole(self, trajectory: int) -> Column:
        """All rows of a trajectory (a row of the manifest), read-only and not copied: T+1 of an
        observation, T of what belongs to a step."""
        manifest, column = self._manifest, self._mapped[self._manifest.shard[trajectory]]
        assert column is not None
        begin = int(manifest.row_start[trajectory]) + 1 + self.field.arrives
        end = begin + int(manifest.length[trajectory]) + 1 + first_row(self.field)
        rows: Column = column[begin:end]
        return rows

    def fresh(self, place: Place) -> NDArray[np.generic]:
        """[n, rows, *shape] in memory of its own; what lies behind a column's end is zero."""
        width = self.field.row_bytes
        span = place.rows * width
        begin = self._begin[place.which] + place.start * width
        if place.fits:
            found = self._view(span)[begin]
        else:
            found = np.zeros(len(begin), f"V{span}")
            self.copy(place, memoryview(found.view(np.uint8).data))
        rows: NDArray[np.generic] = found.view(self.field.dtype)
        return rows.reshape(len(begin), place.rows, *self.field.shape)

    def copy(self, place: Place, target: memoryview) -> None:
        """The same, into `target`, window by window: for large ones."""
        width = self.field.row_bytes
        span = place.rows * width
        begin = self._begin[place.which] + place.start * width
        end = np.minimum(begin + span, self._end[place.which])
        at = 0
        for first, last in zip(begin.tolist(), end.tolist(), strict=True):
            target[at : at + last - first] = self._raw[first:last]
            at += span

    def _view(self, span: int) -> NDArray[np.void]:
        found = self._windows.get(span)
        if found is None:
            count = max(self._bytes.nbytes - span + 1, 0)
            found = np.ndarray((count,), f"V{span}", buffer=self._bytes.data, strides=(1,))
            self._windows[span] = found
        return found
