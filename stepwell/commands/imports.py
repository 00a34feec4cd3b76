"""`stepwell import`: upload an offline dataset file and wait until the service has parsed it."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn

from stepwell._plural import pluralize
from stepwell.commands import common
from stepwell.messages import PARTIALLY_OBSERVABLE

ABOUT = """\
Upload an offline dataset, a D4RL (HDF5) or npz file, and wait until the service has stored it.

All trajectories of the file are stored, or none. Importing a file again stores nothing twice."""
EXAMPLES = """\
  stepwell import hopper-medium-v2.hdf5 --dataset hopper --env Hopper-v5
  stepwell import plays.npz --dataset my-plays --partition fifo
  stepwell import babyai.hdf5 --dataset babyai --option drop-infos=mission,seed

The layout of both formats: docs/own_data.md."""


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("import", ABOUT, EXAMPLES)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--dataset", required=True, metavar="NAME", help="created if it does not exist"
    )
    parser.add_argument("--env", default="", metavar="ID", help="environment name, e.g. Hopper-v5")
    parser.add_argument("--format", choices=("d4rl", "npz"), help="default: from the suffix")
    parser.add_argument(
        "--partition",
        choices=("protected", "fifo"),
        default="protected",
        help="default: protected, which is never evicted",
    )
    parser.add_argument(
        "--partially-observable",
        action="store_true",
        help="one observation does not show the state, so `stepwell train offline` uses memory: "
        "tag the dataset",
    )
    parser.add_argument("--no-create", action="store_true", help="the dataset must exist already")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="further option of the importer: action=discrete:6, "
        "observation=discrete:64, max-steps=1000, drop-infos=NAME,…",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds to wait for the job")
    common.add_connection(parser)
    args = parser.parse_args(argv)
    options = {}
    for option in args.option:
        key, equals, value = option.partition("=")
        if not equals or not key:
            parser.error(f"--option wants KEY=VALUE, not {option!r}")
        options[key.replace("-", "_")] = value
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        disable=args.json or not sys.stderr.isatty(),
    )
    with common.connect(args) as client, bar:
        sending = bar.add_task("uploading", total=None)
        job = client.upload(
            args.dataset,
            args.file,
            format=args.format,
            partition=args.partition,
            create=not args.no_create,
            env=args.env,
            progress=lambda done, total: bar.update(sending, completed=done, total=total),
            wait=False,
            **options,
        )
        bar.update(sending, description="importing")
        size = bar.tasks[0].total or 1.0
        job = client.wait_job(
            job.id,
            args.timeout,
            lambda state: bar.update(sending, completed=state.progress * size),
        )
        if args.partially_observable:
            tags = client.dataset(args.dataset).tags
            client.patch_dataset(args.dataset, tags=sorted({*tags, PARTIALLY_OBSERVABLE}))
    if args.json:
        common.print_json(job)
        return 0
    result = job.result or {}
    for warning in result.get("warnings", []):
        print(f"stepwell: note: {common.printable(str(warning))}", file=sys.stderr)
    trajectories = pluralize(result.get("trajectories", 0), "trajectory", "trajectories")
    steps = pluralize(result.get("steps", 0), "step")
    print(f"{args.file.name} → {result.get('dataset', args.dataset)}: {trajectories}, {steps}")
    return 0
