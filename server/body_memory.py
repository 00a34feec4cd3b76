"""Memory of request bodies: one budget, reserved before the first byte of a body is read.

    length declared     all of it at once: a request that has begun can finish, so no two ever wait
                        for each other halfway
    none declared       in steps, as it grows
    JSON                JSON_WEIGHT times its length: what it becomes when it is parsed
    streamed to a file  what is held on the way there, however long the body is

Beyond the budget a request waits, unread, for a moment, and is answered 429 then. An eighth is
left to small bodies, which need not wait behind large ones. What was taken is given back when the
request is answered and nothing else needs the bytes (`Reservation.retain`).

A body that arrives too slowly is answered 408. While others wait it must come at a pace that would
bring what it took within HOLD_SECONDS; without need it may take its time (MIN_RATE).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.problems import ProblemError
from server.settings import JSON_WEIGHT, Settings
from server.telemetry import Telemetry

WAIT = 3.0
"""Seconds that a body waits for memory before its request is answered 429."""
MAX_WAITING = 1024
"""Requests that may wait; each keeps a connection and what came with its head."""
SMALL = 4 << 20
"""What takes at most this much may use the last eighth of the budget, and overtakes."""
STEP = 1 << 20
"""How much is taken at a time for a body of unknown length."""
STREAM_CHUNK = 1 << 20
"""Bodies that go to a file are gathered to this size: a hop to a thread for each packet would cost
more than the writing."""
STREAM_BYTES = 3 * STREAM_CHUNK
"""What such a body holds: a chunk that gathers, with its slack, and one on its way to the disk."""

MIN_RATE = 16 << 10
"""Bytes per second that a body must keep up after its first `body_timeout` seconds."""
HOLD_SECONDS = 60.0
"""While others wait for memory: how long a body may take, beyond a third of `body_timeout`."""
PRESSURE = 10.0
"""Seconds after a refusal during which others count as waiting: they were told to come again."""
LOOK = 1.0
"""Seconds between looks at whether others wait."""
DISCARD = 1 << 20
"""A refused body with no more than this to come is read and dropped, so that the connection can be
used again; of a longer one the connection is closed."""

_INGEST = re.compile(r"/v1/datasets/[^/]+/trajectories/?")
_IMPORT = re.compile(r"/v1/datasets/[^/]+/imports/?")
_POLICY = re.compile(r"/v1/runs/[^/]+/policies/[^/]+/?")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a route's body may bring, and what it holds."""

    limit: int
    """Most bytes."""
    weight: int = 1
    """Bytes held for each byte of the body …"""
    held: int | None = None
    """… or so many for all of it, because it goes to a file."""


def body_limits(settings: Settings, method: str, path: str) -> BodyLimits:
    if method == "POST" and _INGEST.fullmatch(path):
        return BodyLimits(settings.max_body)
    if method == "POST" and _IMPORT.fullmatch(path):
        return BodyLimits(settings.max_upload, held=STREAM_BYTES)
    if method == "PUT" and _POLICY.fullmatch(path):
        return BodyLimits(settings.max_policy, held=STREAM_BYTES)
    return BodyLimits(settings.max_json, JSON_WEIGHT)


def may_lack_type(path: str) -> bool:
    """Whether a body of this route may come without a Content-Type: a file sent by hand."""
    return _IMPORT.fullmatch(path) is not None


# --- the budget -----------------------------------------------------------------------------------


