"""A run's numbers and its sign of life.

    <run>/metrics.jsonl     one point per line {"key", "step", "value", "time"}, appended
    <run>/metrics.sent      how many bytes of it the service has acknowledged

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

from stepwell.client import Client
from stepwell.errors import BadRequest, StepwellError
from stepwell.failpoints import failpoint
from stepwell.messages import MetricPoint
from trainer.delivery import LineSpool

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

    def send(self, client: Client, lines: Sequence[bytes]) -> None:
        points = [MetricPoint(**json.loads(line)) for line in lines]
        try:
            client.log_metrics(self._run, points)
        except BadRequest as error:  # asking again would not help; they stay in the local file
            log.error("the service refused %d metric points: %s", len(points), error)
        failpoint("metrics.after_answer")


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
