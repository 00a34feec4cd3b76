"""The one error of the service: raised anywhere, answered as RFC 9457 application/problem+json.

A leaf: it imports nothing of ours but the message, so every layer may raise it. How an exception
becomes a response is in `app.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from stepwell.messages import Problem


class ProblemError(Exception):
    """A refusal: what was expected, what came, what to do. `code` is stable and snake_case."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        expected: Any = None,
        got: Any = None,
        errors: list[dict[str, Any]] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.expected = expected
        self.got = got
        self.errors = errors
        self.headers = dict(headers or {})

    def problem(self) -> Problem:
        """The document that goes over the wire."""
        return Problem(
            title=title_of(self.status),
            status=self.status,
            detail=self.detail,
            code=self.code,
            expected=self.expected,
            got=self.got,
            errors=self.errors,
        )


def title_of(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def not_found(what: str, name: str) -> ProblemError:
    """404 for a thing addressed by name or id."""
    return ProblemError(404, "not_found", f"there is no {what} {name!r}")
