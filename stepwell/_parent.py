"""A process that ends with the one that started it, however that ended."""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT = "STEPWELL_PARENT"
"""Environment variable with the pid of the process to end with."""
LOOK_SECONDS = 1.0


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """If the variable names this process's parent: send `by` to this process once it is gone."""
    # Removed, so that it does not reach the children of this process.
    parent = os.environ.pop(PARENT, "")
    if not parent.isdecimal():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), by)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
