"""Answers only requests for the dashboard's own names, from its own pages: the service's rule.

Without it a web page anywhere, whose owner points its name to this machine (DNS rebinding), opens
the dashboard's websocket, with all rights of the person in front of it.
"""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stepwell._hosts import (
    HOSTS,
    ORIGINS,
    allowed_names,
    from_environment,
    host_of,
    is_allowed_origin,
)

BAD_HOST = f"""421: this dashboard is not known by that name.
Open it as http://127.0.0.1:PORT, or allow the name: {HOSTS}='["NAME"]' stepwell dash
"""
FOREIGN_ORIGIN = f"""403: a web page of another origin may not use this dashboard.
Allow it: {ORIGINS}='["https://NAME"]' stepwell dash
"""
POLICY_VIOLATION = 1008


class HostGuard:
    """Pure ASGI, before all of Streamlit: pages, files, uploads, and the websocket."""

    def __init__(self, app: ASGIApp, address: str):
        self.app = app
        self._hosts = allowed_names(address, from_environment(HOSTS))
        self._origins = from_environment(ORIGINS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        host = headers.get("host", "")
        if host_of(host) not in self._hosts:
            refusal = PlainTextResponse(BAD_HOST, 421)
        elif not is_allowed_origin(headers.get("origin"), host, self._origins):
            refusal = PlainTextResponse(FOREIGN_ORIGIN, 403)
        else:
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":  # closed before it is accepted: the client gets a 403
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            await refusal(scope, receive, send)
