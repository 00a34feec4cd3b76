"""Memory of request bodies: one budget, reserved before the first byte of a body is read.

    length declared     all of it at once: a request that has started can finish, so no two requests
                        wait for each other
    none declared       in steps, as it grows
    JSON                JSON_WEIGHT times its length: the size of the parsed objects
    streamed to a file  the size of the buffers, whatever the length of the body

Beyond the budget (memory_budget.py) a request waits, unread, for a moment, and then fails with 429.
A reservation ends when the response is sent and nothing else uses the bytes.

A body that arrives too slowly fails with 408. While other requests wait, the reserved bytes must
arrive at a rate that completes them within HOLD_SECONDS; otherwise MIN_RATE applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.memory_budget import Reservation
from server.problems import ProblemError
from server.settings import JSON_WEIGHT, Settings

STEP = 1 << 20
"""Size of one reservation step for a body of unknown length."""
STREAM_CHUNK = 1 << 20
"""Bodies that go to a file are buffered to this size: a thread switch for each packet would cost
more than the write."""
VALUES_WEIGHT = 4
"""Weight of a body of step values: the body, its joined lists, a selection, the written file."""
STREAM_BYTES = 3 * STREAM_CHUNK
"""Memory of such a body: the buffer, with its slack, and a chunk that is being written."""

MIN_RATE = 16 << 10
"""Bytes per second that a body must reach on average after its first `body_timeout` seconds."""
HOLD_SECONDS = 60.0
"""Time for a body while others wait for memory, beyond a third of `body_timeout`."""
LOOK = 1.0
"""Seconds between checks whether others wait."""
DISCARD = 1 << 20
"""A refused body with at most this many bytes left is read and dropped, which keeps the connection
usable; with more bytes left the connection is closed."""

SPLIT_TRAJECTORIES = (
    "send fewer trajectories in one request; one that is larger by itself must be stored in pieces"
    " (max_steps of the collector) or needs a higher STEPWELL_MAX_BODY"
)

_INGEST = re.compile(r"/v1/datasets/[^/]+/trajectories/?")
_VALUES = re.compile(r"/v1/datasets/[^/]+/annotations/values/?")
_IMPORT = re.compile(r"/v1/datasets/[^/]+/imports/?")
_POLICY = re.compile(r"/v1/runs/[^/]+/policies/[^/]+/?")
_VIDEO = re.compile(r"/v1/evaluations/[^/]+/videos/[^/]+/?")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of the body of a route."""

    limit: int
    """Largest body in bytes."""
    weight: int = 1
    """Bytes of memory for each byte of the body …"""
    held: int | None = None
    """… or for the whole body, because it goes to a file."""
    advice: str = "send less in one request, or raise STEPWELL_MAX_JSON"
    """What to do about a larger body."""

    def refusal(self, got: int) -> ProblemError:
        """The problem of a body of at least `got` bytes."""
        return ProblemError(
            413,
            "body_too_large",
            self.advice,
            expected=f"at most {self.limit} bytes",
            got=f"{got} bytes or more",
        )


def body_limits(settings: Settings, method: str, path: str) -> BodyLimits:
    if method == "POST" and _INGEST.fullmatch(path):
        return BodyLimits(settings.max_body, advice=SPLIT_TRAJECTORIES)
    if method == "POST" and _VALUES.fullmatch(path):
        return BodyLimits(
            settings.max_body // VALUES_WEIGHT,
            VALUES_WEIGHT,
            advice="send the values of fewer trajectories in one request, or raise"
            f" STEPWELL_MAX_BODY: {VALUES_WEIGHT} times the limit",
        )
    if method == "POST" and _IMPORT.fullmatch(path):
        advice = "import a part of the data at a time, or raise STEPWELL_MAX_UPLOAD"
        return BodyLimits(settings.max_upload, held=STREAM_BYTES, advice=advice)
    if method == "PUT" and _POLICY.fullmatch(path):
        advice = "a policy file this large needs a higher STEPWELL_MAX_POLICY"
        return BodyLimits(settings.max_policy, held=STREAM_BYTES, advice=advice)
    if method == "PUT" and _VIDEO.fullmatch(path):
        advice = "store a smaller or shorter video, or raise STEPWELL_MAX_VIDEO"
        return BodyLimits(settings.max_video, held=STREAM_BYTES, advice=advice)
    return BodyLimits(settings.max_json, JSON_WEIGHT)


