"""The heartbeat of a worker: reports the status of a process and receives commands.

    heartbeat = Heartbeat(client, "collect-1", role="collect", run="first", status=numbers)
    heartbeat.command        # "pause", "resume", "drain" or "stop", once one was sent
    heartbeat.close(state="stopped")

A failed heartbeat does not interrupt the work; the next one reports the current status.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from stepwell._background import BackgroundLoop
from stepwell.client import Client
from stepwell.errors import BadRequest, Conflict, InvalidData, StepwellError
from stepwell.messages import MetricPoint, Worker

log = logging.getLogger(__name__)
TIMEOUT = LONGEST_WAIT = 5.0
MAX_POINTS = 10_000
MAX_ERROR = 20_000
"""Maximum length of `last_error` in characters."""


def report_worker(client: Client, worker: str, **fields: Any) -> Worker:
    """Send one heartbeat of this process; `fields` of PutWorker. Raises errors of the service."""
    fields["last_error"] = str(fields.get("last_error") or "")[:MAX_ERROR]
    return client.heartbeat(worker, host=socket.gethostname(), pid=os.getpid(), **fields)


class Heartbeat:
    """Sends heartbeats of a worker and its run every `every` seconds from a thread.

    `status()` returns fields of PutWorker (state, counters, policy, last_error). Its "metrics", a
    list of MetricPoint, are stored as metrics of the run. `on_command` is called with each command.
    """

    def __init__(
        self,
        client: Client,
        worker: str,
        *,
        role: str,
        run: str,
        status: Callable[[], Mapping[str, Any]],
        on_command: Callable[[str], object] | None = None,
        every: float = 2.0,
    ):
        # Without retries, so that an unreachable service does not delay the next heartbeat.
        self._client = client.with_options(timeout=TIMEOUT, retry_for=0.0)
        self._worker, self._role, self._run = worker, role, run
        self._status, self._on_command, self._every = status, on_command, every
        self._ending: dict[str, Any] = {}
        self._changes: dict[str, Any] = {}
        self._points: list[MetricPoint] = []
        self._defect = ""
        self._lock = threading.Lock()
        self.command = "none"
        """The newest command that is not "none"."""
        self._loop = BackgroundLoop(
            "heartbeat",
            self._beat,
            every=every,
            longest_wait=LONGEST_WAIT,
            expected=(StepwellError,),
        ).start()

    def wake(self) -> None:
        """Send the next heartbeat soon, because the status has changed."""
        self._loop.wake()

    def change_run(self, **changes: Any) -> None:
        """Change the run's row (fields of PatchRun) with one of the next heartbeats."""
        with self._lock:
            self._changes.update(changes)
        self._loop.wake()

    @property
    def trouble(self) -> str:
        """Error of the last heartbeat; empty if it succeeded."""
        return self._loop.trouble

    def close(self, **ending: Any) -> None:
        """Send the last heartbeat; `ending` (state, last_error) overrides fields of `status()`."""
        self._loop.stop(2 * TIMEOUT)
        self._ending = ending
        try:
            self._beat()
        except Exception as error:  # the status of the run records how the work ended
            log.warning("the last heartbeat did not arrive: %s", error)

    def _beat(self) -> None:
        """Send one heartbeat. Raises errors of the service."""
        fields = {**self._fields(), **self._ending}
        self._points = [*self._points, *fields.pop("metrics", ())][-MAX_POINTS:]
        answer = report_worker(self._client, self._worker, role=self._role, run=self._run, **fields)
        if answer.command != "none":
            self.command = answer.command
        if self._on_command is not None:
            self._on_command(answer.command)
        if self._points:
            self._client.log_metrics(self._run, self._points)
            self._points = []
        if self._changes or not self._ending:
            self._patch_run()

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the status. An error in `status()` does not stop the heartbeats."""
        try:
            fields = dict(self._status())
        except Exception as error:
            if not self._defect:
                log.exception("a defect in the numbers of the heartbeat")
            self._defect = f"a defect in the numbers of the heartbeat: {error}"
            return {"last_error": self._defect}
        return fields

    def _patch_run(self) -> None:
        """Send changes of the run. An empty patch is a heartbeat of the run."""
        with self._lock:
            changes = dict(self._changes)
        try:
            self._client.patch_run(self._run, **changes)
        except (BadRequest, Conflict, InvalidData) as error:
            if not changes:
                raise
            log.error("the run's row cannot be changed to %s: %s", changes, error)
        with self._lock:  # changes made in the meantime are sent with the next heartbeat
            for name, value in changes.items():
                if self._changes.get(name) is value:
                    del self._changes[name]
