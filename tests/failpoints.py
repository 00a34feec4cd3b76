"""The failpoints that the source of a package passes, so that a new one cannot go untested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r'"([a-z]+\.(?:before|after)_[a-z_]+)"')


def failpoints_of(*packages: str) -> list[str]:
    """Their names, sorted."""
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return sorted({name for path in files for name in _NAME.findall(path.read_text())})
