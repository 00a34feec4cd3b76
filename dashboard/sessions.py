"""Browsers that stay signed in: random id → token, in the memory of this process.

A browser holds the id in a cookie that no script can read (HttpOnly) and that goes to no other site
(SameSite=Strict). It gets the cookie for a ticket: a page cannot set one itself, so it draws a
component that sends the ticket, which is good once, for a minute. Tokens never leave the process,
and when it ends, or after `SECONDS`, everybody signs in again.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time

import streamlit as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH = "/signin"
SECONDS = 12 * 3600
TICKET_SECONDS = 60.0
MOST = 1000
"""Sessions; the oldest goes first."""
MAX_BODY = 200


_sessions: dict[str, tuple[str, float]] = {}
"""By the hash of the id: the token, and until when."""
_tickets: dict[str, tuple[str, float]] = {}
"""By the hash of the ticket: the id, and until when."""
_lock = threading.Lock()


def cookie_name(port: int) -> str:
    """Cookies belong to a host, and several dashboards may be on it."""
    return f"stepwell_{port}"


def begin(token: str) -> tuple[str, str]:
    """A new session: its id, and the ticket for which a browser gets the cookie."""
    identity, ticket = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    now = time.monotonic()
    with _lock:
        for kept in (_tickets, _sessions):
            for gone in [key for key, (_, until) in kept.items() if until < now]:
                del kept[gone]
        while len(_sessions) >= MOST:
            del _sessions[next(iter(_sessions))]
        _sessions[_hash(identity)] = token, now + SECONDS
        _tickets[_hash(ticket)] = identity, now + TICKET_SECONDS
    return identity, ticket


def token_of(identity: str | None) -> str | None:
    """None for an unknown session, or one that has ended."""
    if not identity:
        return None
    with _lock:
        token, until = _sessions.get(_hash(identity), ("", 0.0))
        return token if until > time.monotonic() else None


def end(identity: str | None) -> None:
    if identity:
        with _lock:
            _sessions.pop(_hash(identity), None)


def is_open(ticket: str) -> bool:
    """Whether the cookie for it is still to be fetched."""
    with _lock:
        return _hash(ticket) in _tickets


def redeem(ticket: str) -> str | None:
    """The id of the session; only once."""
    with _lock:
        identity, until = _tickets.pop(_hash(ticket), ("", 0.0))
        return identity if until > time.monotonic() else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def _sign_in(request: Request) -> Response:
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return Response(status_code=403)  # another site would sign its visitors in as somebody
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            return Response(status_code=413)
    identity = redeem(body.decode(errors="replace"))
    answer = Response(status_code=204 if identity else 403, headers={"Cache-Control": "no-store"})
    if identity:
        answer.set_cookie(
            cookie_name(int(st.get_option("server.port"))), identity, max_age=SECONDS,
            httponly=True, samesite="strict", secure=request.url.scheme == "https",
        )  # fmt: skip
    return answer


ROUTE = Route(PATH, _sign_in, methods=["POST"])
