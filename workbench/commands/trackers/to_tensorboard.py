"""TensorBoard: FOLDER/RUN has the config and the metrics, FOLDER/RUN/eval the evaluations.

What is there is read from the event files. TensorBoard hides points before one of a lower step, and
policies are evaluated in any order: all evaluations are written again if there is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from stepwell.errors import StepwellError
from stepwell.messages import Run
from workbench.commands.trackers import Row, Tracker, flat_config, lock

FILES = "*.tfevents.*"


class TensorBoard(Tracker):
    def __init__(self, folder: str, run: Run):
        super().__init__(run)
        self._folder = Path(folder) / run.name
        self._lock = lock(self._folder / "export.lock")
        created = run.created_at
        begun = False
        for event in _events(self._folder):
            for value in event.summary.value:
                self.last_step[value.tag] = max(event.step, self.last_step.get(value.tag, 0))
                if value.tag.startswith("_hparams_"):
                    begun, created = True, event.wall_time
        if created != run.created_at:
            raise StepwellError(f"{self._folder} has an older run of this name; use another folder")
        self._writer = EventFileWriter(str(self._folder))
        if not begun:
            config = hparams_pb(flat_config(run), trial_id=run.name, start_time_secs=created)
            self._writer.add_event(Event(wall_time=created, summary=config))

    def write(self, rows: list[Row]) -> None:
        _add(self._writer, rows)
        self._writer.flush()

    def log_evaluations(self, rows: list[Row]) -> None:
        folder = self._folder / "eval"
        rows = sorted(rows, key=lambda row: (row.step, row.time))
        there = [(event.step, event.wall_time) for event in _events(folder) if event.summary.value]
        if there != [(row.step, row.time) for row in rows]:
            old = list(folder.glob(FILES))
            writer = EventFileWriter(str(folder))
            _add(writer, rows)
            writer.close()
            for path in old:
                path.unlink()

    def close(self) -> None:
        self._writer.close()
        self._lock.close()


def _events(folder: Path) -> Iterator[Event]:
    for path in sorted(folder.glob(FILES)):
        yield from LegacyEventFileLoader(str(path)).Load()


def _add(writer: EventFileWriter, rows: list[Row]) -> None:
    for row in rows:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in row.values.items()]
        writer.add_event(Event(step=row.step, wall_time=row.time, summary=Summary(value=values)))


open_run = TensorBoard
