"""One process per folder: a lock file that a process holds until it ends, even by a crash.

The file contains the pid of the holder, for messages. On Windows the lock has no effect.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

LOOK_SECONDS = 1.0
"""How long `take_lock` waits, because `held_by` holds the lock for a moment."""


def take_lock(path: Path, refusal: Callable[[int], Exception]) -> IO[str]:
    """The lock, held until the file is closed. Raises the `refusal` for the pid that holds it (0
    where unknown), OSError."""
    file = path.open("a+")
    deadline = time.monotonic() + LOOK_SECONDS
    while not _locked(file):
        holder = _pid(file)
        if pid_exists(holder) or time.monotonic() > deadline:
            file.close()
            raise refusal(holder)
        time.sleep(0.01)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def held_by(path: Path) -> int | None:
    """Pid of the process that holds the lock, 0 if unknown; None if no process does."""
    try:
        file = path.open()
    except OSError:
        return None
    with file:
        return None if _locked(file, shared=True) else _pid(file)


def pid_exists(pid: int) -> bool:
    """Whether a process of that number exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return pid > 0


def _locked(file: IO[str], *, shared: bool = False) -> bool:
    """Lock it, unless another process has done so."""
    if os.name == "nt":
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _pid(file: IO[str]) -> int:
    file.seek(0)
    text = file.read(32).strip()
    return int(text) if text.isdecimal() else 0
