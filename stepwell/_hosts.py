"""Which Host and Origin headers service and dashboard answer.

Any web page can send requests to loopback, and a name that its owner points there (DNS rebinding)
makes the page and the server one origin. So a server answers only to its own names, and a page of
another origin gets nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from stepwell.errors import InvalidData

HOSTS, ORIGINS = "STEPWELL_ALLOWED_HOSTS", "STEPWELL_ALLOWED_ORIGINS"
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def allowed_names(address: str, names: Iterable[str] = ()) -> frozenset[str]:
    """Hosts that a server which listens on `address` answers to."""
    return LOCAL | {name.lower() for name in (address, *names) if name}


def host_of(header: str) -> str:
    """The name in a Host header, without its port; "" for none."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def is_allowed_origin(origin: str | None, host: str, allowed: Collection[str] = ()) -> bool:
    """Whether a request to `host` (its header) may come from a page of `origin`. Programs send no
    Origin; pages without one of their own send "null"."""
    if origin is None or origin in allowed:
        return True
    try:
        return bool(host) and urlsplit(origin).netloc == host
    except ValueError:
        return False


def from_environment(variable: str) -> tuple[str, ...]:
    """The JSON list in HOSTS or ORIGINS. Raises `InvalidData`."""
    text = os.environ.get(variable, "").strip()
    try:
        names = json.loads(text or "[]")
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidData(f"{variable}: not a JSON list", expected='["NAME"]', got=text[:200])
    return tuple(names)
