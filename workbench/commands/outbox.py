"""`stepwell outbox`: list and send what collectors and trainers could not deliver."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from stepwell import terminal
from stepwell._outbox_folder import (
    ROOT,
    Summary,
    default_root,
    find_outboxes,
    summarise,
)
from stepwell._outbox_kinds import describe
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData, OutboxError, OutboxInUse
from stepwell.outbox import reopen

ABOUT = """\
Data that waits on this disk for the service.

Collectors and evaluations queue each episode in an outbox on disk, trainers their run's metrics,
log and policies (RUNS/NAME/outbox), and send when they can. A program that ends while the service
is down leaves the rest there. The next collector of the dataset, or the next trainer of the run,
sends it; this command shows it and sends it now."""
EXAMPLES = """\
  stepwell outbox list                        every outbox below this folder
  stepwell outbox list stepwell-outbox/hopper --json
  stepwell outbox send                        deliver what waits below this folder
  stepwell outbox send stepwell-outbox/hopper/1 --url http://10.0.0.5:8000
  stepwell outbox send runs/*                 what training runs still keep
  stepwell outbox send --retry-rejected       also what the service has refused

send: exit status 0 if nothing is left, 1 if something is, with one line that says what and why.
What the service refuses is moved to the outbox's rejected/, with the reason beside it."""
TICK = 0.1


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("outbox", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    listing = terminal.add_action(actions, "list", list_outboxes, "outboxes and what waits in them")
    send = terminal.add_action(actions, "send", send_outboxes, "deliver what waits in them")
    for sub in (listing, send):
        sub.add_argument(
            "path",
            nargs="*",
            type=Path,
            help=f"outboxes, or folders above some (default: the current folder and {ROOT})",
        )
    send.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        help="stop with an outbox when nothing of it was taken for this many seconds (default 10)",
    )
    send.add_argument(
        "--retry-rejected", action="store_true", help="offer again what the service refused"
    )
    return terminal.dispatch(parser, argv)


def list_outboxes(client: Client, args: argparse.Namespace) -> int:
    del client  # the service is not needed
    found = list(_found(args.path))
    if args.json:
        terminal.print_json([{**asdict(s), "folder": str(s.folder.absolute())} for s in found])
        return 0
    terminal.print_table(
        ["outbox", "for", "waiting", "size", "oldest", "rejected", "damaged", "used by"],
        [
            (
                str(s.folder),
                s.destination.name
                + (f" ({s.destination.partition})" if s.destination.partition != "fifo" else ""),
                describe(s.kinds) or "nothing",
                terminal.size(s.bytes),
                terminal.ago(s.oldest),
                s.rejected,
                s.damaged,
                None if s.held_by is None else f"process {s.held_by or '?'}",
            )
            for s in found
        ],
        empty=f"no outboxes in {_places(args.path)}; collectors keep theirs in stepwell-outbox/ or "
        "their --outbox, trainers in RUNS/NAME/outbox",
    )
    for s in found:
        for reason, count in s.reasons.items():
            print(f"{s.folder}: {count} rejected: {terminal.printable(reason)}")
    return 0


def send_outboxes(client: Client, args: argparse.Namespace) -> int:
    found = list(_found(args.path))
    if not found:
        raise InvalidData(
            f"no outboxes in {_places(args.path)}", expected="outboxes, or a folder above some"
        )
    wanted = [s for s in found if s.waiting or (args.retry_rejected and s.rejected)]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        disable=args.json or not sys.stderr.isatty(),
    )
    results = []
    with bar, _silent(logging.getLogger("stepwell.outbox")):  # what it says is printed below, once
        sending = bar.add_task("sending", total=sum(s.waiting for s in wanted))
        for summary in wanted:
            results.append(_send(summary, client, args, bar, sending))
    sent, problems = sum(r["sent"] for r in results), [r for r in results if r["problem"]]
    if args.json:
        terminal.print_json({"sent": sent, "outboxes": results})
    else:
        outboxes = pluralize(len(wanted), "outbox", "outboxes")
        print(f"sent {pluralize(sent, 'item')} of {outboxes}")
    for result in problems:
        print(f"stepwell outbox: {terminal.printable(result['problem'])}", file=sys.stderr)
    return 1 if problems else 0


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _send(
    summary: Summary, client: Client, args: argparse.Namespace, bar: Progress, task: TaskID
) -> dict[str, Any]:
    """One outbox: {outbox, sent, problem}."""
    folder, sent, problem = summary.folder, 0, ""
    bar.update(task, description=f"sending {folder}")
    own = client
    # Send to the service for which the items were queued, unless another is given.
    if not args.url and not os.environ.get("STEPWELL_URL") and summary.destination.url:
        own = Client(summary.destination.url, args.token, retry_for=terminal.RETRY_FOR)
    try:
        outbox = reopen(folder, own)
        try:
            if args.retry_rejected and outbox.retry_rejected():
                bar.update(task, total=(bar.tasks[0].total or 0) + outbox.pending - summary.waiting)
            moved = time.monotonic()
            while outbox.pending and time.monotonic() - moved < args.timeout:
                before = outbox.pending
                outbox.flush(TICK)
                if gone := before - outbox.pending:
                    bar.advance(task, gone)
                    moved = time.monotonic()
            problem, sent = outbox.undelivered(), outbox.sent
        finally:
            outbox.close(0.0)
    except OutboxInUse as error:
        problem = f"{error}" if summary.held_by is None else f"{folder}: {_in_use(summary)}"
    except OutboxError as error:
        problem = f"{folder}: {error}"
    finally:
        if own is not client:
            own.close()
    return {"outbox": str(folder.absolute()), "sent": sent, "problem": problem}


def _in_use(summary: Summary) -> str:
    who = f"process {summary.held_by}" if summary.held_by else "a process"
    return f"{who} uses it and sends its {describe(summary.kinds)} itself"


def _found(paths: list[Path]) -> Iterator[Summary]:
    """The outboxes that `paths` mean, each once."""
    roots = paths or [Path("."), *([default_root()] if os.environ.get(ROOT) else [])]
    seen = set()
    for root in roots:
        if not root.is_dir() and paths:
            raise InvalidData(f"there is no folder {root}")
        for folder in find_outboxes(root):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                summary = summarise(folder)
            except OutboxError as error:
                print(f"stepwell outbox: {error}", file=sys.stderr)
                continue
            if summary is not None:
                yield summary


def _places(paths: list[Path]) -> str:
    return ", ".join(map(str, paths)) or str(Path.cwd())
