"""Small things that every page shares and that draw nothing: formatting, colours, the page map.

Filters live in the URL (widgets with `bind="query-params"`), not here; what is here survives
neither a reload nor a second browser, and need not.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from typing import Any

import streamlit as st

PALETTE = (
    "#0b5cad",
    "#c2410c",
    "#12703a",
    "#7a2aa8",
    "#b3126f",
    "#007080",
    "#7a4a00",
    "#3f4a5a",
    "#5145cd",
    "#56620a",
)
"""Colours of lines and marks: each at least 4.5 : 1 on white, and told apart when colour-blind."""

_PAGES = "_pages"


def colours(names: Iterable[str]) -> dict[str, str]:
    """Name → colour, for names in order of creation: who came earlier keeps theirs.

    The hash of the name proposes a colour; a later name takes the next free one, so that adding
    a run never recolours another. Beyond the palette's length colours repeat.
    """
    taken: dict[str, str] = {}
    for name in dict.fromkeys(names):
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        order = [PALETTE[(start + i) % len(PALETTE)] for i in range(len(PALETTE))]
        free = [c for c in order if c not in taken.values()]
        taken[name] = free[0] if free else order[0]
    return taken


def remember_pages(pages: dict[str, Any]) -> None:
    """Called by the router: page name → st.Page, so that views can link to one another."""
    st.session_state[_PAGES] = pages


def page(name: str) -> Any | None:
    """The st.Page of that name, or None when a view is run alone (as tests do)."""
    return st.session_state.get(_PAGES, {}).get(name)


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
