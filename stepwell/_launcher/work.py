"""One claimed launch on this machine: its processes, its record on disk, and what to report of it.

The record is written before anything happens that a launcher killed at that moment would have to
know of, and goes once the service has heard how the launch ended.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell._files import whole_file
from stepwell._launcher.children import Child
from stepwell._launcher.rules import Places, Start
from stepwell.client import Client
from stepwell.errors import NotFound
from stepwell.messages import Launch

log = logging.getLogger("stepwell.launcher")

LONGEST_ERROR = 8_000
Report = dict[str, str]


@dataclass
class Work:
    """Children of one launch; `told` is the last report that the service has taken."""

    launch_id: str
    role: str
    slots: int
    """That each child takes."""
    children: list[Child]
    refusal: str = ""
    """Why nothing of it is started."""
    stopped_because: str = ""
    cancelled: bool = False
    """The service knows that already: there is nothing to report."""
    problems: dict[str, str] = field(default_factory=dict)
    """Run → why it failed, or "" if it did not."""
    told: Report | None = None

    # --- the record -------------------------------------------------------------------------

    @classmethod
    def begin(cls, launch: Launch, slots: int, starts: list[Start], places: Places) -> Work:
        children = [
            Child(start.run, start.words, launch.role, *_files(places, launch.id, index))
            for index, start in enumerate(starts)
        ]
        return cls(launch.id, launch.role, slots, children)

    def save(self, places: Places) -> None:
        data = {name: value for name, value in vars(self).items() if name != "children"}
        data["children"] = [child.to_json() for child in self.children]
        with whole_file(_record(places, self.launch_id)) as file:
            file.write(json.dumps(data, indent=1).encode())

    def forget(self, places: Places) -> None:
        _record(places, self.launch_id).unlink(missing_ok=True)

    # --- life -------------------------------------------------------------------------------

    def with_state(self, state: str) -> list[Child]:
        return [child for child in self.children if child.state == state]

    @property
    def used(self) -> int:
        return self.slots * len(self.with_state("running"))

    @property
    def busy(self) -> bool:
        """Something of it runs or waits to be started."""
        return any(child.state != "ended" for child in self.children)

    @property
    def ended(self) -> bool:
        """Nothing of it runs, and of each child it is known how it went."""
        return not self.busy and not self.undecided

    @property
    def undecided(self) -> list[Child]:
        ended = self.with_state("ended")
        return [c for c in ended if not c.stopped and c.run not in self.problems]

    def stop(self, because: str, grace: float) -> None:
        self.stopped_because = self.stopped_because or because
        for child in self.children:
            child.stop(grace)

    def decide(self, client: Client | None) -> bool:
        """Note how ended children went; True if something was noted.

        Where nobody saw a child end, its run's row says how; without `client` that waits. Raises
        errors of the service.
        """
        changed = False
        for child in self.undecided:
            if child.status is not None:
                self.problems[child.run] = "" if child.status == 0 else child.trouble()
            elif client is None:
                continue
            else:
                fine = _run_status(client, child.run) in ("finished", "stopped")
                self.problems[child.run] = "" if fine else child.trouble()
            changed = True
        return changed

    # --- what to say ------------------------------------------------------------------------

    @property
    def runs(self) -> str:
        names = [child.run for child in self.children]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else ""

    @property
    def error(self) -> str:
        parts = [self.refusal, self.stopped_because, *self.problems.values()]
        return "\n".join(part for part in parts if part)[:LONGEST_ERROR]

    @property
    def state(self) -> str:
        if self.cancelled:
            return "cancelled"
        if not self.ended:
            return "running"
        return "failed" if self.error else "finished"

    def report(self) -> Report:
        return {"state": self.state, "error": self.error, "run": self.runs}


def load(places: Places) -> Iterator[Work]:
    """What earlier launchers on this directory have left, oldest first."""
    for path in sorted(places.launches.glob("*.json")):
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            children = [
                Child.from_json(child, *_files(places, data["launch_id"], index))
                for index, child in enumerate(data.pop("children"))
            ]
            yield Work(**data, children=children)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("left out a record that does not read: %s: %s", path, error)


def _record(places: Places, launch_id: str) -> Path:
    return places.launches / f"{launch_id}.json"


def _files(places: Places, launch_id: str, index: int) -> tuple[Path, Path]:
    """(log, lock) of one child"""
    name = f"{launch_id}-{index + 1}"
    return places.logs / f"{name}.log", places.launches / f"{name}.lock"


def _run_status(client: Client, run: str) -> str:
    try:
        return client.run(run).status
    except NotFound:
        return "failed"
