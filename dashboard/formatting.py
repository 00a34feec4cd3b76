"""Numbers, sizes, ages and SQL literals as text. Draws nothing and keeps nothing."""

from __future__ import annotations

import math
import time


def count(number: float | None) -> str:
    """1234567 → "1,234,567"; None and NaN → "–"."""
    return "–" if _absent(number) else f"{number:,.0f}"


def decimal(number: float | None, digits: int = 2) -> str:
    return "–" if _absent(number) else f"{number:,.{digits}f}"


def percent(share: float | None) -> str:
    return "–" if _absent(share) else f"{share:.0%}"


def _absent(number: float | None) -> bool:
    return number is None or math.isnan(number)


def size(number: float | None) -> str:
    """Bytes for people: powers of 1000, as disks are sold."""
    if number is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def ago(moment: float | None, now: float | None = None) -> str:
    """Unix seconds → "12 s ago"."""
    if moment is None:
        return "never"
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def literal(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
