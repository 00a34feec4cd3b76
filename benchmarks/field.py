"""The datasets on which offline recipes are compared, and how each is made.

    python -m benchmarks.field                       the table
    python -m benchmarks.field --make FOLDER [NAME …] makes what is missing in the folder

At most half of the datasets may be used to fit a rule ("fit"). The others, with some of each kind,
are only reported ("held-out"). A file is a pure function of its command; delete it when the
generator has changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from collector.builtin import (
    BANDIT_ID,
    CARTPOLE_POSITION_ID,
    CARTPOLE_VELOCITY_ID,
    FIND_BLOCK_IMAGE_ID,
    GRIDWORLD_ID,
    MAZE2D_LARGE_ID,
    MAZE2D_MEDIUM_ID,
    MODIFIED_ID,
    RECALL_ID,
    TMAZE_PASSIVE_ID,
)
from collector.builtin.__main__ import main as generator
from collector.builtin.generate_ars import ARS_KINDS

Group = Literal["fit", "held-out", "file"]
FIT: Group = "fit"
HELD_OUT: Group = "held-out"
FILE: Group = "file"
"""A file that somebody brings."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One row of the table."""

    name: str
    kind: str
    """What it tests; there are datasets of each kind in both groups."""
    group: Group
    command: str
    """Arguments of `python -m collector.builtin` without the file."""
    environment: str
    """The environment in which a policy is evaluated."""
    env_args: Mapping[str, Any] = field(default_factory=dict)
    memory: bool = False
    """Whether the observations alone do not determine the best action."""


def _modified(
    env: str,
    reward_scale: float = 1.0,
    constant_action: bool = False,
    hide: Sequence[int] = (),
    units: tuple[float, float] | None = None,
) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "env": env,
        "reward_scale": reward_scale,
        "constant_action": constant_action,
    }
    if hide:
        changes["hide"] = list(hide)
    if units is not None:
        changes["observation_scale"], changes["observation_shift"] = units
    return changes


PENDULUM, HALFCHEETAH, HOPPER, WALKER2D = (
    "Pendulum-v1",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
)
LANDER, LANDER_DISCRETE = "LunarLanderContinuous-v3", "LunarLander-v3"

