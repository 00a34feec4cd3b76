"""Which layers of confinement hold on this machine: what `stepwell fsck --sandbox` prints."""

from __future__ import annotations

import json
import subprocess
import sys

from server.sql.confine import environment

LAYERS = {
    "limits": "memory, CPU time, open files, and no file may grow",
    "uid": "another user, who may read and write nothing (only when started as root)",
    "files": "Landlock: reads named paths only, writes nowhere, signals nobody",
    "network": "seccomp: no sockets, programs, processes, signals or changes of files",
}
_PROBE = """
import json, sys
from server.sql.confine import confine, libraries
layers = confine(libraries(), address_space=2 << 30, cpu_seconds=10)
sys.stdout.write(json.dumps(layers))
"""


def active() -> dict[str, bool]:
    """Layer → whether it holds, found out by a child process that confines itself."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-s", "-c", _PROBE],
            env=environment(),
            cwd="/",
            capture_output=True,
            timeout=30,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return dict.fromkeys(LAYERS, False)
    return {name: bool(found.get(name)) for name in LAYERS}
