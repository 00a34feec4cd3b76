"""The tools that `stepwell runs export` writes to. Each module imports its tool's library, and is
imported when it is used: Stepwell depends on none of them."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stepwell._locks import take_lock
from stepwell._settings import flatten
from stepwell.errors import StepwellError
from stepwell.messages import Run

TOOLS = ("tensorboard", "wandb", "mlflow")
EVALUATION = "eval/"
"""First part of the keys of evaluations."""


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one moment: metrics that were logged together, or one evaluation."""

    step: int
    time: float
    values: dict[str, float]

    @property
    def ms(self) -> int:
        return round(self.time * 1000)


class Tracker(ABC):
    """One run in a tool. It knows what is there already, so that a repeated export continues."""

    def __init__(self, run: Run):
        self.run = run
        """The run as it was last read."""
        self.last_step: dict[str, int] = {}
        """Last step of each metric that is there."""
        self.copied = 0
        """Points of metrics written since it was opened."""
        self.evaluated: set[int] = set()
        """Times of the evaluations that are there, in milliseconds."""

    def log_metrics(self, rows: list[Row]) -> None:
        """Write rows that are later than `last_step`."""
        self.write(rows)
        for row in rows:
            self.last_step |= dict.fromkeys(row.values, row.step)
            self.copied += len(row.values)

    def log_evaluations(self, rows: list[Row]) -> None:
        """Write those of all evaluations that are not there."""
        new = [row for row in rows if row.ms not in self.evaluated]
        self.write(new)
        self.evaluated |= {row.ms for row in new}

    @abstractmethod
    def write(self, rows: list[Row]) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered, and how the run has ended."""


def open_tracker(to: str, run: Run) -> Tracker:
    """The run in the tool and place "tool:where"."""
    tool, _, where = to.partition(":")
    tracker: Tracker = importlib.import_module(f"{__name__}.to_{tool}").open_run(where, run)
    return tracker


@contextmanager
def tool_errors(to: str) -> Iterator[None]:
    """Turn errors of a tool's library into one line."""
    tool = to.partition(":")[0]
    try:
        yield
    except StepwellError:
        raise
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed; install it with: pip install 'stepwell[{tool}]'"
        raise StepwellError(text) from None
    except Exception as error:
        raise StepwellError(f"{tool}: {' '.join(str(error).split())}") from error


def lock(path: Path) -> IO[str]:
    """One export to a place at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return take_lock(path, lambda pid: StepwellError(f"process {pid} exports to {path.parent} now"))


def flat_config(run: Run) -> dict[str, Any]:
    """The config as {"agent.losses.gamma": 0.99}, without the origins of a trainer's settings."""
    config = flatten({key: value for key, value in run.config.items() if key != "origins"})
    simple = bool | int | float | str
    return {k: v if isinstance(v, simple) else json.dumps(v) for k, v in config.items()}
