"""Batches in the sampler's order, prefetched by a thread.

For a GPU, the copies to the device are also prefetched (gpu_copies.py). The loader's only state is
the number of the next step.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago_model.data.batch import Batch
from trainer.config import DataConfig
from trainer.data.alignment import collate, undiscounted
from trainer.data.cache import Cache
from trainer.data.columns import MappedColumns, gather
from trainer.data.fields import RETURN_TO_GO, Field
from trainer.data.gpu_copies import GpuCopies
from trainer.data.relabel import make_relabelers
from trainer.data.relabel.sampling import Relabeling, ends_of, gather_episodes
from trainer.data.returns import DataReturns
from trainer.data.sampler import Ints, Windows, WindowSampler
from trainer.data.snapshot import Manifest


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot that batches are drawn from, from step `start` on; `open_view` makes one."""

    start: int
    manifest: Manifest
    sampler: WindowSampler
    columns: Sequence[MappedColumns]
    rows_left: Ints
    """Per trajectory: number of rows from its first row to the end of its column."""
    unknown_action: Tensor
    """Replaces actions that were not recorded."""
    relabeling: Relabeling | None
    returns: DataReturns | None = None
    """The returns that the snapshot shows, for the health of learning; None if nobody asks."""
    held_back: int = 0
    """Number of trajectories held back, which `manifest` does not have."""
    validation: tuple[Batch, ...] = ()
    """Batches of held-back trajectories, always the same, on the CPU."""


def open_view(
    cache: Cache,
    fields: Sequence[Field],
    sampler: WindowSampler,
    start: int = 0,
    *,
    return_to_go: bool = False,
) -> SnapshotView:
    """Map a snapshot's columns and prepare its relabelers. This is slow; any thread may call it.

    With `return_to_go`, batches have the undiscounted returns of whole trajectories: 4 bytes of
    memory per row.

    Mapped columns stay readable even if their files are deleted.
    """
    manifest = sampler.manifest
    used = set(np.unique(manifest.shard).tolist())
    columns = [
        MappedColumns(
            field,
            manifest,
            [
                cache.column(shard, field) if index in used else None
                for index, shard in enumerate(manifest.shards)
            ],
        )
        for field in fields
    ]
    if return_to_go:
        rewards = next(column for column in columns if column.field.name == "reward")
        columns.append(rewards.computed(RETURN_TO_GO, undiscounted))
    relabelers = make_relabelers(sampler.config.relabel)
    return SnapshotView(
        start,
        manifest,
        sampler,
        columns,
        rows_left=np.min([column.rows_left() for column in columns], axis=0),
        unknown_action=torch.tensor(next(f for f in fields if f.name == "action").fill_array),
        relabeling=Relabeling(relabelers, manifest, columns) if relabelers else None,
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch and its origin."""

    step: int
    batch: Batch
    windows: Windows
    manifest: Manifest
    metrics: Mapping[str, float]
    """Metrics of relabeling; empty without relabelers."""

    @property
    def ids(self) -> list[str]:
        """A readable name of each sample: trajectory id @ first row of the window."""
        ids = self.manifest.trajectory_ids(self.windows.trajectory)
        return [f"{i}@{s}" for i, s in zip(ids, self.windows.start.tolist(), strict=True)]


class Loader:
    """An endless iterator of `Loaded`, from step `step` on.

    If preparing a batch fails, the iterator raises the error at that batch and ends. `on_unused` is
    called with the names of shards that no view uses any more.
    """

    def __init__(
        self,
        views: Sequence[SnapshotView],
        config: DataConfig,
        *,
        step: int = 0,
        rank: int = 0,
        device: torch.device | str = "cpu",
        on_unused: Callable[[set[str]], None] = lambda _: None,
    ):
        self._views = tuple(views)  # replaced as a whole, never changed: two threads read it
        self._config, self._rank, self._on_unused = config, rank, on_unused
        device = torch.device(device)
        self._copies = GpuCopies(device) if device.type == "cuda" else None
        self._read = self._next = step
        """The next steps of the reader and of the prefetch thread."""
        self._wanted: SimpleQueue[int] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Loaded, Any] | BaseException] = SimpleQueue()
        """Batches, each with the event of its copy, or an exception."""
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def _ahead(self) -> int:
        """Number of batches prepared in advance: `prefetch` ready ones and one in preparation."""
        return self._config.prefetch + 1

    @property
    def lookahead(self) -> int:
        """A view added now must begin at least this many steps after the next batch."""
        return self._ahead + 1

    def add_view(self, view: SnapshotView) -> None:
        """Draw from another snapshot from step view.start on. No batch from that step on may have
        been prepared."""
        assert view.start >= self._next, (view.start, self._next)
        self._views = (*self._views, view)

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        if self._closed:
            raise RuntimeError("the loader has ended: it failed before, or was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._prefetch, name="loader", daemon=True)
            self._thread.start()
        while self._next <= self._read + self._ahead:
            self._wanted.put(self._next)
            self._next += 1
        item = self._ready.get()
        self._read += 1
        if isinstance(item, BaseException):
            self.close()
            raise item
        loaded, copied = item
        if self._copies is not None:
            self._copies.receive(loaded.batch, copied)
        self._drop_views_before(loaded.step)
        return loaded

    def view(self, step: int) -> SnapshotView:
        """The snapshot view that the batch of a step is drawn from."""
        views = self._views
        index = bisect_right([view.start for view in views], step) - 1
        if index < 0:
            raise IndexError(f"step {step} is before the first view, {views[0].start}")
        return views[index]

    def load(self, step: int) -> Loaded:
        """Prepare the batch of any step in the calling thread; equal to that of the iterator."""
        view = self.view(step)
        if view.relabeling is None:
            windows = view.sampler.batch(step, self._rank)
            rows = gather(view.columns, windows, view.rows_left)
            metrics: dict[str, float] = {}
            batch = collate(view.manifest, windows.trajectory, windows, rows, view.unknown_action)
        else:
            episodes, windows, metrics = view.relabeling.draw(view.sampler, step, self._rank)
            rows = gather_episodes(episodes, windows, [column.field for column in view.columns])
            which = np.arange(len(episodes))
            batch = collate(ends_of(episodes), which, windows, rows, view.unknown_action)
        return Loaded(step, batch, windows, view.manifest, metrics)

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._wanted.put(-1)  # wakes the thread
            self._thread.join()

    def _prefetch(self) -> None:
        """Put one item for each requested step: a batch or an exception."""
        while True:
            step = self._wanted.get()
            if self._closed:
                return
            try:
                self._ready.put(self._prepare(step))
            except BaseException as error:
                self._ready.put(error)

    def _prepare(self, step: int) -> tuple[Loaded, Any]:
        loaded = self.load(step)
        if self._copies is None:
            return loaded, None
        batch, copied = self._copies.send(loaded.batch)
        return replace(loaded, batch=batch), copied

    def _drop_views_before(self, step: int) -> None:
        """Drop views that no step from `step` on uses, so growing data does not fill memory."""
        views = self._views
        while len(views) > 1 and views[1].start <= step:
            views = views[1:]
        if len(views) < len(self._views):
            before = {name for view in self._views for name in view.manifest.shards}
            self._views = views
            self._on_unused(before.difference(*(view.manifest.shards for view in views)))
