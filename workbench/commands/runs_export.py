"""`stepwell runs export`: copy runs to TensorBoard, W&B or MLflow, once or while they train.

It reads the service like any client and writes with the tool's own library: trainers know nothing
of it, so neither the tool nor its network can stop or slow one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import threading
from collections import defaultdict

from stepwell import terminal
from stepwell._signals import stop_signals
from stepwell._wording import pluralize
from stepwell.client import MAX_POINTS, Client
from stepwell.errors import Busy, ServiceUnreachable
from stepwell.messages import Run
from workbench.commands.trackers import EVALUATION, TOOLS, Row, Tracker, open_tracker, tool_errors

SCORES = ("mean", "ci_low", "ci_high", "iqm", "normalised")
# For series that the metrics route would down-sample.
ALL_POINTS = (
    "select step, time, value from metrics where run = ? and key = ? and step > ? order by step"
)
MAX_ROWS = 1_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="+", help="the runs")
    parser.add_argument(
        "--to",
        required=True,
        type=_destination,
        metavar="TOOL:WHERE",
        help="tensorboard:FOLDER; wandb:PROJECT or wandb:ENTITY/PROJECT, offline if not logged in; "
        "mlflow:URI, such as sqlite:///mlflow.db (experiment: MLFLOW_EXPERIMENT_NAME, or stepwell)",
    )
    parser.add_argument("--follow", action="store_true", help="go on until the runs end")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds between two looks (default 10)"
    )


def _destination(text: str) -> str:
    tool, _, where = text.partition(":")
    if tool not in TOOLS or not where:
        forms = "tensorboard:FOLDER, wandb:PROJECT or mlflow:URI"
        raise argparse.ArgumentTypeError(f"expected {forms}; got {text!r}")
    return text


def export_runs(client: Client, args: argparse.Namespace) -> terminal.Answer:
    """Copy what is new of each run; with --follow, until all have ended or until Ctrl-C."""
    runs = [client.run(name) for name in dict.fromkeys(args.name)]
    stop, reachable = threading.Event(), True
    with stop_signals(stop.set), tool_errors(args.to), contextlib.ExitStack() as opened:
        trackers = [
            opened.enter_context(contextlib.closing(open_tracker(args.to, run))) for run in runs
        ]
        while not stop.is_set():
            # As of the look before: a trainer's outbox sends the end of its run first.
            last = not args.follow or all(t.run.status != "running" for t in trackers)
            try:
                for tracker in trackers:
                    copy_new(client, tracker)
                if last:
                    break
                reachable = True
            except (Busy, ServiceUnreachable) as error:
                if not args.follow:
                    raise
                if reachable:
                    print(f"stepwell: waiting: {error}", file=sys.stderr, flush=True)
                reachable = False
            stop.wait(args.every)
    if stop.is_set():
        raise KeyboardInterrupt
    copied = [
        {"run": t.run.name, "status": t.run.status, "points": t.copied, "to": args.to}
        for t in trackers
    ]
    lines = [
        f"{t.run.name} ({t.run.status}): {pluralize(t.copied, 'new point')} in {args.to}"
        for t in trackers
    ]
    return copied, lambda: print(*lines, sep="\n")


def copy_new(client: Client, tracker: Tracker) -> None:
    """Copy the points and evaluations of a run that the tool lacks."""
    run = tracker.run = client.run(tracker.run.name)
    while rows := new_metrics(client, run, tracker.last_step):
        tracker.log_metrics(rows)
    tracker.log_evaluations(evaluations(client, run))


def new_metrics(client: Client, run: Run, last_step: dict[str, int]) -> list[Row]:
    """The run's points after the last step of each key, in order of step."""
    after = {key: last_step.get(key, -1) for key in run.latest_steps}
    after = {key: step for key, step in after.items() if step < run.latest_steps[key]}
    keys = [key for key in after if "," not in key]  # which separates keys in the URL
    steps = [after[key] for key in keys]
    found = client.metrics(run.name, keys, MAX_POINTS, after=steps) if keys else {}
    rows: defaultdict[tuple[int, float], dict[str, float]] = defaultdict(dict)
    for key, step in after.items():
        series = found.get(key)
        if series is not None and series.total == len(series.steps):
            points = list(zip(series.steps, series.times, series.values, strict=True))
        else:
            where = [run.name, key, step]
            points = client.sql(ALL_POINTS, where, limit=MAX_ROWS, timeout=60.0).rows
        for at, moment, value in points:
            rows[at, moment][key] = math.nan if value is None else value
    return [Row(*at, rows[at]) for at in sorted(rows)]


def evaluations(client: Client, run: Run) -> list[Row]:
    """All evaluations of the run's policies, oldest first, at the updates of the policies."""
    updates = {
        f"{run.name}/{p.version}": p.version if p.step is None else p.step
        for p in client.policies(run.name)
    }
    rows = []
    for found in reversed(client.evaluations()):
        if found.policy in updates:
            scores = {name: getattr(found, name) for name in SCORES}
            values = {f"{EVALUATION}{found.env}/{k}": v for k, v in scores.items() if v is not None}
            rows.append(Row(updates[found.policy], found.created_at, values))
    return rows
