"""The processes of `stepwell run`: one that breaks is started again.

    waiting ──start──▶ running ──status 0 or 3──▶ ended
       ▲                  │
       └──── a delay ─────┘ killed, or another status

A part ends with status 0 when its work is done, or when somebody told it to stop. It is given up
when its command line is wrong, or when it broke several times in a row soon after its start,
although the service answered: with `PartFailed`, but for an evaluator, without which a run learns.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepwell._exit_message import PARTIAL
from stepwell.errors import StepwellError
from workbench.processes import STOP_GRACE, Job, Processes, stop

USAGE, INTERRUPTED = 2, 130
"""Exit statuses of a command that was called wrongly, and of an evaluation that was stopped."""
SERVICE = "service"
"""The part that all others need."""
TRAINER, EVALUATOR, COLLECTOR = "train", "evaluate", "collect-"
"""Names of parts; collectors have a number after it."""
SOON, ATTEMPTS = 60.0, 4
"""A part that lived for fewer seconds has broken soon; so often in a row, and it is given up."""
DELAY, LONGEST_DELAY = 1.0, 30.0
"""Seconds before the second start, doubled with each further one."""


class PartFailed(StepwellError):
    """A part of the run cannot go on; the message is the end of its log."""


@dataclass
class Part:
    """A `stepwell` command that runs beside the others."""

    name: str
    words: Sequence[str]
    processes: Processes
    """Starts it; its folder has the log."""
    job: Job | None = None
    pid: int | None = None
    """Id of the last process, which may have ended."""
    starts: int = 0
    broke_soon: int = 0
    not_before: float = 0.0
    """Time (monotonic) of the next start."""
    ended: bool = False
    given_up: bool = False
    """Whether it ended because it broke again and again."""
    last_reason: str = field(default="", repr=False)
    """Why it broke the last time."""
    follows: str = ""
    """Name of a part before whose end it is never done: if it ends earlier, it is started again."""

    @property
    def state(self) -> str:
        if self.ended:
            return "broken" if self.given_up else "ended"
        return "running" if self.job is not None else "waiting"


class Supervisor:
    """Starts parts and keeps them running.

    Args:
        say: receives a line for each part that broke.
        check: raises KeyboardInterrupt after a request to stop.
        service_answers: a part that breaks while it does not is not to blame.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        check: Callable[[], object] = lambda: None,
        service_answers: Callable[[], bool] = lambda: True,
    ):
        self.say, self.check, self.service_answers = say, check, service_answers
        self.parts: dict[str, Part] = {}

    def add(self, part: Part) -> None:
        """Start a part. One of an earlier `stepwell run` that was killed stops by itself; raises
        `PartFailed` if it has not after a while."""
        began, said = time.monotonic(), False
        while part.processes.is_running(part.name):
            self.check()
            if not said and time.monotonic() > began + 1.0:
                self.say(f"waiting until an earlier {part.name} has stopped …")
                said = True
            if time.monotonic() > began + STOP_GRACE:
                raise PartFailed(
                    f"{part.name} of another `stepwell run` still runs, see "
                    f"{part.processes.log(part.name)}; stop that one, or give this one another "
                    "--run or --data"
                )
            time.sleep(0.2)
        self.parts[part.name] = part
        self._start(part)

    def tick(self) -> None:
        """See what has ended, and start what is due. Raises `PartFailed`."""
        for part in self.parts.values():
            if part.job is not None and (status := part.job.process.poll()) is not None:
                self._ended(part, part.job, status)
            if part.state == "waiting" and time.monotonic() >= part.not_before:
                self._start(part)

    def stop(self, names: Sequence[str], grace: float = STOP_GRACE) -> None:
        """Ask parts to stop, wait until they have, and kill those that do not."""
        chosen = [self.parts[name] for name in names if name in self.parts]
        stop([part.job for part in chosen if part.job is not None], grace)
        for part in chosen:
            part.ended, part.job = True, None

    def kill(self) -> None:
        """Kill all parts at once."""
        for part in self.parts.values():
            if part.job is not None and part.job.process.poll() is None:
                os.killpg(part.job.process.pid, signal.SIGKILL)

    def _start(self, part: Part) -> None:
        part.job = part.processes.start(part.name, part.words)
        part.pid = part.job.process.pid
        part.starts += 1

    def _ended(self, part: Part, job: Job, status: int) -> None:
        part.job = None
        followed = self.parts.get(part.follows)
        if status == 0 and followed is not None and not followed.ended:
            part.not_before = time.monotonic() + DELAY
            return
        if status in (0, PARTIAL, INTERRUPTED):
            part.ended = True
            self._say_if_nobody_collects(part)
            return
        part.last_reason = job.reason()
        if part.name == SERVICE or self.service_answers():
            part.broke_soon = part.broke_soon + 1 if job.seconds < SOON else 1
        if status == USAGE or part.broke_soon >= ATTEMPTS:
            why = f"{part.name}: {part.last_reason} (its log: {job.log})"
            if status == USAGE or part.name != EVALUATOR:
                raise PartFailed(why)
            part.ended = part.given_up = True
            self.say(f"{why}; it is given up, and the run goes on without scores")
            return
        delay = min(DELAY * 2 ** max(0, part.broke_soon - 1), LONGEST_DELAY)
        part.not_before = time.monotonic() + delay
        self.say(f"{part.name} broke ({part.last_reason}); starting it again in {delay:g} s")

    def _say_if_nobody_collects(self, part: Part) -> None:
        """A trainer then waits for data, which may come from elsewhere."""
        collectors = [p for p in self.parts.values() if p.name.startswith(COLLECTOR)]
        trainer = self.parts.get(TRAINER)
        if part in collectors and all(p.ended for p in collectors):
            if trainer is not None and not trainer.ended:
                self.say(
                    f"{part.name} was stopped, and no collector is left: start one "
                    "(`stepwell collect`), or stop this run with Ctrl-C"
                )
