"""`stepwell demo`: the platform's main job, end to end, on this machine.

It starts processes and talks HTTP, nothing else: service, dashboard, three trainers, a collector,
an evaluator, each the command that a person would type. What they print goes to DIR/logs/.

    generate (or --dataset) → upload → train learn-only ×3 → evaluate → collect → SQL → table
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.intervals import Interval, bootstrap_mean

EVALUATION_SEEDS = 30
# Fixed, and far from the seeds that any of the data was reset with.
FIRST_EVALUATION_SEED = 900_000
STOP_GRACE = 15.0
# What the demo knows of environments: the recipe made for each. Any other gets `offline`.
RECIPES = {
    "Pendulum-v1": "pendulum_stitch",
    "LunarLanderContinuous-v3": "lunarlander_continuous",
}
# The data that ships with us; any other environment needs a file of its own.
GENERATORS = {
    "Pendulum-v1": "pendulum-stitch",
    "LunarLanderContinuous-v3": "lunarlander-noisy",
}


class DemoError(StepwellError):
    """A process of the demo failed; the message ends with the last lines of its log."""


@dataclass
class Processes:
    """Children by name; each in a session of its own, so that Ctrl-C reaches only the demo,
    which then stops them in an order that loses nothing."""

    logs: Path
    env: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        log: IO[bytes] = open(self.logs / f"{name}.log", "ab")
        with log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )
        self.running[name] = process
        return process

    def finish(self, name: str, timeout: float) -> None:
        """Wait until `name` ends by itself; `DemoError` if it fails or takes too long."""
        try:
            status = self.running[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise DemoError(self._failure(name, f"did not end within {timeout:.0f} s")) from None
        if status != 0:
            raise DemoError(self._failure(name, f"ended with status {status}"))
        del self.running[name]

    def check(self) -> None:
        """`DemoError` if a process that should still run has ended."""
        for name, process in self.running.items():
            if process.poll() not in (None, 0):
                raise DemoError(self._failure(name, f"ended with status {process.returncode}"))

    def stop(self, *names: str) -> None:
        """SIGTERM to each in turn and wait; SIGKILL only to one that does not listen."""
        for name in names:
            process = self.running.pop(name, None)
            if process is None or process.poll() is not None:
                continue
            _signal_group(process, signal.SIGTERM)
            try:
                process.wait(STOP_GRACE)
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
                process.wait()

    def stop_all(self) -> None:
        """Those that send before those that receive: the service goes last."""
        self.stop(*[n for n in reversed(self.running) if n != "service"], "service")

    def _failure(self, name: str, what: str) -> str:
        path = self.logs / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines()
        # An earlier demo may have written to the same file: only this start is of interest.
        begin = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=0)
        tail = "\n".join(lines[begin:][-15:])
        return f"{name} {what}; its log is {path}:\n{tail}"


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    data: Path
    dataset: Path | None
    env: str
    recipe: str
    seed: int
    steps: int
    updates: int | None
    episodes: int
    collect_episodes: int
    port: int
    dashboard: bool
    stay: bool
    json: Path | None


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    console = Console()
    options.data.mkdir(parents=True, exist_ok=True)
    logs = options.data / "logs"
    logs.mkdir(exist_ok=True)
    processes = Processes(logs, _environment())
    # SIGTERM takes the same way out as Ctrl-C.
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        return _run(options, processes, console)
    except KeyboardInterrupt:
        console.print("\nstopping …")
        return 130
    except StepwellError as error:
        console.print(f"[red]the demo failed:[/] {error}", markup=True, highlight=False)
        return 1
    finally:
        # A second Ctrl-C must not leave a child behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.stop_all()


def _run(options: Options, processes: Processes, console: Console) -> int:
    began = time.monotonic()
    me = [sys.executable, "-m", "stepwell.cli"]

    # --- act one: a service, a dashboard, a dataset ------------------------------------------
    port = _free_port(options.port)
    url = f"http://127.0.0.1:{port}"
    processes.env["STEPWELL_URL"] = url
    console.print(f"[bold]stepwell demo[/] on {options.env}; everything lies in {options.data}")
    processes.start(
        "service", *me, "serve", "--data", str(options.data / "data"), "--port", str(port)
    )
    dashboard_url = None
    if options.dashboard:
        dashboard_port = _free_port()
        dashboard_url = f"http://127.0.0.1:{dashboard_port}"
        processes.start("dashboard", *me, "dash", "--port", str(dashboard_port))
    with Client(url) as client, _progress(console) as progress:
        client.wait_ready(60)
        path = options.dataset or _generate(options, processes, progress)
        dataset = _upload(client, path, options.env, progress)

        # --- act two: three learners that never see an environment; one collector that waits ---
        prefix = _free_prefix(client)
        agent = f"{prefix}-agent"
        processes.start(
            "collector",
            *(*me, "collect", "--env", options.env, "--dataset", dataset, "--policy", agent),
            *("--wait-for-policy", "--episodes", str(options.collect_episodes), "--envs", "2"),
            *("--run", f"{prefix}-collect", "--seed", str(100_000 + options.seed)),
            *("--outbox", str(options.data / "outbox")),
        )
        runs = {
            "behaviour cloning": (f"{prefix}-bc", "behaviour_cloning"),
            "10% BC": (f"{prefix}-bc10", "bc10"),
            "our agent": (agent, options.recipe),
        }
        for label, (run, recipe) in runs.items():
            _train(client, options, processes, progress, label, run, recipe, dataset)

        # --- act three: fixed seeds, greedy; the scores are trajectories in the dataset --------
        scores: dict[str, Interval] = {"data mean": _data_mean(client, dataset)}
        for label, (run, _) in runs.items():
            scores[label] = _evaluate(client, options, processes, progress, label, run, dataset)
        _wait_collector(processes, progress)
        processes.check()

        # --- the end: what SQL says, and the table --------------------------------------------
        _show_sql(client, dataset, console)
    elapsed = time.monotonic() - began
    console.print(_table(options, scores, elapsed))
    if options.json:
        options.json.write_text(json.dumps(_report(options, scores, elapsed), indent=2))
    if not options.stay:
        console.print(
            f"Look around in it: stepwell serve --data {options.data / 'data'}, then stepwell dash"
        )
        return 0
    console.print(f"service    {url}    (its data: {options.data / 'data'})")
    if dashboard_url:
        console.print(f"dashboard  {dashboard_url}")
    console.print("Ctrl-C stops everything.")
    while True:
        processes.check()
        time.sleep(0.5)


def _generate(options: Options, processes: Processes, progress: Progress) -> Path:
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


def _upload(client: Client, path: Path, env: str, progress: Progress) -> str:
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


def _train(
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


def _evaluate(
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


def _data_mean(client: Client, dataset: str) -> Interval:
    rows = client.sql(
        "select \"return\" from trajectories where dataset = $d and partition = 'protected'",
        {"d": dataset},
        limit=1_000_000,
        timeout=30,
    ).rows
    return bootstrap_mean([row[0] for row in rows])


def _wait_collector(processes: Processes, progress: Progress) -> None:
    bar = progress.add_task("collect with the published policy", total=None)
    processes.finish("collector", 300)
    progress.update(bar, total=1, completed=1)


def _show_sql(client: Client, dataset: str, console: Console) -> None:
    sql = """select partition, purpose, policy, count(*) as trajectories, sum(length) as steps,
       round(avg("return"), 1) as mean_return
