"""What the messages of all routes share: names, limits, and the shape of an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME)]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Alias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,63}$")]
Text = Annotated[str, StringConstraints(max_length=4096)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Partition = Literal["fifo", "protected"]
MAX_DEPTH = 64
"""Of objects in objects: more than any configuration has, less than any reader's recursion."""


def sayable(document: dict[str, Any]) -> dict[str, Any]:
    """Refuse what could be stored and then never be answered: it would break every list it is in.

    Raises ValueError, which becomes a 422.
    """
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif isinstance(value, str) and not value.isascii():
                _refuse_half_characters(value)
        if not below:
            return document
        level = below
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _refuse_half_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text with half a surrogate pair, which UTF-8 cannot say") from None
    return text


Json = dict[str, Any]
Document = Annotated[Json, AfterValidator(sayable)]
"""A stranger's JSON object, kept as it is."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, le=2**53)]
"""A step or a version: what every reader of JSON keeps exact."""
Limit = Annotated[int, Field(ge=1, le=2**53)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

ARROW = "application/vnd.apache.arrow.stream"
PROBLEM = "application/problem+json"


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Response(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Problem(Response):
    """RFC 9457. Every error of every route has this shape (application/problem+json)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str
    """Stable, machine-readable, for instance "schema_mismatch"; docs/http.md lists them."""
    expected: Any = None
    got: Any = None
    errors: list[Json] | None = None


class Excluded(Response):
    """A damaged file, and what the answer therefore lacks."""

    dataset: str
    file: str
    """A shard (sh_…), or a segment whose records could not be sealed (sg_…)."""
    trajectories: int
    """Living ones in it."""
