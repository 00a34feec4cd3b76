"""A run's numbers and its sign of life.

    <run>/metrics.jsonl     one point per line {"key", "step", "value", "time"}, appended
    <run>/metrics.sent      how many bytes of it the service has acknowledged
    <run>/metrics.refused   lines that do not read, or that the service refuses, with the reason

Points are idempotent on (key, step), so sending twice does no harm.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell._background import BackgroundLoop
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.failpoints import failpoint
from stepwell.messages import MetricPoint
from trainer.delivery import LineSpool, Refused, is_final

log = logging.getLogger(__name__)


class MetricLog(LineSpool):
    """Append points; they reach the service without gaps (delivery.py)."""

    what = "metrics"
    at_once = 2000

    def __init__(self, folder: Path, client: Client | None, run: str, *, every: float = 1.0):
        super().__init__(folder / "metrics.jsonl", client, run, every=every)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step. On disk (not fsynced) when this returns."""
        now = time.time()
        self.append(
            [
                json.dumps({"key": k, "step": step, "value": _finite(v), "time": now})
                for k, v in values.items()
            ]
        )
        failpoint("metrics.after_line")

    def send(self, client: Client, lines: Sequence[bytes]) -> list[Refused]:
        points: list[tuple[bytes, MetricPoint]] = []
        refused: list[Refused] = []
        for line in lines:
            try:
                points.append((line, MetricPoint.model_validate_json(line)))
            except ValueError as error:  # a disk's fault, or a hand's
                refused.append((line, f"this line does not read: {error}"))
        refused += self._send(client, points)
        failpoint("metrics.after_answer")
        return refused

    def _send(self, client: Client, points: Sequence[tuple[bytes, MetricPoint]]) -> list[Refused]:
        """Those that the service will never take: a refused group is halved to find them."""
        if not points:
            return []
        try:
            client.log_metrics(self._run, [point for _, point in points])
        except StepwellError as error:
            if not is_final(error):
                raise
            if len(points) == 1:
                return [(points[0][0], str(error))]
            half = len(points) // 2
            return self._send(client, points[:half]) + self._send(client, points[half:])
        return []


class Heartbeat:
    """Tells the service now and then that this run is alive; hears what somebody wants of it.

    `trouble()` is what is wrong with the run's other threads, shown as the worker's last error.
    """

    def __init__(
        self,
        client: Client,
        worker: str,
        fields: Mapping[str, Any],
        counters: Callable[[], Mapping[str, float]],
        *,
        every: float = 2.0,
        trouble: Callable[[], str] = str,
    ):
        self._client, self._worker, self._counters = client, worker, counters
        self._fields, self._trouble, self._every = dict(fields), trouble, every
        self._row: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.command = "none"
        """Of the newest answer: none, pause, resume, drain or stop."""
        self._loop = BackgroundLoop(
            "heartbeat", self._tell, every=every, longest_wait=10.0, expected=(StepwellError,)
        )
        self._loop.start()

    def say(self, **fields: Any) -> None:
        """Change what is reported (state, last_error), and report soon; waits for nobody."""
        with self._lock:
            self._fields.update(fields)
        self._loop.wake()

    def change_row(self, **changes: Any) -> None:
        """Change the run's row with one of the next heartbeats; waits for nobody."""
        with self._lock:
            self._row.update(changes)
        self._loop.wake()

    @property
    def trouble(self) -> str:
        """Why the service does not hear of this run."""
        return self._loop.trouble

    def close(self, **fields: Any) -> None:
        """The last heartbeat, with these fields."""
        self._loop.stop(2 * self._every)
        with self._lock:
            self._fields.update(fields)
        try:
            self._tell()
        except Exception as error:  # the run has ended well or not: this changes nothing of it
            log.warning("the last heartbeat did not arrive: %s", error)

    def _tell(self) -> None:
        with self._lock:
            fields, changes = dict(self._fields), dict(self._row)
        fields["last_error"] = (fields.get("last_error") or self._trouble())[:20_000]
        answer = self._client.heartbeat(self._worker, counters=dict(self._counters()), **fields)
        if answer.command != "none":
            self.command = answer.command
        try:
            self._client.patch_run(fields["run"], **changes)
        except StepwellError as error:
            if not (changes and is_final(error)):
                raise
            log.error("the run's row cannot be changed to %s: %s", changes, error)
            self._client.patch_run(fields["run"])
        with self._lock:  # what was changed again meanwhile is told with the next one
            for name, value in changes.items():
                if self._row.get(name) is value:
                    del self._row[name]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
