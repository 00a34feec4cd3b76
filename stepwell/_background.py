"""A daemon thread that calls a function again and again, whatever it raises, and shows its errors.

    loop = BackgroundLoop("leases", self._renew_all, every=30.0)
    loop.start()
    loop.trouble      # why the last call failed; "" after one that did not
    loop.stop()

A plain thread ends silently with the first unexpected exception. The owner of a loop shows its
`trouble`: in a worker's heartbeat, in the service's /readyz.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable
from typing import Self

log = logging.getLogger(__name__)
FIRST_WAIT, LONGEST_WAIT = 0.2, 30.0
LONGEST_RETRY_AFTER = 300.0
"""Seconds that a service may ask a loop to wait."""


class BackgroundLoop:
    """Calls `work` every `every` seconds until `stop`, whatever it raises.

    After an error the next call comes `FIRST_WAIT` seconds later, then twice as many, at most
    `longest_wait`, with jitter, and not before the error's `retry_after`. Errors of the kinds
    `expected` (an absent service) are only kept in `trouble`; any other is a defect: `report` is
    called with it, once until `work` succeeds or fails in another way. The default logs it with its
    traceback.
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
        """Calls that raised."""
        self.last_error = ""
        """Why the last call failed; empty after one that did not."""
        self._trouble = ""
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def wake(self) -> None:
        """Call `work` now, also where it would wait after an error."""
        self._wake.set()

    def stop(self, timeout: float | None = None) -> bool:
        """No more calls. Waits for the running one, at most `timeout` seconds; whether it ended."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until `work` itself has called `stop`; whether the thread ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self.alive

    @property
    def stopping(self) -> bool:
        """For a long `work`: whether `stop` was called."""
        return self._stopping.is_set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def trouble(self) -> str:
        """Why the last call failed, or that the thread is gone; empty where all is well."""
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
            except BaseException as error:  # SystemExit, too: it would end the thread silently
                wait = min(2 * wait or FIRST_WAIT, self._longest_wait)
                with contextlib.suppress(Exception):  # a full disk under the log, say
                    self._note(error)
                self._pause(max(wait * random.uniform(0.5, 1.0), retry_after(error)))
            else:
                wait, self._trouble, self.last_error = 0.0, "", ""
                self._pause(self._every)

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
    """Seconds that a service asked us to wait; 0 where it did not ask for a sensible number."""
    seconds = getattr(error, "retry_after", None)
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return 0.0
    return min(max(float(seconds), 0.0), LONGEST_RETRY_AFTER)


def _log(name: str, error: BaseException) -> None:
    log.error("a defect in the thread %r, which goes on", name, exc_info=error)
