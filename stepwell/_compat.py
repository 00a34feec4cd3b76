"""What Python 3.10 lacks: robots and games run collectors on it, though not the service."""

from __future__ import annotations

import os
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib

    OWN_GROUP: dict[str, Any] = {"process_group": 0}
    """Arguments of Popen: a process group of its own, so that Ctrl-C does not reach the child."""
else:
    import tomli as tomllib

    # Runs between fork and exec, where only calls that take no lock are safe; this one takes none.
    OWN_GROUP: dict[str, Any] = {"preexec_fn": os.setpgrp}

__all__ = ["OWN_GROUP", "tomllib"]
