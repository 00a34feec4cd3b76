"""`stepwell <command>`: a table of commands, whose modules are imported only when they run.

Each command is a function `main(argv) -> int`. If its dependencies are missing, the error states
how to install them. A `StepwellError` is printed as one line on stderr, with exit status 2 for a
wrong command line or input and 1 otherwise; `--debug` prints the traceback.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from dataclasses import dataclass

from stepwell._exit_message import DEBUG
from stepwell._exit_message import fail as fail_as
from stepwell._extras import modules_of
from stepwell._parent import end_with_parent
from stepwell.errors import StepwellError


@dataclass(frozen=True, slots=True)
class Command:
    target: str
    """"module:function" that takes the arguments after the command."""
    summary: str
    extra: str = ""
    """The extra that it requires, if the SDK alone is not sufficient."""


GROUPS: dict[str, dict[str, Command]] = {
    "See it work": {
        "demo": Command("workbench.demo:main", "the whole loop on this machine, in minutes", "all"),
    },
    "Collect and learn together": {
        "run": Command(
            "workbench.run.main:main",
            "service, collectors, trainer and evaluator for one env",
            "all",
        ),
    },
    "Programs": {
        "serve": Command("server.main:main", "the dataset service", "server"),
        "train": Command("trainer.main:main", "train a policy on a dataset", "trainer"),
        "recommend": Command(
            "trainer.recommend:main", "settings that suit a dataset, with reasons", "trainer"
        ),
        "collect": Command(
            "collector.main:main", "play in an environment, store every episode", "collector"
        ),
        "evaluate": Command(
            "collector.main:evaluate", "score a published policy on fixed seeds", "collector"
        ),
        "estimate": Command(
            "trainer.offline_evaluation.estimate:main",
            "value of a run's policies, without an environment",
            "trainer",
        ),
        "reproduce": Command(
            "trainer.reproduce:main", "train a run again, and compare its curves", "trainer"
        ),
        "annotate": Command(
            "trainer.offline_evaluation.annotate:main",
            "a critic's values of each step, beside the data",
            "trainer",
        ),
        "compare": Command(
            "workbench.compare.main:main",
            "train recipes with several seeds, evaluate, one table",
            "all",
        ),
        "dash": Command("dashboard.main:main", "the dashboard, in a browser", "dashboard"),
        "launcher": Command(
            "workbench.launcher.main:main", "start on this machine what the dashboard asks for"
        ),
    },
    "Data": {
        "import": Command("workbench.commands.imports:main", "upload a D4RL, npz or Minari file"),
        "jobs": Command("workbench.commands.jobs:main", "list, follow, cancel imports"),
        "export": Command(
            "workbench.commands.export:main", "a dataset as npz, D4RL, Parquet or Minari files"
        ),
        "datasets": Command(
            "workbench.commands.datasets:main", "list, show, create, limit, delete datasets"
        ),
        "versions": Command(
            "workbench.commands.versions:main", "named selections of a dataset that never change"
        ),
        "trajectories": Command(
            "workbench.commands.trajectories:main", "list, show, tag, protect trajectories"
        ),
        "sql": Command(
            "workbench.commands.sql:main", "query trajectories, steps, runs, metrics in SQL"
        ),
        "doctor": Command("workbench.commands.doctor:main", "find what is wrong with a dataset"),
        "lineage": Command(
            "workbench.commands.lineage:main", "what data and policies were made from"
        ),
        "outbox": Command(
            "workbench.commands.outbox:main", "list and send data that waits on this machine"
        ),
        "flush": Command("workbench.commands.flush:main", "seal a dataset's newest trajectories"),
    },
    "Runs and workers": {
        "runs": Command("workbench.commands.runs:main", "list and show runs, metrics, logs"),
        "tokens": Command("workbench.commands.tokens:main", "create and revoke tokens; audit log"),
        "workers": Command("workbench.commands.workers:main", "list workers, pause or stop them"),
        "status": Command(
            "workbench.commands.status:main", "health of the service, and what it holds"
        ),
    },
    "Maintenance of the service's directory": {
        "fsck": Command(
            "server.fsck.main:main", "check index and files against each other", "server"
        ),
        "backup": Command(
            "server.backup.main:main", "copy everything, of a running service too", "server"
        ),
        "restore": Command(
            "server.backup.main:restore_main", "put a backup into a new directory", "server"
        ),
        "db": Command("server.main:db_main", "migrate the index (upgrade, current)", "server"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

EXAMPLES = """\
Examples:
  stepwell serve --data ./data
  stepwell import hopper-medium-v2.hdf5 --dataset hopper --env Hopper-v5
  stepwell sql "select env, count(*), avg(return) from trajectories group by env"
  stepwell datasets show hopper --json

STEPWELL_URL and STEPWELL_TOKEN tell every command where the service is (or --url, --token).
"""
OURS = ("stepwell", "workbench", "server", "trainer", "collector", "dashboard", "amago_model")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    end_with_parent()
    args = list(sys.argv[1:] if argv is None else argv)
    while args and args[0] == "--debug":
        os.environ[DEBUG] = "1"
        args = args[1:]
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        import stepwell

        print(f"stepwell {stepwell.__version__}")
        return 0
    name, rest = args[0], args[1:]
    if "--debug" in rest:
        os.environ[DEBUG] = "1"
        rest = [a for a in rest if a != "--debug"]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean: stepwell {near[0]}" if near else "; see: stepwell --help"
        return fail(f"unknown command {name!r}{hint}", status=2)
    try:
        return run(name, rest)
    except StepwellError as error:
        return fail(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `stepwell sql … | head`: the reader has seen enough. Keep the interpreter from complaining
        # when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(name: str, argv: list[str]) -> int:
    command = COMMANDS[name]
    module, function = command.target.split(":")
    entry = None
    try:
        entry = getattr(importlib.import_module(module), function)
        return int(entry(argv) or 0)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        ours = missing.split(".")[0] in OURS
        if not command.extra or (ours and missing != module and not module.startswith(missing)):
            raise
        if entry is not None and missing.split(".")[0] not in modules_of(command.extra):
            raise  # a module of the user's, for instance
        return fail(
            f"`stepwell {name}` needs more than the SDK: {missing} is not installed; "
            f"pip install 'stepwell[{command.extra}]'",
            status=2,
        )


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "stepwell: datasets of trajectories, and agents that learn from them",
        "",
        "Usage: stepwell [--debug] <command> [options]      (stepwell <command> --help)",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    return "\n".join([*lines, "", EXAMPLES.rstrip()])


def fail(error: StepwellError | str, *, status: int | None = None) -> int:
    return fail_as("stepwell", error, status=status)


if __name__ == "__main__":
    sys.exit(main())
