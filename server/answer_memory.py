"""Memory of answers: one budget, reserved before the first byte of an answer is made.

    Answer      made piece by piece in a few worker threads, one piece ahead of the client: holds
                the size that its route names, whatever the length of the answer
    any other   made whole, because it is small; if it is longer than a piece, it holds its length
                until it is sent (`AnswerMemoryMiddleware`)

Beyond the budget (memory_budget.py) an answer waits for a moment, and then fails with 429. While
others wait, a client that has not taken its piece for STALLED seconds loses its connection, and so
its place: the client that has waited for longest first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, TypeVar

import structlog
from anyio import CancelScope, CapacityLimiter, to_thread
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.memory_budget import ANSWERS, MemoryBudget, Reservation
from server.problems import ProblemError
from server.telemetry import Telemetry

PIECE = 64 << 10
"""Bytes of an answer that are made at once. Small: each client that does not read holds one that is
sent and one that waits."""
PIECES = 5 * PIECE
"""Memory of an answer's pieces, a piece in the connection with slack and the next one, and of its
request and its connection."""
STALLED = 2.0
"""Seconds after which a client that has not taken its piece loses its place to others."""
COMPUTE, READ = 1, 2
"""Threads that make pieces, apart from those of the routes: of answers that are computed, where a
second one would only compete for the interpreter, and of files that are read."""
ABORT = "stepwell.abort"
"""In the scope of a request: a function that ends its connection at once (http_protocol.py)."""

T = TypeVar("T")
log = structlog.get_logger("stepwell.answers")


class Damaged(Exception):
    """The stored bytes of an answer are not what was written. Not an OSError: Starlette treats
    those as a client that disconnected."""


class Place:
    """One answer that is being sent."""

    __slots__ = ("_abort", "dropped", "reservation", "since")

    def __init__(self, reservation: Reservation, abort: Callable[[], object]):
        self.reservation, self._abort = reservation, abort
        self.since = 0.0
        """When the client was given the piece that it has not taken yet; 0 while none is sent."""
        self.dropped = False

    async def send(self, send: Send, message: Message) -> None:
        self.since = time.monotonic()
        await send(message)
        self.since = 0.0

    def drop(self) -> None:
        self.dropped = True
        self._abort()

    async def break_off(self) -> None:
        """End the connection, so that an incomplete answer never looks complete."""
        self._abort()
        # The server hears of it first, and does not log that the answer is incomplete.
        await asyncio.sleep(0)


class Answers:
    """The answers that are being sent, their memory, and the threads that make them."""

    def __init__(self, total: int, telemetry: Telemetry):
        self.budget = MemoryBudget(total, telemetry, ANSWERS, self._make_room)
        self._places: set[Place] = set()
        self._dropped = telemetry.answers_dropped
        self._limiters: dict[int, CapacityLimiter] = {}

    @asynccontextmanager
    async def place(self, scope: Scope, size: int) -> AsyncIterator[Place]:
        """Hold `size` bytes for the answer to a request. Raises 429."""
        place = Place(Reservation(self.budget), scope.get(ABORT, lambda: None))
        try:
            await place.reservation.reserve(size)
            self._places.add(place)
            yield place
        finally:
            self._places.discard(place)
            place.reservation.release()

    async def in_thread(self, threads: int, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in one of the threads for answers, COMPUTE or READ; waits for its end even if
        cancelled."""
        if threads not in self._limiters:
            self._limiters[threads] = CapacityLimiter(threads)
        return await to_thread.run_sync(work, *args, limiter=self._limiters[threads])

    def _make_room(self, wanted: int) -> None:
        """Drop as many stalled clients as hold `wanted` bytes."""
        limit = time.monotonic() - STALLED
        stalled = [place for place in self._places if place.dropped or 0 < place.since < limit]
        for place in sorted(stalled, key=lambda place: (not place.dropped, place.since)):
            if wanted <= 0:
                return
            wanted -= place.reservation.size
            if not place.dropped:
                self._dropped.inc()
                log.info("a client that does not read its answer was disconnected: others wait")
                place.drop()


