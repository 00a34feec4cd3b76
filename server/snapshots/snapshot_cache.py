"""Runs selections, and keeps recent snapshots in memory: a refresh reads only what changed.

    SelectionRunner   SQL → the whole selection, or only its changes since an earlier snapshot
    SnapshotCache     the newest snapshots with their blocks; `catch_up` keeps selections up to date

A cached snapshot has two sets of blocks: those of its file, which never change, and those that its
selection found when it was last run (`SelectionResult`). A second snapshot of the same selection
starts with the latter, whether it names the first as `since` or not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from server.index.mirror import Mirror
from server.problems import ProblemError
from server.snapshots.selection import (
    Block,
    Blocks,
    Component,
    Damaged,
    SelectionRules,
    all_of,
    select_all,
    select_changed,
)
from server.sql.pool import SqlPool
from server.sql.selected import Selected
from server.storage.checksums import Corrupt
from stepwell._background import BackgroundLoop

log = structlog.get_logger("stepwell.snapshots")
MANY_CHANGES = 0.25
"""If a larger part of the trajectories has changed, the whole selection is run again."""
MOST_CHANGES = 200_000
"""The same for this number of changes, which are read into memory at once."""
RECENT, RECENT_ROWS = 16, 2_000_000
"""Most snapshots whose blocks stay in memory, and most rows (of some 80 bytes each)."""
CATCH_UP_EVERY, CATCH_UP_BEHIND, CATCH_UP_FOR = 0.25, 200, 600.0
"""Interval in seconds, number of changes and seconds since the last use: at each interval, a used
selection with at least that many changes catches up. Fewer are quick to read when needed."""


class SelectionMoved(Exception):
    """Selected trajectories were moved or deleted while the snapshot was created."""


@dataclass(frozen=True, slots=True)
class SelectionResult:
    """The result of a selection at one moment of the index."""

    sources: tuple[Component, ...]
    rules: SelectionRules
    blocks: Blocks
    change_id: int
    epoch: int
    reads: tuple[frozenset[str] | None, ...]
    """Per component: the columns it reads if it depends on one row at a time, else None."""
    damaged: Damaged
    """Rows that were left out because their shards are damaged."""


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """A snapshot in memory."""

    pk: int
    blocks: Blocks
    """The blocks of its file."""
    found: SelectionResult | None = None
    """The result of the last run of its selection: newer than the file, or None."""


class SelectionRunner:
    """Runs selections as SQL over the index."""

    def __init__(self, sql: SqlPool, mirror: Mirror):
        self._sql, self._mirror = sql, mirror

    def all(self, sources: tuple[Component, ...], rules: SelectionRules) -> SelectionResult:
        """Run the whole selection. Raises `SelectionMoved`, and 422 as SQL does."""
        blocks: Blocks = {}
        reads: list[frozenset[str] | None] = []
        marks, epochs, damaged = [], set(), Counter[tuple[str, str]]()
        for component, source in enumerate(sources):
            selected = self._sql.select_rows(source.select, source.dataset)
            assert selected.state is not None
            try:
                some, spoiled = select_all(self._mirror, component, selected, rules)
            except FileNotFoundError as error:  # slower than the mirror keeps files
                raise SelectionMoved from error
            except Corrupt as error:
                log.error("a file of the mirror is damaged and is rewritten", error=str(error))
                self._mirror.discard([f"mirror/{Path(error.path).name}"])
                raise SelectionMoved from error
            blocks |= some
            damaged += spoiled
            reads.append(None if selected.reads is None else frozenset(selected.reads))
            marks.append(selected.state.change_id)
            epochs.add(selected.state.epoch)
        if len(epochs) > 1:
            raise SelectionMoved
        return SelectionResult(
            sources, rules, blocks, min(marks), epochs.pop(), tuple(reads), damaged
        )

    def behind(self, found: SelectionResult, most: int) -> int | None:
        """Number of changes since, up to `most`; None if a full run is necessary."""
        return self._mirror.changes.count(found.change_id, found.epoch, most)

    def changed(
        self, sources: tuple[Component, ...], rules: SelectionRules, earlier: CachedSnapshot | None
    ) -> SelectionResult | None:
        """The same, from the changes since `earlier` alone; None if a full run is necessary."""
        if earlier is None or earlier.found is None or not earlier.blocks:
            return None
        last = earlier.found
        if (last.sources, last.rules) != (sources, rules):
            return None
        reads = frozenset({"dataset"}).union(*(names or () for names in last.reads))
        if None in last.reads:
            return None
        total = sum(map(len, last.blocks.values()))
        most = min(MOST_CHANGES, max(1000, int(MANY_CHANGES * total)))
        count = self.behind(last, most + 1)
        if count is None or count > most:
            return None
        changes = self._mirror.changes.read(last.change_id, last.epoch, sorted(reads))
        if changes is None:
            return None

        def among(component: int) -> Selected:
            source = sources[component]
            if source.all:
                return all_of(source.dataset, changes.locations)
            return self._sql.select_rows(source.select, source.dataset, among=changes.columns)

        try:
            blocks = select_changed(last.blocks, changes, len(sources), among, rules)
        except ProblemError as error:
            log.info("an incremental selection failed", error=error.detail[:200])
            return None
        return replace(last, blocks=blocks, change_id=changes.change_id)


class SnapshotCache:
    """Recent snapshots by id, least recently used first. Thread-safe."""

    def __init__(self, finder: SelectionRunner, rules: Callable[[bool], SelectionRules]):
        """`rules` returns the current rules for snapshots with or without evaluation."""
        self._finder, self._rules = finder, rules
        self._recent: OrderedDict[str, CachedSnapshot] = OrderedDict()
        self._last_used: dict[str, float] = {}
        """Time of the last use of each, on the monotonic clock."""
        self._lock = threading.Lock()
        self._loop = BackgroundLoop("snapshots", self.catch_up, every=CATCH_UP_EVERY)

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        self._loop.stop(5.0)

    @property
    def trouble(self) -> str:
        return self._loop.trouble

    def get(self, snapshot_id: str) -> CachedSnapshot | None:
        with self._lock:
            if (recent := self._recent.get(snapshot_id)) is not None:
                self._recent.move_to_end(snapshot_id)
                self._last_used[snapshot_id] = time.monotonic()
            return recent

    def latest_like(self, sources: tuple[Component, ...], rules: SelectionRules) -> str | None:
        """The latest snapshot with the same selection."""
        with self._lock:
            for snapshot_id, recent in reversed(self._recent.items()):
                found = recent.found
                if found and (found.sources, found.rules) == (sources, rules):
                    return snapshot_id
        return None

    def put(self, snapshot_id: str, recent: CachedSnapshot) -> CachedSnapshot:
        with self._lock:
            self._recent[snapshot_id] = recent
            self._recent.move_to_end(snapshot_id)
            self._last_used[snapshot_id] = time.monotonic()
            while len(self._recent) > 1 and (
                len(self._recent) > RECENT or _rows(self._recent.values()) > RECENT_ROWS
            ):
                gone, _ = self._recent.popitem(last=False)
                del self._last_used[gone]
        return recent

    def forget(self, snapshot_id: str) -> None:
        with self._lock:
            self._recent.pop(snapshot_id, None)
            self._last_used.pop(snapshot_id, None)

    def clear(self) -> None:
        with self._lock:
            self._recent.clear()
            self._last_used.clear()

    def catch_up(self) -> None:
        """One round: update the selections in use with what changed."""
        since = time.monotonic() - CATCH_UP_FOR
        with self._lock:
            used = [(name, r) for name, r in self._recent.items() if self._last_used[name] > since]
        for name, recent in used:
            last = recent.found
            if self._loop.stopping or last is None:
                continue
            if (self._finder.behind(last, CATCH_UP_BEHIND) or 0) < CATCH_UP_BEHIND:
                continue
            rules = self._rules(last.rules.include_eval)
            # None: a full run is necessary, which the next request for a snapshot does.
            found = self._finder.changed(last.sources, rules, recent)
            with self._lock:
                if self._recent.get(name) is recent:
                    self._recent[name] = replace(recent, found=found)


def _rows(recent: Iterable[CachedSnapshot]) -> int:
    """Number of rows; blocks that several snapshots share count once."""
    blocks: dict[int, Block] = {}
    for one in recent:
        for some in (one.blocks, one.found.blocks if one.found else {}):
            blocks.update(zip(map(id, some.values()), some.values(), strict=True))
    return sum(len(block) for block in blocks.values())
