"""pytest plugin for mutation runs: child processes run the mutant that their parent runs.

mutmut chooses a mutant by the environment. Children that get an environment of their own (confined
SQL workers, importers) would run the unmutated code; while coverage is recorded, children would
record into nothing. So a test that starts or asks a confined child is taken to reach all that such
children run, but for the module that is their program: there it has another name, and tests of
their own process reach it.
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
_IN_CHILDREN = [f"server/sql/{name}.py.meta" for name in ("confine", "files", "guard", "selecting")]
_plain = subprocess.Popen.__init__


def _functions() -> set[str]:
    """Of the modules that confined children run."""
    root = Path(__file__).resolve().parents[1]
    metas = [root / name for name in _IN_CHILDREN if (root / name).exists()]
    keys = [key for meta in metas for key in json.loads(meta.read_text())["exit_code_by_key"]]
    return {mangled_name_from_mutant_name(key) for key in keys}


_REACHED = _functions()


def _note() -> None:
    if os.environ.get(VARIABLE) == "stats":
        state()._stats.update(_REACHED)


def _with_mutant(self: Any, *args: Any, **options: Any) -> None:
    chosen = os.environ.get(VARIABLE, "")
    given = options.get("env")
    env = dict(os.environ if given is None else given)
    options["env"] = env | {VARIABLE: "" if chosen in _PHASES else chosen}
    _note()
    _plain(self, *args, **options)


subprocess.Popen.__init__ = _with_mutant  # type: ignore[assignment, method-assign]


def pytest_sessionstart() -> None:
    from server.sql.child import Worker

    ask = Worker.ask

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        _note()
        return ask(self, *args, **options)

    Worker.ask = noted  # type: ignore[method-assign]
