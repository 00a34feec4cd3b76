"""The one error of the service: raised anywhere, sent as RFC 9457 application/problem+json.

A leaf: it imports nothing of the project but the message, so every layer may raise it. `app.py`
converts other exceptions into problems.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from itertools import islice
from typing import Any

import orjson
from starlette.responses import Response

from stepwell.messages import PROBLEM, Problem

RETRIED = frozenset({408, 429, 503})
"""Statuses after which the same request can succeed (docs/reference/http.md): each has a
Retry-After."""
RETRY_AFTER = "1"


class ProblemError(Exception):
    """An error response: expected, got, and what to do. `code` is stable and snake_case."""

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
        if status in RETRIED:
            self.headers.setdefault("Retry-After", RETRY_AFTER)

    def copy(self) -> ProblemError:
        """A copy without a traceback. Raise a copy of a stored problem, never the stored one: each
        raise attaches frames to it, which reference request bodies."""
        return ProblemError(**vars(self))

    def problem(self) -> Problem:
        """The JSON document."""
        return Problem(title=title_of(self.status), **vars(self))

    def body(self) -> bytes:
        return orjson.dumps(self.problem().model_dump(mode="json", exclude_none=True))

    def response(self) -> Response:
        """The response, which is an ASGI application too: a middleware calls it."""
        return Response(self.body(), self.status, headers=self.headers, media_type=PROBLEM)


def title_of(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


MAX_HINTS = 500
"""Number of names that are searched for the nearest one."""


def not_found(what: str, name: str, known: Iterable[str] = ()) -> ProblemError:
    """404 for a resource addressed by name or id; suggests the nearest of the `known` names."""
    near = difflib.get_close_matches(name, list(islice(known, MAX_HINTS)), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ProblemError(404, "not_found", f"there is no {what} {name!r}{hint}")


def index_damaged(detail: str) -> ProblemError:
    """What was asked for was in rows of the index that are damaged. 500: to try again is no use,
    and an outbox keeps what it could not deliver."""
    return ProblemError(500, "index_damaged", detail, expected="an intact index")
