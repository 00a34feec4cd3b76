"""`stepwell run`: collect, learn and evaluate together, by one command.

    service ◀── collect ×N ──┐ episodes           each part is a `stepwell` command of its own,
       │  ▲                  │                    with its log in DIR/logs/RUN/
       ▼  └── train ── policies ──▶ evaluate

The order of starts does not matter, and every part may be killed, added or moved to another machine
at any time: what breaks is started again, and the same command continues a run that was stopped.
docs/online.md is for users.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stepwell._compat import tomllib
from stepwell._files import whole_file
from stepwell._parent import PARENT
from stepwell._plural import pluralize
from stepwell._ports import free_port
from stepwell._processes import Processes, read_train_config
from stepwell._run.parts import WARM_UP_STEPS, Plan, growing_data, parts, selected_data
from stepwell._run.status import Line, read_status, scores
from stepwell._run.supervisor import SERVICE, Part, Supervisor
from stepwell._settings import flatten
from stepwell._signals import stop_signals
from stepwell.client import Client
from stepwell.commands import common
from stepwell.errors import InvalidData, NotFound, ServiceUnreachable, StepwellError

SECTIONS = ("train", "collect", "evaluate")
DEFAULT_PORT = 8000
LOOK_EVERY = 0.5
REPORT_SECONDS = 30.0
"""How long the last report waits for a service that is away."""
SCREEN_EVERY, LINES_EVERY = 1.0, 10.0
"""Seconds between two reports, on a terminal and elsewhere."""

ABOUT = """\
Collect episodes in an environment, learn from them and evaluate the policies, with progress of all
of it on one screen. It starts a service (unless --url or STEPWELL_URL names one), collectors, a
trainer and an evaluator, and ends with the last update.

The trainer makes --updates-per-step updates for each collected step: the faster side waits. Ctrl-C
stops everything (twice: at once); the same command continues. What breaks is started again.

After these options, any setting of a part is a flag after its name: --train.X, --collect.X,
--evaluate.X, as in `stepwell train --help`; or a table of FILE.toml, of which later ones win:

  recipe = "online"
  updates_per_step = 0.25
  [train]
  agent.losses.gamma = 0.98
  [collect]
  epsilon.kind = "greedy\""""
EXAMPLES = """\
  stepwell run Pendulum-v1
  stepwell run stepwell/TMazePassive-v0 --env-args corridor_length=20 --train.updates 1500
  stepwell run examples/00_meta_frozen_lake.toml
  stepwell run examples/00_meta_frozen_lake.toml --help               what this file is about
  stepwell run examples/00_meta_frozen_lake.toml examples/tiny.toml   in a minute: see it work
  stepwell run my_envs:Robot-v0 robot.toml --envs 16 --collectors 2 --data ./robot
  stepwell run Pendulum-v1 --url http://10.0.0.5:8000 --no-train    only collect and evaluate"""


def main(argv: list[str] | None = None) -> int:
    words, sections = _split(list(sys.argv[1:] if argv is None else argv))
    args = _parse(words, sections)
    console = Console(highlight=False)
    folder: Path = args.data.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = read_train_config([args.recipe])["config"]
    growing = growing_data(
        base,
        collectors=args.collectors,
        updates_per_step=args.updates_per_step,
        warm_up_steps=args.warm_up_steps,
        min_size=args.min_size,
    )
    words = [args.recipe, "--run", args.run, *growing]
    words += selected_data(args.dataset or args.run, sections["train"])
    config = read_train_config([*words, *sections["train"]])["config"]

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
    with stop_signals(stop, again=supervisor.kill):
        try:
            own = _service(args, folder, supervisor)
            variables = {
                "STEPWELL_URL": args.url,
                "STEPWELL_OUTBOX": os.environ.get("STEPWELL_OUTBOX") or str(folder / "outbox"),
                PARENT: str(os.getpid()),
            }
            if args.token:
                variables["STEPWELL_TOKEN"] = args.token
            with Client(args.url, args.token, timeout=5.0, retry_for=0.0) as client:
                plan = _plan(args, client, folder, growing, sections)
                if base["derive"] != "off":
                    _require_data(plan, client)
                processes = Processes(folder / "logs" / plan.run, variables)
                _remember(plan, processes.folder / "task.json")
                for part in parts(plan, config, processes):
                    check()
                    supervisor.add(part)
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


