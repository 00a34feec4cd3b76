"""Make an offline dataset: `python -m collector.builtin pendulum-stitch OUT.hdf5`."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from collector.builtin.generate import Behaviour, generate
from collector.builtin.generate_ars import ARS_KINDS, ArsBehaviour
from collector.builtin.generate_bipedal_walker import BipedalWalkerNoisy
from collector.builtin.generate_cartpole import CartPolePositionNoisy, CartPoleVelocityNoisy
from collector.builtin.generate_classic_control import (
    AcrobotNoisy,
    MountainCarContinuousNoisy,
    MountainCarNoisy,
)
from collector.builtin.generate_find_block import FindBlockNoisy
from collector.builtin.generate_lunarlander import LunarLanderDiscreteNoisy, LunarLanderNoisy
from collector.builtin.generate_maze2d import Maze2dLarge, Maze2dMedium, Maze2dSparse
from collector.builtin.generate_mujoco import (
    InvertedDoublePendulumNoisy,
    PusherNoisy,
    ReacherNoisy,
    SwimmerNoisy,
)
from collector.builtin.generate_pendulum import PendulumMixed, PendulumStitch
from collector.builtin.generate_random import (
    BanditContinuous,
    BanditDiscrete,
    GridworldRandom,
    RecallRandom,
)
from collector.builtin.generate_tmaze import TMazePassiveCoin
from collector.builtin.generate_toy_text import CliffWalkingNoisy, FrozenLakeNoisy, TaxiNoisy
from stepwell._exit_message import fail
from stepwell.errors import InvalidData, StepwellError

_DESCRIPTION = """\
Make an offline dataset: a scripted behaviour policy acts in a gymnasium environment,
and its episodes are written as one HDF5 file in the D4RL layout.
The same arguments always give the same file.
"""

_EPILOG = """\
examples:
  the demo's data: 100,000 steps of Pendulum-v1, all episodes with a low return (3 s)
      python -m collector.builtin pendulum-stitch pendulum.hdf5
  a smaller dataset with another seed
      python -m collector.builtin pendulum-stitch small.hdf5 --steps 2000 --seed 7
  the four datasets of Hopper, with one training of 2 CPU minutes
      python -m collector.builtin hopper-medium medium.hdf5 --snapshots policies
      python -m collector.builtin hopper-replay replay.hdf5 --snapshots policies  (and so on)
  a T-Maze whose cue must be remembered for 100 steps
      python -m collector.builtin tmaze-passive tmaze.hdf5 --corridor-length 100
"""

KINDS: dict[str, type[Behaviour]] = {
    "pendulum-stitch": PendulumStitch,
    "pendulum-mixed": PendulumMixed,
    "lunarlander-noisy": LunarLanderNoisy,
    "lunarlander-discrete-noisy": LunarLanderDiscreteNoisy,
    "tmaze-passive": TMazePassiveCoin,
    "gridworld-random": GridworldRandom,
    "bandit-discrete": BanditDiscrete,
    "bandit-continuous": BanditContinuous,
    "recall-random": RecallRandom,
    "cartpole-position": CartPolePositionNoisy,
    "cartpole-velocity": CartPoleVelocityNoisy,
    "find-block-noisy": FindBlockNoisy,
    "maze2d-medium": Maze2dMedium,
    "maze2d-large": Maze2dLarge,
    "maze2d-sparse": Maze2dSparse,
    "mountaincar-noisy": MountainCarNoisy,
    "mountaincar-continuous-noisy": MountainCarContinuousNoisy,
    "acrobot-noisy": AcrobotNoisy,
    "inverted-double-pendulum-noisy": InvertedDoublePendulumNoisy,
    "reacher-noisy": ReacherNoisy,
    "pusher-noisy": PusherNoisy,
    "swimmer-noisy": SwimmerNoisy,
    "bipedal-walker-noisy": BipedalWalkerNoisy,
    "frozen-lake-noisy": FrozenLakeNoisy,
    "taxi-noisy": TaxiNoisy,
    "cliff-walking-noisy": CliffWalkingNoisy,
    **ARS_KINDS,
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m collector.builtin",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, behaviour in KINDS.items():
        kind = kinds.add_parser(name, help=behaviour.about, description=behaviour.about)
        kind.add_argument("out", type=Path, metavar="OUT.hdf5", help="the file to write or replace")
        at_least = "minimum number of steps; the last episode is completed"
        size = kind.add_mutually_exclusive_group()
        size.add_argument("--steps", type=int, help=f"{at_least} (default: {behaviour.steps})")
        size.add_argument("--episodes", type=int, help="number of episodes, instead of steps")
        chance = "random seed of environment and policy; different seeds share no episode"
        kind.add_argument("--seed", type=int, default=0, help=f"{chance} (default: %(default)s)")
        changes = "arguments of the environment; values are JSON if possible"
        kind.add_argument("--env-args", nargs="+", default=[], metavar="KEY=VALUE", help=changes)
        kind.add_argument("--json", action="store_true", help="print the summary as JSON")
        scale = "multiply every reward with this (default: %(default)s)"
        kind.add_argument("--reward-scale", type=float, default=1.0, metavar="X", help=scale)
        constant = "add an action dimension that is always 0 and has no effect"
        kind.add_argument("--constant-action", action="store_true", help=constant)
        hidden = "leave out these numbers of each observation; the behaviour policy sees them"
        kind.add_argument("--hide", type=int, nargs="+", default=[], metavar="INDEX", help=hidden)
        units = "multiply every observed number with this (default: %(default)s)"
        kind.add_argument("--observation-scale", type=float, default=1.0, metavar="X", help=units)
        units = "then add this to every observed number (default: %(default)s)"
        kind.add_argument("--observation-shift", type=float, default=0.0, metavar="X", help=units)
        if name == "tmaze-passive":
            length = "number of steps between the cue and the junction (default: %(default)s)"
            kind.add_argument("--corridor-length", type=int, default=20, help=length)
        if name == "maze2d-sparse":
            share = "share of the visits of the rewarded cell that are kept (default: %(default)s)"
            kind.add_argument("--successes", type=float, default=0.1, metavar="0..1", help=share)
        if issubclass(behaviour, ArsBehaviour):
            folder = "read the trained policies from this folder, or write them to it"
            kind.add_argument("--snapshots", type=Path, metavar="FOLDER", help=folder)
    return parser


def _pair(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidData("--env-args", expected="KEY=VALUE", got=repr(text))
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status (docs/reference/maintenance.md)."""
    args = parser().parse_args(argv)
    if not args.out.parent.is_dir():  # checked before the episodes are generated
        missing = f"no folder {args.out.parent} to write into; create it"
        return fail(args.kind, missing, status=2)
    given = {name: vars(args).get(name) for name in ("successes", "snapshots")}
    policy_args = {name: value for name, value in given.items() if value is not None}
    started = time.monotonic()
    try:
        env_args = dict(map(_pair, args.env_args))
        if args.kind == "tmaze-passive":
            env_args["corridor_length"] = args.corridor_length
        # The progress bar goes to stderr, so that `--json > summary.json` contains only JSON.
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(args.kind, total=None)
            summary = generate(
                KINDS[args.kind],
                args.out,
                args.steps,
                args.seed,
                lambda done, total: bar.update(task, completed=done, total=total),
                episodes=args.episodes,
                reward_scale=args.reward_scale,
                constant_action=args.constant_action,
                hide=args.hide,
                observation_scale=args.observation_scale,
                observation_shift=args.observation_shift,
                policy_args=policy_args,
                env_args=env_args,
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
