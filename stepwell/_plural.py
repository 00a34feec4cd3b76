"""Numbers and their nouns in messages."""

from __future__ import annotations


def pluralize(number: int, one: str, many: str = "") -> str:
    """A number with its noun, such as "1 step" or "2,000 steps"; `many` is the plural if it is not
    `one` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
