"""What an extra of this package installs, from the package's own metadata."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

NAMES = {"pillow": "PIL", "protobuf": "google", "pyyaml": "yaml"}
"""Modules that are not called like their distribution."""


def modules_of(extra: str) -> set[str]:
    """Names of the top-level modules that `stepwell[extra]` needs beyond the SDK."""
    try:
        requirements = metadata.requires("stepwell") or []
    except metadata.PackageNotFoundError:  # run from its source
        return set()
    found: set[str] = set()
    for requirement in requirements:
        if not re.search(rf"extra == [\"']{re.escape(extra)}[\"']", requirement):
            continue
        name, inner = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == "stepwell":
            found.update(*map(modules_of, inner.split(",")))
        else:
            found.add(NAMES.get(name, name.replace("-", "_")))
    return found


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError for the first that is not installed, without importing any."""
    for name in sorted(modules):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
