"""`stepwell import`: upload an offline dataset file and wait until the service has parsed it.

A folder that `stepwell export --format parquet` wrote is read here, and sent as trajectories.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TaskProgressColumn, TextColumn

from stepwell import terminal
from stepwell._folders import is_export
from stepwell._progress import CommandProgress
from stepwell._wording import pluralize
from stepwell.import_options import ARRAY_ROLES, COLUMN_ROLES, OPTIONS
from stepwell.messages import FORMATS, PARTIALLY_OBSERVABLE

ABOUT = """\
Upload an offline dataset (a D4RL, npz, Parquet or Arrow file, or a folder of Minari, AMAGO, RLDS,
LeRobot, Hugging Face, Parquet or Arrow) and wait until the service has stored it.

All trajectories of the file are stored, or none. Importing a file again stores nothing twice.
A folder of `stepwell export --format parquet` is sent trajectory by trajectory: repeat it if it was
interrupted."""
EXAMPLES = """\
  stepwell import hopper-medium-v2.hdf5 --dataset hopper --env Hopper-v5
  stepwell import plays.npz --dataset my-plays --partition fifo
  stepwell import babyai.hdf5 --dataset babyai --option drop-infos=mission,seed
  stepwell import ~/.minari/datasets/D4RL/door/human-v2 --dataset door
  stepwell import ~/amago_runs/my_buffer --dataset old-run
  stepwell import ~/tensorflow_datasets/my_robot/1.0.0 --dataset my-robot
  stepwell import plays.parquet --dataset plays --columns observation=x,y action=push episode=ep
  stepwell import hopper/ --dataset hopper-copy

The layout of the formats: docs/reference/own_data.md, docs/reference/formats.md."""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("import", ABOUT, EXAMPLES)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--dataset", required=True, metavar="NAME", help="created if it does not exist"
    )
    parser.add_argument("--env", default="", metavar="ID", help="environment name, e.g. Hopper-v5")
    parser.add_argument(
        "--format", choices=FORMATS, help="default: from the suffix, or what the folder holds"
    )
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
        help="further option of the importer: " + "; ".join(map(_described, OPTIONS)),
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        default=[],
        metavar="ROLE=COLUMN",
        help="of Parquet, Arrow, LeRobot, npz and flat HDF5: observation=x,y (a vector; "
        "* matches names; observation/arm=… is one of several); episode=worker,id (an id of both); "
        "roles: "
        f"{', '.join((*ARRAY_ROLES, *COLUMN_ROLES))}, info/NAME; what is not given is guessed by "
        "name, ROLE= is none",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds to wait for the job")
    terminal.add_connection(parser)
    args = parser.parse_args(argv)
    options = {}
    for option in args.option:
        key, equals, value = option.partition("=")
        if not equals or not key:
            parser.error(f"--option wants KEY=VALUE, not {option!r}")
        options[key.replace("-", "_")] = value
    if args.columns:
        options["columns"] = args.columns
    bar = CommandProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        quiet=args.json,
    )
    exported = is_export(args.file)
    if exported and options:
        parser.error("a folder of stepwell export has no --option and no --columns")
    with terminal.connect(args) as client, bar:
        sending = bar.add_task("sending" if exported else "uploading", total=None)
        job = client.upload(
            args.dataset,
            args.file,
            format=None if exported else args.format,
            partition=args.partition,
            create=not args.no_create,
            env=args.env,
            progress=lambda done, total: bar.update(sending, completed=done, total=total),
            wait=False,
            **options,
        )
        if not exported:  # of which there is no job: it is stored
            bar.update(sending, description="importing")
            size = bar.tasks[0].total or 1.0
            try:
                job = client.wait_job(
                    job.id,
                    args.timeout,
                    lambda state: bar.update(sending, completed=state.progress * size),
                )
            except KeyboardInterrupt:
                print(
                    f"the service goes on with the import: stepwell jobs follow {job.id}, or"
                    f" stepwell jobs cancel {job.id}",
                    file=sys.stderr,
                )
                raise
        if args.partially_observable:
            tags = client.dataset(args.dataset).tags
            client.patch_dataset(args.dataset, tags=sorted({*tags, PARTIALLY_OBSERVABLE}))
    result = job.result or {}
    if args.json:
        terminal.print_json(job.result if exported else job)
        return 0
    for warning in result.get("warnings", []):
        print(f"stepwell: note: {terminal.printable(str(warning))}", file=sys.stderr)
    trajectories = pluralize(result.get("trajectories", 0), "trajectory", "trajectories")
    steps = pluralize(result.get("steps", 0), "step")
    print(f"{args.file.name} → {result.get('dataset', args.dataset)}: {trajectories}, {steps}")
    return 0


def _described(name: str) -> str:
    option = OPTIONS[name]
    return f"{name.replace('_', '-')}={option.example} ({option.about})"
