"""One TCP connection, as far as uvicorn leaves it open: heads that never end, answers never read.

uvicorn times an idle connection between requests, but neither one that sends nothing at first nor
one that sends its head byte by byte, and no limit is set to how much head it keeps. So a client
could hold every descriptor of the process. Bodies are watched in body_memory.py, which knows the
routes.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.body_memory import declared_length
from server.problems import ProblemError
from stepwell.messages import PROBLEM

HEAD_SECONDS = 15.0
"""From the connection, or the first byte of a further request, to the end of its head."""
MAX_HEAD = 64 << 10
READ_AHEAD = 64 << 10
"""A body no longer than this comes in as it comes; it fits what uvicorn buffers anyway."""
SEND_SECONDS = 60.0
"""A reader that takes nothing for so long is given up."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's own protocol, with a deadline and a limit for heads, and problems for errors."""

    _deadline: asyncio.TimerHandle | None = None
    """Set while a head is awaited."""
    _head = 0
    _unread: asyncio.TimerHandle | None = None
    """Set while the other side does not take what we send."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # abort, not close: that would wait for the reader, who may never come back.
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
            self._await_head()  # blank lines between requests: they have ended uvicorn's own timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._have_head()
        super().on_headers_complete()
        length = declared_length(self.scope)
        if length is None or length > READ_AHEAD:
            # Nothing of a body is read before the app asks for it: until then no memory is reserved
            # (body_memory.py). uvicorn resumes when it is asked for, or after the answer is sent.
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
        problem = ProblemError(status, code, "the request is not answered", expected=expected)
        body = problem.body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {PROBLEM}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
