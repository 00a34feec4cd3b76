"""`stepwell demo`: the whole platform on this machine, as the commands that a person would type.

    serve · generate data (or --dataset) · import · train ×3 · collect · evaluate ×3 · sql · table

What the commands print goes to DIR/logs/.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stepwell.client import Client
from stepwell.commands import common
from stepwell.confidence_intervals import Interval, bootstrap_mean
from stepwell.errors import StepwellError

FIRST_EVALUATION_SEED, EVALUATION_SEEDS = 900_000, 30
"""Fixed, and far from the seeds of any training data."""
# For each environment with data of its own: what generates the data, the recipe made for it.
BUILTIN = {
    "Pendulum-v1": ("pendulum-stitch", "pendulum_stitch"),
    "LunarLanderContinuous-v3": ("lunarlander-noisy", "lunarlander_continuous"),
}
STEPWELL = (sys.executable, "-m", "stepwell.cli")
STOP_GRACE = 15.0
SUMMARY = (
    "select partition, purpose, policy, count(*) as trajectories, sum(length) as steps, "
    "round(avg(return), 1) as mean_return from trajectories where dataset = '{}' "
    "group by all order by trajectories desc limit 12"
)


class DemoError(StepwellError):
    """A command of the demo failed; the message ends with the last lines of its log."""


class Commands:
    """The demo's processes by name. Each has a session of its own: Ctrl-C reaches only the demo,
    which notices it in `check` and stops them in an order that loses nothing."""

    def __init__(self, logs: Path):
        self.logs = logs
        self.env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.interrupted = False

    def interrupt(self, *_: object) -> None:
        """For SIGINT and SIGTERM. It raises nothing: an exception between a child and its name
        here would lose the child."""
        self.interrupted = True

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        self.check()
        with (self.logs / f"{name}.log").open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )
        return self.running[name]

    def check(self) -> None:
        """Raises `DemoError` if a command has failed, KeyboardInterrupt after Ctrl-C."""
        if self.interrupted:
            raise KeyboardInterrupt
        for name, process in self.running.items():
            if process.poll() not in (None, 0):
                raise DemoError(self._failure(name, process.returncode))

    def finish(self, name: str, tick: Callable[[], object] = str) -> None:
        """Wait until `name` has succeeded; calls `tick` meanwhile."""
        while self.running[name].poll() is None:
            self.check()
            tick()
            time.sleep(0.2)
        self.check()
        del self.running[name]

    def stop_all(self) -> None:
        """Those that send before those that receive: the service goes last."""
        for name in sorted(self.running, key=lambda name: name == "serve"):
            process = self.running.pop(name)
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_GRACE)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _failure(self, name: str, status: int) -> str:
        path = self.logs / f"{name}.log"
        # An earlier demo may have written to the same file: only this start is of interest.
        _, _, printed = f"\n{path.read_text(errors='replace')}".rpartition("\n$ ")
        tail = "\n".join(printed.splitlines()[-15:])
        return f"{name} ended with status {status}; its log is {path}:\n$ {tail}"


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    logs = args.data / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    commands = Commands(logs)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, commands.interrupt)
    try:
        _run(args, commands, console)
        while not args.exit:
            commands.check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("\nstopping …")
        return 130
    except StepwellError as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, highlight=False)
        return 1
    finally:
        commands.stop_all()
    return 0


def _run(args: argparse.Namespace, commands: Commands, console: Console) -> None:
    began = time.monotonic()
    url, dashboard = (f"http://127.0.0.1:{_free_port(port)}" for port in (args.port, 0))
    commands.env |= {"STEPWELL_URL": url, "STEPWELL_OUTBOX": str(args.data / "outbox")}
    console.print(f"[bold]stepwell demo[/] on {args.env}; everything lies in {args.data}")
    data = args.data / "data"
    commands.start("serve", *STEPWELL, "serve", "--data", str(data), "--port", url.split(":")[-1])
    if args.dashboard:
        commands.start("dash", *STEPWELL, "dash", "--port", dashboard.split(":")[-1])
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24)
    with Client(url) as client, Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        client.wait_ready(60)

        def step(title: str, name: str, *command: str, run: str = "") -> None:
            """Run a command, or wait for one that was started; with the progress of a `run`."""
            bar = bars.add_task(title, total=None)
            if command:
                commands.start(name, *command)
            commands.finish(name, lambda: bars.update(bar, **_progress(client, run)))
            bars.update(bar, total=1, completed=1)

        # --- a dataset ---------------------------------------------------------------------------
        path = args.dataset or args.data / f"{BUILTIN[args.env][0]}.hdf5"
        if not args.dataset:
            make = (sys.executable, "-m", "collector.builtin", path.stem, str(path))
            step(f"generate {path.name}", "generate", *make, "--steps", str(args.steps))
        stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in path.stem.lower())
        dataset = (stem.strip("._-") or "dataset")[:60]
        upload = ("import", str(path), "--dataset", dataset, "--format", "d4rl", "--env", args.env)
        step(f"upload {path.name} over REST", "import", *STEPWELL, *upload)

        # --- one collector that waits for a policy; three trainers that see no environment --------
        prefix = _free_prefix(client)
        runs = {
            "behaviour cloning": (f"{prefix}-bc", "bc"),
            "10% BC": (f"{prefix}-bc10", "bc10"),
            "our agent": (f"{prefix}-agent", args.recipe),
        }
        commands.start(
            "collect",
            *(*STEPWELL, "collect", "--env", args.env, "--dataset", dataset, "--wait-for-policy"),
            *("--policy", f"{prefix}-agent", "--episodes", str(args.collect_episodes)),
            *("--envs", "2", "--run", f"{prefix}-collect", "--seed", str(100_000 + args.seed)),
        )
        for label, (name, recipe) in runs.items():
            command = [*STEPWELL, "train", recipe, "--run", name, "--dataset", dataset]
            command += ["--seed", str(args.seed), "--output", str(args.data / "trainer")]
            if recipe != "bc10":  # which has a condition of its own
                command += ["--where", "partition = 'protected'"]
            if args.updates is not None:
                command += ["--updates", str(args.updates)]
            step(f"train {label} ({recipe})", f"train-{name}", *command, run=name)

        # --- fixed seeds, greedy; the scores are trajectories in the dataset ----------------------
        seeds = ("--seeds", str(FIRST_EVALUATION_SEED), "--episodes", str(args.episodes))
        for label, (name, _) in runs.items():
            options = ("--policy", name, "--env", args.env, "--dataset", dataset, *seeds)
            command = [*STEPWELL, "evaluate", *options, "--run", f"{name}-eval"]
            step(f"evaluate {label}", f"evaluate-{name}", *command)
        step("collect with the published policy", "collect")
        scores = {"data mean": _data_mean(client, dataset)}
        for label, (name, _) in runs.items():
            e = client.evaluations(run=f"{name}-eval")[0]
            scores[label] = Interval(e.mean, e.ci_low, e.ci_high, len(e.returns), e.confidence)

    query = SUMMARY.format(dataset)
    shown = f'\nstepwell sql "{query}"'
    console.print(shown, style="dim", markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
    subprocess.run([*STEPWELL, "sql", "--timeout", "30", query], env=commands.env, check=False)
    elapsed = round(time.monotonic() - began, 1)
    console.print(_table(args, scores, elapsed))
    if args.json:
        report = {"env": args.env, "recipe": args.recipe, "seed": args.seed, "seconds": elapsed}
        table = {k: dict(mean=s.value, low=s.low, high=s.high, n=s.n) for k, s in scores.items()}
        args.json.write_text(json.dumps({**report, "scores": table}, indent=2))
    if args.exit:
        console.print(f"Look around in it: stepwell serve --data {data}, then stepwell dash")
        return
    console.print(f"service    {url}    (its data: {data})")
    if args.dashboard:
        console.print(f"dashboard  {dashboard}")
    console.print("Ctrl-C stops everything.")


def _progress(client: Client, run: str) -> dict[str, Any]:
    """Updates made, of how many, as a run itself reports; nothing of one that is not there yet."""
    try:
        latest = client.run(run).latest if run else {}
    except StepwellError:
        return {}
    return {"completed": latest.get("progress/updates"), "total": latest.get("progress/total")}


def _data_mean(client: Client, dataset: str) -> Interval:
    query = "select \"return\" from trajectories where dataset = ? and partition = 'protected'"
    rows = client.sql(query, [dataset], limit=1_000_000, timeout=30).rows
    return bootstrap_mean([row[0] for row in rows])


def _free_prefix(client: Client) -> str:
    """demo, demo2, demo3 …: a demo over the data of an earlier one is a set of new runs."""
    names, number = {run.name for run in client.runs()}, 1
    while any(name.startswith(f"demo{number if number > 1 else ''}-") for name in names):
        number += 1
    return f"demo{number if number > 1 else ''}"


def _free_port(wanted: int) -> int:
    """`wanted`, or any. A service that is there already must not get the demo's data."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError) as error:
            raise DemoError(f"--port {wanted}: {error}; choose another, or leave it out") from None
        return int(probe.getsockname()[1])


