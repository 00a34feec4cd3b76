"""Progress output of a collector: a progress bar on a terminal, else periodic lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, TextColumn

from collector.config import CollectConfig
from collector.stats import CollectorStatistics
from stepwell._progress import LINE_EVERY
from stepwell._wording import pluralize
from stepwell.outbox import Outbox

BAR_EVERY = 0.2


@contextlib.contextmanager
def show_progress(
    config: CollectConfig, console: Console, stats: CollectorStatistics, outbox: Outbox
) -> Iterator[Callable[[], None]]:
    """Gives an `update`, cheap enough for every step."""
    live = config.progress and console.is_terminal
    every = BAR_EVERY if live else LINE_EVERY
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[text]}"))
    due = time.monotonic() + every
    with Progress(*columns, console=console, disable=not live) as bar:
        total = config.episodes or config.steps or None
        task = bar.add_task("collect", total=total, text="")

        def update() -> None:
            nonlocal due
            now = time.monotonic()
            if now < due or not config.progress:
                return
            due = now + every
            text = _describe(stats, outbox)
            if live:
                done = stats.episodes if config.episodes else stats.steps
                bar.update(task, completed=done, text=text)
            else:
                console.print(f"collect: {text}", highlight=False)

        yield update


def _describe(stats: CollectorStatistics, outbox: Outbox) -> str:
    parts = [
        pluralize(stats.episodes, "episode"),
        pluralize(stats.steps, "step"),
        f"{stats.steps_per_second:.0f}/s",
    ]
    if stats.recent:
        parts += [f"return {stats.mean_return:.1f}", stats.recent[-1].policy_id]
    if stats.waiting:
        parts.append(f"waiting: {stats.waiting}")
    if outbox.pending:
        parts.append(f"outbox {outbox.pending}")
    return " · ".join(parts)
