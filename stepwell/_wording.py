"""Numbers with their nouns, and lists of names, in messages."""

from __future__ import annotations

from collections.abc import Sequence


def pluralize(number: int, one: str, many: str = "") -> str:
    """A number with its noun, such as "1 step" or "2,000 steps"; `many` is the plural if it is not
    `one` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def shown(names: Sequence[str], most: int = 60) -> str:
    """The first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(name[:80] for name in names[:most]) or "none") + more


def duration(seconds: float) -> str:
    """A time in a suitable unit, such as "80 s" or "3 h"."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
