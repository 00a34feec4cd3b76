"""MLflow: a run of the experiment MLFLOW_EXPERIMENT_NAME (default: stepwell), known by its tag
stepwell.run. What is there is read back."""

from __future__ import annotations

import os
import re

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from stepwell.messages import Run
from workbench.commands.trackers import EVALUATION, Row, Tracker, flat_config

METRICS_PER_REQUEST, PARAMS_PER_REQUEST = 1000, 100
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflow(Tracker):
    def __init__(self, uri: str, run: Run):
        super().__init__(run)
        self._client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "stepwell")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        tag = f"{run.name} {run.created_at}"
        runs = self._client.search_runs([experiment], f"tags.`stepwell.run` = '{tag}'")
        if not runs:
            began = round(run.created_at * 1000)
            runs = [self._client.create_run(experiment, began, {"stepwell.run": tag}, run.name)]
        self._id, data = runs[0].info.run_id, runs[0].data
        self._client.update_run(self._id, "RUNNING")
        keys = {_name(key): key for key in run.latest_steps}
        for name in data.metrics:
            there = self._client.get_metric_history(self._id, name)
            if name.startswith(EVALUATION):
                self.evaluated |= {metric.timestamp for metric in there}
            else:
                self.last_step[keys.get(name, name)] = max(metric.step for metric in there)
        config = {_name(key): str(value) for key, value in flat_config(run).items()}
        # A parameter cannot change, the settings of a resumed run can.
        params = [Param(key, value) for key, value in config.items() if key not in data.params]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_PER_REQUEST])

    def write(self, rows: list[Row]) -> None:
        metrics = [
            Metric(_name(key), value, row.ms, row.step)
            for row in rows
            for key, value in row.values.items()
        ]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(self._id, metrics[start : start + METRICS_PER_REQUEST])

    def close(self) -> None:
        if self.run.finished_at is not None:
            ended = round(self.run.finished_at * 1000)
            self._client.set_terminated(self._id, STATUS[self.run.status], ended)


def _name(key: str) -> str:
    """The key with _ for characters that MLflow refuses."""
    return re.sub(r"[^/\w.\- :]", "_", key)


open_run = MLflow
