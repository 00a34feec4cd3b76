"""Stored files over HTTP: a body that becomes a file, and a file as a response.

    receive     body → DIR/tmp (hashed while it streams); then registry/stored_files.py

Every byte is verified before it is sent, also for a Range. If the start of the file is damaged, the
response is a problem. If damage is found later, the connection is aborted, so that an incomplete
response never looks complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from server.answer_memory import PIECE, READ, Answer, Damaged
from server.body_memory import STREAM_CHUNK
from server.problems import ProblemError
from server.service import Service
from server.storage.checksums import CheckedFile, Corrupt, Source
from server.storage.store import Writer

AHEAD = 1 << 20
"""Bytes that are checked before the response starts: damage in them has a response of its own."""
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


HEAD_BYTES = 16
"""First bytes of a body, which show its type."""


async def receive(request: Request, writer: Writer) -> bytes:
    """Write the body to `writer`; returns its first HEAD_BYTES."""
    head, waiting = b"", bytearray()
    async for chunk in request.stream():
        waiting += chunk
        if len(waiting) >= STREAM_CHUNK:
            head = head or bytes(waiting[:HEAD_BYTES])
            await run_in_threadpool(writer.write, bytes(waiting))
            waiting.clear()
    await run_in_threadpool(writer.write, bytes(waiting))
    return head or bytes(waiting[:HEAD_BYTES])


def require_media_type(request: Request, what: str, *allowed: str) -> str:
    """The declared media type of the body, without parameters; "" if there is none. Raises 415
    unless it is allowed; `what` says what is sent as which type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in allowed:
        expected = " or ".join(filter(None, allowed))
        raise ProblemError(
            415, "unsupported_media_type", what, expected=expected, got=kind or "none"
        )
    return kind


class StoredFile(Answer):
    """The bytes of a file, or the one requested range of them.

    A request for several ranges gets the whole file.
    """

    threads = READ

    def __init__(
        self,
        request: Request,
        service: Service,
        source: Source,
        *,
        headers: Mapping[str, str],
        media_type: str,
        damaged: Callable[[], ProblemError],
        status_code: int = 200,  # FastAPI reads this default for its documentation
    ):
        """`damaged`: the error where the first part cannot be read. Raises 416 for a bad Range."""
        assert source.checksums is not None, "a file without checksums cannot be served"
        size = source.size
        first, last, partial = _range_of(request, size, headers.get("etag", ""))
        sent = {**headers, "accept-ranges": "bytes", "content-length": str(last - first)}
        if partial:
            sent["content-range"] = f"bytes {first}-{last - 1}/{size}"
        super().__init__(
            service.answers,
            0,
            _parts_of(source, first, last),
            media_type=media_type,
            status_code=206 if partial else status_code,
            headers=sent,
            damaged=damaged,
        )


def _parts_of(source: Source, first: int, last: int) -> Callable[[], Iterator[bytes]]:
    """Bytes `first` … `last` of a file, checked. The iterator raises `Damaged`."""

    def parts() -> Iterator[bytes]:
        begun = False
        try:
            with source.open() as file:
                assert isinstance(file, CheckedFile), "it has checksums"
                for at in range(first, min(last, first + AHEAD), PIECE):
                    file.read_at(at, min(PIECE, last - at))
                for at in range(first, last, PIECE):
                    begun = at > first
                    yield file.read_at(at, min(PIECE, last - at))
        except OSError as error:
            # Before the first part any other error of the disk has a response of its own.
            if begun or isinstance(error, Corrupt | FileNotFoundError):
                raise Damaged(str(error)) from None
            raise

    return parts


def matches(condition: str | None, etag: str) -> bool:
    """Whether an If-None-Match header matches the ETag: the caller already has the file."""
    tags = [tag.strip().removeprefix("W/") for tag in (condition or "").split(",")]
    return tags == ["*"] or etag in tags


def _range_of(request: Request, size: int, etag: str) -> tuple[int, int, bool]:
    """(first byte, one past the last, whether it is a range)."""
    asked = request.headers.get("range", "")
    condition = request.headers.get("if-range")
    if not asked or "," in asked or condition not in (None, etag):
        return 0, size, False
    found = _RANGE.fullmatch(asked.replace(" ", ""))
    if found is None or found.groups() == ("", ""):
        raise _bad_range(400, asked, size)
    low, high = found.groups()
    if len(low) > 18 or len(high) > 18:  # Python limits the length of integers that it parses
        raise _bad_range(416, asked, size)
    first = int(low) if low else max(0, size - int(high))
    last = min(int(high) + 1, size) if low and high else size
    if first >= size:
        raise _bad_range(416, asked, size)
    if first >= last:
        raise _bad_range(400, asked, size)
    return first, last, True


def _bad_range(status: int, asked: str, size: int) -> ProblemError:
    headers: dict[str, Any] = {"content-range": f"bytes */{size}"} if status == 416 else {}
    return ProblemError(
        status,
        "bad_range",
        "the Range header is invalid; without one, the whole file is sent",
        expected="bytes=FIRST-LAST, with FIRST ≤ LAST and FIRST inside the file",
        got=asked[:100],
        headers=headers,
    )
