"""`stepwell run`: collect, learn and evaluate together, by one command.

    service ◀── collect ×N ──┐ episodes           each part is a `stepwell` command of its own,
       │  ▲                  │                    with its log in DIR/logs/RUN/
       ▼  └── train ── policies ──▶ evaluate

The order of starts does not matter, and every part may be killed, added or moved to another machine
at any time: what breaks is started again, and the same command continues a run that was stopped.
docs/reference/online.md is for users.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stepwell import terminal
from stepwell._files import whole_file
from stepwell._locks import take_lock
from stepwell._parent import PARENT
from stepwell._ports import free_port
from stepwell._signals import stop_signals
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData, NotFound, ServiceUnreachable, StepwellError
from workbench.processes import Processes, read_train_config
from workbench.run.command_line import parse
from workbench.run.parts import Plan, default_warm_up, growing_data, parts, selected_data
from workbench.run.status import Line, read_status, scores
from workbench.run.supervisor import SERVICE, Part, Supervisor

LOOK_EVERY = 0.5
REPORT_SECONDS = 30.0
"""How long the last report waits for a service that is away."""
SCREEN_EVERY, LINE_EVERY = 1.0, 60.0
"""Seconds between two reports, on a terminal and elsewhere."""


def main(argv: list[str] | None = None) -> int:
    args, sections = parse(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    folder: Path = args.data.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    stopping = False

    def stop() -> None:
        nonlocal stopping
        stopping = True

    def check() -> None:
        if stopping:
            raise KeyboardInterrupt

    supervisor = Supervisor(say, check, lambda: _answers(args.url, args.token))
    with stop_signals(stop, again=supervisor.kill), ExitStack() as locks:
        try:
            own, fresh = _start_service(args, folder, supervisor, locks)
            try:
                growing, config = _settings(args, sections)  # takes seconds, as the service does
            except InvalidData:
                check()  # Ctrl-C ends its child, too
                raise
            if not fresh:
                _wait_for_service(args, supervisor)
            variables = {
                "STEPWELL_URL": args.url,
                "STEPWELL_OUTBOX": os.environ.get("STEPWELL_OUTBOX") or str(folder / "outbox"),
                PARENT: str(os.getpid()),
            }
            if args.token:
                variables["STEPWELL_TOKEN"] = args.token
            with Client(args.url, args.token, timeout=5.0, retry_for=0.0) as client:
                plan = _plan(args, None if fresh else client, folder, growing, sections)
                if config["derive"] != "off":
                    _require_data(plan, None if fresh else client, default_warm_up(config))
                processes = Processes(folder / "logs" / plan.run, variables)
                _lock(processes.folder, f"run {plan.run} is run", "--run", locks)
                _remember(plan, processes.folder / "task.json")
                for part in parts(plan, config, processes):
                    check()
                    supervisor.add(part)
                if fresh:  # the parts were started beside it, as they take as long
                    _wait_for_service(args, supervisor)
                _watch(plan, client, supervisor, console)
                patient = client.with_options(retry_for=REPORT_SECONDS)
                status = _report(patient, plan, console, own)
                return 1 if any(p.given_up for p in supervisor.parts.values()) else status
        except KeyboardInterrupt:
            say("stopping …")
            _stop(supervisor)
            say("stopped; the same command continues")
            return 130
        finally:
            _stop(supervisor)


def _stop(supervisor: Supervisor) -> None:
    """Stop the service last, so that the others can send what they have."""
    supervisor.stop([name for name in supervisor.parts if name != SERVICE])
    supervisor.stop([SERVICE])


def _settings(
    args: argparse.Namespace, sections: Mapping[str, list[str]]
) -> tuple[list[str], dict[str, Any]]:
    """What the trainer needs for growing data, and its config. Raises `InvalidData`."""
    growing = growing_data(
        read_train_config([args.recipe])["config"],
        collectors=args.collectors,
        updates_per_step=args.updates_per_step,
        warm_up_steps=args.warm_up_steps,
        min_size=args.min_size,
    )
    words = [args.recipe, "--run", args.run, *growing]
    words += selected_data(args.dataset or args.run, sections["train"])
    return growing, read_train_config([*words, *sections["train"]])["config"]


def _require_data(plan: Plan, client: Client | None, needed: int) -> None:
    """Raise `InvalidData` if settings must be derived from data that nobody will collect; `needed`
    are the steps for it. `client`: None for a service that has no data yet."""
    selects_itself = not selected_data(plan.dataset, plan.more["train"])
    if not plan.train or plan.warm_up_steps is None or selects_itself:
        return
    steps = 0
    if client is not None:
        with suppress(NotFound):
            found = client.dataset(plan.dataset)
            steps = found.fifo.steps + found.protected.steps
    if steps + plan.warm_up_steps < needed:
        raise InvalidData(
            f"--warm-up-steps: recipe {plan.recipe} derives settings from data, so the first steps "
            "must be random, or in the dataset",
            expected=f"at least {needed:,}, with those in dataset {plan.dataset}",
            got=f"{plan.warm_up_steps:,}, and {pluralize(steps, 'step')}",
        )


def _remember(plan: Plan, path: Path) -> None:
    """Keep the task of a run. Raises `InvalidData` if a run of this name has another one."""
    task = {"env": plan.env, "env_args": list(plan.env_args), "recipe": plan.recipe}
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = task
    if before != task:
        raise InvalidData(
            f"run {plan.run} was begun with another task; give this one a name: --run NAME",
            expected=str(before),
            got=str(task),
        )
    with whole_file(path) as file:
        file.write(json.dumps(task).encode())


def _plan(
    args: argparse.Namespace,
    client: Client | None,
    folder: Path,
    growing: list[str],
    sections: Mapping[str, list[str]],
) -> Plan:
    run = _free_name(client, args.run) if args.train and client is not None else args.run
    return Plan(
        env=args.env,
        env_args=args.env_args,
        recipe=args.recipe,
        run=run,
        dataset=args.dataset or run,
        folder=folder,
        seed=args.seed,
        envs=args.envs,
        collectors=args.collectors,
        train=args.train,
        evaluate=args.evaluate,
        episodes=args.episodes,
        growing=growing,
        warm_up_steps=args.warm_up_steps,
        plugins=args.plugin,
        more=sections,
    )


def _watch(plan: Plan, client: Client, supervisor: Supervisor, console: Console) -> None:
    """Show what all parts do, until the trainer has made its last update."""
    with _screen(console, plan.run) as show:
        while not _over(supervisor, lambda: _has_ended(client, plan.run)):
            supervisor.check()
            supervisor.tick()
            show(lambda: read_status(client, plan, [*supervisor.parts.values()]))
            time.sleep(LOOK_EVERY)


def _over(supervisor: Supervisor, run_has_ended: Callable[[], bool]) -> bool:
    """Whether the trainer has ended, and the evaluator has scored its last policy. Without a
    trainer: whether the evaluator has ended; without both, the run or all collectors. Then the
    collectors stop."""
    parts = supervisor.parts
    collectors = [name for name in parts if name.startswith("collect-")]
    first = "train" if "train" in parts else "evaluate"
    if first in parts:
        ended = parts[first].ended
    else:
        ended = all(parts[name].ended for name in collectors) or run_has_ended()
    if not ended:
        return False
    supervisor.stop([name for name in collectors if not parts[name].ended])
    return "evaluate" not in parts or parts["evaluate"].ended


def _has_ended(client: Client, run: str) -> bool:
    """Whether a run whose trainer is elsewhere has begun and ended, as far as the service tells."""
    try:
        return client.run(run).status != "running"
    except StepwellError:
        return False


def _lock(folder: Path, what: str, option: str, locks: ExitStack) -> None:
    """Let no other `stepwell run` use a folder before `locks` end. Raises `InvalidData`."""

    def refusal(pid: int) -> InvalidData:
        return InvalidData(
            f"{what} by another `stepwell run`, process {pid or '?'}; stop that one, or give this "
            f"one another {option}",
        )

    folder.mkdir(parents=True, exist_ok=True)
    locks.enter_context(take_lock(folder / "run.lock", refusal))


def _start_service(
    args: argparse.Namespace, folder: Path, supervisor: Supervisor, locks: ExitStack
) -> tuple[bool, bool]:
    """Set args.url to the address of the service; start it, unless one is named. Returns whether it
    was started, and whether it begins without data. It does not answer yet."""
    if given := args.url or os.environ.get("STEPWELL_URL"):
        if not _answers(given, args.token):
            raise ServiceUnreachable(f"no service answers at {given}; start one: stepwell serve")
        args.url = given
        supervisor.say(f"service {given} (it was running)")
        return False, False
    _lock(folder, f"{folder} is used", "--data (or the service of that one: --url)", locks)
    try:
        port = free_port(args.port)
    except InvalidData:
        port = free_port()
    args.url, data = f"http://127.0.0.1:{port}", folder / "data"
    fresh = not data.exists()
    processes = Processes(folder / "logs", {PARENT: str(os.getpid())})
    words = ["serve", "--data", str(data), "--port", str(port)]
    supervisor.add(Part(SERVICE, words, processes))
    supervisor.say(f"service {args.url} (its data: {data})")
    return True, fresh


def _wait_for_service(args: argparse.Namespace, supervisor: Supervisor) -> None:
    """Wait until it answers. Raises `PartFailed` if it cannot be started."""
    while not _answers(args.url, args.token):
        supervisor.check()
        supervisor.tick()
        time.sleep(0.1)


def _answers(url: str, token: str | None) -> bool:
    with Client(url, token, timeout=2.0, retry_for=0.0) as client:
        try:
            client.wait_ready(0.0)
        except StepwellError:
            return False
    return True


def _free_name(client: Client, name: str) -> str:
    """The run's name; where a run of this name has finished, with a number that is free."""
    for number in range(1, 10_000):
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            if client.run(candidate).status != "finished":
                return candidate
        except NotFound:
            return candidate
    raise InvalidData(f"--run: 9,999 runs are called {name}", expected="another name")


