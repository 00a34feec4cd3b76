"""A budget of memory that many requests share: reserved before the memory is used.

Beyond the budget a reservation waits for a moment, and then fails with 429. An eighth is reserved
for small ones, which need not wait behind large ones. A reservation ends when every owner has
released it (`Reservation.retain`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from server.problems import ProblemError
from server.telemetry import Telemetry

WAIT = 3.0
"""Seconds that a request waits for memory before it fails with 429."""
MAX_WAITING = 1024
"""Requests that may wait; each holds a connection and the bytes received with its head."""
SMALL = 4 << 20
"""Reservations of at most this size may use the last eighth of the budget, and overtake others."""
PRESSURE = 10.0
"""Seconds after a 429 during which others count as waiting: the response told them to retry."""
ROOM = 0.25
"""Seconds between two calls of `make_room` while a request waits."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a budget is for."""

    name: str
    """In the names of its metrics."""
    busy: str
    """The detail of a 429."""


BODIES = Kind(
    "body",
    "the bodies of other requests use all memory for bodies (STEPWELL_BODY_MEMORY); send the"
    " request again",
)
ANSWERS = Kind(
    "answer",
    "the answers to other requests use all memory for answers (STEPWELL_ANSWER_MEMORY); send the"
    " request again",
)


class Reservation:
    """The part of the budget that one request holds, until every owner has released it."""

    __slots__ = ("_budget", "_owners", "size")

    def __init__(self, budget: MemoryBudget):
        self._budget = budget
        self._owners = 1
        self.size = 0

    async def reserve(self, size: int) -> None:
        """Hold `size` bytes in total; waits for a moment. Raises 429."""
        if size > self.size:
            await self._budget.wait_for(self, size)

    def add(self, more: int) -> None:
        """Hold `more` additional bytes without waiting, from any thread. Raises 429."""
        self._budget.reserve_now(self, self.size + more)

    def retain(self) -> Reservation:
        """Add an owner, who must call `release` too."""
        with self._budget.lock:
            assert self._owners > 0, "released already"
            self._owners += 1
        return self

    @property
    def contended(self) -> bool:
        """Whether others wait for memory."""
        return self.size > 0 and self._budget.contended

    def release(self) -> None:
        with self._budget.lock:
            assert self._owners > 0, "released more often than retained"
            self._owners -= 1
            if self._owners:
                return
        self._budget.free(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    reservation: Reservation
    size: int
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]


class MemoryBudget:
    """The memory of all requests of one kind. Thread-safe."""

    def __init__(
        self,
        total: int,
        telemetry: Telemetry,
        kind: Kind = BODIES,
        make_room: Callable[[int], object] = lambda _wanted: None,
    ):
        """`make_room(bytes)` is called, in the event loop, while a request waits for them."""
        self.total = total
        self.reserve = total // 8
        """Reserved for small ones."""
        self.held = 0
        self.lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._refused_at = -PRESSURE
        self._kind, self._make_room = kind, make_room
        gauges = telemetry.memory[kind.name]
        gauges.budget.set(total)
        gauges.held.set_function(lambda: self.held)
        gauges.waiting.set_function(lambda: len(self._waiting))
        self._refused = gauges.refused

    @property
    def contended(self) -> bool:
        """Whether others wait for memory, or were refused a moment ago."""
        return bool(self._waiting) or time.monotonic() - self._refused_at < PRESSURE

    async def wait_for(self, reservation: Reservation, size: int) -> None:
        with self.lock:
            if self._take(reservation, size):
                return
            if len(self._waiting) >= MAX_WAITING:
                raise self._refuse(reservation, size)
            loop = asyncio.get_running_loop()
            waiter = _Waiter(reservation, size, loop, loop.create_future())
            # A request that has part of its body goes first: only when it ends is that part freed.
            (self._waiting.appendleft if reservation.size else self._waiting.append)(waiter)
        end = time.monotonic() + WAIT
        try:
            while not waiter.granted.done() and (left := end - time.monotonic()) > 0:
                self._make_room(size - reservation.size)
                # Not wait_for, which cancels what it waits for.
                await asyncio.wait([waiter.granted], timeout=min(left, ROOM))
            with self.lock:
                if waiter in self._waiting:
                    raise self._refuse(reservation, size)
        finally:
            # Waiters behind it are admitted when its reservation is released, right after this.
            with self.lock, contextlib.suppress(ValueError):
                self._waiting.remove(waiter)

    def reserve_now(self, reservation: Reservation, size: int) -> None:
        with self.lock:
            # Also uses the part for small ones: bytes already read should not be sent again.
            if self.held + size - reservation.size > self.total:
                raise self._refuse(reservation, size)
            self._grant(reservation, size)

    def free(self, reservation: Reservation) -> None:
        with self.lock:
            self.held -= reservation.size
            reservation.size = 0
        self._admit()

    def _take(self, reservation: Reservation, size: int) -> bool:
        in_turn = reservation.size == 0 and any(waiter.size > SMALL for waiter in self._waiting)
        if size > SMALL and in_turn:
            return False
        if not self._fits(reservation, size):
            return False
        self._grant(reservation, size)
        return True

    def _fits(self, reservation: Reservation, size: int) -> bool:
        limit = self.total if size <= SMALL else self.total - self.reserve
        return self.held + size - reservation.size <= limit

    def _grant(self, reservation: Reservation, size: int) -> None:
        self.held += size - reservation.size
        reservation.size = size

    def _admit(self) -> None:
        """Admit waiters in order; a large one that does not fit blocks large ones only."""
        with self.lock:
            held_up = False
            for waiter in list(self._waiting):
                large = waiter.size > SMALL
                if (large and held_up) or not self._fits(waiter.reservation, waiter.size):
                    held_up = held_up or large
                    continue
                self._grant(waiter.reservation, waiter.size)
                self._waiting.remove(waiter)
                with contextlib.suppress(RuntimeError):  # its event loop has ended
                    waiter.loop.call_soon_threadsafe(_wake, waiter.granted)

    def _refuse(self, reservation: Reservation, size: int) -> ProblemError:
        self._refused_at = time.monotonic()
        self._refused.inc()
        return ProblemError(
            429,
            "too_busy",
            self._kind.busy,
            expected=f"{size - reservation.size} bytes free of {self.total}",
            got=f"{self.total - self.held} bytes free",
            headers={"Retry-After": "1"},
        )


def _wake(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)
