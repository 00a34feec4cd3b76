"""What the demo does, one function each: a command that a person would type, or a request."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from stepwell._demo.options import GENERATORS, Options
from stepwell._demo.processes import DemoError, Processes
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.intervals import Interval, bootstrap_mean

# Fixed, and far from the seeds that any of the data was reset with.
FIRST_EVALUATION_SEED = 900_000


def generate(options: Options, processes: Processes, progress: Progress) -> Path:
    kind = GENERATORS[options.env]
    path = options.data / f"{kind}.hdf5"
    bar = progress.add_task(f"generate {kind} (gymnasium physics)", total=None)
    processes.start(
        "generate",
        *(sys.executable, "-m", "collector.builtin", kind, str(path)),
        *("--steps", str(options.steps), "--seed", "0"),
    )
    processes.finish("generate", 300)
    progress.update(bar, total=1, completed=1)
    return path


def upload(client: Client, path: Path, env: str, progress: Progress) -> str:
    """POST the file and wait for the job; the dataset is named after the file."""
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in path.stem.lower())
    name = (stem.strip("._-") or "dataset")[:60]
    bar = progress.add_task(f"upload {path.name} over REST", total=100)
    job = client.upload(
        name,
        path,
        format="d4rl",
        env=env,
        progress=lambda done, total: progress.update(bar, completed=100 * done / max(total, 1)),
    )
    result = job.result or {}
    progress.update(
        bar,
        completed=100,
        description=f"upload {path.name}: {result.get('trajectories')} trajectories, "
        f"{result.get('steps')} steps",
    )
    return name


def train(
    client: Client,
    options: Options,
    processes: Processes,
    progress: Progress,
    label: str,
    run: str,
    recipe: str,
    dataset: str,
) -> None:
    """One learn-only run by `accelerate launch`, on the uploaded (protected) data alone."""
    command = [sys.executable, "-m", "stepwell.cli", "train", recipe]
    command += ["--run", run, "--dataset", dataset, "--seed", str(options.seed)]
    command += ["--output", str(options.data / "trainer")]
    if recipe != "bc10":
        command += ["--where", "partition = 'protected'"]
    if options.updates is not None:
        command += ["--updates", str(options.updates)]
    bar = progress.add_task(f"train {label} ({recipe})", total=None)
    process = processes.start(f"train-{run}", *command)
    while process.poll() is None:
        processes.check()
        _follow(client, run, bar, progress)
        time.sleep(0.5)
    processes.finish(f"train-{run}", 10)
    _follow(client, run, bar, progress)
    progress.update(bar, total=1, completed=1)


def _follow(client: Client, run: str, bar: Any, progress: Progress) -> None:
    """Show a run's own numbers; a run that is not there yet has none."""
    try:
        state = client.run(run)
    except StepwellError:
        return
    done, total = state.latest.get("progress/updates"), state.latest.get("progress/total")
    if done is not None and total:
        progress.update(bar, completed=done, total=total)


def evaluate(
    client: Client,
    options: Options,
    processes: Processes,
    progress: Progress,
    label: str,
    run: str,
    dataset: str,
) -> Interval:
    bar = progress.add_task(f"evaluate {label}", total=None)
    processes.start(
        f"evaluate-{run}",
        *(sys.executable, "-m", "stepwell.cli", "evaluate", "--policy", run),
        *("--env", options.env, "--dataset", dataset, "--episodes", str(options.episodes)),
        *("--seeds", str(FIRST_EVALUATION_SEED)),
        *("--run", f"{run}-eval"),
    )
    processes.finish(f"evaluate-{run}", 300)
    found = client.evaluations(run=f"{run}-eval")
    if not found:
        raise DemoError(f"the evaluation of {run} ended without a result")
    progress.update(bar, total=1, completed=1)
    best = found[0]
    return Interval(best.mean, best.ci_low, best.ci_high, len(best.returns), best.confidence)


def data_mean(client: Client, dataset: str) -> Interval:
    rows = client.sql(
        "select \"return\" from trajectories where dataset = $d and partition = 'protected'",
        {"d": dataset},
        limit=1_000_000,
        timeout=30,
    ).rows
    return bootstrap_mean([row[0] for row in rows])


def wait_collector(processes: Processes, progress: Progress) -> None:
    bar = progress.add_task("collect with the published policy", total=None)
    processes.finish("collector", 300)
    progress.update(bar, total=1, completed=1)


def free_prefix(client: Client) -> str:
    """demo, demo2, demo3 …: a demo over the data of an earlier one is a set of new runs."""
    names = {run.name for run in client.runs()}
    for number in range(1, 10_000):
        prefix = "demo" if number == 1 else f"demo{number}"
        if not any(name.startswith(f"{prefix}-") for name in names):
            return prefix
    raise DemoError("no free run name demo…; remove old runs in the dashboard")


def progress_bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
    )