@contextmanager
def _screen(console: Console, run: str) -> Iterator[Callable[[Callable[[], Sequence[Line]]], None]]:
    """Reads and shows lines, when it is time: on a terminal in place, else as one line a minute."""
    every, due = (SCREEN_EVERY if console.is_terminal else LINE_EVERY), 0.0
    with (
        Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live
    ):

        def show(read: Callable[[], Sequence[Line]]) -> None:
            nonlocal due
            if time.monotonic() < due:
                return
            lines = read()
            due = time.monotonic() + every
            if live is not None:
                live.update(_table(run, lines), refresh=True)
                return
            parts = (f"{line.part} {line.state}: {line.text}" for line in lines)
            text = terminal.printable(f"{run}  {' | '.join(parts)}")
            console.print(text, markup=False, soft_wrap=True)

        yield show


def _table(run: str, lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (run, "", ""):
        table.add_column(Text(column))
    for line in lines:
        table.add_row(Text(line.part), Text(line.state), Text(terminal.printable(line.text)))
    return table


def _report(client: Client, plan: Plan, console: Console, own: bool) -> int:
    """The last lines: how it ended, the scores, and what to do with the policy. Returns the exit
    status. `own`: the service ends with this command."""

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    found = scores(client, plan.run, plan.env)
    if found:
        terminal.print_table(
            ["version", "mean return", "interval", "IQM", "episodes"],
            [
                (v, e.mean, f"{e.ci_low:.4g} … {e.ci_high:.4g}", e.iqm, len(e.returns))
                for v, e in found.items()
            ],
        )
    if not plan.train:
        return 0
    run = client.run(plan.run)
    seconds = (run.finished_at or run.heartbeat_at) - run.created_at
    say(f"run {plan.run} {run.status}, {seconds:.0f} s after its begin")
    if own:
        say(f"its service:  stepwell serve --data {shlex.quote(str(plan.folder / 'data'))}")
    words = ["--policy", f"{plan.run}/best" if found else plan.run, "--env", plan.env]
    words += ["--env-args", *plan.env_args] if plan.env_args else []
    words += ["--plugin", *plan.plugins] if plan.plugins else []
    words += [] if own else ["--url", client.url]
    say(f"evaluate:     stepwell evaluate {shlex.join(words)}")
    say(f"its episodes: stepwell datasets show {plan.dataset}")
    return 0 if run.status == "finished" else 1
