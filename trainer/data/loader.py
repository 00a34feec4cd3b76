"""Batches in the order's order: gathers windows from mapped columns, one batch ahead of its user.

A batch of large windows (images), or one for a GPU, lives in one of a few buffers that are used in
turn (page-locked for the GPU): so it is good until the next one is asked for. The loader's whole
state is the number of the next step.
"""

from __future__ import annotations

import math
import queue
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago_model.batch import Batch
from trainer.config import DataConfig
from trainer.data.cache import Cache
from trainer.data.collate import collate
from trainer.data.fields import Field
from trainer.data.gather import Columns, Place
from trainer.data.order import Ints, Order, Windows
from trainer.data.relabel import make_relabelers
from trainer.data.relabel.sampling import Relabeling
from trainer.data.snapshot import Manifest

SMALL = 4 << 20
"""Bytes of a field in a batch up to which fresh memory is no slower than memory used in turn."""


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot in use: its rows, and the order of samples from it."""

    start: int
    """First step (update) that is drawn from it."""
    manifest: Manifest
    order: Order


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch and where it came from."""

    step: int
    batch: Batch
    windows: Windows
    manifest: Manifest
    metrics: Mapping[str, float]
    """Of the relabeling; empty where there is none."""

    @property
    def ids(self) -> list[str]:
        """Trajectory id @ first row of each window: names a sample for people."""
        ids = self.manifest.names(self.windows.trajectory)
        return [f"{i}@{s}" for i, s in zip(ids, self.windows.start.tolist(), strict=True)]


