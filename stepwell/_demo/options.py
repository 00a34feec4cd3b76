"""What the demo's command line says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EVALUATION_SEEDS = 30
# What the demo knows of environments: the recipe made for each. Any other gets `offline`.
RECIPES = {
    "Pendulum-v1": "pendulum_stitch",
    "LunarLanderContinuous-v3": "lunarlander_continuous",
}
# The data that ships with us; any other environment needs a file of its own.
GENERATORS = {
    "Pendulum-v1": "pendulum-stitch",
    "LunarLanderContinuous-v3": "lunarlander-noisy",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    data: Path
    dataset: Path | None
    env: str
    recipe: str
    seed: int
    steps: int
    updates: int | None
    episodes: int
    collect_episodes: int
    port: int
    dashboard: bool
    stay: bool
    json: Path | None


def parse(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="stepwell demo",
        description="Upload an offline dataset, learn from it, evaluate, collect, query: "
        "every part of the platform, as separate processes on this machine.",
        epilog="examples:\n"
        "  stepwell demo\n"
        "  stepwell demo --env LunarLanderContinuous-v3\n"
        "  stepwell demo --dataset hopper-medium-v2.hdf5 --env Hopper-v5 --updates 20000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", type=Path, help="a D4RL-layout HDF5 file (default: made for --env)")
    add(
        "--env",
        default="",
        help="gymnasium id that evaluates and collects (default: Pendulum-v1); without --dataset "
        f"one of: {', '.join(GENERATORS)}",
    )
    add("--recipe", default="", help="training recipe (default: made for --env, or `offline`)")
    add("--data", type=Path, default=Path("stepwell-demo"), help="where everything is kept")
    add("--seed", type=int, default=0, help="training seed")
    add("--steps", type=int, default=100_000, help="steps to generate, without --dataset")
    add("--updates", type=int, default=None, help="updates of every run (default: the recipe's)")
    add("--episodes", type=int, default=EVALUATION_SEEDS, help="evaluation episodes")
    add("--collect-episodes", type=int, default=20, help="episodes that the collector plays")
    add("--port", type=int, default=0, help="of the service (default: a free one)")
    add("--no-dashboard", action="store_true", help="do not start the dashboard")
    add("--json", type=Path, default=None, help="also write the table to this file")
    add(
        "--exit",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end after the table (default: only when not on a terminal)",
    )
    args = parser.parse_args(argv)
    if args.dataset and not args.env:
        parser.error("--dataset needs --env: which environment evaluates it? e.g. --env Hopper-v5")
    if args.dataset and not args.dataset.is_file():
        parser.error(f"--dataset: no such file: {args.dataset}")
    env = args.env or "Pendulum-v1"
    if not args.dataset and env not in GENERATORS:
        parser.error(
            f"--env {env}: data for it? give --dataset FILE.hdf5, or one of these: "
            f"{', '.join(GENERATORS)}"
        )
    leave = args.exit if args.exit is not None else not sys.stdout.isatty()
    return Options(
        data=args.data,
        dataset=args.dataset,
        env=env,
        recipe=args.recipe or RECIPES.get(env, "offline"),
        seed=args.seed,
        steps=args.steps,
        updates=args.updates,
        episodes=args.episodes,
        collect_episodes=args.collect_episodes,
        port=args.port,
        dashboard=not args.no_dashboard,
        stay=not leave,
        json=args.json,
    )