def _table(args: argparse.Namespace, scores: dict[str, Interval], elapsed: float) -> Table:
    table = Table(
        title=f"{args.env}: mean return, {args.episodes} fixed evaluation seeds, "
        "95% bootstrap interval",
        caption=f"training seed {args.seed}; {elapsed:.0f} s",
    )
    table.add_column("who")
    for column in ("mean return", "interval", "episodes"):
        table.add_column(column, justify="right")
    for label, score in scores.items():
        cells = f"{score.value:.1f}", f"{score.low:.1f} … {score.high:.1f}", str(score.n)
        table.add_row(label, *cells, style="bold green" if label == "our agent" else "")
    return table


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser(
        "demo",
        "Upload an offline dataset, learn from it, evaluate, collect, query: every part of the "
        "platform, as separate processes on this machine.",
        "  stepwell demo\n"
        "  stepwell demo --env LunarLanderContinuous-v3\n"
        "  stepwell demo --dataset hopper-medium-v2.hdf5 --env Hopper-v5 --updates 20000",
    )
    add = parser.add_argument
    add("--dataset", type=Path, help="a D4RL-layout HDF5 file (default: made for --env)")
    add(
        "--env",
        default="",
        help="gymnasium id that evaluates and collects (default: Pendulum-v1); without --dataset "
        f"one of: {', '.join(BUILTIN)}",
    )
    add("--recipe", default="", help="training recipe (default: made for --env, or `offline`)")
    add("--data", type=Path, default=Path("stepwell-demo"), help="where everything is kept")
    add("--seed", type=int, default=0, help="training seed")
    add("--steps", type=int, default=100_000, help="steps to generate, without --dataset")
    add("--updates", type=int, help="updates of every run (default: the recipe's)")
    add("--episodes", type=int, default=EVALUATION_SEEDS, help="evaluation episodes")
    add("--collect-episodes", type=int, default=20, help="episodes that the collector plays")
    add("--port", type=int, default=0, help="of the service (default: a free one)")
    add("--no-dashboard", dest="dashboard", action="store_false", help="start no dashboard")
    add("--json", type=Path, help="also write the table to this file")
    add(
        "--exit",
        action=argparse.BooleanOptionalAction,
        default=not sys.stdout.isatty(),
        help="end after the table (default: only when not on a terminal)",
    )
    args = parser.parse_args(argv)
    if args.dataset and not args.env:
        parser.error("--dataset needs --env: which environment evaluates it? e.g. --env Hopper-v5")
    if args.dataset and not args.dataset.is_file():
        parser.error(f"--dataset: no such file: {args.dataset}")
    args.env = args.env or "Pendulum-v1"
    if not args.dataset and args.env not in BUILTIN:
        parser.error(
            f"--env {args.env}: data for it? give --dataset FILE.hdf5, or one of these: "
            f"{', '.join(BUILTIN)}"
        )
    args.recipe = args.recipe or BUILTIN.get(args.env, ("", "offline"))[1]
    return args


if __name__ == "__main__":
    sys.exit(main())
