"""How a command reports its failure: one line on stderr, with a traceback only on request."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import groupby

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


@contextmanager
def mistakes_in_one_line(program: str) -> Iterator[None]:
    """Inside the block, tyro's box about a wrong command line becomes one line on stderr."""
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            yield
    finally:
        if captured.getvalue():
            print(_unboxed(program, captured.getvalue()), file=sys.stderr, flush=True)


def _unboxed(program: str, box: str) -> str:
    """tyro's message and nearest option, without its frame, its explanations and its advice."""
    inside = [line.strip("│ ") for line in box.splitlines()[1:]]
    # Between rules; where the screen has no Unicode there is one below the title, too.
    parts = [[*lines] for ruled, lines in groupby(inside, key=_is_rule) if not ruled]
    if not parts:
        return box
    message, *more = parts
    if message[0].startswith("Missing from"):
        missing = [line for line in message if line.startswith("--")]
        return f"{program}: missing {', '.join(missing)}; see {program} --help"
    near = [part[1] for part in more if part[0].startswith("Perhaps you meant")]
    return f"{program}: " + "; perhaps ".join([" ".join(message), *near])


def _is_rule(line: str) -> bool:
    return not line.strip("─-╰╯")
