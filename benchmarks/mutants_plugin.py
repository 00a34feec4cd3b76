"""pytest plugin for mutation runs: child processes run the same mutant as their parent.

mutmut selects the mutant with an environment variable. Some child processes (confined SQL workers,
importers) get a new environment and would run the unmutated code, so the plugin adds the variable
to the environment of every child process.

mutmut first records which tests reach which functions, but only in the process of the tests.
Therefore a test that starts a Python process is assumed to reach all mutated functions. A test that
starts or uses a confined process is assumed to reach all functions of the modules that such
processes run. The exception is the module server.sql.worker: as the program of its process it is
named `__main__`, so mutmut does not find it there. Other tests call it in their own process.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from mutmut.state import state
from mutmut.utils.format_utils import mangled_name_from_mutant_name

VARIABLE = "MUTANT_UNDER_TEST"
_PHASES = ("stats", "list_all_tests", "mutant_generation")
_CONFINED = ("server.sql.worker", "server.imports")
_IN_CONFINED = (
    "server.sandbox",
    "server.sql.checked_files",
    "server.sql.guard",
    "server.sql.selected_rows",
)
_plain = subprocess.Popen.__init__


def _functions() -> set[str]:
    """Names of all mutated functions, except those of the SQL workers' program."""
    root = Path(__file__).resolve().parents[1]
    texts = [path.read_text() for path in root.rglob("*.py.meta")]
    keys = [key for text in texts for key in json.loads(text)["exit_code_by_key"]]
    names = {mangled_name_from_mutant_name(key) for key in keys}
    return {name for name in names if not name.startswith("server.sql.worker.")}


_REACHED = _functions()
_REACHED_CONFINED = {name for name in _REACHED if name.startswith(_IN_CONFINED)}


def _note(confined: bool) -> None:
    if os.environ.get(VARIABLE) == "stats":
        state()._stats.update(_REACHED_CONFINED if confined else _REACHED)


def _with_mutant(self: Any, *args: Any, **options: Any) -> None:
    chosen = os.environ.get(VARIABLE, "")
    given = options.get("env")
    env = dict(os.environ if given is None else given)
    options["env"] = env | {VARIABLE: "" if chosen in _PHASES else chosen}
    command = str(args[0] if args else options.get("args"))
    if "python" in command:
        _note(any(name in command for name in _CONFINED))
    _plain(self, *args, **options)


subprocess.Popen.__init__ = _with_mutant  # type: ignore[assignment, method-assign]


def pytest_sessionstart() -> None:
    from server.sql.worker_handle import WorkerProcess

    ask = WorkerProcess.ask

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        _note(confined=True)
        return ask(self, *args, **options)

    WorkerProcess.ask = noted  # type: ignore[method-assign]