def may_lack_type(path: str) -> bool:
    """Whether a body of this route may omit Content-Type: a file sent with curl."""
    return _IMPORT.fullmatch(path) is not None


# --- reading a body -------------------------------------------------------------------------------


class BodyMemoryMiddleware:
    """Pure ASGI, inside the token check: reserves memory for bodies, and limits size and time."""

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
                return  # this problem replaces the app's response to the incomplete body
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
    """Reads the body of one request: `receive` as the app calls it."""

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
        """The problem to respond with. Copies of it are raised, because it outlives the frames
        that a raise attaches, which reference the body."""

    async def receive(self) -> Message:
        if self._done:
            return await self._receive()  # the app waits for a disconnect: no deadline
        await self._reserve(STEP)
        message = await self._in_time()
        self._seen += len(message.get("body", b""))
        self._done = not message.get("more_body", False)
        if self._seen > self._limit:
            raise self._refuse(self._limits.refusal(self._seen))
        await self._reserve(0)
        return message

    async def _reserve(self, ahead: int) -> None:
        """Hold the received bytes and `ahead` more; the whole length where it is declared."""
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
            self._began += time.monotonic() - before  # a delay of the service, not of the sender

    async def _in_time(self) -> Message:
        """The next part of the body. Raises 408 when it stops or is too slow."""
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
                        "the body arrived too slowly; send it again",
                        expected=f"bytes every {self._patience:g} s, and {MIN_RATE} a second on"
                        f" average; while others wait, the whole body within {HOLD_SECONDS:g} s",
                        got=f"{self._seen} bytes in {time.monotonic() - self._began:.1f} s",
                    )
                )
            wait, before = min(left, LOOK), time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    return await self._receive()
            # The service was stopped or busy: the sender's bytes may wait in the socket.
            late = time.monotonic() - before - wait
            self._began += late
            self._latest += late

    def _deadline(self) -> float:
        patience, rate = self._patience, float(MIN_RATE)
        if self._reservation.contended:
            patience /= 3
            rate = max(rate, self._reservation.size / self._limits.weight / HOLD_SECONDS)
        return min(self._latest + patience, self._began + patience + self._seen / rate)

    def _refuse(self, error: ProblemError) -> ProblemError:
        """Store the problem; returns the exception to raise."""
        rest = None if self._length is None else self._length - self._seen
        if error.status != 429 or rest is None or rest > DISCARD:
            # The rest of the body is not read: the connection cannot be reused.
            error.headers["connection"] = "close"
        self.refused = error.copy()
        return error


async def read_whole_body(request: Request) -> memoryview:
    """A body in one piece, once in memory: neither a list of chunks nor a copy of it.

    Raises `ClientDisconnect`.
    """
    length = declared_length(request.scope)
    if length is None:
        grown = bytearray()  # grows in place: large blocks are moved by the kernel, not copied
        async for chunk in request.stream():
            grown += chunk
        return memoryview(grown)
    buffer: Any = np.empty(length, np.uint8)  # pages are not touched before bytes arrive
    view = memoryview(buffer)
    at = 0
    async for chunk in request.stream():
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    return view[:at]


def declared_length(scope: Mapping[str, Any]) -> int | None:
    """The declared length of the body; None for a chunked body, 0 for no body."""
    found = 0
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            found = int(value)
        elif name == b"transfer-encoding":
            return None
    return found
