"""Outbox directories for collectors that were given none: numbered, the first free one is taken.

stepwell-outbox/my-data/0    a living collector holds its lock
stepwell-outbox/my-data/1    left by one that crashed, with what it could not send: taken first
"""

from __future__ import annotations

from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: there, give each collector its own --outbox
    fcntl = None  # type: ignore[assignment]

from stepwell.errors import OutboxError

MAX_LANES = 1000


def free_lane(parent: Path) -> Path:
    """The first directory below `parent` that no process holds; leftovers there get sent too."""
    for number in range(MAX_LANES):
        lane = parent / str(number)
        if not _held(lane / "lock"):
            return lane
    raise OutboxError(f"{MAX_LANES} collectors hold outboxes in {parent}; name one with --outbox")


def _held(lock: Path) -> bool:
    """Whether a living process holds the outbox's lock. It may be lost right after we look: then
    the Outbox itself refuses, so two collectors never share one."""
    if fcntl is None or not lock.exists():
        return False
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
