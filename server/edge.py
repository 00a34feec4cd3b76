"""What is checked before anything is parsed: where a request comes from, and how much it brings.

Pure ASGI, so that a body is counted while it streams: a length may lie, chunks have none.
Loopback is not private, since any web page can reach it: hence Host, Origin and content type.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from server.problems import ProblemError
from server.settings import Settings
from stepwell.messages import PROBLEM

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
# What a page may send across origins without asking first; text/plain is how forged JSON travels.
SIMPLE = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})

MIN_RATE = 16 << 10
"""Bytes per second that a body must keep up after its first `body_timeout` seconds."""

_INGEST = re.compile(r"/v1/datasets/[^/]+/trajectories/?")
_IMPORT = re.compile(r"/v1/datasets/[^/]+/imports/?")
_POLICY = re.compile(r"/v1/runs/[^/]+/policies/[^/]+/?")


class Edge:
    """Refuses strangers by Host, Origin and content type; ends bodies too long or stuck."""

    def __init__(self, app: App, settings: Settings):
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        try:
            self._check_host(headers)
            self._check_origin(headers)
            limit = self._limit(scope)
            self._check_body(scope, headers, limit)
        except ProblemError as error:
            await send_problem(send, error)
            return
        await self._counted(scope, receive, send, limit)

    def _check_host(self, headers: dict[str, str]) -> None:
        settings = self.settings
        if settings.token is not None and not settings.loopback and not settings.allowed_hosts:
            return  # a public name cannot be known here, and the token protects
        host = _host_of(headers.get("host", ""))
        allowed = LOCAL | {settings.host.lower()} | {h.lower() for h in settings.allowed_hosts}
        if host not in allowed:
            raise ProblemError(
                421,
                "bad_host",
                "this service does not answer to that name; start it with"
                " STEPWELL_ALLOWED_HOSTS='[\"NAME\"]' if it should",
                expected=sorted(allowed),
                got=host[:200],
            )

    def _check_origin(self, headers: dict[str, str]) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self.settings.allowed_origins:
            return
        if origin != "null" and urlsplit(origin).netloc == headers.get("host"):
            return
        raise ProblemError(
            403,
            "foreign_origin",
            "a web page of another origin may not call this service; allow it with"
            " STEPWELL_ALLOWED_ORIGINS='[\"ORIGIN\"]' if it should",
            expected=list(self.settings.allowed_origins) or "no Origin header, or our own",
            got=origin[:200],
        )

    def _limit(self, scope: Scope) -> int:
        path = scope["path"]
        if scope["method"] == "POST" and _INGEST.fullmatch(path):
            return self.settings.max_body
        if scope["method"] == "POST" and _IMPORT.fullmatch(path):
            return self.settings.max_upload
        if scope["method"] == "PUT" and _POLICY.fullmatch(path):
            return self.settings.max_policy
        return self.settings.max_json

    def _check_body(self, scope: Scope, headers: dict[str, str], limit: int) -> None:
        if scope["method"] not in WRITES:
            return
        length = headers.get("content-length")
        if length is not None and length.isdecimal() and int(length) > limit:
            raise too_large(limit, int(length))
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = length not in (None, "0") or "transfer-encoding" in headers
        if kind in SIMPLE or (has_body and not kind and not _IMPORT.fullmatch(scope["path"])):
            raise ProblemError(
                415,
                "unsupported_media_type",
                "say what the body is with a Content-Type header (for a file by hand:"
                " curl -T FILE -X POST -H 'Content-Type: application/octet-stream' URL)",
                expected="application/json, application/vnd.apache.arrow.stream or"
                " application/octet-stream, as the route asks",
                got=kind or "none",
            )

    async def _counted(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        """Run the app with a `receive` that counts, and answer for it when the body is refused."""
        seen = 0
        began = time.monotonic()
        done = False
        started = False
        refused: ProblemError | None = None

        async def counting_receive() -> Message:
            nonlocal seen, done, refused
            if done:
                return await receive()  # the app waits for a disconnect: no deadline for that
            patience = self.settings.body_timeout
            left = began + patience + seen / MIN_RATE - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), min(patience, max(0.0, left)))
            except TimeoutError:
                refused = ProblemError(
                    408,
                    "body_timeout",
                    "the body stands still or trickles; send it again",
                    expected=f"bytes every {patience:g} s, and {MIN_RATE} a second on average",
                    got=f"{seen} bytes in {time.monotonic() - began:.1f} s",
                )
                raise refused from None
            seen += len(message.get("body", b""))
            done = not message.get("more_body", False)
            if seen > limit:
                refused = too_large(limit, seen)
                raise refused
            return message

        async def watching_send(message: Message) -> None:
            nonlocal started
            if refused is not None and not started:
                return  # whatever the app makes of the broken body, our answer is the better one
            started = True
            await send(message)

        try:
            await self.app(scope, counting_receive, watching_send)
        except ProblemError:
            if refused is None:
                raise
        if refused is not None and not started:
            # The rest of the body is not read: the connection cannot be used again.
            refused.headers["connection"] = "close"
            await send_problem(send, refused)


def too_large(limit: int, got: int) -> ProblemError:
    return ProblemError(
        413,
        "body_too_large",
        "send less in one request",
        expected=f"at most {limit} bytes",
        got=f"{got} bytes or more",
    )


def _host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


async def send_problem(send: Send, error: ProblemError) -> None:
    """Answer with a problem document from outside the router."""
    body = orjson.dumps(error.problem().model_dump(mode="json", exclude_none=True))
    headers = {"content-type": PROBLEM, "content-length": str(len(body)), **error.headers}
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
