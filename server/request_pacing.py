"""Many requests in one moment: a few start in each round of the event loop, in order.

The start of a request, until its route runs in a thread, occupies the event loop for about half a
millisecond. Of 500 at once none would be answered before all of them have started, nor would
/healthz, by which a supervisor decides to kill the service.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

STARTS = 8
"""Requests that start in one round."""
AT_ONCE = frozenset({"/healthz", "/readyz"})


class RequestPacing:
    """Pure ASGI, outermost."""

    def __init__(self, app: ASGIApp):
        self.app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._started = 0
        """In this round."""
        self._in_rounds = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in AT_ONCE:
            await self._turn()
        await self.app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._in_rounds:
            self._in_rounds = True
            loop.call_soon(self._next_round, loop)
        if self._started < STARTS and not self._waiting:
            self._started += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._started = 0
        while self._waiting and self._started < STARTS:
            turn = self._waiting.popleft()
            if not turn.done():  # else cancelled
                turn.set_result(None)
                self._started += 1
        self._in_rounds = self._started > 0
        if self._in_rounds:
            loop.call_soon(self._next_round, loop)
