"""A fair queue: hands idle workers to waiting callers, each with a share.

admitted   a caller has at most `per_caller` queries here; a caller that has one already gets at
           most half of the waiting places, so that one caller cannot block the others
running    at most `running` queries of one caller at once: one worker stays free for others
next       the caller with the fewest running queries, then the one whose arrival or last service
           is longest ago: round robin, however many each has queued
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.problems import ProblemError

W = TypeVar("W")


@dataclass(eq=False, slots=True)
class _Place(Generic[W]):
    """A waiting query. `worker` is set when it is assigned one."""

    caller: str
    since: float
    worker: W | None = None


class FairQueue(Generic[W]):
    """Hands idle workers to callers in fair order. Thread-safe."""

    def __init__(
        self,
        *,
        running: int,
        waiting: int,
        per_caller: int,
        on_demand: Callable[[int], object] = lambda _workers: None,
    ):
        """`on_demand` gets the number of workers that the queries here could use at once."""
        self._running_each = running
        self._waiting_most = waiting
        self._per_caller = per_caller
        self._on_demand = on_demand
        self._changed = threading.Condition()
        self._idle: list[W] = []
        self._places: list[_Place[W]] = []
        self._present: Counter[str] = Counter()
        """Admitted queries of each caller that have not ended."""
        self._running: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        """Time at which each caller with queries last got or returned a worker."""
        self._closed = False

    def put(self, worker: W) -> None:
        """Add an idle worker."""
        with self._changed:
            self._idle.append(worker)
            self._assign()

    def close(self) -> None:
        """Refuse all waiting and later queries."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def admit(self, caller: str) -> None:
        """Admit a query, or raise 429. Call `leave` when an admitted query ends."""
        with self._changed:
            mine = self._present[caller]
            waiting = sum(self._present.values()) - sum(self._running.values())
            most = self._waiting_most if mine == 0 else self._waiting_most // 2
            # With an idle worker for it, a query does not wait.
            free = len(self._idle) > waiting and self._running[caller] < self._running_each
            if mine >= self._per_caller or (waiting >= most and not free):
                raise ProblemError(
                    429,
                    "too_many_queries",
                    "too many queries at once; try again in a moment",
                    expected=f"at most {self._per_caller} of one caller,"
                    f" {self._waiting_most} waiting",
                    got=f"{mine} of this caller, {waiting} waiting",
                    headers={"Retry-After": "1"},
                )
            self._present[caller] += 1

    def leave(self, caller: str) -> None:
        """End an admitted query of this caller, after `give`."""
        with self._changed:
            self._present[caller] -= 1
            if not self._present[caller]:
                del self._present[caller]
                self._served.pop(caller, None)

    def take(self, caller: str, deadline: float) -> W:
        """A worker for an admitted query. Raises 429 if none is free by the deadline."""
        with self._changed:
            place = _Place[W](caller, time.monotonic())
            self._places.append(place)
            self._assign()
            if place.worker is None:
                self._on_demand(self._usable())
            while place.worker is None:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    self._places.remove(place)
                    raise _closing() if self._closed else _too_late()
                self._changed.wait(left)
            return place.worker

    def give(self, caller: str, worker: W | None) -> None:
        """Return the worker from `take`; None: it is not returned."""
        with self._changed:
            self._served[caller] = time.monotonic()
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
            if worker is not None:
                self._idle.append(worker)
            self._assign()

    def _usable(self) -> int:
        present = self._running + Counter(place.caller for place in self._places)
        return sum(min(count, self._running_each) for count in present.values())

    def _assign(self) -> None:
        while self._idle:
            able = [p for p in self._places if self._running[p.caller] < self._running_each]
            if not able:
                return
            place = min(able, key=self._rank)
            self._places.remove(place)
            place.worker = self._idle.pop()
            self._running[place.caller] += 1
            self._served[place.caller] = time.monotonic()
            self._changed.notify_all()

    def _rank(self, place: _Place[W]) -> tuple[int, float]:
        waits = max(place.since, self._served.get(place.caller, 0.0))
        return self._running[place.caller], waits


def _too_late() -> ProblemError:
    return ProblemError(
        429,
        "too_many_queries",
        "no SQL worker became free before the query's deadline; try again, or set a longer timeout",
        headers={"Retry-After": "2"},
    )


def _closing() -> ProblemError:
    return ProblemError(503, "shutting_down", "the service is stopping")