class Loader:
    """An endless iterator of `Loaded`, from step `step` on.

    Raises what goes wrong while preparing a batch, at the batch that it concerns.
    """

    def __init__(
        self,
        cache: Cache,
        fields: Sequence[Field],
        views: Sequence[View],
        config: DataConfig,
        *,
        step: int = 0,
        rank: int = 0,
        device: torch.device | str = "cpu",
    ):
        self._cache, self._config, self._rank = cache, config, rank
        self._relabelers = make_relabelers(config.relabel)
        self._fields = tuple(f for f in fields if self._relabelers or not f.hidden)
        self._shown = tuple(f for f in self._fields if not f.hidden)
        self._views = list(views)
        self._relabelings: dict[str, Relabeling] = {}
        self._device = torch.device(device)
        # Mapped before the first batch: what is mapped stays readable, also if it is deleted.
        self._columns = {view.manifest.digest: self._map(view.manifest) for view in self._views}
        self._unknown = _unknown_action(self._fields)
        # One being read, `prefetch` ready, one being written.
        each = config.batch // views[0].order.world
        pin = self._device.type == "cuda"
        self._ring = [
            _Buffers(self._shown, each, config.window + 1, pin) for _ in range(config.prefetch + 2)
        ]
        self._next = step
        self._ready: queue.Queue[Loaded | BaseException] = queue.Queue(config.prefetch)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lookahead(self) -> int:
        """A view added now must begin at least this many steps after the next batch."""
        return self._config.prefetch + 2

    def add_view(self, view: View) -> None:
        """Draw from another snapshot from view.start on, which no prepared batch has passed."""
        assert view.start >= self._next, (view.start, self._next)
        self._columns[view.manifest.digest] = self._map(view.manifest)
        self._views.append(view)

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        if self._thread is None:
            self._thread = threading.Thread(target=self._prefetch, name="loader", daemon=True)
            self._thread.start()
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        if self._device.type != "cpu":
            item = replace(item, batch=item.batch.to(self._device))
            # The buffer is written again two batches later; the copy must be over by then.
            torch.cuda.current_stream(self._device).synchronize()
        return item

    def view(self, step: int) -> View:
        """What the batch of a step is drawn from."""
        return self._views[bisect_right([v.start for v in self._views], step) - 1]

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                with_nothing_waiting(self._ready)
                self._thread.join(0.05)

    def load(self, step: int, buffers: _Buffers | None = None) -> Loaded:
        """The batch of a step: what the iterator gives, but for any step and at once."""
        view = self.view(step)
        each = self._config.batch // view.order.world
        buffers = buffers or _Buffers(self._shown, each, self._config.window + 1, False)
        if self._relabelers:
            return self._load_relabeled(view, step, buffers)
        windows = view.order.batch(step, self._rank)
        rows = self._gather(view.manifest, windows, buffers)
        batch = collate(view.manifest, windows, rows, self._unknown)
        return Loaded(step, batch, windows, view.manifest, {})

    def _load_relabeled(self, view: View, step: int, buffers: _Buffers) -> Loaded:
        """The same, of whole trajectories that are rewritten before windows are cut from them."""
        drawn = self._relabelings[view.manifest.digest].draw(view.order, step, self._rank)
        count = int(drawn.windows.length.max()) + 1
        rows: dict[str, Tensor] = {}
        for shown, buffer in zip(self._shown, buffers.of, strict=True):
            shape = (len(drawn.windows), count, *shown.shape)
            if buffer is None:
                tensor = torch.from_numpy(np.empty(shape, shown.dtype))
            else:
                tensor = buffer[: math.prod(shape)].reshape(shape)
            drawn.fill(shown, tensor.numpy())
            rows[shown.name] = tensor
        for name in drawn.masks:
            if name not in rows:  # a relabeler made it
                allowed = np.empty((len(drawn.windows), count), np.bool_)
                drawn.fill(Field(name, "", "bool", ()), allowed)
                rows[name] = torch.from_numpy(allowed)
        endings, windows = drawn.for_collate
        batch = collate(endings, windows, rows, self._unknown)
        return Loaded(step, batch, drawn.windows, view.manifest, drawn.metrics)

    def _prefetch(self) -> None:
        while not self._stop.is_set():
            item: Loaded | BaseException
            try:
                item = self.load(self._next, self._ring[self._next % len(self._ring)])
            except BaseException as error:  # handed to the reader, who raises it
                item = error
            self._next += 1
            while not self._stop.is_set():
                try:
                    self._ready.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def _gather(self, manifest: Manifest, windows: Windows, buffers: _Buffers) -> dict[str, Tensor]:
        """The rows of all windows, by field name [n, longest + 1, *shape]; behind a window's end
        is zero. The number of shards does not matter."""
        columns, room = self._columns[manifest.digest]
        count = int(windows.length.max()) + 1
        place = Place(windows, count, room)
        short = np.flatnonzero(windows.length < count - 1)
        ends = [*zip(short.tolist(), (windows.length[short] + 1).tolist(), strict=True)]
        found: dict[str, Tensor] = {}
        for column, buffer in zip(columns, buffers.of, strict=True):
            field = column.field
            if buffer is None:
                rows = column.fresh(place)
                tensor = torch.from_numpy(rows)
            else:
                size = len(windows) * count * field.size
                tensor = buffer[:size].reshape(len(windows), count, *field.shape)
                rows = tensor.numpy()
                column.copy(place, memoryview(rows.reshape(-1).view(np.uint8).data))
            for row, end in ends:
                rows[row, end:] = 0
            found[field.name] = tensor
        return found

    def _map(self, manifest: Manifest) -> tuple[list[Columns], Ints]:
        """Every field's columns of a snapshot, and the room behind each trajectory's first row."""
        used = set(np.unique(manifest.shard).tolist())
        columns = []
        for field in self._fields:
            mapped = [
                self._cache.column(shard, field) if index in used else None
                for index, shard in enumerate(manifest.shards)
            ]
            columns.append(Columns(field, manifest, mapped))
        if self._relabelers:
            self._relabelings[manifest.digest] = Relabeling(self._relabelers, manifest, columns)
        return columns, np.min([column.room() for column in columns], axis=0)


class _Buffers:
    """Room for one batch: per field a flat tensor, or None where fresh memory will do."""

    def __init__(self, fields: Sequence[Field], batch: int, rows: int, pin: bool):
        self.of: list[Tensor | None] = []
        for field in fields:
            if not pin and batch * rows * field.row_bytes <= SMALL:
                self.of.append(None)
                continue
            dtype = torch.from_numpy(np.zeros(0, field.dtype)).dtype
            self.of.append(torch.zeros(batch * rows * field.size, dtype=dtype, pin_memory=pin))


def _unknown_action(fields: Sequence[Field]) -> Tensor | None:
    for field in fields:
        if field.name == "action":
            fill: Any = np.broadcast_to(np.asarray(field.fill), field.size)
            return torch.from_numpy(fill.astype(field.dtype).reshape(field.shape))
    return None


def with_nothing_waiting(waiting: queue.Queue[Any]) -> None:
    """Empty a queue, so that whoever wants to put something can."""
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        return
