"""What a trainer says, as the log of its run: `stepwell runs log NAME`, the dashboard's panel.

    2026-11-21 16:40:12 resumed after 2000 updates, from runs/demo/checkpoints/2000

Lines of `say`, and the warnings of our own modules. Their number is bounded on both sides: of what
the service has not taken at most MOST_UNSENT bytes are kept, and the service keeps a log's tail.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from stepwell.client import Client
from stepwell.errors import StepwellError
from trainer.delivery import LineSpool, Refused, is_final

LONGEST_LINE = 4000
MOST_UNSENT = 1_000_000


class RunLog(LineSpool):
    """The lines of one run, with their times (UTC). Any thread may write; writing never fails."""

    what = "log lines"
    at_once = 40
    level = logging.INFO  # a warning would be one more line of this very log

    def __init__(self, folder: Path, client: Client | None, run: str, *, every: float = 1.0):
        self._lock, self._left_out = threading.Lock(), 0
        self._uncertain = True
        """The service may have lines whose acknowledgement was lost, in this life or the last."""
        super().__init__(folder / "run.log", client, run, every=every)

    def write(self, text: str, now: float | None = None) -> None:
        """Keep the lines of `text`, said at the Unix time `now`."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() if now is None else now))
        lines = [f"{stamp} {line[:LONGEST_LINE]}" for line in text.splitlines()]
        with self._lock:
            try:
                if self.unsent > MOST_UNSENT:
                    self._left_out += len(lines)
                    return
                if self._left_out:
                    lines.insert(0, f"{stamp} ({self._left_out} lines left out)")
                self.append(lines)
                self._left_out = 0
            except (OSError, ValueError):  # no room, or closed: a log line is worth no run
                self._left_out += len(lines)

    def send(self, client: Client, lines: Sequence[bytes]) -> list[Refused]:
        if self._uncertain:
            lines = lines[_already_there(client.run_log(self._run), lines) :]
        self._uncertain = True
        try:
            if lines:
                client.patch_run(self._run, log=b"".join(lines).decode(errors="replace"))
        except StepwellError as error:
            if not is_final(error):
                raise
            self._uncertain = False
            return [(line, str(error)) for line in lines]
        self._uncertain = False
        return []


class Warnings(logging.Handler):
    """Hands warnings and errors of the trainer's modules to the run's log."""

    def __init__(self, run_log: RunLog):
        super().__init__(logging.WARNING)
        self._run_log = run_log

    def emit(self, record: logging.LogRecord) -> None:
        self._run_log.write(f"{record.levelname.lower()}: {record.getMessage()}", record.created)


def _already_there(text: str, lines: Sequence[bytes]) -> int:
    """How many of `lines`, from the first on, the log already ends with."""
    there = text.encode()
    ends = (n for n in range(len(lines), 0, -1) if there.endswith(b"".join(lines[:n])))
    return next(ends, 0)
