"""A trainer's messages as the log of its run: `stepwell runs log NAME`, the dashboard's panel.

    2026-11-21 16:40:12 resumed after 2000 updates, from runs/demo/checkpoints/2000

They are appended to RUN/run.log and queued for the service. At most MAX_WAITING bytes of them wait;
the service keeps the end of a log.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from stepwell._wording import pluralize
from stepwell.errors import OutboxError
from stepwell.outbox import Outbox

MAX_LINE = 4000
MAX_WAITING = 1_000_000


class RunLog(logging.Handler):
    """The log lines of one run, with their times (UTC). Thread-safe; writing never fails.

    As a logging handler, it records the warnings and errors of a logger.
    """

    def __init__(self, folder: Path, outbox: Outbox, run: str):
        super().__init__(logging.WARNING)
        self._path, self._outbox, self._run = folder / "run.log", outbox, run
        self._write_lock, self._left_out = threading.Lock(), 0

    def write(self, text: str, now: float | None = None) -> None:
        """Append the lines of `text`, with the Unix time `now`."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() if now is None else now))
        lines = [f"{stamp} {line[:MAX_LINE]}\n" for line in text.splitlines()]
        with self._write_lock:
            try:
                if self._outbox.waiting("log") > MAX_WAITING:
                    self._left_out += len(lines)
                    return
                if self._left_out:
                    lines.insert(0, f"{stamp} ({pluralize(self._left_out, 'line')} left out)\n")
                with self._path.open("a") as file:
                    file.write("".join(lines))
                self._outbox.put_log(self._run, "".join(lines))
                self._left_out = 0
            except (OSError, OutboxError):  # disk full or outbox closed: logging must not end a run
                self._left_out += len(lines)

    def emit(self, record: logging.LogRecord) -> None:
        self.write(f"{record.levelname.lower()}: {record.getMessage()}", record.created)
