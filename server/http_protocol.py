"""Timeouts of one TCP connection that uvicorn does not have: incomplete heads, unread responses.

uvicorn limits idle time between requests, but neither a connection that sends nothing at first nor
one that sends its head byte by byte, and it does not limit the size of a head. A client could hold
every descriptor of the process. body_memory.py limits bodies, because it knows the routes.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.answer_memory import ABORT
from server.body_memory import declared_length
from server.problems import ProblemError
from stepwell.messages import PROBLEM

HEAD_SECONDS = 15.0
"""From the connection, or the first byte of a further request, to the end of its head."""
MAX_HEAD = 64 << 10
READ_AHEAD = 64 << 10
"""A body of at most this size is read without waiting; it fits uvicorn's own buffer."""
SEND_SECONDS = 60.0
"""Timeout of a client that does not read its response; while others wait for memory it loses its
place sooner (answer_memory.py)."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a deadline and a size limit for heads, and problems as errors."""

    _deadline: asyncio.TimerHandle | None = None
    """Set while a head is awaited."""
    _head = 0
    _unread: asyncio.TimerHandle | None = None
    """Set while the client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # abort, not close: close waits for the client to read the rest.
        self._unread = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._deadline is not None:
            if self._head > MAX_HEAD:
                self._refuse(431, "head_too_large", f"at most {MAX_HEAD} bytes of headers")
        elif self.cycle is None or self.cycle.response_complete:
            self._await_head()  # blank lines between requests stop uvicorn's own timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT] = self.transport.abort
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._have_head()
        super().on_headers_complete()
        length = declared_length(self.scope)
        if length is None or length > READ_AHEAD:
            # No byte of a body is read before the app calls receive(): until then no memory is
            # reserved (body_memory.py). uvicorn resumes on receive() or after the response.
            self.flow.pause_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad_request", msg)

    def _await_head(self) -> None:
        self._have_head()
        self._head = 0
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._late)

    def _have_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._refuse(408, "head_timeout", f"a request's head within {HEAD_SECONDS:g} s")

    def _refuse(self, status: int, code: str, expected: str) -> None:
        self._have_head()
        if self.transport is None or self.transport.is_closing():
            return
        problem = ProblemError(status, code, "the request was not processed", expected=expected)
        body = problem.body()
        headers = "".join(f"{name}: {value}\r\n" for name, value in problem.headers.items())
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {PROBLEM}\r\n"
            f"content-length: {len(body)}\r\n{headers}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
