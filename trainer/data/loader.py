"""Batches in the order's order: gathers windows from mapped columns, one batch ahead of its user.

A batch of large windows (images) lives in one of a few buffers that are used in turn: so it is good
until the next one is asked for. One for a GPU is copied there ahead of its user (staging.py). The
loader's whole state is the number of the next step.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago_model.data.batch import Batch
from trainer.config import DataConfig
from trainer.data.alignment import collate
from trainer.data.cache import Cache
from trainer.data.columns import Columns, Place
from trainer.data.fields import Field
from trainer.data.relabel import make_relabelers
from trainer.data.relabel.sampling import Relabeling
from trainer.data.sampler import Ints, Windows, WindowSampler
from trainer.data.snapshot import Manifest
from trainer.data.staging import Block, Buffers, Cuda, Sent, Transfer, block_bytes


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot in use: its rows, and the order of samples from it."""

    start: int
    """First step (update) that is drawn from it."""
    manifest: Manifest
    sampler: WindowSampler


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


@dataclass(frozen=True, slots=True)
class OpenView:
    """A view and what it takes to draw from it: mapped columns, prepared relabelers."""

    view: SnapshotView
    columns: Sequence[Columns]
    room: Ints
    """Rows behind each trajectory's first one, to the end of its column."""
    relabeling: Relabeling | None


