"""The failpoints that the source of a package passes, so that a new one cannot go untested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r'"([a-z]+\.(?:before|after)_[a-z_]+)"')


AT_LEAST = {"server": 72, "stepwell": 10, "trainer": 13, "collector": 2}
"""Failpoints of each package: one that disappears with its test is noticed."""


def failpoints_of(*packages: str) -> list[str]:
    """Their names, sorted."""
    found: set[str] = set()
    for package in packages:
        files = (ROOT / package).rglob("*.py")
        names = {name for path in files for name in _NAME.findall(path.read_text())}
        assert len(names) >= AT_LEAST[package], (package, sorted(names))
        found |= names
    return sorted(found)
