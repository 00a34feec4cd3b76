"""Batches in the order's order: gathers windows from mapped columns, one batch ahead of its user.

A batch lives in one of a few buffers that are used in turn (page-locked where a GPU reads them): it
is good until the next one is asked for. The loader's whole state is the number of the next step.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago_model.batch import Batch
from trainer.config import DataConfig
from trainer.data.cache import Cache
from trainer.data.collate import collate, first_row
from trainer.data.fields import Field
from trainer.data.order import Order, Windows
from trainer.data.snapshot import Manifest


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

    @property
    def ids(self) -> list[str]:
        """Trajectory id @ first row of each window: names a sample for people."""
        ids = self.manifest.ids[self.windows.trajectory]
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
        self._cache, self._fields, self._config, self._rank = cache, tuple(fields), config, rank
        self._views = list(views)
        self._device = torch.device(device)
        self._columns: dict[tuple[str, str], _Columns] = {}
        self._unknown = _unknown_action(self._fields)
        # One being read, `prefetch` ready, one being written.
        each = config.batch // views[0].order.world
        pin = self._device.type == "cuda"
        self._ring = [
            _Buffers(self._fields, each, config.window + 1, pin) for _ in range(config.prefetch + 2)
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
            item = Loaded(item.step, item.batch.to(self._device), item.windows, item.manifest)
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
        windows = view.order.batch(step, self._rank)
        buffers = buffers or _Buffers(self._fields, len(windows), self._config.window + 1, False)
        rows = self._gather(view.manifest, windows, buffers)
        batch = collate(view.manifest, windows, rows, self._unknown)
        return Loaded(step, batch, windows, view.manifest)

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
        """Copy each window's rows to its place. Plain slices of bytes: nothing else touches memory,
        and the number of shards does not matter."""
        which = windows.trajectory
        n = len(windows)
        longest = int(windows.length.max())
        ragged = longest != int(windows.length.min())
        # + 1: a column begins with one row of "nothing".
        first = manifest.row_start[which] + windows.start + 1
        count = windows.length + 1
        shards = manifest.shard[which].tolist()
        rows: dict[str, Tensor] = {}
        for field, (tensor, raw) in zip(self._fields, buffers.of, strict=True):
            width, shift = field.row_bytes, first_row(field)
            columns = self._columns_of(manifest, field)
            full = (longest + 1) * width
            begins = ((first + shift) * width).tolist()
            if not ragged:
                at = 0
                for shard, begin in zip(shards, begins, strict=True):
                    raw[at : at + full] = columns[shard][begin : begin + full]
                    at += full
            else:
                ends = ((first + shift + count) * width).tolist()
                at = 0
                for shard, begin, end in zip(shards, begins, ends, strict=True):
                    size = end - begin
                    raw[at : at + size] = columns[shard][begin:end]
                    raw[at + size : at + full] = bytes(full - size)
                    at += full
            flat = tensor[: n * (longest + 1) * field.size]
            rows[field.name] = flat.reshape(n, longest + 1, *field.shape)
        return rows

    def _columns_of(self, manifest: Manifest, field: Field) -> _Columns:
        """A field's columns of all shards of a snapshot, mapped when first asked for."""
        key = (manifest.digest, field.name)
        found = self._columns.get(key)
        if found is None:
            found = self._columns[key] = _Columns(self._cache, manifest, field)
        return found


class _Columns(dict[int, memoryview]):
    """Index of a shard in the manifest -> bytes of its column."""

    def __init__(self, cache: Cache, manifest: Manifest, field: Field):
        super().__init__()
        self._cache, self._shards, self._field = cache, manifest.shards, field

    def __missing__(self, index: int) -> memoryview:
        array = self._cache.column(self._shards[index], self._field)
        self[index] = memoryview(array.reshape(-1).view(np.uint8).data)
        return self[index]


class _Buffers:
    """Room for one batch: per field a flat tensor, and its bytes."""

    def __init__(self, fields: Sequence[Field], batch: int, rows: int, pin: bool):
        self.of: list[tuple[Tensor, memoryview]] = []
        for field in fields:
            dtype = torch.from_numpy(np.zeros(0, field.dtype)).dtype
            tensor = torch.zeros(batch * rows * field.size, dtype=dtype, pin_memory=pin)
            self.of.append((tensor, memoryview(tensor.numpy().view(np.uint8).data)))


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
