"""How a program says that it failed: one line on stderr, and where it happened only on request."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import groupby

DEBUG = "STEPWELL_DEBUG"
"""Set by `stepwell --debug …`, so that a command and whatever it starts know of it."""


def fail(program: str, error: BaseException | str, *, status: int | None = None) -> int:
    """Print `program: error` on stderr, and the traceback if STEPWELL_DEBUG; the exit status.

    Unless told, that is the error's own `exit_status`: 2 for wrong words, 1 for any other failure.
    """
    if isinstance(error, BaseException) and os.environ.get(DEBUG):
        traceback.print_exception(error)
    print(f"{program}: {error}", file=sys.stderr, flush=True)
    return int(getattr(error, "exit_status", 1)) if status is None else status


@contextmanager
def mistakes_in_one_line(program: str) -> Iterator[None]:
    """Inside, what tyro says of a wrong command line in a box on stderr becomes such a line."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    finally:
        if said.getvalue():
            print(_unboxed(program, said.getvalue()), file=sys.stderr, flush=True)


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