def _require_data(plan: Plan, client: Client) -> None:
    """Raise `InvalidData` if settings must be derived from data that nobody will collect."""
    selects_itself = not selected_data(plan.dataset, plan.more["train"])
    if not plan.train or plan.warm_up_steps != 0 or selects_itself:
        return
    try:
        found = client.dataset(plan.dataset)
        steps = found.fifo.steps + found.protected.steps
    except NotFound:
        steps = 0
    if steps < WARM_UP_STEPS:
        raise InvalidData(
            f"--warm-up-steps: recipe {plan.recipe} derives settings from data, so the first steps "
            "must be random, or in the dataset",
            expected=f"at least 1, or {WARM_UP_STEPS:,} steps in dataset {plan.dataset}",
            got=f"0, and {pluralize(steps, 'step')}",
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
    client: Client,
    folder: Path,
    growing: list[str],
    sections: Mapping[str, list[str]],
) -> Plan:
    run = _free_name(client, args.run) if args.train else args.run
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


def _service(args: argparse.Namespace, folder: Path, supervisor: Supervisor) -> bool:
    """Set args.url to the address of the service; start it, unless one is named. Returns whether it
    was started."""
    if given := args.url or os.environ.get("STEPWELL_URL"):
        if not _answers(given, args.token):
            raise ServiceUnreachable(f"no service answers at {given}; start one: stepwell serve")
        args.url = given
        supervisor.say(f"service {given} (it was running)")
        return False
    try:
        port = free_port(args.port)
    except InvalidData:
        port = free_port()
    args.url, data = f"http://127.0.0.1:{port}", folder / "data"
    processes = Processes(folder / "logs", {PARENT: str(os.getpid())})
    words = ["serve", "--data", str(data), "--port", str(port)]
    supervisor.add(Part(SERVICE, words, processes))
    while not _answers(args.url, args.token):
        supervisor.check()
        supervisor.tick()
        time.sleep(0.1)
    supervisor.say(f"service {args.url} (its data: {data})")
    return True


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
    """Reads and shows lines, when it is time: on a terminal in place, else below each other."""
    every, due = (SCREEN_EVERY if console.is_terminal else LINES_EVERY), 0.0
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
            for line in lines:
                text = common.printable(f"{run}  {line.part:<10} {line.state:<9} {line.text}")
                console.print(text, markup=False, soft_wrap=True)

        yield show


