"""Checks of a request's headers before anything is parsed: Host, Origin, content type and length.

Pure ASGI; body_memory.py handles the body itself. Any web page can send requests to loopback, so
Host, Origin and content type are checked there too.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from server.body_memory import (
    DISCARD,
    body_limits,
    declared_length,
    may_lack_type,
)
from server.problems import ProblemError
from server.settings import Settings
from stepwell._hosts import allowed_names, host_of, is_allowed_origin

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
# What a page may send across origins without a preflight; forged JSON is sent as text/plain.
SIMPLE = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})


class RequestLimits:
    """Refuses foreign Hosts and Origins, other content types, and bodies declared too long."""

    def __init__(self, app: ASGIApp, settings: Settings):
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
            self._check_body(scope, headers)
        except ProblemError as error:
            length = declared_length(scope)
            if length is None or length > DISCARD:
                error.headers["connection"] = "close"
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check_host(self, headers: dict[str, str]) -> None:
        settings = self.settings
        if not settings.loopback and not settings.allowed_hosts:
            return  # the public name is unknown here, and every caller there needs a token
        host = host_of(headers.get("host", ""))
        allowed = allowed_names(settings.host, settings.allowed_hosts)
        if host not in allowed:
            raise ProblemError(
                421,
                "bad_host",
                "the Host header names another host; allow the name with"
                " STEPWELL_ALLOWED_HOSTS='[\"NAME\"]'",
                expected=sorted(allowed),
                got=host[:200],
            )

    def _check_origin(self, headers: dict[str, str]) -> None:
        origin = headers.get("origin")
        allowed = self.settings.allowed_origins
        if origin is None or is_allowed_origin(origin, headers.get("host", ""), allowed):
            return
        raise ProblemError(
            403,
            "foreign_origin",
            "a web page of another origin may not call this service; allow it with"
            " STEPWELL_ALLOWED_ORIGINS='[\"ORIGIN\"]'",
            expected=list(self.settings.allowed_origins) or "no Origin header, or the service's",
            got=origin[:200],
        )

    def _check_body(self, scope: Scope, headers: dict[str, str]) -> None:
        if scope["method"] not in WRITES:
            return
        limits = body_limits(self.settings, scope["method"], scope["path"])
        length = headers.get("content-length")
        if length is not None and length.isdecimal() and int(length) > limits.limit:
            raise limits.refusal(int(length))
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = length not in (None, "0") or "transfer-encoding" in headers
        if kind in SIMPLE or (has_body and not kind and not may_lack_type(scope["path"])):
            raise ProblemError(
                415,
                "unsupported_media_type",
                "the Content-Type header is missing or unsupported (to send a file:"
                " curl -T FILE -X POST -H 'Content-Type: application/octet-stream' URL)",
                expected="application/json, application/vnd.apache.arrow.stream or"
                " application/octet-stream, depending on the route",
                got=kind or "none",
            )
