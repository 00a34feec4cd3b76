"""What one collector has done so far, and the part of it that outlives the process: its clock."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from collector.recorder import Episode
from stepwell._files import whole_file
from stepwell.failpoints import failpoint

CLOCK = "clock.json"
_RECENT = 100


@dataclass(slots=True)
class Tally:
    """What one collector has done; written by the acting thread, read by the others."""

    before: int = 0
    """Steps that earlier sessions on this outbox have played: the schedule goes on from there."""
    sessions: int = 0
    """How many earlier sessions there were, ended well or killed."""
    steps: int = 0
    episodes: int = 0
    broken: int = 0
    error: str = ""
    began: float = field(default_factory=time.monotonic)
    recent: deque[Episode] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """The last whole episodes."""
    unreported: list[Episode] = field(default_factory=list)
    """Whole episodes since the last metrics."""

    @property
    def clock(self) -> int:
        return self.before + self.steps

    @property
    def rate(self) -> float:
        """Environment steps per second, on average."""
        return self.steps / max(time.monotonic() - self.began, 1e-9)

    def count(self, episode: Episode) -> None:
        if episode.whole:
            self.episodes += 1
            self.recent.append(episode)
            self.unreported.append(episode)

    def counters(self) -> dict[str, float]:
        return {
            "env_steps": float(self.clock),
            "episodes": float(self.episodes),
            "broken": float(self.broken),
            "steps_per_second": self.rate,
        }

    def series(self) -> dict[str, float]:
        """Means over the episodes since the last call; nothing where there were none."""
        episodes, self.unreported = self.unreported, []
        if not episodes:
            return {}
        values = {
            "collect/return": float(np.mean([e.total_reward for e in episodes])),
            "collect/length": float(np.mean([e.length for e in episodes])),
            "collect/steps_per_second": self.rate,
        }
        if known := [e.success for e in episodes if e.success is not None]:
            values["collect/success"] = float(np.mean(known))
        return values


def open_clock(directory: Path) -> Tally:
    """The tally of a new session, counted on disk before it plays: even a killed one was one."""
    try:
        found = json.loads((directory / CLOCK).read_text())
        tally = Tally(max(0, int(found["env_steps"])), max(0, int(found["sessions"])))
    except (OSError, ValueError, KeyError, TypeError):
        tally = Tally()  # the first session here, or a clock that no longer reads: begin anew
    write_clock(directory, tally)
    return tally


def write_clock(directory: Path, tally: Tally) -> None:
    with whole_file(directory / CLOCK) as file:
        file.write(json.dumps({"env_steps": tally.clock, "sessions": tally.sessions + 1}).encode())
        failpoint("clock.before_rename")
    failpoint("clock.after_rename")