class Answer(StreamingResponse):
    """An answer that is made in pieces, while it is sent."""

    threads = COMPUTE

    def __init__(
        self,
        answers: Answers,
        size: int,
        parts: Callable[[], Iterable[bytes | memoryview]],
        *,
        media_type: str,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        damaged: Callable[[], ProblemError] | None = None,
    ):
        """`size`: the memory that `parts`, an iterator of any pieces, holds besides them.

        An exception from `parts` before the first piece becomes an error response, a later one
        breaks the connection. `damaged` gives the error of `Damaged`; called in a thread.
        """
        super().__init__((), status_code, headers, media_type)
        self._answers, self._size = answers, size + PIECES
        self._parts, self._damaged = parts, damaged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
            return
        in_thread = partial(self._answers.in_thread, self.threads)
        async with self._answers.place(scope, self._size) as place:
            pieces = in_pieces(self._parts)
            try:
                try:
                    first = await in_thread(_next, pieces)
                except Damaged:
                    raise await in_thread(self._problem) from None
                self.body_iterator = self._rest(first, pieces)

                async def timed_send(message: Message) -> None:
                    await place.send(send, message)

                try:
                    await super().__call__(scope, receive, timed_send)
                except Damaged as error:
                    log.error(
                        "a response was aborted because its file is damaged", error=str(error)
                    )
                    await place.break_off()
                    await in_thread(self._problem)
                except Exception:  # logged by whoever is outside
                    await place.break_off()
                    raise
            finally:
                if getgeneratorstate(pieces) != GEN_CLOSED:
                    with CancelScope(shield=True):
                        await in_thread(pieces.close)

    async def _rest(self, first: bytes, pieces: Generator[bytes]) -> AsyncIterator[bytes]:
        piece = first
        while piece:
            yield piece
            if getgeneratorstate(pieces) == GEN_CLOSED:
                return
            piece = await self._answers.in_thread(self.threads, _next, pieces)

    def _problem(self) -> ProblemError:
        assert self._damaged is not None, "an answer that can be damaged says so"
        return self._damaged()


def in_pieces(parts: Callable[[], Iterable[bytes | memoryview]]) -> Generator[bytes]:
    """The bytes of all parts in pieces of PIECE bytes; the last one is shorter."""
    waiting = bytearray()
    source = iter(parts())
    try:
        for part in source:
            if isinstance(part, bytes) and len(part) == PIECE and not waiting:
                yield part  # of a file: no further copy for each client that does not read
                continue
            view = memoryview(part).cast("B")
            for at in range(0, len(view), PIECE):
                waiting += view[at : at + PIECE]
                if len(waiting) >= PIECE:
                    yield _cut(waiting)
        if waiting:
            yield bytes(waiting)
    finally:
        if isinstance(source, Generator):
            source.close()


def _next(pieces: Generator[bytes]) -> bytes:
    """The next piece of `in_pieces`, b"" at the end. With the last one the generator is closed: a
    small answer takes one turn in the threads, and waits once for those of others."""
    piece = next(pieces, b"")
    if len(piece) < PIECE:
        pieces.close()
    return piece


def _cut(waiting: bytearray) -> bytes:
    piece = bytes(waiting[:PIECE])
    del waiting[:PIECE]
    return piece


class AnswerMemoryMiddleware:
    """Pure ASGI: a whole body that is longer than a piece holds its length until it is sent."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answers: Answers = scope["app"].state.service.answers
        start: Message | None = None

        async def bounded_send(message: Message) -> None:
            """Holds the start back until the body is known: the answer may become a 429."""
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            head, start = start, None
            body = message.get("body", b"")
            if head is None or message.get("more_body") or len(body) <= PIECE:
                if head is not None:
                    await send(head)
                await send(message)
                return
            try:
                async with answers.place(scope, len(body)) as place:
                    await send(head)
                    for at in range(0, len(body), PIECE):
                        part = {"body": bytes(body[at : at + PIECE])}
                        more = at + PIECE < len(body)
                        await place.send(send, {**message, **part, "more_body": more})
            except ProblemError as error:
                await error.response()(scope, receive, send)

        await self.app(scope, receive, bounded_send)
