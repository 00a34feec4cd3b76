"""User code: modules named on a command line, and messages for their errors."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from stepwell.errors import StepwellError


def import_plugins(modules: Sequence[str], refusal: Callable[[str], StepwellError]) -> None:
    """Import modules that register things. Raises a `refusal` that names the one that fails."""
    for name in modules:
        import_named(name, f"--plugin {name}", refusal, "--plugin ")


def import_named(
    name: str, words: str, refusal: Callable[[str], StepwellError], flag: str = ""
) -> None:
    """Import a module that a command line names in these `words`. Raises a `refusal`."""
    # It is usually in the working directory, which a console script does not have in sys.path.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except ImportError as error:
        hint = ""
        if name.endswith(".py"):
            hint = f"; expected the name of a module, as in {flag}{name.removesuffix('.py')}"
        raise refusal(f"{words}: {error}{hint}") from error
    except Exception as error:
        raise refusal(
            f"{words}: {type(error).__name__}: {error}{_place(error)}; mend the "
            "module (stepwell --debug … shows the whole traceback)"
        ) from error


def describe_error(error: BaseException) -> str:
    """Describe an exception of user code: message, or the code that raised it without one; type,
    and the line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    message = str(error) or (frames[-1].line if frames else "") or "no message"
    return f"{message} ({type(error).__name__}{place})"


def _place(error: Exception) -> str:
    """The line that raised; a syntax error says its own."""
    if isinstance(error, SyntaxError):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}, line {frame.lineno})"
