"""Make an offline dataset: `python -m collector.builtin pendulum-stitch OUT.hdf5`."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from collector.builtin.generate import Summary
from collector.builtin.generate_lunarlander import lunarlander_noisy
from collector.builtin.generate_pendulum import pendulum_stitch
from collector.builtin.generate_tmaze import tmaze_passive
from stepwell._exit_message import fail
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

_KINDS: dict[str, tuple[Callable[..., Summary], int, str]] = {
    "pendulum-stitch": (
        pendulum_stitch,
        100_000,
        "Pendulum-v1; random, weak and expert torque change hands inside episodes",
    ),
    "lunarlander-noisy": (
        lunarlander_noisy,
        100_000,
        "LunarLanderContinuous-v3; a heuristic with noise (needs Box2D)",
    ),
    "tmaze-passive": (
        tmaze_passive,
        42_000,
        "the passive T-Maze; walks right, then turns at random",
    ),
}
"""Name -> (generator, default steps, help)."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m collector.builtin",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (_, steps, text) in _KINDS.items():
        kind = kinds.add_parser(name, help=text, description=text)
        kind.add_argument("out", type=Path, metavar="OUT.hdf5", help="the file to write or replace")
        at_least = "at least so many steps; the last episode is finished (default: %(default)s)"
        kind.add_argument("--steps", type=int, default=steps, help=at_least)
        chance = "of initial states and behaviour; files of different seeds share no episode"
        kind.add_argument("--seed", type=int, default=0, help=f"{chance} (default: %(default)s)")
        kind.add_argument("--json", action="store_true", help="print the summary as JSON")
        if name == "tmaze-passive":
            length = "steps between the cue and the turn (default: %(default)s)"
            kind.add_argument("--corridor-length", type=int, default=20, help=length)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the file is written, else 1 or 2 (docs/maintenance.md)."""
    args = _parser().parse_args(argv)
    if not args.out.parent.is_dir():  # checked before the work
        missing = f"no folder {args.out.parent} to write into; create it"
        return fail(args.kind, missing, status=2)
    generator = _KINDS[args.kind][0]
    if args.kind == "tmaze-passive":
        generator = partial(generator, corridor_length=args.corridor_length)
    started = time.monotonic()
    try:
        # On stderr, so that `--json > summary.json` holds JSON and nothing else.
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(args.kind, total=args.steps)
            summary = generator(
                args.out, args.steps, args.seed, lambda done, _: bar.update(task, completed=done)
            )
    except (StepwellError, OSError) as error:
        return fail(args.kind, error)
    except KeyboardInterrupt:
        print(f"{args.kind}: stopped, nothing written", file=sys.stderr)
        return 130
    facts = {"path": str(args.out), **dataclasses.asdict(summary)}
    facts["seconds"] = time.monotonic() - started
    if args.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            text = f"{value:,.2f}" if isinstance(value, float) else str(value)
            print(f"{name.replace('_', ' '):12} {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
