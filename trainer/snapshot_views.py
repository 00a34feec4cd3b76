"""The snapshots a run draws from, one after another: fetched on every node, leased, and switched.

SnapshotViews that grows is looked for in the background, and no update waits for it:

    rank 0        asks whether there is a newer snapshot
    node mains    fetch its manifest and build columns; name the shards that cannot be read
    all ranks     order the samples, map columns, prepare relabelers
    all ranks     agree on a step, a few from now, and switch there

Each line is an errand in a thread of each rank; `agree`, at updates where all ranks meet anyway,
finds out that all have done it. So the order of samples is the same on all of them, and the step of
the switch is in the checkpoint: a resumed run replays the same views.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stepwell._background import BackgroundLoop
from stepwell._files import TEMPORARY
from stepwell.client import Client
from stepwell.errors import Gone, NotFound, StepwellError
from trainer.config import TrainConfig
from trainer.data.cache import Cache
from trainer.data.fields import Field, fields_for
from trainer.data.loader import Loader, OpenView, SnapshotView
from trainer.data.relabel import make_relabelers
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import DataError, LeaseKeeper, Manifest, forget, load, take
from trainer.distributed import World

log = logging.getLogger(__name__)


class Errand:
    """One thing at a time done in the background; what comes of it is picked up later."""

    def __init__(self, name: str, between: Callable[[], None]):
        self.result: Any = None
        self.error = ""
        """Why there is no result."""
        self._failed = ""
        self._task: Callable[[], Any] | None = None
        self._between, self._idle = between, True
        self._loop = BackgroundLoop(name, self._work, every=60.0).start()

    @property
    def idle(self) -> bool:
        """Nothing is being done, and nothing waits to be picked up."""
        return self._idle

    @property
    def done(self) -> bool:
        return not self._idle and self._task is None

    @property
    def trouble(self) -> str:
        """Why the last errand failed; empty where all is well."""
        return self._failed or self._loop.trouble

    def start(self, task: Callable[[], Any]) -> None:
        assert self._idle
        self.result, self.error, self._idle, self._task = None, "", False, task
        self._loop.wake()

    def pick_up(self) -> tuple[Any, str]:
        """The result, and why there is none."""
        assert self.done
        result, self.result, self._idle = self.result, None, True
        return result, self.error

    def wake(self) -> None:
        self._loop.wake()

    def close(self) -> None:
        self._loop.stop(5.0)

    def _work(self) -> None:
        self._between()
        task = self._task
        if task is None:
            return
        try:
            self.result = task()
            self._failed = ""
        except StepwellError as error:
            self.error = self._failed = str(error) or type(error).__name__
        except BaseException as error:  # a defect: the run goes on with the data that it has
            self.error = self._failed = f"{type(error).__name__}: {error}"
            log.exception("a defect while looking for new data")
        self._task = None


class SnapshotViews:
    """The snapshots in use, their columns on this node, and the leases that keep them."""

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
        self.history: list[dict[str, Any]] = []
        """For the checkpoint: which snapshot from which step, and what could not be read of it."""
        self.manifest: Manifest
        """The newest one in use, or about to be."""
        self._views: list[SnapshotView] = []
        """Until the loader has them."""
        self._digest = self._opened_digest = ""
        """Of the newest snapshot in use and of the one last opened, all of it: with what could not
        be read."""
        self._fetched: Manifest | None = None
        self._phase = self._coming = ""
        self._old = 0
        """Views of the history that no checkpoint needs any more."""
        self._drop: deque[str] = deque()
        if world.is_main:
            for litter in self.folder.glob(f".*{TEMPORARY}"):  # of a life that was killed
                litter.unlink(missing_ok=True)
        self.leases = LeaseKeeper(client, holder) if world.is_main else None
        self._errand = Errand("new data", self._give_back)

    def begin(self, snapshot: str) -> None:
        """Draw from a snapshot from step 0 on. All ranks; waits for it.

        Raises `DataError` on all ranks alike when one node cannot get it.
        """
        self._use(snapshot, 0, ())

    def take_up(self, views: list[dict[str, Any]], update: int) -> None:
        """Go on with a checkpoint's views: the one in use at `update`, and those that follow."""
        current = _current(views, update)
        self.history = list(views[:current])
        for view in views[current:]:
            self._use(view["snapshot"], view["start"], tuple(view["left_out"]))

    def loader(self, update: int, device: torch.device) -> Loader:
        views, self._views = self._views, []
        return Loader(
            self.cache,
            self._fields_of(self.manifest),
            views,
            self.config.data,
            step=update,
            rank=self.world.rank,
            device=device,
        )

    # --- growing data ---------------------------------------------------------------------------

    def look(self) -> None:
        """Look for newer data. Rank 0, in the background; one look at a time."""
        if self.world.is_main and not self.config.snapshot and not self._phase:
            if self._errand.idle:
                self._errand.start(self._newer)

    def agree(self, loader: Loader, update: int, wish: int, oldest: int) -> tuple[int, bool]:
        """The largest wish of all ranks, and whether they switch to newer data now.

        All ranks call this at the same updates; `oldest` is the update of the oldest checkpoint, as
        far as this rank knows (0 elsewhere): what none needs is forgotten.
        """
        found = self._phase == "" and self._errand.done
        busy = self._phase != "" and not self._errand.done
        mine = [wish, int(found), int(busy), oldest]
        wish, found, busy, oldest = self.world.largest_of(mine)  # type: ignore[assignment]
        self._forget(oldest)
        if self._phase:
            return wish, not busy and self._go_on(loader, update)
        if found:
            name, error = self._errand.pick_up() if self.world.is_main else ("", "")
            if error:
                log.warning("no newer snapshot, training goes on with the last: %s", error)
            name = self.world.share(name or "")
            if name:
                self._phase, self._coming = "fetch", name
                node_main = self.world.is_node_main
                self._errand.start(partial(self._fetch, name, ()) if node_main else list)
        return wish, False

    def _go_on(self, loader: Loader, update: int) -> bool:
        """All have done the errand of this phase: the next one. Whether there is none."""
        result, error = self._errand.pick_up()
        spoiled = result if self._phase == "fetch" and not error else []
        answers = self.world.gather([error, spoiled])
        if errors := [text for text, _ in answers if text]:
            log.warning("training goes on with the last snapshot: %s", errors[0])
            self._release(self._coming)
            self._phase = self._coming = ""
            return False
        if self._phase == "fetch":
            everywhere = tuple(sorted(set().union(*(names for _, names in answers))))
            self._phase = "open"
            self._errand.start(partial(self._open, loader, self._coming, everywhere))
            return False
        opened, left_out = result
        self._phase = self._coming = ""
        self._switch(loader, update + loader.lookahead, opened, left_out)
        return True

    def _switch(
        self, loader: Loader, start: int, opened: OpenView, left_out: tuple[str, ...]
    ) -> None:
        old, new = self.manifest, opened.view.manifest
        loader.add_view(replace(opened, view=replace(opened.view, start=start)))
        self._note(new, start, left_out)
        self.say(
            f"from update {start} on: {len(new)} trajectories, {new.steps} steps "
            f"(were {len(old)}, {old.steps})"
        )

    # --- errands, in the background -------------------------------------------------------------

    def _newer(self) -> str:
        """A new snapshot, if it holds anything else than the newest one in use, or ""."""
        newest = self.manifest.snapshot
        try:
            name = take(self.client, self.config, self.holder, since=newest)
        except (NotFound, Gone):  # the service has forgotten the one in use
            name = take(self.client, self.config, self.holder)
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
        """Have a snapshot's manifest and columns on this node; shards that cannot be read."""
        try:
            before = self.history[-1]["snapshot"] if self.history else ""
            manifest = self._fetched = load(self.client, snapshot, self.folder, since=before)
            rest = manifest.without(left_out)
            spoiled = self.cache.ensure(rest, self._fields_of(manifest), self._progress)
        except StepwellError as error:
            raise DataError(
                f"snapshot {snapshot} cannot be had on {self.world.host}: {error}"
            ) from error
        return sorted({*left_out, *spoiled})

    def _view(self, snapshot: str, left_out: tuple[str, ...]) -> SnapshotView:
        manifest, self._fetched = self._fetched, None
        if manifest is None or manifest.snapshot != snapshot:
            manifest = load(self.client, snapshot, self.folder)
        self._opened_digest = manifest.digest
        manifest = manifest.without(left_out)
        config = self.config
        sampler = WindowSampler(manifest, config.data, config.seed, self.world.size, config.sources)
        return SnapshotView(0, manifest, sampler)

    def _open(
        self, loader: Loader, snapshot: str, left_out: tuple[str, ...]
    ) -> tuple[OpenView, tuple[str, ...]]:
        return loader.open(self._view(snapshot, left_out)), left_out

    def _give_back(self) -> None:
        while self._drop and self.leases is not None:
            self.leases.drop(self._drop.popleft())

    # --- both -----------------------------------------------------------------------------------

    def _use(self, snapshot: str, start: int, left_out: tuple[str, ...]) -> None:
        world = self.world
        if self.leases is not None:
            self.leases.hold(snapshot)
        error, spoiled = "", sorted(left_out)
        if world.is_node_main:
            try:
                spoiled = self._fetch(snapshot, left_out)
            except DataError as caught:
                error = str(caught)
        # A shard that one node cannot read is left out on all: the order must be the same.
        answers = world.gather([error, spoiled])
        if errors := [text for text, _ in answers if text]:
            raise DataError(errors[0])
        everywhere = tuple(sorted(set().union(*(names for _, names in answers))))
        view = replace(self._view(snapshot, everywhere), start=start)
        self._views.append(view)
        self._note(view.manifest, start, everywhere)

    def _note(self, manifest: Manifest, start: int, left_out: tuple[str, ...]) -> None:
        self.manifest = manifest
        self._digest = self._opened_digest
        self.history.append(
            {"snapshot": manifest.snapshot, "start": start, "left_out": list(left_out)}
        )

    def _forget(self, oldest: int) -> None:
        """What no run resumed at `oldest` or later reads: its lease and its manifest go."""
        current = _current(self.history, oldest)
        if current <= self._old:
            return
        old, self._old = self.history[self._old : current], current
        needed = {view["snapshot"] for view in self.history[current:]}
        if self.world.is_node_main:
            forget(self.folder, [*needed, self._coming])
        for snapshot in {view["snapshot"] for view in old} - needed:
            self._release(snapshot)

    def _release(self, snapshot: str) -> None:
        self._drop.append(snapshot)
        self._errand.wake()

    # --- for others -----------------------------------------------------------------------------

    @property
    def snapshots(self) -> list[str]:
        """Ids of all snapshots that the run has drawn from, in order."""
        return [view["snapshot"] for view in self.history]

    @property
    def left_out(self) -> set[str]:
        """Shards that could not be read, of all snapshots."""
        return {shard for view in self.history for shard in view["left_out"]}

    @property
    def trouble(self) -> str:
        """Why there is no newer data, or no lease; empty where all is well."""
        kept = self.leases.trouble if self.leases is not None else ""
        return self._errand.trouble or kept

    def close(self) -> None:
        self._errand.close()
        if self.leases is not None:
            self.leases.close()

    def _fields_of(self, manifest: Manifest) -> tuple[Field, ...]:
        return fields_for(manifest.spec, self.config.data)

    def _progress(self, done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            self.say(f"columns of {done} of {total} shards are on this node")


def _current(views: list[dict[str, Any]], update: int) -> int:
    """Which view is in use at an update."""
    return max((i for i, view in enumerate(views) if view["start"] <= update), default=0)
