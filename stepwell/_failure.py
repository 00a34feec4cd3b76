"""How a program says that it failed: one line on stderr, and where it happened only on request."""

from __future__ import annotations

import os
import sys
import traceback

DEBUG = "STEPWELL_DEBUG"
"""Set by `stepwell --debug …`, so that a command and whatever it starts know of it."""


def fail(program: str, error: BaseException | str, *, status: int = 1) -> int:
    """Print `program: error` on stderr, and the traceback if STEPWELL_DEBUG; the exit status."""
    if isinstance(error, BaseException) and os.environ.get(DEBUG):
        traceback.print_exception(error)
    print(f"{program}: {error}", file=sys.stderr, flush=True)
    return status