class Reservation:
    """What one request holds of the budget. Given back when every owner has released it."""

    __slots__ = ("_budget", "_owners", "size")

    def __init__(self, budget: MemoryBudget):
        self._budget = budget
        self._owners = 1
        self.size = 0

    async def reserve(self, size: int) -> None:
        """Hold `size` bytes in all; waits for a moment. Raises 429."""
        if size > self.size:
            await self._budget.wait_for(self, size)

    def add(self, more: int) -> None:
        """Hold `more` bytes beyond the rest, at once, from any thread. Raises 429."""
        self._budget.reserve_now(self, self.size + more)

    def retain(self) -> Reservation:
        """One more owner, who will release it too."""
        with self._budget.lock:
            assert self._owners > 0, "released already"
            self._owners += 1
        return self

    @property
    def contended(self) -> bool:
        """Whether others wait for what this holds."""
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
    """So many bytes for all bodies of the process together. Thread-safe."""

    def __init__(self, total: int, telemetry: Telemetry):
        self.total = total
        self.reserve = total // 8
        """For small bodies only."""
        self.held = 0
        self.lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._refused_at = -PRESSURE
        self._telemetry = telemetry
        telemetry.body_budget.set(total)
        telemetry.body_held.set_function(lambda: self.held)
        telemetry.body_waiting.set_function(lambda: len(self._waiting))

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
            # Who holds a part of a body goes first: only its end gives that part back.
            (self._waiting.appendleft if reservation.size else self._waiting.append)(waiter)
        try:
            async with asyncio.timeout(WAIT):
                await waiter.granted
        except TimeoutError:
            with self.lock:
                if waiter not in self._waiting:
                    return  # granted at the last moment
                raise self._refuse(reservation, size) from None
        finally:
            # Who stands behind it is let in when its reservation is released, right after this.
            with self.lock, contextlib.suppress(ValueError):
                self._waiting.remove(waiter)

    def reserve_now(self, reservation: Reservation, size: int) -> None:
        with self.lock:
            # Not only the room for small bodies: what was read already should not be read again.
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
        room = self.total if size <= SMALL else self.total - self.reserve
        return self.held + size - reservation.size <= room

    def _grant(self, reservation: Reservation, size: int) -> None:
        self.held += size - reservation.size
        reservation.size = size

    def _admit(self) -> None:
        """Let in who waits, in order; a large one that does not fit holds up large ones only."""
        with self.lock:
            held_up = False
            for waiter in list(self._waiting):
                large = waiter.size > SMALL
                if (large and held_up) or not self._fits(waiter.reservation, waiter.size):
                    held_up = held_up or large
                    continue
                self._grant(waiter.reservation, waiter.size)
                self._waiting.remove(waiter)
                with contextlib.suppress(RuntimeError):  # its loop has ended, and its task with it
                    waiter.loop.call_soon_threadsafe(_wake, waiter.granted)

    def _refuse(self, reservation: Reservation, size: int) -> ProblemError:
        self._refused_at = time.monotonic()
        self._telemetry.body_refused.inc()
        return ProblemError(
            429,
            "too_busy",
            "the bodies of other requests fill the memory set aside for them"
            " (STEPWELL_BODY_MEMORY); send it again",
            expected=f"{size - reservation.size} bytes free of {self.total}",
            got=f"{self.total - self.held} bytes free",
            headers={"Retry-After": "1"},
        )


def _wake(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)


# --- reading a body -------------------------------------------------------------------------------


