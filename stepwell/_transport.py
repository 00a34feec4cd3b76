"""HTTP calls: pooled connections, retries, typed errors. This module is independent of the routes.

Idempotent calls are retried if the service did not respond (ServiceUnreachable) or was busy (Busy;
Retry-After is honoured). Other calls are retried only if they certainly had no effect.
"""

from __future__ import annotations

import email.utils
import math
import os
import random
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2
import orjson
import tenacity
from pydantic import BaseModel, ValidationError

from stepwell.errors import (
    Busy,
    InvalidData,
    ServiceError,
    ServiceFault,
    ServiceUnreachable,
    from_problem,
)
from stepwell.messages import Page, reason_of

DEFAULT_URL = "http://127.0.0.1:8000"
JSON = "application/json"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECT_TIMEOUT = 5.0
_jitter = random.Random()  # not the numbers of the program, which may have seeded them
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")


class Transport:
    """The connection of a `Client`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        retry_for: float = 10.0,
        transport: httpx2.BaseTransport | None = None,
    ):
        self.url = (url or os.environ.get("STEPWELL_URL") or DEFAULT_URL).rstrip("/")
        token = (token or os.environ.get("STEPWELL_TOKEN") or "").strip()
        if not token.isascii() or not token.isprintable():
            raise InvalidData("bad token", expected="printable ASCII", got="other characters")
        try:
            address = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise InvalidData(f"bad address: {error}", expected=DEFAULT_URL, got=self.url) from None
        if address.scheme not in ("http", "https") or not address.host:
            raise InvalidData("bad address", expected=f"like {DEFAULT_URL}", got=repr(self.url))
        self.timeout = timeout
        self.retry_for = retry_for
        self._http = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=self._timeout(timeout),
            limits=httpx2.Limits(max_connections=64, max_keepalive_connections=16),
            # No proxy from the environment for a service on this machine.
            trust_env=address.host not in LOOPBACK,
            transport=transport,
        )

    def close(self) -> None:
        """Close the pooled connections; the client cannot be used afterwards."""
        self._http.close()

    def _timeout(self, seconds: float) -> httpx2.Timeout:
        return httpx2.Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT))

    # --- calls ------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: BaseModel | None = None,
        content: bytes | Callable[[], Iterator[bytes]] | None = None,
        headers: Mapping[str, str] | None = None,
        idempotent: bool | None = None,
        timeout: float | None = None,
        accept: str = JSON,
        fine: tuple[int, ...] = (),
    ) -> httpx2.Response:
        """The complete response. Raises `ServiceError` for an error status, `ServiceUnreachable`.

        `idempotent` defaults to True except for POST. `content` may be a function that makes a
        fresh stream for each attempt. `fine`: statuses other than 2xx that are not errors here.
        """
        repeatable = method != "POST" if idempotent is None else idempotent
        seconds = timeout or self.timeout
        sent = {"Accept": accept, **(headers or {})}
        if body is not None:
            content = to_json(body)
            sent.setdefault("Content-Type", JSON)

        def attempt() -> httpx2.Response:
            request = self._http.build_request(
                method,
                path,
                params={k: v for k, v in (params or {}).items() if v is not None},
                content=content() if callable(content) else content,
                headers=sent,
                timeout=self._timeout(seconds),
            )
            with sending(self.url, seconds):
                response = self._http.send(request)
            self.raise_for(response, fine)
            return response

        return self.retrying(attempt, repeatable=repeatable)

    def ask(self, model: type[M], method: str, path: str, **options: Any) -> M:
        """The response as a message; options as of `call`."""
        response = self.call(method, path, **options)
        return self.parse(model, response)

    def items(self, model: type[M], path: str, **params: Any) -> list[M]:
        """Everything in a list, from all of its pages."""
        page_type: Any = Page.__class_getitem__(model)
        found: list[M] = []
        while True:
            page = self.ask(page_type, "GET", path, params=params)
            found += page.items
            if page.next is None:
                return found
            params["cursor"] = page.next

    # --- the parts of a call ----------------------------------------------------------------

    def retrying(self, attempt: Callable[[], R], *, repeatable: bool) -> R:
        """Call `attempt` until it succeeds, must not be repeated, or `retry_for` is over."""
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: _may_repeat(error, repeatable)),
            wait=_pause,
            stop=tenacity.stop_before_delay(self.retry_for),
            sleep=time.sleep,
            reraise=True,
        )
        return again(attempt)

    def raise_for(self, response: httpx2.Response, fine: tuple[int, ...] = ()) -> None:
        """Raise the error of the status, with the problem document if there is one."""
        if response.is_success or response.status_code in fine:
            return
        problem: dict[str, Any] = {}
        try:
            document = orjson.loads(response.content)
            problem = document if isinstance(document, dict) else {}
        except ValueError:
            pass
        if "code" not in problem:
            # A proxy answered, or it is not a Stepwell service.
            request = response.request
            problem = {
                "code": "unexpected_answer",
                "title": response.reason_phrase,
                "detail": f"{request.method} {request.url} answered without a problem document; "
                f"is {self.url} a Stepwell service?",
                "got": response.text[:200] or None,
            }
        problem["status"] = response.status_code
        raise from_problem(problem, retry_after=_retry_after(response))

    def parse(self, model: type[M], response: httpx2.Response) -> M:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise ServiceFault(
                {
                    "status": response.status_code,
                    "code": "unexpected_answer",
                    "detail": f"the answer to {response.request.method} {response.request.url} "
                    f"is not what it should be; is {self.url} a Stepwell service of this version?",
                    "got": _first_error(error),
                }
            ) from None


@contextmanager
def sending(url: str, timeout: float) -> Iterator[None]:
    """Turns what the HTTP library raises into `ServiceUnreachable`."""
    try:
        yield
    except httpx2.RequestError as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            text = (
                f"no service at {url} ({reason}); start one with: stepwell serve "
                "(STEPWELL_URL or --url tell where it is)"
            )
        elif isinstance(error, httpx2.TimeoutException):
            text = f"{url} did not answer within {timeout:g} s ({reason})"
        else:
            text = f"the connection to {url} broke ({reason})"
        result = ServiceUnreachable(text)
        unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
        result.unsent = unsent  # type: ignore[attr-defined] # read by `retrying` only
        raise result from None


def request(model: type[M], **values: Any) -> M:
    """The request body with the `values` that are given (None means: not given).

    Raises `InvalidData` naming the field, so that no library's errors reach the caller.
    """
    given = {k: v for k, v in values.items() if v is not None}
    try:
        return model(**given)
    except ValidationError as error:
        raise InvalidData(
            _first_error(error), got=repr(error.errors()[0].get("input"))[:120]
        ) from None


def to_json(body: BaseModel) -> bytes:
    """Only the fields that were given; numpy numbers and paths as JSON has them; NaN as null."""
    data = body.model_dump(by_alias=True, exclude_unset=True)
    try:
        return orjson.dumps(
            data, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        )
    except TypeError as error:
        raise InvalidData(f"the request cannot be written as JSON: {error}") from None


def route(*parts: object) -> str:
    """The path of the API with these segments: a slash or a dot-dot in a name stays a name."""
    quoted = [urllib.parse.quote(str(part), safe="") for part in parts]
    for part, text in zip(quoted, parts, strict=True):
        if part in ("", ".", ".."):
            raise InvalidData("bad name", expected="letters, digits, . _ -", got=repr(text))
    return "/".join(["/v1", *quoted])


def _may_repeat(error: BaseException, repeatable: bool) -> bool:
    if isinstance(error, Busy):
        return True
    unsent = getattr(error, "unsent", False)
    return isinstance(error, ServiceUnreachable) and (repeatable or unsent)


def _pause(state: tenacity.RetryCallState) -> float:
    """Seconds until the next attempt: Retry-After, or a doubling wait. Both have jitter, so that
    many collectors do not retry at the same moment."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, Busy) and error.retry_after is not None:
        return error.retry_after * _jitter.uniform(1.0, 1.25)
    doubled = FIRST_WAIT * 2.0 ** min(state.attempt_number - 1, 30)
    return min(doubled, LONGEST_WAIT) * _jitter.uniform(0.5, 1.0)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r}"[:120])


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds of a Retry-After header, which may also be a date."""
    text = response.headers.get("Retry-After")
    if text is None:
        return None
    try:
        seconds = float(text)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field or 'the whole'}: {reason_of(first)}"


def as_service_error(problem: BaseModel) -> ServiceError:
    """The exception for a problem that came inside an answer (an item, a job)."""
    return from_problem(problem.model_dump())
