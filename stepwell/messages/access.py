"""Tokens, and the service's health."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from stepwell.messages.base import Request, Response, Text


class CreateToken(Request):
    name: Text
    scopes: Annotated[
        list[
            Annotated[
                str, StringConstraints(pattern=r"^(read|sql|train|admin|ingest(:[a-z0-9._*-]+)?)$")
            ]
        ],
        Field(min_length=1),
    ]
    expires_in: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds from now; null for no end."""


class Token(Response):
    id: str
    name: str
    scopes: list[str]
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    token: str | None = None
    """The secret, shown once, in the answer to its creation."""


class TokenPage(Response):
    items: list[Token]
    next: str | None = None


class Health(Response):
    status: Literal["ok", "degraded"]
    version: str
    database_revision: str = ""
    writable: bool = True
    detail: str = ""
    """Why it is degraded."""
