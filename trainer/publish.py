"""Policies on their way to the service: acting weights only, one immutable version after another.

    policies/50.safetensors      a policy file; the newest three stay when they are delivered
    policies/50.json             it waits for the service: its digest, and what lists say of it
    policies/refused/50.*        what the service refused, or what is not what was written; why

The version is the number of updates made, so a resumed run that comes by again publishes the same
bytes under the same name. A policy is published when its file has its name, the note beside it was
there before; the note goes when the service has acknowledged. So the queue outlives the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell._files import TEMPORARY, sync_folder, whole_file
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.failpoints import failpoint
from trainer.delivery import Delivery, is_final
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from amago_model.agent import Agent

log = logging.getLogger(__name__)
KEPT = 3
"""Delivered policy files that stay."""
MOST_WAITING = 8 << 30
"""Bytes that may wait; beyond them the oldest policies go undelivered."""


class Publisher(Delivery):
    """The queue of a run's policies. Used by global rank 0 only; one process per folder."""

    what = "policies"

    def __init__(self, folder: Path, client: Client | None, run: str, *, every: float = 1.0):
        super().__init__(client, run, every=every)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lock = folder, threading.Lock()
        for litter in folder.rglob(f".*{TEMPORARY}"):  # of a life that was killed
            litter.unlink(missing_ok=True)
        self._waiting = {version: self._size(version) for version in self._noted()}
        self._start()

    def publish(
        self, agent: Agent, update: int, metadata: dict[str, Any], extra: dict[str, Any]
    ) -> int:
        """Queue what acts after `update` updates; its version. When this returns it is on disk.

        `metadata` (a little) is for the service's list, `extra` (the whole config) for the file.
        Raises `TrainerError` where the disk is full or broken.
        """
        # Not above: to deliver what lies here needs no torch.
        from amago_model.policy_file import save_policy

        data = save_policy(agent, step=update, extra={**metadata, **extra})
        note = {"sha256": hashlib.sha256(data).hexdigest(), "metadata": metadata}
        with self._lock:
            taken = update in self._waiting
        if taken and self._file(update).read_bytes() != data:
            # As at the service: an earlier life came by here with other rounding or settings.
            log.warning("policy %s/%d waits with other bytes already; they stay", self._run, update)
            return update
        try:
            with whole_file(self._note(update)) as file:
                file.write(json.dumps(note).encode())
            failpoint("policy.after_note")
            with whole_file(self._file(update)) as file:
                file.write(data)
        except OSError as error:
            raise TrainerError(
                f"policy {self._run}/{update} cannot be written to {self._folder}: {error}; make "
                "room, then run the same command again: it goes on from its newest checkpoint"
            ) from error
        failpoint("policy.after_file")
        with self._lock:
            self._waiting[update] = len(data)
            full = sum(self._waiting.values()) - MOST_WAITING
            for version in sorted(self._waiting)[:-1]:
                if full <= 0:
                    break
                full -= self._waiting.pop(version)
                log.error(
                    "policy %s/%d goes undelivered: more than %d bytes wait for the service",
                    *(self._run, version, MOST_WAITING),
                )
                self._note(version).unlink(missing_ok=True)
        self._tidy()
        if self._loop is not None:
            self._loop.wake()
        return update

    def has(self, version: int) -> bool:
        """Whether this version was published, by this life of the run or an earlier one."""
        aside = self._folder / "refused" / self._file(version).name
        return self._file(version).exists() or aside.exists()

    @property
    def waiting(self) -> list[int]:
        """Versions that the service has not acknowledged."""
        with self._lock:
            return sorted(self._waiting)

    @property
    def unsent(self) -> int:
        with self._lock:
            return sum(self._waiting.values())

    def close(self, timeout: float = 30.0) -> bool:
        delivered = super().close(timeout)
        if waiting := self.waiting:
            log.error(
                "%d policies of %s wait for the service, versions %d to %d; they lie in %s",
                *(len(waiting), self._run, waiting[0], waiting[-1], self._folder),
            )
        return delivered

    def send_next(self, client: Client) -> bool:
        waiting = self.waiting
        if not waiting:
            return False
        version = waiting[0]
        try:
            data, metadata = self._read(version)
        except (ValueError, TypeError, FileNotFoundError) as error:
            self._refuse(version, str(error))
            return True
        try:
            client.publish_policy(self._run, version, data, step=version, metadata=metadata)
        except StepwellError as error:
            if not is_final(error):
                raise
            self._refuse(version, str(error))
            return True
        failpoint("policy.after_answer")
        self._note(version).unlink(missing_ok=True)
        self._forget(version)
        return True

    def _read(self, version: int) -> tuple[bytes, dict[str, Any]]:
        """Raises ValueError where it is not what was written."""
        note = json.loads(self._note(version).read_bytes())
        data = self._file(version).read_bytes()
        if not isinstance(note, dict) or hashlib.sha256(data).hexdigest() != note.get("sha256"):
            raise ValueError("the file is not what was written")
        return data, dict(note.get("metadata") or {})

    def _refuse(self, version: int, reason: str) -> None:
        """Aside with it and the reason, so that those behind it are not held up."""
        log.error("policy %s/%d cannot be delivered: %s", self._run, version, reason)
        aside = self._folder / "refused"
        aside.mkdir(exist_ok=True)
        with whole_file(aside / f"{version}.json") as file:
            file.write(json.dumps({"reason": reason}).encode())
        failpoint("policy.after_reason")
        with contextlib.suppress(FileNotFoundError):  # somebody took it away
            os.replace(self._file(version), aside / f"{version}.safetensors")
        sync_folder(aside)
        failpoint("policy.after_refusal")
        self._note(version).unlink(missing_ok=True)
        self._forget(version)

    def _forget(self, version: int) -> None:
        with self._lock:
            self._waiting.pop(version, None)
        self._tidy()

    def _tidy(self) -> None:
        """Keep the newest delivered ones; the service keeps them all."""
        with self._lock:
            files = [
                path
                for path in self._folder.glob("*.safetensors")
                if path.stem.isdigit() and not self._waits(path)
            ]
            # By number: a clock that was put back would make the newest look oldest.
            for old in sorted(files, key=lambda path: int(path.stem))[:-KEPT]:
                old.unlink(missing_ok=True)

    def _waits(self, path: Path) -> bool:
        return path.with_suffix(".json").exists()

    def _noted(self) -> list[int]:
        """Versions that an earlier life published and that the service may not have."""
        found = []
        for note in self._folder.glob("*.json"):
            if not note.stem.isdigit():
                continue
            if not note.with_suffix(".safetensors").exists():
                note.unlink()  # killed before it was published
                continue
            found.append(int(note.stem))
        return found

    def _size(self, version: int) -> int:
        return self._file(version).stat().st_size

    def _file(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"

    def _note(self, version: int) -> Path:
        return self._folder / f"{version}.json"
