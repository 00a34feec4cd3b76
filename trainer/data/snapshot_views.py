"""The snapshots that a run samples from, in order: cached on each node, leased and switched.

New data is found and downloaded in the background, without blocking updates:

    find     rank 0        asks whether there is a newer snapshot
    fetch    node mains    its manifest and columns; name the shards that cannot be read
    open     all ranks     sampler, mapped columns, prepared relabelers
    switch   all ranks     at a step that they agree on, a few from now

Each phase is one task in a thread of each rank. `sync`, called at updates where all ranks
synchronise anyway, checks that all have completed it. Samples are therefore the same on all ranks.
The step of the switch is stored in the checkpoint: a resumed run uses the same views.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import Gone, NotFound, StepwellError
from trainer.config import TrainConfig
from trainer.data.cache import Cache
from trainer.data.fields import Field, fields_of
from trainer.data.loader import Loader, SnapshotView, open_view
from trainer.data.relabel import make_relabelers
from trainer.data.returns import data_returns
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import (
    DataError,
    LeaseKeeper,
    Manifest,
    create_snapshot,
    delete_manifests,
    load_manifest,
)
from trainer.data.validation import BATCHES, FEWEST, hold_back, validation_sampler
from trainer.distributed import World

log = logging.getLogger(__name__)


def in_background(task: Callable[[], Any]) -> Future[Any]:
    """Run a task in a daemon thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # raised again by future.result()
            future.set_exception(error)

    threading.Thread(target=run, name="new data", daemon=True).start()
    return future


SAY_EVERY = 2.0
"""Seconds between two lines about columns that are loaded: short loading says nothing."""


