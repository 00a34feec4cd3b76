"""How a command reports its failure: one line on stderr, with a traceback only on request."""

from __future__ import annotations

import os
import sys
import traceback

PARTIAL = 3
"""Exit status of a command that has done its work, but for what others broke: episodes whose
environment failed."""
DEBUG = "STEPWELL_DEBUG"
"""Set by `stepwell --debug …`, for a command and the processes it starts."""


def fail(program: str, error: BaseException | str, *, status: int | None = None) -> int:
    """Print `program: error` on stderr, and the traceback if STEPWELL_DEBUG; the exit status.

    The status defaults to the error's `exit_status`: 2 for a wrong command line, 1 otherwise.
    """
    if isinstance(error, BaseException) and os.environ.get(DEBUG):
        traceback.print_exception(error)
    print(f"{program}: {error}", file=sys.stderr, flush=True)
    return int(getattr(error, "exit_status", 1)) if status is None else status
