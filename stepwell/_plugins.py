"""Modules of the user's own, imported because a command line names them with --plugin."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence

from stepwell.errors import StepwellError


def import_plugins(modules: Sequence[str], refusal: Callable[[str], StepwellError]) -> None:
    """Import modules that register things. Raises a `refusal` that names the one that fails."""
    # A plug-in usually lies where the person stands, and the console script does not look there.
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            hint = ""
            if name.endswith(".py"):
                hint = f"; expected the name of a module, as in --plugin {name.removesuffix('.py')}"
            raise refusal(f"--plugin {name}: {error}{hint}") from error
        except Exception as error:
            raise refusal(
                f"--plugin {name}: {type(error).__name__}: {error}{_place(error)}; mend the "
                "module (stepwell --debug … shows the whole traceback)"
            ) from error


def _place(error: Exception) -> str:
    """The line that raised; a syntax error says its own."""
    if isinstance(error, SyntaxError):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}, line {frame.lineno})"
