"""A daemon thread that calls a function repeatedly and records its errors.

    loop = BackgroundLoop("leases", self._renew_all, every=30.0)
    loop.start()
    loop.trouble      # error of the last call; "" if it succeeded
    loop.stop()

A plain thread ends silently with the first unexpected exception. This loop continues, and its owner
reports `trouble` in a worker's heartbeat or in /readyz of the service.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable

from typing_extensions import Self

log = logging.getLogger(__name__)
_jitter = random.Random()  # not the numbers of the program, which may have seeded them
FIRST_WAIT, LONGEST_WAIT = 0.2, 30.0
LONGEST_RETRY_AFTER = 300.0
"""Maximum `retry_after` that a loop accepts, in seconds."""


class BackgroundLoop:
    """Calls `work` every `every` seconds until `stop`, even if it raises.

    After an error, the next call follows after `FIRST_WAIT` seconds. The wait doubles with each
    further error up to `longest_wait`, with jitter, and is at least `retry_after` of the error.
    Errors of the types `expected` (such as an unreachable service) only set `trouble`. Any other
    error is a defect: `report` is called with it, and not again until `work` succeeds or raises
    a different error. By default it is logged with its traceback.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        every: float,
        at_once: bool = True,
        longest_wait: float = LONGEST_WAIT,
        expected: tuple[type[BaseException], ...] = (),
        report: Callable[[str, BaseException], object] | None = None,
    ):
        self.name, self._work, self._every, self._at_once = name, work, every, at_once
        self._longest_wait, self._expected = longest_wait, expected
        self._report = report or _log
        self.failures = 0
        """Number of calls that raised."""
        self.last_error = ""
        """Error of the last call; empty if it succeeded."""
        self._trouble = ""
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def wake(self) -> None:
        """Call `work` now, even during the wait after an error."""
        self._wake.set()

    def stop(self, timeout: float | None = None) -> bool:
        """Stop calling `work`. Waits up to `timeout` seconds for the thread; True if it ended."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until `work` has called `stop`. Returns whether the thread ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self.alive

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called, for a long-running `work` to check."""
        return self._stopping.is_set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def trouble(self) -> str:
        """Error of the last call, or a note that the thread has ended; empty if there is none."""
        if self._thread.ident is not None and not self.alive and not self.stopping:
            return f"{self.name}: its thread is gone"  # in the child of a fork, for instance
        return self._trouble

    def _run(self) -> None:
        if not self._at_once:
            self._pause(self._every)
        wait = 0.0
        while not self.stopping:
            try:
                self._work()
            except BaseException as error:  # includes SystemExit, which ends a thread silently
                wait = min(2 * wait or FIRST_WAIT, self._longest_wait)
                with contextlib.suppress(Exception):  # for instance, the disk of the log is full
                    self._note(error)
                self._pause(max(wait * _jitter.uniform(0.5, 1.0), retry_after(error)))
            else:
                wait = 0.0
                self.forget_error()
                self._pause(self._every)

    def forget_error(self) -> None:
        """For a long `work`: what failed the last time works again."""
        self._trouble, self.last_error = "", ""

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _note(self, error: BaseException) -> None:
        self.failures += 1
        before, kind = self._trouble, type(error).__name__
        self.last_error = str(error) or kind
        if isinstance(error, self._expected):
            self._trouble = f"{self.name}: {self.last_error}"
            return
        self._trouble = f"{self.name}: {kind}: {error}"
        if self._trouble != before:
            self._report(self.name, error)


def retry_after(error: BaseException) -> float:
    """Return `retry_after` of an error in seconds; 0 if it is missing or invalid."""
    seconds = getattr(error, "retry_after", None)
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return 0.0
    return min(max(float(seconds), 0.0), LONGEST_RETRY_AFTER)


def _log(name: str, error: BaseException) -> None:
    log.error("a defect in the thread %r, which goes on", name, exc_info=error)
