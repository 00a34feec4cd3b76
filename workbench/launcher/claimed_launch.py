"""One claimed launch on this machine: its processes, its record on disk, and its report.

The record is written before each action that a restarted launcher must know about. It is deleted
once the service has accepted how the launch ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from stepwell._exit_message import PARTIAL
from stepwell._files import whole_file
from stepwell.client import Client
from stepwell.errors import NotFound
from stepwell.messages import Launch
from workbench.launcher.launch_permissions import CommandLine, LauncherFolder
from workbench.launcher.process import LaunchedProcess

log = logging.getLogger("stepwell.launcher")

LONGEST_ERROR = 8_000
LONGEST_LOG = 16_000


class ClaimedLaunch(BaseModel):
    """The processes of one launch and their results."""

    launch_id: str
    role: str
    slots: int
    """Slots used by each process."""
    processes: list[LaunchedProcess]
    refusal: str = ""
    """Why no process of the launch is started; empty if it is accepted."""
    stop_reason: str = ""
    cancelled: bool = False
    """The launch was cancelled on the service, so there is nothing to report."""
    failures: dict[str, str] = {}
    """Reason of failure by run; "" if the run did not fail."""
    reported: dict[str, str] | None = None
    """The last report that the service has accepted."""

    # --- the record -------------------------------------------------------------------------

    @classmethod
    def create(
        cls, launch: Launch, slots: int, lines: list[CommandLine], folder: LauncherFolder
    ) -> ClaimedLaunch:
        processes = [
            LaunchedProcess(run=line.run, command=line.words, role=launch.role) for line in lines
        ]
        claimed = cls(launch_id=launch.id, role=launch.role, slots=slots, processes=processes)
        return claimed._in(folder)

    @classmethod
    def read(cls, path: Path, folder: LauncherFolder) -> ClaimedLaunch:
        """Read a record. Raises OSError, or ValueError if the file is not a record."""
        return cls.model_validate_json(path.read_bytes())._in(folder)

    def _in(self, folder: LauncherFolder) -> ClaimedLaunch:
        for number, process in enumerate(self.processes, start=1):
            process.log = folder.logs / f"{self.launch_id}-{number}.log"
            process.lock = folder.launches / f"{self.launch_id}-{number}.lock"
        return self

    def save(self, folder: LauncherFolder) -> None:
        with whole_file(_record(folder, self.launch_id)) as file:
            file.write(self.model_dump_json(indent=1).encode())

    def delete(self, folder: LauncherFolder) -> None:
        _record(folder, self.launch_id).unlink(missing_ok=True)

    # --- life -------------------------------------------------------------------------------

    def with_state(self, state: str) -> list[LaunchedProcess]:
        return [process for process in self.processes if process.state == state]

    @property
    def active(self) -> bool:
        """Whether any process runs or waits to be started."""
        return any(process.state != "ended" for process in self.processes)

    @property
    def ended(self) -> bool:
        """Whether no process runs and the result of each is known."""
        return not self.active and not self._unresolved

    @property
    def _unresolved(self) -> list[LaunchedProcess]:
        ended = self.with_state("ended")
        return [p for p in ended if not p.stopped and p.run not in self.failures]

    def stop(self, reason: str, grace: float) -> None:
        self.stop_reason = self.stop_reason or reason
        for process in self.processes:
            process.stop(grace)

    def note_exits(self, client: Client | None) -> bool:
        """Record how processes ended. Returns True if the record changed.

        Without an exit status, the result is read from the run on the service; if `client` is None,
        this is left for a later call. Raises errors of the service.
        """
        changed = False
        for process in self._unresolved:
            if process.status is None and client is None:
                continue
            fine = process.status in (0, PARTIAL)
            if process.status is None and client is not None:
                fine = _run_status(client, process.run) in ("finished", "stopped")
            self.failures[process.run] = "" if fine else process.failure()
            changed = True
        return changed

    # --- the report -------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.cancelled:
            return "cancelled"
        if not self.ended:
            return "running"
        return "failed" if self.error else "finished"

    @property
    def error(self) -> str:
        parts = [self.refusal, self.stop_reason, *self.failures.values()]
        return "\n".join(part for part in parts if part)[:LONGEST_ERROR]

    @property
    def runs(self) -> str:
        names = [process.run for process in self.processes]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else ""

    def log_tail(self) -> str:
        """The end of the output of its processes, those of many one after the other."""
        if not self.processes:
            return ""
        each = LONGEST_LOG // len(self.processes)
        tails = [process.log_tail(each) for process in self.processes]
        if len(tails) == 1:
            return tails[0]
        # The lines between them count as well.
        names = [process.run for process in self.processes]
        parts = [f"--- {name}\n{tail}" for name, tail in zip(names, tails, strict=True) if tail]
        return "\n".join(parts)[-LONGEST_LOG:]

    def report(self) -> dict[str, str]:
        return {"state": self.state, "error": self.error, "run": self.runs}


def load(folder: LauncherFolder) -> Iterator[ClaimedLaunch]:
    """Yield the launches recorded by earlier launchers in this directory, oldest first."""
    for path in sorted(folder.launches.glob("*.json")):
        try:
            yield ClaimedLaunch.read(path, folder)
        except (OSError, ValueError) as error:
            log.warning("skipped an unreadable record: %s: %s", path, error)


def _record(folder: LauncherFolder, launch_id: str) -> Path:
    return folder.launches / f"{launch_id}.json"


def _run_status(client: Client, run: str) -> str:
    try:
        return client.run(run).status
    except NotFound:
        return "failed"
