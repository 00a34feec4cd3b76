"""`stepwell deliver FOLDER …`: send what runs that are over could not, without training on.

    stepwell deliver runs/first
    stepwell deliver runs/*

A run that is resumed does the same by itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from contextlib import closing
from pathlib import Path

from stepwell.client import Client
from stepwell.commands import common
from stepwell.errors import StepwellError
from trainer.delivery import Delivery, take_folder
from trainer.errors import SettingError
from trainer.metrics import MetricLog
from trainer.publish import Publisher
from trainer.run_log import RunLog

EVERY = 0.2


def main(argv: list[str] | None = None) -> int:
    """Deliver; 0 if nothing is left anywhere."""
    parser = common.parser(
        "deliver",
        "Send the metrics, log lines and policies that ended training runs still keep on this "
        "machine because the service was away.",
        "  stepwell deliver runs/first\n  stepwell deliver runs/* --timeout 600",
    )
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run: its --output / --run")
    add("--timeout", type=float, default=60.0, help="seconds to try for each (default: 60)")
    common.add_connection(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with common.connect(args) as client:
        client.retry_for = 0.0  # the thread of each queue is the retry
        reports = [deliver(folder, client, args) for folder in args.folders]
    if args.json:
        common.print_json(reports)
    return 0 if all(report["unsent"] == 0 for report in reports) else 1


def deliver(folder: Path, client: Client, args: argparse.Namespace) -> dict[str, object]:
    """What became of one run's folder. Raises `StepwellError` where it is none, or in use."""
    run = _run_of(folder)
    with closing(take_folder(folder, run)):
        queues: list[Delivery] = [
            MetricLog(folder, client, run, every=EVERY),
            Publisher(folder / "policies", client, run, every=EVERY),
            RunLog(folder, client, run, every=EVERY),
        ]
        before = sum(queue.unsent for queue in queues)
        for queue in queues:
            queue.close(args.timeout)
        left = sum(queue.unsent for queue in queues)
        why = "; ".join(queue.trouble for queue in queues if queue.trouble)
    if not args.json:
        print(f"{run}: {common.size(before - left)} sent, {common.size(left)} left")
        if left:
            print(f"stepwell deliver: {why or 'out of time'}", file=sys.stderr)
    return {"run": run, "sent": before - left, "unsent": left, "trouble": why}


def _run_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / "run.json").read_bytes())["name"])
    except (OSError, ValueError, KeyError, TypeError):
        raise SettingError(
            f"{folder} is not the folder of a training run: it has no run.json that reads; give "
            "one such as runs/first"
        ) from None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StepwellError as error:
        print(f"stepwell deliver: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
