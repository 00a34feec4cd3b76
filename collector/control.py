"""The state of a collector, and the commands that change it.

pause   stop acting, keep the heartbeat        resume  continue
drain   finish the running episodes, then end  stop    end now; running episodes are truncated
"""

from __future__ import annotations

import threading
from typing import Literal

State = Literal["starting", "running", "paused", "draining", "stopped", "failed"]

_COMMANDS: dict[str, tuple[State, tuple[State, ...]]] = {
    "go": ("running", ("starting",)),
    "pause": ("paused", ("starting", "running")),
    "resume": ("running", ("paused",)),
    "drain": ("draining", ("starting", "running", "paused")),
    "stop": ("stopped", ("starting", "running", "paused", "draining")),
}
"""Command → the resulting state, and the states in which the command has an effect."""


class Control:
    """The state requested by commands of the service and by signals."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: State = "starting"

    @property
    def state(self) -> State:
        return self._state

    @property
    def stopping(self) -> bool:
        return self._state == "stopped"

    def go(self) -> None:
        """Start playing, unless a command has changed the state in the meantime."""
        self.command("go")

    def command(self, word: str) -> None:
        """Apply pause, resume, drain or stop. Any other word, such as "none", has no effect."""
        state, before = _COMMANDS.get(word, (self._state, ()))
        with self._changed:  # reentrant: a signal may interrupt this block
            if self._state in before:
                self._state = state
            self._changed.notify_all()

    def wait_while_paused(self) -> None:
        with self._changed:
            while self._state == "paused":
                self._changed.wait(0.5)