from trajectories where dataset = $dataset
group by all order by trajectories desc limit 12"""
    result = client.sql(sql, {"dataset": dataset}, timeout=30)
    table = Table(title=f"SQL, answered in {result.elapsed_ms:.0f} ms")
    for column in result.columns:
        table.add_column(column)
    for row in result.rows:
        table.add_row(*["" if value is None else str(value) for value in row])
    console.print(sql, style="dim", highlight=False)
    console.print(table)


def _table(options: Options, scores: dict[str, Interval], elapsed: float) -> Table:
    table = Table(
        title=f"{options.env}: mean return, {options.episodes} fixed evaluation seeds, "
        f"95% bootstrap interval"
    )
    table.add_column("who")
    table.add_column("mean return", justify="right")
    table.add_column("interval", justify="right")
    table.add_column("episodes", justify="right")
    for label, score in scores.items():
        style = "bold green" if label == "our agent" else ""
        table.add_row(
            label,
            f"{score.value:.1f}",
            f"{score.low:.1f} … {score.high:.1f}",
            str(score.n),
            style=style,
        )
    table.caption = f"training seed {options.seed}; {elapsed:.0f} s"
    return table


def _report(options: Options, scores: dict[str, Interval], elapsed: float) -> dict[str, Any]:
    return {
        "env": options.env,
        "recipe": options.recipe,
        "seed": options.seed,
        "seconds": round(elapsed, 1),
        "scores": {
            label: {"mean": s.value, "low": s.low, "high": s.high, "n": s.n}
            for label, s in scores.items()
        },
    }


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
    )


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env["PYTHONUNBUFFERED"] = "1"
    return env


def _free_port(wanted: int = 0) -> int:
    """`wanted`, or any. A service that is there already must not get the demo's data."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError) as error:
            raise DemoError(
                f"--port {wanted}: {error}; choose another, or leave it out for a free one"
            ) from None
        return int(probe.getsockname()[1])