class Loader:
    """An endless iterator of `Loaded`, from step `step` on.

    Raises what goes wrong while preparing a batch, at the batch that it concerns.
    """

    def __init__(
        self,
        cache: Cache,
        fields: Sequence[Field],
        views: Sequence[SnapshotView],
        config: DataConfig,
        *,
        step: int = 0,
        rank: int = 0,
        device: torch.device | str = "cpu",
        cuda: Cuda | None = None,
    ):
        self._cache, self._config, self._rank = cache, config, rank
        self._relabelers = make_relabelers(config.relabel)
        self._fields = tuple(f for f in fields if self._relabelers or not f.hidden)
        self._shown = tuple(f for f in self._fields if not f.hidden)
        self._device = torch.device(device)
        self._unknown = _unknown_action(self._fields)
        # Mapped before the first batch: what is mapped stays readable, also if it is deleted.
        # Replaced as a whole, never changed: two threads read it.
        self._open = tuple(self.open(view) for view in views)
        each, rows = config.batch // views[0].sampler.world, config.window + 1
        self._ring: list[Buffers] = []
        self._transfer: Transfer | None = None
        if self._device.type == "cuda" or cuda is not None:
            size = block_bytes(self._shown, each, rows)
            self._transfer = Transfer(cuda or Cuda(self._device), size)
        else:
            # One being read, `prefetch` ready, one being written.
            count = config.prefetch + 2
            self._ring = [Buffers(self._shown, each, rows) for _ in range(count)]
        self._next = step
        self._ready: queue.Queue[_Item] = queue.Queue(config.prefetch)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lookahead(self) -> int:
        """A view added now must begin at least this many steps after the next batch."""
        return self._config.prefetch + 2

    def open(self, view: SnapshotView) -> OpenView:
        """Make ready to draw from a view. Any thread may; it takes time, `add_view` then none."""
        manifest = view.manifest
        used = set(np.unique(manifest.shard).tolist())
        columns = []
        for field in self._fields:
            mapped = [
                self._cache.column(shard, field) if index in used else None
                for index, shard in enumerate(manifest.shards)
            ]
            columns.append(Columns(field, manifest, mapped))
        room = np.min([column.room() for column in columns], axis=0)
        relabeling = Relabeling(self._relabelers, manifest, columns) if self._relabelers else None
        return OpenView(view, columns, room, relabeling)

    def add_view(self, view: SnapshotView | OpenView) -> None:
        """Draw from another snapshot from view.start on, which no prepared batch has passed."""
        opened = view if isinstance(view, OpenView) else self.open(view)
        assert opened.view.start >= self._next, (opened.view.start, self._next)
        self._open = (*self._open, opened)

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        if self._thread is None:
            self._thread = threading.Thread(target=self._prefetch, name="loader", daemon=True)
            self._thread.start()
        item = self._take()
        if isinstance(item, BaseException):
            raise item
        loaded, sent = item
        if self._transfer is not None and sent is not None:
            loaded = replace(loaded, batch=self._transfer.receive(sent))
        elif self._device.type != "cpu":
            loaded = replace(loaded, batch=loaded.batch.to(self._device, non_blocking=False))
        self._drop_views_before(loaded.step)
        return loaded

    def view(self, step: int) -> SnapshotView:
        """What the batch of a step is drawn from."""
        return self._at(step).view

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                with_nothing_waiting(self._ready)
                self._thread.join(0.05)

    def load(self, step: int, room: Buffers | Block | None = None) -> Loaded:
        """The batch of a step: what the iterator gives, but for any step and at once."""
        opened = self._at(step)
        view = opened.view
        if opened.relabeling is not None:
            return self._load_relabeled(view, opened.relabeling, step, room)
        windows = view.sampler.batch(step, self._rank)
        rows = self._gather(opened, windows, room)
        batch = collate(view.manifest, windows, rows, self._unknown)
        return Loaded(step, batch, windows, view.manifest, {})

    def _load_relabeled(
        self, view: SnapshotView, relabeling: Relabeling, step: int, room: Buffers | Block | None
    ) -> Loaded:
        """The same, of whole trajectories that are rewritten before windows are cut from them."""
        drawn = relabeling.draw(view.sampler, step, self._rank)
        count = int(drawn.windows.length.max()) + 1
        rows: dict[str, Tensor] = {}
        for shown in self._shown:
            tensor = room.room(shown, len(drawn.windows), count) if room is not None else None
            if tensor is None:
                shape = (len(drawn.windows), count, *shown.shape)
                tensor = torch.from_numpy(np.empty(shape, shown.dtype))
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

    def _take(self) -> _Item:
        """The next item. Waits no longer than there is a thread that may bring one."""
        assert self._thread is not None
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                if self._thread.is_alive() or not self._ready.empty():
                    continue
                raise RuntimeError(
                    "the loader has ended: it failed before, or was closed"
                ) from None

    def _prefetch(self) -> None:
        while not self._stop.is_set():
            item: _Item
            try:
                item = self._prepare(self._next)
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

    def _prepare(self, step: int) -> tuple[Loaded, Sent | None]:
        if self._transfer is None:
            return self.load(step, self._ring[step % len(self._ring)]), None
        slot = step % len(self._transfer.blocks)
        loaded = self.load(step, self._transfer.wait(slot))
        return loaded, self._transfer.send(slot, loaded.batch)

    def _at(self, step: int) -> OpenView:
        opened = self._open
        index = bisect_right([o.view.start for o in opened], step) - 1
        if index < 0:
            raise IndexError(f"step {step} is before the first view, {opened[0].view.start}")
        return opened[index]

    def _drop_views_before(self, step: int) -> None:
        """Forget what no step from `step` on is drawn from: growing data must not fill memory."""
        opened = self._open
        while len(opened) > 1 and opened[1].view.start <= step:
            opened = opened[1:]
        if len(opened) < len(self._open):
            gone = {name for o in self._open for name in o.view.manifest.shards}
            self._open = opened
            self._cache.release(gone.difference(*(o.view.manifest.shards for o in opened)))

    def _gather(
        self, opened: OpenView, windows: Windows, room: Buffers | Block | None
    ) -> dict[str, Tensor]:
        """The rows of all windows, by field name [n, longest + 1, *shape]; behind a window's end
        is zero. The number of shards does not matter."""
        count = int(windows.length.max()) + 1
        place = Place(windows, count, opened.room)
        short = np.flatnonzero(windows.length < count - 1)
        ends = [*zip(short.tolist(), (windows.length[short] + 1).tolist(), strict=True)]
        found: dict[str, Tensor] = {}
        for column in opened.columns:
            field = column.field
            tensor = room.room(field, len(windows), count) if room is not None else None
            if tensor is None:
                rows = column.fresh(place)
                tensor = torch.from_numpy(rows)
            else:
                rows = tensor.numpy()
                column.copy(place, memoryview(rows.reshape(-1).view(np.uint8).data))
            for row, end in ends:
                rows[row, end:] = 0
            found[field.name] = tensor
        return found


_Item = tuple[Loaded, Sent | None] | BaseException


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
