"""`stepwell demo`: run the whole platform on this machine with the commands a user would type.

    serve · generate data (or --file) · import · train ×3 · collect · evaluate ×3 · sql · table

Each command is printed before it runs. What serve, dash and collect print goes to DIR/logs/.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console

from stepwell import terminal
from stepwell._extras import modules_of, require
from stepwell._ports import free_port
from stepwell._signals import stop_signals
from stepwell.client import Client
from stepwell.errors import StepwellError
from workbench.analysis.confidence_intervals import Interval, bootstrap_mean
from workbench.processes import STEPWELL, Job, end_of_log, spawn, stop

FIRST_EVALUATION_SEED, EVALUATION_SEEDS = 900_000, 30
"""Fixed, and far from the seeds of any training data."""
# For each environment with data of its own: what generates the data, the recipe made for it.
BUILTIN = {
    "Pendulum-v1": ("pendulum-stitch", "pendulum_stitch"),
    "LunarLanderContinuous-v3": ("lunarlander-noisy", "lunarlander_continuous"),
}
PROGRAMS = {"stepwell": STEPWELL, "python": (sys.executable,)}
STOP_GRACE = 15.0
SUMMARY = (
    "select partition, purpose, policy, count(*) as trajectories, sum(length) as steps, "
    "round(avg(return), 1) as mean_return from trajectories where dataset = '{}' "
    "group by all order by trajectories desc limit 12"
)


class DemoError(StepwellError):
    """A command of the demo failed; the message names it and its log."""


class Commands:
    """Starts commands, each in a process group of its own: Ctrl-C reaches only the demo, which
    stops them in an order that loses nothing. One that has failed ends the demo.

    A signal only sets `interrupted`: an exception between the start of a child and its place in
    `running` would lose the child, and one raised in a finalizer would be lost itself."""

    def __init__(self, logs: Path):
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        self.running: dict[str, Job] = {}
        self.interrupted = False

    def interrupt(self) -> None:
        self.interrupted = True

    def run(self, *words: str) -> None:
        """Run one command until it succeeds; its output is printed here."""
        self._start(words[1], words, None)
        self.finish(words[1])

    def start(self, *words: str) -> None:
        """Start a command in the background; its output is written to its log."""
        self._start(words[1], words, self._log(words[1]))

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _start(self, name: str, words: tuple[str, ...], log: Path | None) -> None:
        self.check()
        console = Console(highlight=False)
        console.print(f"\n$ {shlex.join(words)}", style="bold", markup=False, soft_wrap=True)
        command = [*PROGRAMS[words[0]], *words[1:]]
        process = spawn(command, env=self.env, log=log, shown=words)
        self.running[name] = Job(process, self._log(name), time.monotonic())

    def check(self) -> None:
        """Raises `DemoError` if a command has failed, KeyboardInterrupt after Ctrl-C."""
        if self.interrupted:
            raise KeyboardInterrupt
        for name, job in self.running.items():
            if job.process.poll() not in (None, 0):
                tail = end_of_log(job.log)[-15:] if job.log.exists() else []
                status = f"{name} ended with status {job.process.returncode}"
                raise DemoError("\n".join([status, *(f"{job.log}: {line}" for line in tail)]))

    def finish(self, name: str) -> None:
        """Wait until `name` has succeeded."""
        while self.running[name].process.poll() is None:
            self.check()
            time.sleep(0.2)
        self.check()
        del self.running[name]

    def stop_all(self) -> None:
        """Stop senders before receivers, and the service last."""
        for name in sorted(self.running, key=lambda name: name == "serve"):
            stop([self.running.pop(name)], STOP_GRACE)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    ports = free_port(args.port), free_port()
    commands = Commands(args.data / "logs")
    with stop_signals(commands.interrupt, again=commands.interrupt):
        try:
            _run(args, commands, *ports)
            while not args.exit:
                commands.check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("\nstopping …")
            return 130
        finally:
            commands.stop_all()
    return 0


def _run(args: argparse.Namespace, commands: Commands, port: int, dash_port: int) -> None:
    began = time.monotonic()
    data, url, env, run = args.data / "data", f"http://127.0.0.1:{port}", args.env, commands.run
    commands.env |= {"STEPWELL_URL": url, "STEPWELL_OUTBOX": str(args.data / "outbox")}
    commands.start("stepwell", "serve", "--data", str(data), "--port", str(port))
    if args.dashboard:
        commands.start("stepwell", "dash", "--port", str(dash_port))
    with Client(url) as client:
        client.wait_ready(60)
        path = args.file or args.data / f"{BUILTIN[env][0]}.hdf5"
        if not args.file:
            generate = (path.stem, str(path), "--steps", str(args.steps))
            run("python", "-m", "collector.builtin", *generate)
        stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in path.stem.lower())
        dataset = (stem.strip("._-") or "dataset")[:60]
        common_words = ("--dataset", dataset, "--env", env)
        run("stepwell", "import", str(path), *common_words, "--format", "d4rl")
        prefix = _free_prefix(client)
        recipes = {
            "behaviour cloning": (f"{prefix}-bc", "bc"),
            "10% BC": (f"{prefix}-bc10", "bc10"),
            "our agent": (f"{prefix}-agent", args.recipe),
        }
        # It waits for the first policy; the trainers never see the environment.
        commands.start(
            *("stepwell", "collect", *common_words, "--wait-for-policy", "--envs", "2"),
            *("--policy", f"{prefix}-agent", "--episodes", str(args.collect_episodes)),
            *("--run", f"{prefix}-collect", "--seed", str(100_000 + args.seed)),
        )
        for name, recipe in recipes.values():
            words = ["--dataset", dataset, "--seed", str(args.seed), "--run", name]
            if recipe != "bc10":  # which has a condition of its own
                words += ["--where", "partition = 'protected'"]
            # Cloning has the network and windows of our agent's recipe.
            fixed = recipe in ("bc", "bc10") and args.recipe != "offline"
            if args.updates or fixed:
                words += ["--updates", str(args.updates or 1000)]
            words += ["--derive", "off"] if fixed else []
            run("stepwell", "train", recipe, *words, "--output", str(args.data / "trainer"))
        # Fixed seeds, greedy; the scores are trajectories in the dataset, too.
        seeds = ("--seeds", str(FIRST_EVALUATION_SEED), "--episodes", str(args.episodes))
        scores = {"data mean": _data_mean(client, dataset)}
        for label, (name, _) in recipes.items():
            words = ["--policy", name, *common_words, *seeds, "--run", f"{name}-eval"]
            run("stepwell", "evaluate", *words)
            e = client.evaluations(run=f"{name}-eval")[0]
            scores[label] = Interval(e.mean, e.ci_low, e.ci_high, len(e.returns), e.confidence)
        commands.finish("collect")
    run("stepwell", "sql", "--timeout", "30", SUMMARY.format(dataset))
    elapsed = round(time.monotonic() - began, 1)
    _report(args, scores, elapsed)
    if args.exit:
        print(f"\nLook around in it: stepwell serve --data {data}, then stepwell dash")
        return
    print(f"\nservice    {url}    (its data: {data})")
    if args.dashboard:
        print(f"dashboard  http://127.0.0.1:{dash_port}")
    print("Ctrl-C stops everything.")


def _data_mean(client: Client, dataset: str) -> Interval:
    query = "select \"return\" from trajectories where dataset = ? and partition = 'protected'"
    rows = client.sql(query, [dataset], limit=1_000_000, timeout=30).rows
    return bootstrap_mean([row[0] for row in rows])


def _free_prefix(client: Client) -> str:
    """Return demo, demo2, demo3 …, so that a repeated demo creates new runs."""
    names, number = {run.name for run in client.runs()}, 1
    while any(name.startswith(f"demo{number if number > 1 else ''}-") for name in names):
        number += 1
    return f"demo{number if number > 1 else ''}"


def _report(args: argparse.Namespace, scores: dict[str, Interval], seconds: float) -> None:
    print(
        f"\n{args.env}: mean return, {args.episodes} fixed evaluation seeds, 95% bootstrap ", end=""
    )
    print(f"interval; training seed {args.seed}, {seconds:.0f} s")
    terminal.print_table(
        ["who", "mean return", "interval", "episodes"],
        [(who, s.value, f"{s.low:.1f} … {s.high:.1f}", s.n) for who, s in scores.items()],
    )
    if args.json:
        report = {"env": args.env, "recipe": args.recipe, "seed": args.seed, "seconds": seconds}
        table = {k: dict(mean=s.value, low=s.low, high=s.high, n=s.n) for k, s in scores.items()}
        args.json.write_text(json.dumps({**report, "scores": table}, indent=2))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = terminal.parser(
        "demo",
        "Upload an offline dataset, learn from it, evaluate, collect, query: every part of the "
        "platform, as separate processes on this machine.",
        "  stepwell demo\n"
        "  stepwell demo --env LunarLanderContinuous-v3\n"
        "  stepwell demo --file hopper-medium-v2.hdf5 --env Hopper-v5 --updates 20000",
    )
    add = parser.add_argument
    names = ", ".join(BUILTIN)
    add(
        "--file",
        "--dataset",
        dest="file",
        type=Path,
        help="a D4RL-layout HDF5 file (default: made for --env)",
    )
    add("--env", help=f"gymnasium id (default: Pendulum-v1); without --file one of: {names}")
    add("--recipe", help="training recipe (default: made for --env, or `offline`)")
    add("--data", type=Path, default=Path("stepwell-demo"), help="where everything is kept")
    add("--seed", type=int, default=0, help="training seed")
    add("--steps", type=int, default=100_000, help="steps to generate, without --file")
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
    require(*modules_of("all"))  # its commands would fail one by one
    if args.file and not args.env:
        parser.error("--file needs --env: which environment evaluates it? e.g. --env Hopper-v5")
    if args.file and not args.file.is_file():
        parser.error(f"--file: no such file: {args.file}")
    args.env = args.env or "Pendulum-v1"
    if not args.file and args.env not in BUILTIN:
        parser.error(f"--env {args.env}: give its data, --file FILE.hdf5, or one of: {names}")
    args.recipe = args.recipe or BUILTIN.get(args.env, ("", "offline"))[1]
    return args


if __name__ == "__main__":
    sys.exit(main())