def _free_prefix(client: Client) -> str:
    """demo, demo2, demo3 …: a demo over the data of an earlier one is a set of new runs."""
    names = {run.name for run in client.runs()}
    for number in range(1, 10_000):
        prefix = "demo" if number == 1 else f"demo{number}"
        if not any(name.startswith(f"{prefix}-") for name in names):
            return prefix
    raise DemoError("no free run name demo…; remove old runs in the dashboard")


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="stepwell demo",
        description="Upload an offline dataset, learn from it, evaluate, collect, query: "
        "every part of the platform, as separate processes on this machine.",
        epilog="examples:\n"
        "  stepwell demo\n"
        "  stepwell demo --env LunarLanderContinuous-v3\n"
        "  stepwell demo --dataset hopper-medium-v2.hdf5 --env Hopper-v5 --updates 20000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", type=Path, help="a D4RL-layout HDF5 file (default: made for --env)")
    add(
        "--env",
        default="",
        help="gymnasium id that evaluates and collects (default: Pendulum-v1); without --dataset "
        f"one of: {', '.join(GENERATORS)}",
    )
    add("--recipe", default="", help="training recipe (default: made for --env, or `offline`)")
    add("--data", type=Path, default=Path("stepwell-demo"), help="where everything is kept")
    add("--seed", type=int, default=0, help="training seed")
    add("--steps", type=int, default=100_000, help="steps to generate, without --dataset")
    add("--updates", type=int, default=None, help="updates of every run (default: the recipe's)")
    add("--episodes", type=int, default=EVALUATION_SEEDS, help="evaluation episodes")
    add("--collect-episodes", type=int, default=20, help="episodes that the collector plays")
    add("--port", type=int, default=0, help="of the service (default: a free one)")
    add("--no-dashboard", action="store_true", help="do not start the dashboard")
    add("--json", type=Path, default=None, help="also write the table to this file")
    add(
        "--exit",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end after the table (default: only when not on a terminal)",
    )
    args = parser.parse_args(argv)
    if args.dataset and not args.env:
        parser.error("--dataset needs --env: which environment evaluates it? e.g. --env Hopper-v5")
    if args.dataset and not args.dataset.is_file():
        parser.error(f"--dataset: no such file: {args.dataset}")
    env = args.env or "Pendulum-v1"
    if not args.dataset and env not in GENERATORS:
        parser.error(
            f"--env {env}: data for it? give --dataset FILE.hdf5, or one of these: "
            f"{', '.join(GENERATORS)}"
        )
    leave = args.exit if args.exit is not None else not sys.stdout.isatty()
    return Options(
        data=args.data,
        dataset=args.dataset,
        env=env,
        recipe=args.recipe or RECIPES.get(env, "offline"),
        seed=args.seed,
        steps=args.steps,
        updates=args.updates,
        episodes=args.episodes,
        collect_episodes=args.collect_episodes,
        port=args.port,
        dashboard=not args.no_dashboard,
        stay=not leave,
        json=args.json,
    )


if __name__ == "__main__":
    sys.exit(main())
