"""The state of a collector, and the commands and signals that change it.

pause   stop acting, keep the heartbeat        resume  go on
drain   finish the running episodes, then end  stop    end now; running episodes are truncated
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Literal

State = Literal["starting", "running", "paused", "draining", "stopped", "failed"]


class Control:
    """The state that commands of the service and signals ask for."""

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
        """Start playing, unless told otherwise meanwhile."""
        self._move("running", only=("starting",))

    def command(self, word: str) -> None:
        """pause, resume, drain or stop; any other word, such as "none", changes nothing."""
        if word == "pause":
            self._move("paused", only=("starting", "running"))
        elif word == "resume":
            self._move("running", only=("paused",))
        elif word == "drain":
            self._move("draining", only=("starting", "running", "paused"))
        elif word == "stop":
            self._move("stopped", only=("starting", "running", "paused", "draining"))

    def wait_while_paused(self) -> None:
        with self._changed:
            while self._state == "paused":
                self._changed.wait(0.5)

    def _move(self, state: State, only: tuple[State, ...]) -> None:
        with self._changed:
            if self._state in only:
                self._state = state
            self._changed.notify_all()


@contextlib.contextmanager
def signals(control: Control) -> Iterator[None]:
    """SIGINT and SIGTERM stop cleanly; the second one of them does not wait for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(*_: object) -> None:
        if control.stopping:
            raise KeyboardInterrupt
        control.command("stop")  # its lock is reentrant: the signal may find this thread inside

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