FIELD = (
    Dataset("pendulum-stitch", "control", FIT, "pendulum-stitch", PENDULUM),
    Dataset("pendulum-mixed", "control", HELD_OUT, "pendulum-mixed", PENDULUM),
    Dataset("lunarlander", "control", FIT, "lunarlander-noisy", LANDER),
    Dataset("lunarlander-discrete", "control", FIT, "lunarlander-discrete-noisy", LANDER_DISCRETE),
    Dataset("mountaincar", "control", FIT, "mountaincar-noisy", "MountainCar-v0"),
    Dataset(
        "mountaincar-continuous",
        "control",
        FIT,
        "mountaincar-continuous-noisy",
        "MountainCarContinuous-v0",
    ),
    Dataset("acrobot", "control", HELD_OUT, "acrobot-noisy", "Acrobot-v1"),
    Dataset(
        "inverted-double-pendulum",
        "control",
        HELD_OUT,
        "inverted-double-pendulum-noisy",
        "InvertedDoublePendulum-v5",
    ),
    Dataset("reacher", "control", HELD_OUT, "reacher-noisy", "Reacher-v5"),
    Dataset("pusher", "control", HELD_OUT, "pusher-noisy", "Pusher-v5"),
    Dataset("taxi", "control", HELD_OUT, "taxi-noisy", "Taxi-v4"),
    Dataset(
        "cliff-walking",
        "control",
        HELD_OUT,
        "cliff-walking-noisy",
        "CliffWalking-v1",
        {"max_episode_steps": 100},
    ),
    Dataset(
        "cliff-walking-slippery",
        "control",
        HELD_OUT,
        "cliff-walking-noisy --env-args is_slippery=true max_episode_steps=100",
        "CliffWalking-v1",
        {"is_slippery": True, "max_episode_steps": 100},
    ),
    Dataset("halfcheetah-medium", "locomotion", FIT, "halfcheetah-medium", HALFCHEETAH),
    Dataset("halfcheetah-replay", "locomotion", HELD_OUT, "halfcheetah-replay", HALFCHEETAH),
    Dataset("halfcheetah-expert", "locomotion", HELD_OUT, "halfcheetah-expert", HALFCHEETAH),
    Dataset("halfcheetah-mixed", "locomotion", FIT, "halfcheetah-medium-expert", HALFCHEETAH),
    Dataset("hopper-medium", "locomotion", HELD_OUT, "hopper-medium", HOPPER),
    Dataset("hopper-replay", "locomotion", FIT, "hopper-replay", HOPPER),
    Dataset("hopper-expert", "locomotion", FIT, "hopper-expert", HOPPER),
    Dataset("hopper-mixed", "locomotion", HELD_OUT, "hopper-medium-expert", HOPPER),
    Dataset("walker2d-medium", "locomotion", FIT, "walker2d-medium", WALKER2D),
    Dataset("walker2d-replay", "locomotion", FIT, "walker2d-replay", WALKER2D),
    Dataset("walker2d-expert", "locomotion", HELD_OUT, "walker2d-expert", WALKER2D),
    Dataset("walker2d-mixed", "locomotion", HELD_OUT, "walker2d-medium-expert", WALKER2D),
    Dataset("hopper-early", "locomotion", FIT, "hopper-early", HOPPER),
    Dataset("walker2d-early", "locomotion", FIT, "walker2d-early", WALKER2D),
    Dataset("swimmer", "locomotion", FIT, "swimmer-noisy", "Swimmer-v5"),
    Dataset("bipedal-walker", "locomotion", FIT, "bipedal-walker-noisy", "BipedalWalker-v3"),
    Dataset("maze2d-medium", "maze", FIT, "maze2d-medium", MAZE2D_MEDIUM_ID),
    Dataset("maze2d-large", "maze", HELD_OUT, "maze2d-large", MAZE2D_LARGE_ID),
    Dataset("maze2d-30", "sparse", FIT, "maze2d-sparse --successes 0.3", MAZE2D_MEDIUM_ID),
    Dataset("maze2d-10", "sparse", HELD_OUT, "maze2d-sparse --successes 0.1", MAZE2D_MEDIUM_ID),
    Dataset("gridworld", "sparse", FIT, "gridworld-random --episodes 500", GRIDWORLD_ID),
    Dataset(
        "gridworld-10",
        "sparse",
        HELD_OUT,
        "gridworld-random --episodes 1000 --env-args size=10 limit=40",
        GRIDWORLD_ID,
        {"size": 10, "limit": 40},
    ),
    Dataset(
        "frozen-lake",
        "sparse",
        FIT,
        "frozen-lake-noisy",
        "FrozenLake-v1",
        {"map_name": "8x8"},
    ),
    Dataset(
        "frozen-lake-4",
        "sparse",
        HELD_OUT,
        "frozen-lake-noisy --env-args map_name=4x4 --steps 8000",
        "FrozenLake-v1",
        {"map_name": "4x4"},
    ),
    Dataset(
        "tmaze-20",
        "memory",
        FIT,
        "tmaze-passive --corridor-length 20",
        TMAZE_PASSIVE_ID,
        {"corridor_length": 20},
        memory=True,
    ),
    Dataset(
        "tmaze-100",
        "memory",
        FIT,
        "tmaze-passive --corridor-length 100 --steps 101000",
        TMAZE_PASSIVE_ID,
        {"corridor_length": 100},
        memory=True,
    ),
    Dataset(
        "tmaze-60",
        "memory",
        HELD_OUT,
        "tmaze-passive --corridor-length 60 --steps 61000",
        TMAZE_PASSIVE_ID,
        {"corridor_length": 60},
        memory=True,
    ),
    Dataset("recall", "memory", FIT, "recall-random", RECALL_ID, memory=True),
    Dataset(
        "recall-30",
        "memory",
        HELD_OUT,
        "recall-random --steps 64000 --env-args symbols=6 delay=30",
        RECALL_ID,
        {"symbols": 6, "delay": 30},
        memory=True,
    ),
    Dataset(
        "cartpole-position",
        "memory",
        FIT,
        "cartpole-position",
        CARTPOLE_POSITION_ID,
        memory=True,
    ),
    Dataset(
        "cartpole-velocity",
        "memory",
        HELD_OUT,
        "cartpole-velocity",
        CARTPOLE_VELOCITY_ID,
        memory=True,
    ),
    Dataset(
        "pendulum-stitch-position",
        "memory",
        FIT,
        "pendulum-stitch --hide 2",
        MODIFIED_ID,
        _modified(PENDULUM, hide=(2,)),
        memory=True,
    ),
    Dataset(
        "pendulum-mixed-position",
        "memory",
        HELD_OUT,
        "pendulum-mixed --hide 2",
        MODIFIED_ID,
        _modified(PENDULUM, hide=(2,)),
        memory=True,
    ),
    Dataset(
        "lunarlander-position",
        "memory",
        FIT,
        "lunarlander-noisy --hide 2 3 5",
        MODIFIED_ID,
        _modified(LANDER, hide=(2, 3, 5)),
        memory=True,
    ),
    Dataset(
        "lunarlander-angle",
        "memory",
        FIT,
        "lunarlander-noisy --hide 4 5",
        MODIFIED_ID,
        _modified(LANDER, hide=(4, 5)),
        memory=True,
    ),
    Dataset(
        "reacher-position",
        "memory",
        FIT,
        "reacher-noisy --hide 6 7",
        MODIFIED_ID,
        _modified("Reacher-v5", hide=(6, 7)),
        memory=True,
    ),
    Dataset(
        "pusher-position",
        "memory",
        HELD_OUT,
        "pusher-noisy --hide 7 8 9 10 11 12 13",
        MODIFIED_ID,
        _modified("Pusher-v5", hide=(7, 8, 9, 10, 11, 12, 13)),
        memory=True,
    ),
    Dataset(
        "inverted-double-pendulum-position",
        "memory",
        HELD_OUT,
        "inverted-double-pendulum-noisy --hide 5 6 7",
        MODIFIED_ID,
        _modified("InvertedDoublePendulum-v5", hide=(5, 6, 7)),
        memory=True,
    ),
    Dataset(
        "mountaincar-continuous-position",
        "memory",
        HELD_OUT,
        "mountaincar-continuous-noisy --hide 1",
        MODIFIED_ID,
        _modified("MountainCarContinuous-v0", hide=(1,)),
        memory=True,
    ),
    Dataset("find-block", "image", FIT, "find-block-noisy", FIND_BLOCK_IMAGE_ID),
    Dataset(
        "find-block-4",
        "image",
        FIT,
        "find-block-noisy --env-args colours=4",
        FIND_BLOCK_IMAGE_ID,
        {"colours": 4},
    ),
    Dataset(
        "find-block-3",
        "image",
        HELD_OUT,
        "find-block-noisy --env-args colours=3",
        FIND_BLOCK_IMAGE_ID,
        {"colours": 3},
    ),
    Dataset(
        "find-block-20",
        "image",
        HELD_OUT,
        "find-block-noisy --env-args colours=3 steps=20",
        FIND_BLOCK_IMAGE_ID,
        {"colours": 3, "steps": 20},
    ),
    Dataset("bandit-discrete", "one step", FIT, "bandit-discrete", BANDIT_ID),
    Dataset(
        "bandit-continuous",
        "one step",
        HELD_OUT,
        "bandit-continuous",
        BANDIT_ID,
        {"continuous": True},
    ),
    Dataset("five-cheetah", "few episodes", FIT, "halfcheetah-expert --episodes 5", HALFCHEETAH),
    Dataset("five-lander", "few episodes", FIT, "lunarlander-noisy --episodes 5", LANDER),
    Dataset("five-pendulum", "few episodes", FIT, "pendulum-mixed --episodes 5", PENDULUM),
    Dataset("five-hopper", "few episodes", HELD_OUT, "hopper-expert --episodes 5", HOPPER),
    Dataset("ten-pendulum", "few episodes", HELD_OUT, "pendulum-stitch --episodes 10", PENDULUM),
    Dataset("ten-lander", "few episodes", FIT, "lunarlander-noisy --episodes 10", LANDER),
    Dataset("ten-pusher", "few episodes", FIT, "pusher-noisy --episodes 10", "Pusher-v5"),
    Dataset("few-reacher", "few episodes", FIT, "reacher-noisy --episodes 19", "Reacher-v5"),
    Dataset("few-pusher", "few episodes", HELD_OUT, "pusher-noisy --episodes 18", "Pusher-v5"),
    Dataset("few-pendulum", "few episodes", HELD_OUT, "pendulum-mixed --episodes 15", PENDULUM),
    Dataset("few-acrobot", "few episodes", FIT, "acrobot-noisy --episodes 10", "Acrobot-v1"),
    Dataset(
        "few-mountaincar",
        "few episodes",
        HELD_OUT,
        "mountaincar-noisy --episodes 15",
        "MountainCar-v0",
    ),
    Dataset(
        "few-cliff-walking",
        "few episodes",
        HELD_OUT,
        "cliff-walking-noisy --episodes 15",
        "CliffWalking-v1",
        {"max_episode_steps": 100},
    ),
    Dataset(
        "few-double-pendulum",
        "few episodes",
        HELD_OUT,
        "inverted-double-pendulum-noisy --episodes 19",
        "InvertedDoublePendulum-v5",
    ),
    Dataset(
        "pendulum-constant-action",
        "constant action",
        FIT,
        "pendulum-mixed --constant-action",
        MODIFIED_ID,
        _modified(PENDULUM, constant_action=True),
    ),
    Dataset(
        "lunarlander-constant-action",
        "constant action",
        HELD_OUT,
        "lunarlander-noisy --constant-action",
        MODIFIED_ID,
        _modified(LANDER, constant_action=True),
    ),
    Dataset(
        "pendulum-quiet",
        "reward scale",
        FIT,
        "pendulum-stitch --reward-scale 1e-3",
        MODIFIED_ID,
        _modified(PENDULUM, reward_scale=1e-3),
    ),
    Dataset(
        "lunarlander-quiet",
        "reward scale",
        HELD_OUT,
        "lunarlander-noisy --reward-scale 1e-3",
        MODIFIED_ID,
        _modified(LANDER, reward_scale=1e-3),
    ),
    Dataset(
        "lunarlander-loud",
        "reward scale",
        FIT,
        "lunarlander-discrete-noisy --reward-scale 1e4",
        MODIFIED_ID,
        _modified(LANDER_DISCRETE, reward_scale=1e4),
    ),
    Dataset(
        "acrobot-loud",
        "reward scale",
        HELD_OUT,
        "acrobot-noisy --reward-scale 1e4",
        MODIFIED_ID,
        _modified("Acrobot-v1", reward_scale=1e4),
    ),
    Dataset(
        "pendulum-loud",
        "reward scale",
        HELD_OUT,
        "pendulum-mixed --reward-scale 1e4",
        MODIFIED_ID,
        _modified(PENDULUM, reward_scale=1e4),
    ),
    Dataset(
        "pendulum-small-units",
        "observation scale",
        FIT,
        "pendulum-stitch --observation-scale 1e-5",
        MODIFIED_ID,
        _modified(PENDULUM, units=(1e-5, 0.0)),
    ),
    Dataset(
        "lunarlander-small-units",
        "observation scale",
        HELD_OUT,
        "lunarlander-discrete-noisy --observation-scale 1e-4",
        MODIFIED_ID,
        _modified(LANDER_DISCRETE, units=(1e-4, 0.0)),
    ),
    Dataset(
        "reacher-far",
        "observation scale",
        HELD_OUT,
        "reacher-noisy --observation-shift 10000",
        MODIFIED_ID,
        _modified("Reacher-v5", units=(1.0, 10_000.0)),
    ),
)
BY_NAME = {dataset.name: dataset for dataset in FIELD}


def arguments(dataset: Dataset, folder: Path) -> list[str]:
    """The arguments of the generator that write `dataset` to its file in `folder`."""
    kind, *options = dataset.command.split()
    # The trained policies are kept beside the files, so that an environment is trained once.
    snapshots = ["--snapshots", str(folder / "snapshots")] if kind in ARS_KINDS else []
    return [kind, str(folder / f"{dataset.name}.hdf5"), *snapshots, *options]


def make(dataset: Dataset, folder: Path) -> Path:
    """The dataset's file in `folder`, made if it is missing, or `RuntimeError` if that fails."""
    path = folder / f"{dataset.name}.hdf5"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if status := generator(arguments(dataset, folder)):
            raise RuntimeError(f"{dataset.name}: the generator failed with exit status {status}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make what is missing here")
    parser.add_argument("names", nargs="*", metavar="NAME", help="datasets (default: all)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BY_NAME):
        parser.error(f"no dataset {sorted(unknown)}; see python -m benchmarks.field")
    for dataset in [BY_NAME[name] for name in args.names] or FIELD:
        print(f"{dataset.name:28} {dataset.kind:16} {dataset.group:9} {dataset.command}")
        if args.make is not None:
            make(dataset, args.make)


if __name__ == "__main__":
    main()
