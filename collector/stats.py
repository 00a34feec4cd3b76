"""Statistics of a collector, and its step count, which is kept on disk over restarts."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from collector.broken_episodes import BrokenEpisodes
from collector.episode_recorder import BROKEN, EpisodeSummary
from stepwell._files import whole_file
from stepwell.failpoints import failpoint

CLOCK = "clock.json"
STUCK_SECONDS = 60.0
"""A step of all environments that takes longer is reported: one of them may never return."""
_RECENT = 100
DIFFERENT = 3


@dataclass(slots=True)
class CollectorStatistics:
    """Statistics of a collector; the acting thread writes them, other threads read them."""

    earlier_steps: int = 0
    """Steps of earlier sessions with this outbox; the exploration schedule continues from them."""
    earlier_sessions: int = 0
    """Number of earlier sessions with this outbox, finished or killed."""
    steps: int = 0
    episodes: int = 0
    broken: BrokenEpisodes = field(default_factory=BrokenEpisodes)
    kept: int = 0
    """Episodes that no error broke off: complete ones, and those that a stop interrupted."""
    dropped: int = 0
    """Episodes deleted unsent, because the trainers were behind (--when-ahead drop-oldest)."""
    waiting: str = ""
    """What it waits for, while no episode runs."""
    error: str = ""
    remarks: list[str] = field(default_factory=list)
    """What is odd about the episodes, although nothing failed."""
    stepping_since: float | None = None
    """Time (monotonic) at which the step that is being made began."""
    started: float = field(default_factory=time.monotonic)
    recent: deque[EpisodeSummary] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """The last complete episodes."""
    unreported: list[EpisodeSummary] = field(default_factory=list)
    """Complete episodes since the last metrics."""

    @property
    def clock(self) -> int:
        """Steps of all sessions: what the exploration schedule runs on."""
        return self.earlier_steps + self.steps

    @property
    def steps_per_second(self) -> float:
        return self.steps / max(time.monotonic() - self.started, 1e-9)

    @property
    def mean_return(self) -> float | None:
        """Over the last complete episodes; None before the first."""
        return float(np.mean([e.total_reward for e in self.recent])) if self.recent else None

    @property
    def all_alike(self) -> bool:
        """Whether fewer than three of the last complete episodes have another return than most."""
        returns = np.array([e.total_reward for e in self.recent])
        return len(returns) == 0 or int((returns != np.median(returns)).sum()) < DIFFERENT

    @property
    def stuck(self) -> str:
        """Report that the current step takes too long; empty if it does not."""
        since = self.stepping_since  # the other thread may end the step at any moment
        seconds = 0.0 if since is None else time.monotonic() - since
        if seconds < STUCK_SECONDS:
            return ""
        return f"an environment has not returned from its step or reset for {seconds:.0f} s"

    def add_episode(self, episode: EpisodeSummary) -> None:
        self.kept += BROKEN not in episode.tags
        if episode.complete:
            self.episodes += 1
            self.recent.append(episode)
            self.unreported.append(episode)

    def counters(self) -> dict[str, float]:
        return {
            "env_steps": float(self.clock),
            "episodes": float(self.episodes),
            "broken": float(self.broken.total),
            "dropped": float(self.dropped),
            "steps_per_second": self.steps_per_second,
        }

    def metrics(self) -> dict[str, float]:
        """Means over the episodes since the last call; empty if there were none."""
        episodes, self.unreported = self.unreported, []
        if not episodes:
            return {}
        values = {f"collect/{name}": mean for name, mean in mean_metrics(episodes).items()}
        values |= {
            "collect/return": float(np.mean([e.total_reward for e in episodes])),
            "collect/length": float(np.mean([e.length for e in episodes])),
            "collect/steps_per_second": self.steps_per_second,
        }
        if known := [e.success for e in episodes if e.success is not None]:
            values["collect/success"] = float(np.mean(known))
        if lags := [e.policy_lag for e in episodes if e.policy_lag is not None]:
            values["collect/policy_lag"] = float(np.mean(lags))
        return values


def mean_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """The mean of each number that environments reported, over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            values.setdefault(name, []).append(value)
    with np.errstate(over="ignore"):
        means = {name: float(np.mean(found)) for name, found in values.items()}
    return {name: mean for name, mean in means.items() if np.isfinite(mean)}


def load_clock(directory: Path) -> CollectorStatistics:
    """Statistics of a new session, counted on disk before it plays, in case it is killed."""
    try:
        found = json.loads((directory / CLOCK).read_text())
        stats = CollectorStatistics(max(0, int(found["env_steps"])), max(0, int(found["sessions"])))
    except (OSError, ValueError, KeyError, TypeError):
        stats = CollectorStatistics()  # the first session here, or an unreadable clock
    save_clock(directory, stats)
    return stats


def save_clock(directory: Path, stats: CollectorStatistics) -> None:
    values = {"env_steps": stats.clock, "sessions": stats.earlier_sessions + 1}
    with whole_file(directory / CLOCK) as file:
        file.write(json.dumps(values).encode())
        failpoint("clock.before_rename")
    failpoint("clock.after_rename")
