"""Does `stepwell run` learn larger tasks on a GPU, and how far does it come in a few minutes?

    python -m benchmarks.gpu_checks [ID …] [--seconds 400] [--compile graphs] [--keep FOLDER]

All checks run at once, each with service, collectors, trainer and evaluator of its own: policies
act and are scored on CPU cores, the trainers share the GPU. A check ends when its target is
reached, or after --seconds. The clock starts with its command. The result has the scores of all
versions, each with its time.
Results replace those of the same checks in benchmarks/results/gpu_checks.json. Exit status 1 if a
check broke; one that did not reach its target is no failure here, but is recorded so.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.learn_checks import (
    LOSSES,
    MEMORY,
    POPGYM,
    Check,
    add,
    chosen_checks,
    exploring,
    outcome,
    result,
    t_maze,
)
from benchmarks.report import RESULTS, provenance

NAME = "gpu_checks"
UPDATES = 100_000
"""More than any check makes, so that versions are spaced as in a long run."""
EVERY = 1000
"""Updates between scored versions: episodes are long, and the cores are shared."""
WIDER = (
    *(f"{MEMORY}.d-model=128", f"{MEMORY}.d-ff=512", f"{MEMORY}.n-heads=8"),
    "--train.data.batch=32",
)
BF16 = "--train.precision=bf16"
SPACED = ("--train.schedule.publish-every=100", "--train.schedule.log-every=100")
"""A GPU makes the updates of recipe `online` several times as often as two cores do."""


def window(length: int) -> tuple[str, ...]:
    """Windows of this length, all of which the Transformer sees."""
    return (f"--train.data.window={length}", f"{MEMORY}.context={length + 1}")


def popgym(key: str, game: str, target: float, length: int, ratio: float) -> Check:
    words = (
        *(f"popgym:popgym-{game}-v0", *exploring(50_000), *WIDER, *window(length)),
        *("--envs", "16", f"--updates-per-step={ratio}"),
    )
    return check(key, f"POPGym {game}", target, words, package=POPGYM)


def check(key: str, task: str, target: float, words: tuple[str, ...], **more: Any) -> Check:
    return Check(
        key, task, target, 0.0, (), (*words, *SPACED), updates=UPDATES, every=EVERY, **more
    )


def corridor(length: int, batch: int, steps: int, ratio: float, envs: int) -> Check:
    words = (*t_maze(length, batch, steps, ratio), BF16, "--envs", str(envs))
    return check(f"g1-{length}", f"T-Maze, {length} steps", 1.0, words)


CHECKS = (
    corridor(128, 24, 80_000, 0.05, 16),
    corridor(512, 24, 200_000, 0.02, 32),
    popgym("g2-previous", "RepeatPreviousEasy", 0.95, 52, 0.1),
    popgym("g2-first", "RepeatFirstHard", 0.9, 832, 0.03),
    popgym("g2-autoencode", "AutoencodeMedium", -0.3, 104, 0.1),
    popgym("g2-cartpole", "PositionOnlyCartPoleHard", 0.9, 200, 0.05),
    check(
        *("g3", "Dark Key-to-Door 8 x 8, 500 steps", 10.0),
        (
            *("stepwell/DarkKeyDoor-v0", "--env-args", "size=8", "limit=50", "horizon=500"),
            *(*exploring(100_000), *WIDER, *window(500), "--envs", "32", "--updates-per-step=0.05"),
            *(f"{LOSSES}.gamma=0.97", f"{LOSSES}.n-step=1", f"{MEMORY}.position.kind=rotary"),
        ),
    ),
    check(
        *("g4", "Meta-Frozen-Lake 5 x 5, 10 attempts", 0.8),
        (
            *("stepwell/MetaFrozenLake-v0", "--env-args", "size=5", "attempts=10"),
            *(*exploring(100_000), *WIDER, *window(250), "--envs", "32", "--updates-per-step=0.05"),
            "--train.agent.critic.popart.preserve-outputs=true",
        ),
        metric="success_9",
        rises=("success_0", "success_9", 0.15),
    ),
    check(
        *("g5", "LunarLander, windows of 128", 200.0),
        (
            *("LunarLander-v3", *exploring(50_000), *WIDER, *window(128)),
            *("--envs", "16", "--updates-per-step=0.05"),
        ),
        package="Box2D",
    ),
    check(
        *("g6", "HalfCheetah-Velocity: error over the last 50 steps", 0.4),
        (
            *("stepwell/HalfCheetahVelocity-v0", *exploring(50_000), *WIDER, *window(32)),
            *("--envs", "16", "--updates-per-step=0.2"),
            # The error is felt at once: with gamma 0.99 and rewards times 10, values were still
            # falling fast after 500 updates, and actions hardly mattered beside them.
            *(f"{LOSSES}.gamma=0.95", f"{LOSSES}.auxiliary-gammas", "0.8"),
            *(f"{LOSSES}.reward-multiplier=1", f"{LOSSES}.tau=0.02", f"{LOSSES}.bc-weight=0"),
        ),
        metric="velocity_error",
        at_most=True,
        package="mujoco",
    ),
)


def measure(one: Check, seconds: float, more: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run of a check with one more word, and what it reached."""
    limited = dataclasses.replace(one, seconds=seconds, words=(*one.words, more))
    run = outcome(limited, seed, folder / f"{one.key}-{seed}")
    print(f"{one.key} {one.task}: {result(one, run)}", flush=True)
    return {
        **{"task": one.task, "target": one.target, "metric": one.metric or "return"},
        **{"words": " ".join([*limited.words, *limited.common]), "seconds": seconds, **run},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=400.0, help="of each (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", choices=("off", "auto", "on", "graphs"), default="off")
    checks, args = chosen_checks(parser, CHECKS)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    compiling, failed = f"--train.compile={args.compile}", 0
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-checks-") as temporary,
        ThreadPoolExecutor(max(1, len(checks))) as pool,
    ):
        folder = (args.keep or Path(temporary)).resolve()
        runs = {
            one.key: pool.submit(measure, one, args.seconds, compiling, args.seed, folder)
            for one in checks
        }
        for key, run in runs.items():
            try:
                found = run.result() | {"device": device, "at_once": len(checks), **provenance()}
            except RuntimeError as error:
                print(error)
                failed += 1
                continue
            add({key: found}, RESULTS / f"{NAME}.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
