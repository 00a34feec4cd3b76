"""The collector's one line for a person: a live bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from collector.config import CollectConfig
from collector.tally import Tally
from stepwell.outbox import Outbox

BAR_EVERY, LINE_EVERY = 0.2, 30.0


class Display:
    """Shown while it is entered; `update` is cheap enough for every step."""

    def __init__(self, config: CollectConfig, console: Console):
        self._config, self._console = config, console
        self._live = config.progress and console.is_terminal
        self._due = time.monotonic() + (BAR_EVERY if self._live else LINE_EVERY)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        total = config.episodes or config.steps or None
        self._task = self._progress.add_task("collect", total=total, words="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, tally: Tally, outbox: Outbox) -> None:
        now = time.monotonic()
        if now < self._due or not self._config.progress:
            return
        self._due = now + (BAR_EVERY if self._live else LINE_EVERY)
        words = self._words(tally, outbox)
        if self._live:
            done = tally.episodes if self._config.episodes else tally.steps
            self._progress.update(self._task, completed=done, words=words)
        else:
            self._console.print(f"collect: {words}", highlight=False)

    def _words(self, tally: Tally, outbox: Outbox) -> str:
        parts = [f"{tally.episodes} episodes", f"{tally.steps} steps", f"{tally.rate:.0f}/s"]
        if tally.recent:
            recent = list(tally.recent)
            parts.append(f"return {np.mean([e.total_reward for e in recent]):.1f}")
            parts.append(recent[-1].author)
        if outbox.pending:
            parts.append(f"outbox {outbox.pending}")
        return " · ".join(parts)