class SnapshotViews:
    """The snapshots in use, their columns on this node, and the leases that keep them."""

    def __init__(
        self,
        config: TrainConfig,
        client: Client,
        world: World,
        home: Path,
        holder: str,
        echo: Callable[[str], None],
    ):
        self.config, self.client, self.world, self._echo = config, client, world, echo
        self.folder, self.holder = home / "snapshots", holder
        make_relabelers(config.data.relabel)  # an unknown name is an error before any download
        self.cache = Cache(config.data.cache, config.data.cache_gb * 1e9, client)
        self.history: list[dict[str, Any]] = []
        """For the checkpoint: each snapshot, its first step, and its excluded shards."""
        self.manifest: Manifest
        """The manifest of the newest snapshot that is in use or will be used next."""
        self.held_back = 0
        """Number of trajectories held back from the newest snapshot."""
        self._views: list[SnapshotView] = []
        """The views that the loader starts with."""
        self._digest = ""
        """Digest of the newest snapshot in use, before shards are excluded."""
        self._phase, self._coming, self._left_out = "", "", tuple[str, ...]()
        self._task: Future[Any] | None = None
        self._failure = ""
        self._fetched: Manifest | None = None
        self._said_at = 0.0
        """When the progress of loading was said last, or loading began."""
        self._forgotten = 0
        """Number of views in the history that no checkpoint needs any more."""
        self.leases = LeaseKeeper(client, holder) if world.is_main else None

    def begin(self, snapshot: str) -> None:
        """Draw from a snapshot from step 0 on. All ranks call this; it waits for the columns.

        Raises `DataError` on all ranks if one node cannot fetch it.
        """
        self._use(snapshot, 0, ())

    def resume(self, history: list[dict[str, Any]], update: int) -> None:
        """Restore a checkpoint's views: the one in use at `update`, and those after it."""
        current = _view_at(history, update)
        self.history = list(history[:current])
        for view in history[current:]:
            self._use(view["snapshot"], view["start"], tuple(view["left_out"]))

    def loader(self, update: int, device: torch.device) -> Loader:
        views, self._views = self._views, []
        return Loader(
            views,
            self.config.data,
            step=update,
            rank=self.world.rank,
            device=device,
            on_unused=self.cache.release,
        )

    # --- growing data ---------------------------------------------------------------------------

    def refresh(self) -> None:
        """Search for newer data in the background, one search at a time. Called on rank 0."""
        if self.world.is_main and not self.config.snapshot and not self._phase:
            self._start("find", self._find)

    def sync(self, loader: Loader, update: int, request: int, oldest: int) -> tuple[int, bool]:
        """The largest request of all ranks, and whether they switch to newer data now.

        All ranks call this at the same updates. `oldest` is the update of the oldest checkpoint if
        this rank knows it, else 0: snapshots that no checkpoint needs are dropped.
        """
        done = self._task is not None and self._task.done()
        found = self._phase == "find" and done
        together = self._phase in ("fetch", "open")
        request, found_, busy, oldest = self.world.maximum(
            [request, int(found), int(together and not done), oldest]
        )
        self._drop_before(oldest)
        if together:
            return request, not busy and self._advance(loader, update)
        if found_:
            name, error = self._outcome() if found else ("", "")
            if error:
                log.warning("no newer snapshot, training continues with the last: %s", error)
            self._coming = self.world.broadcast(name or "")
            if self._coming:
                fetch = partial(self._fetch, self._coming, ())
                self._start("fetch", fetch if self.world.is_node_main else list)
        return request, False

    def _advance(self, loader: Loader, update: int) -> bool:
        """Start the next phase after all ranks have completed this one. Returns whether it is the
        switch."""
        phase = self._phase
        result, error = self._outcome()
        unreadable = result if phase == "fetch" and not error else []
        left_out, errors = self._exchange(error, unreadable)
        if errors:
            log.warning("training continues with the last snapshot: %s", errors[0])
            self._release(self._coming)
            self._coming = ""
            return False
        if phase == "fetch":
            self._left_out = left_out
            self._start("open", partial(self._open, self._coming, left_out))
            return False
        view, digest = result
        before, view = _size(self.manifest), replace(view, start=update + loader.lookahead)
        loader.add_view(view)
        self._adopt(view, digest, self._left_out)
        self._coming = ""
        self._echo(f"from update {view.start} on: {_size(self.manifest)} (before: {before})")
        return True

    def _start(self, phase: str, task: Callable[[], Any]) -> None:
        self._phase, self._task = phase, in_background(task)

    def _outcome(self) -> tuple[Any, str]:
        """The result of the finished task, and its error message."""
        assert self._task is not None
        task, self._task, self._phase, self._failure = self._task, None, "", ""
        try:
            return task.result(), ""
        except StepwellError as error:
            self._failure = str(error) or type(error).__name__
        except BaseException as error:  # a defect: the run continues with its current data
            log.error("a defect while looking for new data", exc_info=error)
            self._failure = f"{type(error).__name__}: {error}"
        return None, self._failure

    # --- the phases, in the background ----------------------------------------------------------

    def _find(self) -> str:
        """Create a snapshot. Returns its id, or "" if it equals the newest one in use."""
        newest = self.manifest.snapshot
        try:
            name = create_snapshot(self.client, self.config, self.holder, since=newest)
        except (NotFound, Gone):  # the service has deleted the one in use
            name = create_snapshot(self.client, self.config, self.holder)
        if name == newest:
            return ""
        found = self.client.snapshot(name)
        if not found.trajectories or found.digest == self._digest:
            self._release(name)
            return ""
        if self.leases is not None:
            self.leases.hold(name)
        return name

    def _fetch(self, snapshot: str, left_out: tuple[str, ...]) -> list[str]:
        """Fetch a snapshot's manifest and columns to this node. Returns the shards to exclude."""
        try:
            before = self.history[-1]["snapshot"] if self.history else ""
            manifest = load_manifest(self.client, snapshot, self.folder, since=before)
            self._fetched = manifest
            rest = manifest.without(left_out)
            self._said_at = time.monotonic()
            unreadable = self.cache.ensure(rest, self._fields(manifest), self._progress)
        except StepwellError as error:
            raise DataError(
                f"snapshot {snapshot} cannot be fetched on {self.world.host}: {error}"
            ) from error
        return sorted({*left_out, *unreadable})

    def _open(
        self, snapshot: str, left_out: tuple[str, ...], start: int = 0
    ) -> tuple[SnapshotView, str]:
        """The view, and the digest of the whole snapshot."""
        manifest, self._fetched = self._fetched, None
        if manifest is None or manifest.snapshot != snapshot:
            manifest = load_manifest(self.client, snapshot, self.folder)
        config, fields = self.config, self._fields(manifest)
        trained, held = manifest.without(left_out), None
        if config.data.validation:
            trained, held = hold_back(trained, config.data.validation)
        sampler = WindowSampler(trained, config.data, config.seed, self.world.size, config.sources)
        conditioned = config.agent.return_conditioning is not None
        view = open_view(self.cache, fields, sampler, start, return_to_go=conditioned)
        if held is not None:
            view = replace(view, held_back=len(held.distinct))
            if self.world.is_main:
                drawn = validation_sampler(held, config.data)
                other = open_view(self.cache, fields, drawn, return_to_go=conditioned)
                fixed = Loader([other], config.data)
                view = replace(view, validation=tuple(fixed.load(i).batch for i in range(BATCHES)))
        known = next((c for c in view.columns if c.field.name == "action_known"), None)
        if known is not None and not any(known.trajectory(i).any() for i in range(len(trained))):
            raise DataError(
                "no step of the selected trajectories has a known action (action_known), so there "
                "is nothing to learn from; select others by `where`, or record the actions"
            )
        # Relabeling changes rewards, so those of the data say nothing then.
        if self.world.is_main and config.agent.critic is not None and view.relabeling is None:
            rewards = next(column for column in view.columns if column.field.name == "reward")
            returns = data_returns(sampler.manifest, rewards, config.agent.losses.gamma)
            view = replace(view, returns=returns)
        return view, manifest.digest

    # --- shared ---------------------------------------------------------------------------------

    def _use(self, snapshot: str, start: int, left_out: tuple[str, ...]) -> None:
        if self.leases is not None:
            self.leases.hold(snapshot)
        error, unreadable = "", sorted(left_out)
        if self.world.is_node_main:
            try:
                unreadable = self._fetch(snapshot, left_out)
            except DataError as caught:
                error = str(caught)
        left_out, errors = self._exchange(error, unreadable)
        if errors:
            raise DataError(errors[0])
        view, digest = self._open(snapshot, left_out, start)
        self._views.append(view)
        self._adopt(view, digest, left_out)

    def _exchange(self, error: str, unreadable: list[str]) -> tuple[tuple[str, ...], list[str]]:
        """All ranks' errors, and the shards to exclude on all ranks so that samples are the same.
        Returns (shards, errors)."""
        answers = self.world.all_gather([error, unreadable])
        shards = set().union(*(names for _, names in answers))
        return tuple(sorted(shards)), [text for text, _ in answers if text]

    def _adopt(self, view: SnapshotView, digest: str, left_out: tuple[str, ...]) -> None:
        self.manifest, self._digest, self.held_back = view.manifest, digest, view.held_back
        self.history.append(
            {"snapshot": view.manifest.snapshot, "start": view.start, "left_out": list(left_out)}
        )

    def _drop_before(self, oldest: int) -> None:
        """Drop leases and manifests that a run resumed at `oldest` or later does not need."""
        current = _view_at(self.history, oldest)
        if current <= self._forgotten:
            return
        old, self._forgotten = self.history[self._forgotten : current], current
        needed = {view["snapshot"] for view in self.history[current:]}
        if self.world.is_node_main:
            delete_manifests(self.folder, [*needed, self._coming])
        for snapshot in {view["snapshot"] for view in old} - needed:
            self._release(snapshot)

    def _release(self, snapshot: str) -> None:
        if self.leases is not None:
            self.leases.drop(snapshot)

    def _fields(self, manifest: Manifest) -> tuple[Field, ...]:
        return fields_of(manifest.spec, self.config.data)

    def _progress(self, done: int, total: int) -> None:
        if time.monotonic() - self._said_at >= SAY_EVERY:
            self._said_at = time.monotonic()
            self._echo(f"columns of {done} of {pluralize(total, 'shard')} are on this node")

    # --- for others -----------------------------------------------------------------------------

    def summary(self) -> list[str]:
        """Lines that say what the newest snapshot contains."""
        found = self.manifest
        shards = pluralize(len(found.shards), "shard")
        lines = [f"{_size(found)}, {shards} of snapshot {found.snapshot}"]
        if self.config.data.validation:
            few = f" (of fewer than {FEWEST} nothing is)" * (not self.held_back)
            more = pluralize(self.held_back, "more trajectory is", "more trajectories are")
            lines.append(f"{more} held back for validation{few}")
        return lines

    @property
    def snapshots(self) -> list[str]:
        """Ids of all snapshots that the run has sampled from, in order."""
        return [view["snapshot"] for view in self.history]

    @property
    def left_out(self) -> set[str]:
        """Shards that could not be read, of all snapshots."""
        return {shard for view in self.history for shard in view["left_out"]}

    @property
    def trouble(self) -> str:
        """Why newer data or a lease is unavailable; empty if there is no problem."""
        return self._failure or (self.leases.trouble if self.leases is not None else "")

    def close(self) -> None:
        if self._task is not None:
            wait([self._task], timeout=5.0)
        if self.leases is not None:
            self.leases.close()


def _size(manifest: Manifest) -> str:
    trajectories = pluralize(len(manifest.distinct), "trajectory", "trajectories")
    return f"{trajectories}, {pluralize(manifest.distinct_steps, 'step')}"


def _view_at(history: list[dict[str, Any]], update: int) -> int:
    """The index of the view in a history that is in use at an update."""
    return max((i for i, view in enumerate(history) if view["start"] <= update), default=0)
