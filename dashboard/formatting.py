"""Converts numbers, sizes, ages and SQL literals to text. No drawing, no state."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from stepwell import terminal
from stepwell._sql import literal as literal  # strings in queries
from stepwell._sql import quoted as quoted  # names in queries
from stepwell._wording import pluralize as pluralize  # numbers of things
from stepwell.terminal import value_of as value_of  # typed by people


def text_of(value: object) -> str:
    """The inverse of `value_of`: what a person would type for a parameter's value."""
    if isinstance(value, str):
        return value if value_of(value) == value else json.dumps(value)
    return "" if value is None else json.dumps(value)


_QUOTED = r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/"""
_PLACEHOLDER = re.compile(rf"{_QUOTED}|\$(?P<name>[A-Za-z_]\w*)(?![\w$])", re.DOTALL)


def placeholders(query: str) -> list[str]:
    """The names of its $name placeholders, but not those in strings, names and comments."""
    return list(dict.fromkeys(m["name"] for m in _PLACEHOLDER.finditer(query) if m["name"]))


def with_values(query: str, values: Mapping[str, object]) -> str:
    """The query with its placeholders as SQL literals, for where no parameters can be given."""

    def written(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in values:
            return found[0]
        value = values[name]
        return literal(value) if isinstance(value, str) else json.dumps(value)

    return _PLACEHOLDER.sub(written, query)


def trajectories(number: int) -> str:
    return pluralize(number, "trajectory", "trajectories")


def last_line(text: str) -> str:
    """Of a traceback, the line that says what went wrong."""
    return (text.strip().splitlines() or [""])[-1]


def count(number: float | None) -> str:
    """1234567 → "1,234,567"; None and NaN → "–"."""
    return "–" if _absent(number) else f"{number:,.0f}"


def decimal(number: float | None, digits: int = 2) -> str:
    return "–" if _absent(number) else f"{number:,.{digits}f}"


def percent(share: float | None) -> str:
    return "–" if _absent(share) else f"{share:.0%}"


def code(text: str) -> str:
    """Text in a sentence of Markdown, in which nothing of it is Markdown."""
    return "`" + text.replace("`", "'") + "`"


def middle(text: str, most: int) -> str:
    """A text of at most `most` characters, without its middle: names of one sweep differ at their
    ends."""
    if len(text) <= most:
        return text
    front = (most - 1) // 3
    return f"{text[:front]}…{text[front + 1 - most :]}"


def shortened(names: Iterable[str], most: int) -> dict[str, str]:
    """Name → at most so many characters of it; those that would look alike remain whole."""
    found = {name: middle(name, most) for name in names}
    count = Counter(found.values())
    return {name: short if count[short] == 1 else name for name, short in found.items()}


def _absent(number: float | None) -> bool:
    return number is None or math.isnan(number)


def size(number: float | None) -> str:
    """Readable size of a number of bytes, in powers of 1000."""
    return "–" if number is None else terminal.size(number)


def ago(moment: float | None) -> str:
    """Unix seconds → "12 s ago"."""
    return "never" if moment is None else terminal.ago(moment)
