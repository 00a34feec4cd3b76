"""Policies on their way to the service: acting weights only, one immutable version after another.

The version is the number of updates made, so a resumed run that comes by again publishes the same
bytes under the same name. Written at home first; a thread delivers, so an outage only delays.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from amago_model.agent import Agent
from amago_model.policy_file import save_policy
from stepwell.client import Client
from stepwell.errors import Conflict, ServiceError, StepwellError, TooLarge
from stepwell.failpoints import failpoint

log = logging.getLogger(__name__)


class Publisher:
    """Used by global rank 0 only."""

    def __init__(self, folder: Path, client: Client | None, run: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._client, self._run = folder, client, run
        self._waiting: dict[int, tuple[bytes, dict[str, Any]]] = {}
        self._lock = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        if client is not None:
            self._thread = threading.Thread(target=self._deliver, name="publish", daemon=True)
            self._thread.start()

    def publish(
        self, agent: Agent, update: int, metadata: dict[str, Any], extra: dict[str, Any]
    ) -> int:
        """Publish what acts after `update` updates; its version.

        `metadata` (a little) is for the service's list, `extra` (the whole config) for the file.
        """
        path = self._folder / f"{update}.safetensors"
        data = save_policy(agent, path, step=update, extra={**metadata, **extra})
        for old in sorted(self._folder.glob("*.safetensors"), key=lambda p: p.stat().st_mtime)[:-3]:
            old.unlink(missing_ok=True)  # the service keeps them all
        failpoint("policy.after_file")
        with self._lock:
            self._waiting[update] = (data, metadata)
            self._lock.notify_all()
        return update

    def close(self, timeout: float = 30.0) -> bool:
        """Wait until all are delivered, at most `timeout` seconds; whether they are."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            if self._thread is not None:
                while self._waiting and (left := deadline - time.monotonic()) > 0:
                    self._lock.wait(left)
            for version in self._waiting:
                log.error(
                    "policy %s/%d did not reach the service; it lies in %s",
                    *(self._run, version, self._folder),
                )
            return not self._waiting

    def _deliver(self) -> None:
        assert self._client is not None
        told: set[int] = set()
        while True:
            with self._lock:
                while not self._waiting:
                    if self._closing:
                        return
                    self._lock.wait()
                version = min(self._waiting)
                data, metadata = self._waiting[version]
            try:
                self._client.publish_policy(
                    self._run, version, data, step=version, metadata=metadata
                )
            except Conflict:
                # An earlier life of the run stood here with other rounding (another world size,
                # another machine). What was published stays.
                log.warning("policy %s/%d exists with other bytes; those stay", self._run, version)
            except TooLarge as error:
                log.error("policy %s/%d is too large: %s", self._run, version, error)
            except (ServiceError, StepwellError) as error:
                level = logging.DEBUG if version in told else logging.WARNING
                log.log(level, "policy %s/%d waits for the service: %s", self._run, version, error)
                told.add(version)
                time.sleep(1.0)
                continue
            with self._lock:
                self._waiting.pop(version, None)
                self._lock.notify_all()
