"""Progress of a command: a bar on a terminal, elsewhere a line a minute."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

LINE_EVERY = 60.0
"""Seconds."""


class CommandProgress(Progress):
    """On stderr, or the given console. `quiet`: neither a bar nor lines."""

    def __init__(
        self, *columns: str | ProgressColumn, console: Console | None = None, quiet: bool = False
    ):
        console = console or Console(stderr=True, highlight=False)
        terminal = console.is_terminal
        super().__init__(*columns, console=console, disable=quiet or not terminal)
        self._lines = not quiet and not terminal
        self._due = time.monotonic() + LINE_EVERY

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._line(task_id)

    def _line(self, task_id: TaskID) -> None:
        if self._lines and time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_EVERY
            task = self.tasks[self.task_ids.index(task_id)]
            share = f": {task.percentage:.0f}%" if task.total else ""
            self.console.print(f"{task.description}{share}", markup=False, soft_wrap=True)