def _table(run: str, lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (run, "", ""):
        table.add_column(Text(column))
    for line in lines:
        table.add_row(Text(line.part), Text(line.state), Text(common.printable(line.text)))
    return table


def _report(client: Client, plan: Plan, console: Console, own: bool) -> int:
    """The last lines: how it ended, the scores, and what to do with the policy. Returns the exit
    status. `own`: the service ends with this command."""

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    found = scores(client, plan.run, plan.env)
    if found:
        common.print_table(
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


def _split(argv: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of this command, and those of each part without the part's name."""
    own: list[str] = []
    sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
    target = own
    for word in argv:
        if word.startswith("--"):
            section, dot, rest = word.removeprefix("--").partition(".")
            inside = dot and section in sections
            target = sections[section] if inside else own
            word = f"--{rest}" if inside else word
        target.append(word)
    return own, sections


def _read_files(
    paths: Sequence[Path], known: Mapping[str, Any], sections: dict[str, list[str]]
) -> dict[str, Any]:
    """The settings of this command in TOML files, of which later ones win; those of the parts go
    before their words. Lists of later files are added to those of earlier ones."""
    found: dict[str, Any] = {}
    of_parts: dict[str, list[str]] = {name: [] for name in sections}
    for path in paths:
        for key, value in _read_file(path, known, of_parts).items():
            found[key] = [*found.get(key, []), *value] if isinstance(value, list) else value
    for name, words in of_parts.items():
        sections[name][:0] = words
    return found


def _read_file(
    path: Path, known: Mapping[str, Any], sections: dict[str, list[str]]
) -> dict[str, Any]:
    """The settings of this command in a TOML file; those of the parts are added to their words."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidData(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidData(f"{path}: not TOML: {error}") from None
    for name, words in sections.items():
        if isinstance(tree.get(name), dict):
            table = flatten(tree.pop(name))
            words += [word for key, value in table.items() for word in _words(key, value)]
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = key.replace("-", "_")
        own = known.get(name)
        if name not in known:
            near = difflib.get_close_matches(name, sorted({*known, *SECTIONS}), n=1, cutoff=0.0)[0]
            raise InvalidData(f"{path}: unknown setting {key!r}; the nearest known one is {near!r}")
        kinds = (list,) if isinstance(own, list) else (bool,) if own is True else (str, int, float)
        if not isinstance(value, kinds) or (isinstance(value, bool) and own is not True):
            expected = {list: "a list", bool: "true or false"}.get(kinds[0], "a number or a text")
            raise InvalidData(f"{path}: {key}", expected=expected, got=repr(value))
        # argparse converts and checks defaults that are text.
        found[name] = value if kinds[0] in (list, bool) else str(value)
    return found


def _words(key: str, value: Any) -> list[str]:
    """A setting of a file as words of a command line; the tables of a list as JSON."""
    if isinstance(value, list):
        return [f"--{key}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in value)]
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}"]


def _head(path: Path) -> str:
    """The comment at the head of a file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = common.parser("run", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("env", metavar="ENV | FILE.toml", nargs="*",
        help="gymnasium id, as Pendulum-v1 or my_envs:Robot-v0; none if a file has env = \"…\". "
        "Files of settings: later ones win, flags win over files")  # fmt: skip
    add("--recipe", default="online", help="training recipe (default: %(default)s)")
    add("--run", default="", help="its name; a stopped run of this name goes on (default: ENV's)")
    add("--dataset", default="", help="for the episodes (default: the run's name)")
    add("--data", type=Path, default=Path("stepwell-run"), help="folder (default: %(default)s)")
    add("--env-args", nargs="+", default=[], metavar="KEY=VALUE",
        help="of the environment; they are added to those of files, or replace them by KEY"
    )  # fmt: skip
    add("--plugin", nargs="+", default=[], metavar="MODULE", help="modules that register parts")
    add("--envs", type=int, default=8, help="environments per collector (default: %(default)s)")
    add("--collectors", type=int, default=1,
        help="collector processes (default: %(default)s). 0: learn from the dataset as it is; "
        "with --updates-per-step: as collectors elsewhere add to it")  # fmt: skip
    add("--episodes", type=int, default=20, help="per evaluation (default: %(default)s)")
    add("--seed", type=int, default=0, help="of training and collecting (default: %(default)s)")
    add("--updates-per-step", type=float, metavar="X",
        help="updates per collected step (default: the recipe's, or 0.1)")  # fmt: skip
    add("--min-size", type=int, metavar="N",
        help="steps in the dataset before the first update (default: the recipe's)")  # fmt: skip
    add("--warm-up-steps", type=int, metavar="N",
        help="random steps before the first policy acts (default: 0; 2,000 for recipes that "
        "derive settings from data)")  # fmt: skip
    add("--no-train", dest="train", action="store_false", help="the trainer runs elsewhere")
    add("--no-evaluate", dest="evaluate", action="store_false", help="score no policies")
    add("--url", help="of a service that runs (default: STEPWELL_URL; else it starts one)")
    add("--port", type=int, default=DEFAULT_PORT,
        help="of the service that it starts, if free; 0: any (default: %(default)s)")  # fmt: skip
    add("--token", help="default: STEPWELL_TOKEN")
    return parser


def _parse(words: list[str], sections: dict[str, list[str]]) -> argparse.Namespace:
    parser = _parser()
    asks_for_help = bool({"-h", "--help"} & {*words})
    words = [word for word in words if word not in ("-h", "--help")]
    args = parser.parse_intermixed_args(words)
    files = [Path(word) for word in args.env if word.endswith(".toml")]
    known = {name: parser.get_default(name) for name in vars(args)} | {"env": ""}
    given = _read_files(files, known, sections)
    in_files = [env] if (env := given.pop("env", "")) else []
    named = [word for word in args.env if not word.endswith(".toml")] or in_files
    env_args, plugins = given.pop("env_args", []), given.pop("plugin", [])
    parser.set_defaults(**given)
    if asks_for_help:
        parser.description = "\n\n".join([*map(_head, files), ABOUT])
        parser.print_help()
        raise SystemExit(0)
    args = parser.parse_intermixed_args(words)
    if len(named) != 1:
        parser.error(
            f"expected one ENV, or FILE.toml with env = …, got {' '.join(named) or 'none'}"
        )
    args.env = named[0]
    args.env_args = [
        *{pair.partition("=")[0]: pair for pair in [*env_args, *args.env_args]}.values()
    ]
    args.plugin = [*dict.fromkeys([*plugins, *args.plugin])]
    for name, least in (("envs", 1), ("collectors", 0), ("episodes", 1), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    if not (args.train or args.evaluate or args.collectors):
        parser.error("nothing to do: --no-train, --no-evaluate and --collectors 0")
    args.run = args.run or _slug(args.env)
    return args


def _slug(env: str) -> str:
    name = env.rpartition(":")[2].rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]+", "-", name).strip("._-")[:80] or "run"
