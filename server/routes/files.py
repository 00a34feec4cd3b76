"""A stored file as a response: Range as Starlette does it, but refusals in our one error shape."""

from __future__ import annotations

from typing import Any

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from server.bodies import send_problem
from server.problems import ProblemError


class StoredFile(FileResponse):
    """A `FileResponse` whose 400 and 416 for a Range that cannot be are problem documents."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: Message | None = None

        async def unless_refused(message: Message) -> None:
            nonlocal refused
            if message.get("status") in (400, 416):
                refused = message
            if refused is None:
                await send(message)

        await super().__call__(scope, receive, unless_refused)
        if refused is not None:
            await send_problem(send, _problem(refused, _range_of(scope)))


def _problem(refused: Any, asked: str) -> ProblemError:
    size = [value.decode() for name, value in refused["headers"] if name == b"content-range"]
    return ProblemError(
        int(refused["status"]),
        "bad_range",
        "the Range header cannot be served; without one, the whole file is sent",
        expected="bytes=FIRST-LAST, with FIRST ≤ LAST and FIRST inside the file",
        got=asked[:100],
        headers={"content-range": size[0]} if size else None,
    )


def _range_of(scope: Scope) -> str:
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == b"range"), "")
