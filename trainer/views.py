"""The snapshots a run draws from, one after another: fetched on every node, leased, and switched.

All ranks go through this together, so that the order of samples stays the same on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepwell._files import TEMPORARY
from stepwell.client import Client
from stepwell.errors import StepwellError
from trainer.config import TrainConfig
from trainer.data.cache import Cache
from trainer.data.fields import Field, fields_for
from trainer.data.loader import Loader, View
from trainer.data.order import Order
from trainer.data.relabel import make_relabelers
from trainer.data.snapshot import DataError, LeaseKeeper, Manifest, load, take
from trainer.processes import World

log = logging.getLogger(__name__)


class Data:
    """The snapshots in use, their columns on this node, and the lease that keeps them."""

    def __init__(
        self,
        config: TrainConfig,
        client: Client,
        world: World,
        home: Path,
        holder: str,
        say: Callable[[str], None],
    ):
        self.config, self.client, self.world, self.say = config, client, world, say
        self.folder, self.holder = home / "snapshots", holder
        make_relabelers(config.data.relabel)  # a name that nobody knows costs no download
        self.cache = Cache(config.data.cache, config.data.cache_gb * 1e9, client)
        self.views: list[View] = []
        self.left_out: list[tuple[str, ...]] = []
        self.past: list[dict[str, Any]] = []
        """Views that an earlier life of the run is done with: kept for the record only."""
        self._newest_digest = ""
        if world.is_main:
            for litter in self.folder.glob(f".*{TEMPORARY}"):  # of a life that was killed
                litter.unlink(missing_ok=True)
        self.leases = LeaseKeeper(client, holder) if world.is_main else None

    def use(self, snapshot: str, start: int, left_out: tuple[str, ...]) -> View:
        """Draw from a snapshot from step `start` on. All ranks; the node's first one fetches.

        Raises `DataError` on all ranks alike when one node cannot get it.
        """
        world = self.world
        if self.leases is not None:
            self.leases.hold(snapshot)
        error, spoiled = "", set(left_out)
        manifest: Manifest | None = None
        if world.is_node_main:
            try:
                manifest = load(self.client, snapshot, self.folder)
                rest = manifest.without(left_out)
                spoiled |= set(self.cache.ensure(rest, self._fields_of(manifest), self._progress))
            except StepwellError as caught:
                error = f"snapshot {snapshot} cannot be had on {world.host}: {caught}"
        # A shard that one node cannot read is left out on all: the order must be the same.
        answers = world.gather([error, sorted(spoiled)])
        if errors := [text for text, _ in answers if text]:
            raise DataError(errors[0])
        everywhere = tuple(sorted(set().union(*(names for _, names in answers))))
        manifest = manifest or load(self.client, snapshot, self.folder)
        self._newest_digest = manifest.digest
        manifest = manifest.without(everywhere)
        order = Order(manifest, self.config.data, self.config.seed, world.size, self.config.sources)
        view = View(start, manifest, order)
        self.views.append(view)
        self.left_out.append(everywhere)
        return view

    def take_up(self, views: list[dict[str, Any]], update: int) -> None:
        """Go on with a checkpoint's views: the one in use at `update`, and those that follow."""
        current = max(i for i, view in enumerate(views) if view["start"] <= update)
        self.past = views[:current]
        for view in views[current:]:
            self.use(view["snapshot"], view["start"], tuple(view["left_out"]))

    def refresh(self, loader: Loader, update: int) -> None:
        """Switch to a newer snapshot, a few steps from now, if there is anything new."""
        if self.config.snapshot:  # that one, and no other
            return
        name = ""
        if self.world.is_main:
            name = self._newer()
        name = self.world.share(name)
        if not name:
            return
        old = self.views[-1].manifest
        try:
            view = self.use(name, update + loader.lookahead, ())
        except DataError as error:
            log.warning("training goes on with the last snapshot: %s", error)
            self._drop(name)
            return
        loader.add_view(view)
        self._drop(old.snapshot)
        self.say(
            f"from update {view.start} on: {len(view.manifest)} trajectories, "
            f"{view.manifest.steps} steps (were {len(old)}, {old.steps})"
        )

    def _newer(self) -> str:
        """A new snapshot, if it holds anything else than the newest one in use, or ""."""
        name = ""
        try:
            name = take(self.client, self.config, self.holder)
            found = self.client.snapshot(name)
            if found.trajectories and found.digest != self._newest_digest:
                return name
        except StepwellError as error:
            log.warning("no newer snapshot, training goes on with the last: %s", error)
        if name:
            self._drop(name)
        return ""

    def loader(self, update: int, device: torch.device) -> Loader:
        return Loader(
            self.cache,
            self.fields,
            self.views,
            self.config.data,
            step=update,
            rank=self.world.rank,
            device=device,
        )

    def describe(self) -> list[dict[str, Any]]:
        """For the checkpoint: which snapshot from which step, and what could not be read of it."""
        return self.past + [
            {"snapshot": v.manifest.snapshot, "start": v.start, "left_out": list(out)}
            for v, out in zip(self.views, self.left_out, strict=True)
        ]

    @property
    def snapshots(self) -> list[str]:
        """Ids of all snapshots that the run has drawn from, in order."""
        return [view["snapshot"] for view in self.describe()]

    def close(self) -> None:
        if self.leases is not None:
            self.leases.close()

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._fields_of(self.views[0].manifest)

    def _fields_of(self, manifest: Manifest) -> tuple[Field, ...]:
        return fields_for(manifest.spec, self.config.data)

    def _drop(self, snapshot: str) -> None:
        if self.leases is not None:
            self.leases.drop(snapshot)

    def _progress(self, done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            self.say(f"columns of {done} of {total} shards are on this node")
