"""The server is killed at every place where it touches the disk; nothing acknowledged is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server import failpoints, fsck


@pytest.mark.parametrize("name", failpoints.ALL)
def test_dying_at_a_failpoint_loses_nothing_and_doubles_nothing(
    name: str,
    start_service: Callable[..., Any],
    traffic: Callable[[Any], Any],
    reopen: Callable[[Path, Any], None],
    ledger: Any,
    eager: dict[str, str],
) -> None:
    """Live traffic until it dies there; the index may then need a start, but never a repair."""
    service = start_service(env={**eager, "STEPWELL_FAILPOINT": name})
    assert traffic(service).until_death(), f"nothing in the traffic passes {name}"
    assert service.wait_exit() == -9, service.tail()
    died = fsck.check(service.data, deep=True)
    assert [f for f in died.findings if not f.note] == []
    reopen(service.data, ledger)
    restarted = fsck.check(service.data, deep=True)
    assert restarted.findings == []


def test_every_failpoint_named_is_reached_by_the_source() -> None:
    """A name that no code passes would be a test of nothing."""
    root = Path(failpoints.__file__).parent
    source = "\n".join(p.read_text() for p in root.rglob("*.py") if p.name != "failpoints.py")
    assert [name for name in failpoints.ALL if f'"{name}"' not in source] == []
