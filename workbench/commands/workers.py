"""`stepwell workers`: list them, or ask one to pause, resume, drain or stop."""

from __future__ import annotations

import argparse

from stepwell import terminal
from stepwell.client import Client

ABOUT = """\
List the processes that report to the service, or send one a command.

A worker (trainer, collector, evaluation, launcher) receives a command with its next heartbeat:
pause, resume, drain (finish the running episodes, then end) or stop (end now; nothing is lost)."""
EXAMPLES = """\
  stepwell workers list
  stepwell workers command collect-7 drain"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("workers", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    terminal.add_action(actions, "list", list_workers, "all workers")
    command = terminal.add_action(
        actions,
        "command",
        send_command,
        "send a command; the worker gets it with its next heartbeat",
    )
    command.add_argument("id")
    command.add_argument("command", choices=("pause", "resume", "drain", "stop", "none"))
    return terminal.dispatch(parser, argv)


def list_workers(client: Client, _: argparse.Namespace) -> terminal.Answer:
    workers = client.workers()
    return workers, lambda: terminal.print_table(
        ["worker", "role", "state", "alive", "run", "policy", "host", "heartbeat", "counters"],
        [
            (
                w.id,
                w.role,
                w.state if w.command == "none" else f"{w.state} → {w.command}",
                w.alive,
                w.run,
                w.policy,
                w.host,
                terminal.ago(w.heartbeat_at),
                ", ".join(f"{k}={v:g}" for k, v in sorted(w.counters.items())),
            )
            for w in workers
        ],
        empty="no workers",
    )


def send_command(client: Client, args: argparse.Namespace) -> terminal.Answer:
    worker = client.command(args.id, args.command)
    shown = f"{terminal.printable(worker.id)}: {worker.state} → {worker.command}"
    return worker, lambda: print(shown)
