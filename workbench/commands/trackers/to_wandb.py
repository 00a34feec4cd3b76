"""W&B: a run of the project, with `step` as x-axis.

An offline run cannot be read back. A file in wandb/stepwell/ says what is there; it is written when
an export ends. If one was killed, the next export begins another W&B run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import wandb

from stepwell._files import whole_file
from stepwell.messages import Run
from workbench.commands.trackers import Row, Tracker, flat_config, lock


class WandB(Tracker):
    def __init__(self, project: str, run: Run):
        super().__init__(run)
        name = f"{run.name[:100]}-{int(run.created_at):x}"
        self._file = Path(wandb.Settings().wandb_dir) / "stepwell" / project / f"{name}.json"
        self._lock = lock(self._file.with_suffix(".lock"))
        has: dict[str, Any] = {"number": 0}
        if self._file.exists():
            has = json.loads(self._file.read_text())
        if "rows" not in has:
            has = {"number": has["number"] + 1, "rows": 0, "last_step": {}, "evaluated": []}
        self.last_step, self.evaluated = has["last_step"], set(has["evaluated"])
        self._number, self._rows, self._complete = has["number"], has["rows"], True
        mode = os.environ.get("WANDB_MODE")
        entity, _, project = project.rpartition("/")
        self._run = wandb.init(
            project=project,
            entity=entity or None,
            id=f"{name}-{self._number}",
            name=run.name,
            job_type=run.kind,
            config=flat_config(run),
            mode=mode or ("online" if wandb.login(prompt=False) else "offline"),
            resume="allow",
            reinit="create_new",
            # Console, code and machine of the export are not those of the run.
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
        )
        self._note(number=self._number)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, rows: list[Row]) -> None:
        self._complete = False
        for row in rows:
            # W&B's own step cannot go back, as those of evaluations do: it counts the rows.
            values = {**row.values, "step": row.step, "_timestamp": row.time}
            self._run.log(values, step=self._rows)
            self._rows += 1
        self._complete = True

    def close(self) -> None:
        self._run.finish(exit_code=int(self.run.status == "failed"))
        if self._complete:
            self._note(
                number=self._number,
                rows=self._rows,
                last_step=self.last_step,
                evaluated=sorted(self.evaluated),
            )
        self._lock.close()

    def _note(self, **has: Any) -> None:
        with whole_file(self._file) as file:
            file.write(json.dumps(has).encode())


open_run = WandB
