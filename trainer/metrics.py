"""A run's numbers: first into a local file, then to the service from a thread, without gaps.

    <run>/metrics.jsonl     one point per line {"key", "step", "value", "time"}, appended
    <run>/metrics.sent      how many bytes of it the service has acknowledged

The service may be away for as long as it likes; what was not sent is sent later, by this process or
by the next life of the run. Points are idempotent on (key, step), so sending twice does no harm.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepwell._files import whole_file
from stepwell.client import Client
from stepwell.errors import BadRequest, StepwellError
from stepwell.failpoints import failpoint
from stepwell.messages import MetricPoint

log = logging.getLogger(__name__)
POINTS_AT_ONCE = 2000
LONGEST_WAIT = 10.0


class MetricLog:
    """Append points; a thread delivers them. Closing waits a while for the rest to be delivered."""

    def __init__(self, folder: Path, client: Client | None, run: str, *, every: float = 1.0):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._sent_path = folder / "metrics.jsonl", folder / "metrics.sent"
        self._client, self._run, self._every = client, run, every
        _cut_torn_line(self.path)
        self._file = self.path.open("ab")
        self._sent = self._read_sent()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if client is not None:
            self._thread = threading.Thread(target=self._deliver, name="metrics", daemon=True)
            self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step. On disk (not fsynced) when this returns."""
        now = time.time()
        lines = [
            json.dumps({"key": k, "step": step, "value": _finite(v), "time": now}) + "\n"
            for k, v in values.items()
        ]
        self._file.write("".join(lines).encode())
        self._file.flush()
        failpoint("metrics.after_line")

    @property
    def unsent(self) -> int:
        """Bytes that the service has not acknowledged."""
        return self.path.stat().st_size - self._sent

    def close(self, timeout: float = 10.0) -> bool:
        """Deliver the rest, within `timeout` seconds; whether all was delivered."""
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._stop.set()
            self._wake.set()
            while self.unsent and time.monotonic() < deadline and self._thread.is_alive():
                time.sleep(0.01)
            self._client = None  # the thread gives up at its next look
            self._thread.join(1.0)
        self._file.close()
        return not self.unsent

    def _deliver(self) -> None:
        wait = self._every
        while (client := self._client) is not None:
            if not self._stop.is_set():
                self._wake.wait(wait)
            try:
                while self._send_some(client):
                    pass
                wait = self._every
            except (StepwellError, OSError) as error:  # OSError: our own disk is full
                wait = min(2 * wait, LONGEST_WAIT)
                log.info("metrics wait for the service (%d bytes): %s", self.unsent, error)
                time.sleep(0.1 if self._stop.is_set() else 0.0)
            if self._stop.is_set() and not self.unsent:
                return

    def _send_some(self, client: Client) -> bool:
        """Send the next points; whether there may be more."""
        with self.path.open("rb") as file:
            file.seek(self._sent)
            lines: list[bytes] = []
            for line in file:
                if not line.endswith(b"\n") or len(lines) == POINTS_AT_ONCE:
                    break
                lines.append(line)
        if not lines:
            return False
        points = [MetricPoint(**json.loads(line)) for line in lines]
        try:
            client.log_metrics(self._run, points)
        except BadRequest as error:  # asking again would not help; they stay in the local file
            log.error("the service refused %d metric points: %s", len(points), error)
        failpoint("metrics.after_answer")
        self._sent += sum(map(len, lines))
        with whole_file(self._sent_path) as sent:
            sent.write(str(self._sent).encode())
        return True

    def _read_sent(self) -> int:
        try:
            return min(int(self._sent_path.read_text()), self.path.stat().st_size)
        except (OSError, ValueError):
            return 0


class Heartbeat:
    """Tells the service now and then that this run is alive; hears what somebody wants of it."""

    def __init__(
        self,
        client: Client,
        worker: str,
        fields: Mapping[str, Any],
        counters: Callable[[], Mapping[str, float]],
        *,
        every: float = 2.0,
    ):
        self._client, self._worker = client, worker
        self._fields, self._counters, self._every = dict(fields), counters, every
        self.command = "none"
        """Of the newest answer: none, pause, resume, drain or stop."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def say(self, **fields: Any) -> None:
        """Change what is reported (state, last_error), and report at once."""
        self._fields.update(fields)
        self._tell()

    def close(self, **fields: Any) -> None:
        self._stop.set()
        self._thread.join(2 * self._every)
        self.say(**fields)

    def _beat(self) -> None:
        self._tell()
        while not self._stop.wait(self._every):
            self._tell()

    def _tell(self) -> None:
        try:
            answer = self._client.heartbeat(
                self._worker, counters=dict(self._counters()), **self._fields
            )
            self._client.patch_run(self._fields["run"])
        except StepwellError as error:
            log.debug("heartbeat: %s", error)
        else:
            if answer.command != "none":
                self.command = answer.command


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cut_torn_line(path: Path) -> None:
    """A process that was killed may have left half a line; the next point must not join it."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