class BodyMemoryMiddleware:
    """Pure ASGI, inside of the token check: every body is paid for, counted and timed."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reservation = Reservation(scope["app"].state.service.body_memory)
        scope.setdefault("state", {})["reservation"] = reservation
        body = _BodyReader(scope, receive, self.settings, reservation)
        started = False

        async def watching_send(message: Message) -> None:
            nonlocal started
            if body.refused is not None and not started:
                return  # whatever the app makes of the broken body, our answer is the better one
            started = True
            await send(message)

        try:
            await self.app(scope, body.receive, watching_send)
        except ProblemError:
            if body.refused is None:
                raise
        finally:
            reservation.release()
        if body.refused is not None and not started:
            await body.refused.response()(scope, receive, send)


class _BodyReader:
    """The body of one request on its way in: `receive` as the app sees it."""

    def __init__(
        self, scope: Scope, receive: Receive, settings: Settings, reservation: Reservation
    ):
        self._receive = receive
        self._patience = settings.body_timeout
        self._limits = body_limits(settings, scope["method"], scope["path"])
        self._reservation = reservation
        self._length = declared_length(scope)
        self._limit = self._limits.limit
        if self._length is not None:
            self._limit = min(self._limit, self._length)
        self._seen = 0
        self._began = self._latest = 0.0
        self._done = False
        self.refused: ProblemError | None = None
        """What is to be answered. Never raised itself, but a copy of it: it outlives the frames
        that a raise would hang on it, with the parts of the body in them."""

    async def receive(self) -> Message:
        if self._done:
            return await self._receive()  # the app waits for a disconnect: no deadline for that
        await self._reserve(STEP)
        message = await self._in_time()
        self._seen += len(message.get("body", b""))
        self._done = not message.get("more_body", False)
        if self._seen > self._limit:
            raise self._refuse(body_too_large(self._limit, self._seen))
        await self._reserve(0)
        return message

    async def _reserve(self, ahead: int) -> None:
        """Hold what has come and `ahead` bytes more; all of it where that is known."""
        terms = self._limits
        if terms.held is not None:
            size = terms.held if self._length != 0 else 0
        elif self._length is not None:
            size = terms.weight * self._length
        else:
            size = terms.weight * self._seen + ahead
        before = time.monotonic()
        try:
            await self._reservation.reserve(size)
        except ProblemError as error:
            raise self._refuse(error) from None
        if self._began:
            self._began += time.monotonic() - before  # our delay, not the sender's

    async def _in_time(self) -> Message:
        """The next part of the body. Raises 408 when it stands still or trickles."""
        now = time.monotonic()
        self._began = self._began or now
        self._latest = now
        while True:
            left = self._deadline() - time.monotonic()
            if left <= 0:
                raise self._refuse(
                    ProblemError(
                        408,
                        "body_timeout",
                        "the body stands still or trickles; send it again",
                        expected=f"bytes every {self._patience:g} s, and {MIN_RATE} a second on"
                        f" average; while others wait, all of it within {HOLD_SECONDS:g} s",
                        got=f"{self._seen} bytes in {time.monotonic() - self._began:.1f} s",
                    )
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK)):
                    return await self._receive()

    def _deadline(self) -> float:
        patience, rate = self._patience, float(MIN_RATE)
        if self._reservation.contended:
            patience /= 3
            rate = max(rate, self._reservation.size / self._limits.weight / HOLD_SECONDS)
        return min(self._latest + patience, self._began + patience + self._seen / rate)

    def _refuse(self, error: ProblemError) -> ProblemError:
        """Remember the answer; returns what is to be raised."""
        rest = None if self._length is None else self._length - self._seen
        if error.status != 429 or rest is None or rest > DISCARD:
            # The rest of the body is not read: the connection cannot be used again.
            error.headers["connection"] = "close"
        self.refused = error.copy()
        return error


async def read_whole_body(request: Request) -> memoryview:
    """A body in one piece, and in memory once: neither a list of chunks nor a copy of it.

    Raises `ClientDisconnect`.
    """
    length = declared_length(request.scope)
    if length is None:
        grown = bytearray()  # grows in place: large blocks are moved by the kernel, not copied
        async for chunk in request.stream():
            grown += chunk
        return memoryview(grown)
    buffer: Any = np.empty(length, np.uint8)  # memory that is not touched before bytes come
    view = memoryview(buffer)
    at = 0
    async for chunk in request.stream():
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    return view[:at]


def declared_length(scope: Mapping[str, Any]) -> int | None:
    """How long the body says it is; None where it comes in chunks, 0 where there is none."""
    found = 0
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            found = int(value)
        elif name == b"transfer-encoding":
            return None
    return found


def body_too_large(limit: int, got: int) -> ProblemError:
    return ProblemError(
        413,
        "body_too_large",
        "send less in one request",
        expected=f"at most {limit} bytes",
        got=f"{got} bytes or more",
    )
