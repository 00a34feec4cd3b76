"""Points at which tests kill a process, to prove that a crash there loses nothing.

`STEPWELL_FAILPOINT=checkpoint.after_rename` (or `name:3` for the third hit) kills this process with
SIGKILL at that point. Tests visit every name that the source passes (tests/failpoints.py). Unset, a
failpoint costs one compare. A process that ends without reaching it, perhaps because the name is
mistyped, says so on stderr.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

wanted, _, _count = os.environ.get("STEPWELL_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def failpoint(name: str) -> None:
    """Kill this process with SIGKILL if STEPWELL_FAILPOINT selects this failpoint."""
    global _left
    if name != wanted:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _warn_unreached() -> None:
    print(f"STEPWELL_FAILPOINT={wanted}: not reached, so it tested nothing", file=sys.stderr)


if wanted:
    atexit.register(_warn_unreached)
