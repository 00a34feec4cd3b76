"""Make an offline dataset: `python -m collector.builtin pendulum-stitch OUT.hdf5`."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from collector.builtin.generate_lunarlander import lunarlander_noisy
from collector.builtin.generate_pendulum import pendulum_stitch
from collector.builtin.generate_tmaze import tmaze_passive
from collector.builtin.scripted import Summary
from stepwell._failure import fail
from stepwell.errors import StepwellError

_DESCRIPTION = """\
Make an offline dataset: a scripted behaviour plays a real gymnasium environment,
and what happened is written as one HDF5 file in the layout of D4RL.
The same arguments always give the same file.
"""

_EPILOG = """\
examples:
  the demo's data: 100,000 steps of Pendulum-v1 in which no episode is good (3 s)
      python -m collector.builtin pendulum-stitch pendulum.hdf5
  a small one, from other initial states
      python -m collector.builtin pendulum-stitch small.hdf5 --steps 2000 --seed 7
  memory over 100 steps
      python -m collector.builtin tmaze-passive tmaze.hdf5 --corridor-length 100
"""

_HELP = {
    "pendulum-stitch": "Pendulum-v1; random, weak and expert torque change hands inside episodes",
    "lunarlander-noisy": "LunarLanderContinuous-v3; a heuristic with noise (needs Box2D)",
    "tmaze-passive": "the passive T-Maze; walks right, then turns at random",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m collector.builtin",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, text in _HELP.items():
        kind = kinds.add_parser(name, help=text, description=text)
        kind.add_argument("out", type=Path, metavar="OUT.hdf5", help="the file to write or replace")
        default_steps = 42_000 if name == "tmaze-passive" else 100_000
        kind.add_argument(
            "--steps",
            type=int,
            default=default_steps,
            help="at least so many steps; the last episode is finished (default: %(default)s)",
        )
        kind.add_argument(
            "--seed",
            type=int,
            default=0,
            help="decides initial states and behaviour; files of different seeds share no episode "
            "(default: %(default)s)",
        )
        kind.add_argument("--json", action="store_true", help="print the summary as JSON")
        if name == "tmaze-passive":
            kind.add_argument(
                "--corridor-length",
                type=int,
                default=20,
                help="steps between the cue and the turn (default: %(default)s)",
            )
    return parser


def _generate(args: argparse.Namespace, progress: Callable[[int, int], None]) -> Summary:
    if args.kind == "pendulum-stitch":
        return pendulum_stitch(args.out, args.steps, args.seed, progress)
    if args.kind == "lunarlander-noisy":
        return lunarlander_noisy(args.out, args.steps, args.seed, progress)
    return tmaze_passive(
        args.out, args.steps, args.seed, progress, corridor_length=args.corridor_length
    )


def _show(summary: Summary, out: Path, seconds: float) -> None:
    table = Table(title=str(out), show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("steps", f"{summary.steps:,}")
    table.add_row("episodes", f"{summary.episodes:,}")
    table.add_row("mean return", f"{summary.mean_return:.2f}")
    table.add_row("90th percentile", f"{summary.p90_return:.2f}")
    table.add_row("best return", f"{summary.best_return:.2f}")
    table.add_row("seconds", f"{seconds:.1f}")
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the file is written, else 1 or 2 (see upkeep.md) and one sentence."""
    args = _parser().parse_args(argv)
    if not args.out.parent.is_dir():  # said before the work, not after it
        said = f"no folder {args.out.parent} to write into; create it"
        return fail(args.kind, said, status=2)
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        # On stderr, so that `--json > summary.json` holds JSON and nothing else.
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(args.kind, total=args.steps)
            summary = _generate(args, lambda done, _: bar.update(task, completed=done))
    except (StepwellError, OSError) as error:
        return fail(args.kind, error)
    except KeyboardInterrupt:
        print(f"{args.kind}: stopped, nothing written", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    if args.json:
        facts = {"path": str(args.out), **dataclasses.asdict(summary), "seconds": seconds}
        print(json.dumps(facts))
    else:
        _show(summary, args.out, seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
