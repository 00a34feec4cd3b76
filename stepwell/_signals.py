"""SIGINT and SIGTERM as requests to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


def interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def stop_signals(
    stop: Callable[[], object], again: Callable[[], object] = interrupt
) -> Iterator[None]:
    """Inside the block the first SIGINT or SIGTERM calls `stop`, and each further one `again`.

    Outside of the main thread, as in some notebooks, signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = 0

    def handle(*_: object) -> None:
        nonlocal received
        received += 1
        (stop if received == 1 else again)()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
