"""pytest plugin for mutation runs: child processes run the mutant that their parent runs.

mutmut chooses a mutant by the environment. Children that get an environment of their own (confined
SQL workers, importers) would run the unmutated code; while coverage is recorded, children would
record into nothing.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

VARIABLE = "MUTANT_UNDER_TEST"
_PHASES = ("stats", "list_all_tests", "mutant_generation")
_plain = subprocess.Popen.__init__


def _with_mutant(self: Any, *args: Any, **options: Any) -> None:
    chosen = os.environ.get(VARIABLE, "")
    given = options.get("env")
    env = dict(os.environ if given is None else given)
    options["env"] = env | {VARIABLE: "" if chosen in _PHASES else chosen}
    _plain(self, *args, **options)


subprocess.Popen.__init__ = _with_mutant  # type: ignore[assignment, method-assign]
