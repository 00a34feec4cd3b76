"""Time and memory of every recipe: updates per second and peak memory, on synthetic batches.

    python -m benchmarks.recipes [--write-docs] [--recipes offline tmaze …] [--seconds 8]

Runs the trainer's update on full windows of the recipe's shape. Each recipe has a new process with
one thread and runs for a few seconds, with at least 2 updates after a warm-up update. On the CPU
the process's CPU time is measured. If there is a GPU, each recipe is also measured on it. Episodes
shorter than the window cost less. The cost of reading data, publishing and checkpoints is not
included.

benchmarks/results/recipes.json is written after each recipe; the results of other recipes are kept.
--write-docs also replaces the table in docs/reference/training.md, and trainer/recipe_speeds.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from amago_model import ActionSpace, Batch, ObsSpace, Spaces, make_agent
from benchmarks.report import RESULTS, ROOT, place, provenance, write
from collector.builtin import CRAFTER_ID, FIND_BLOCK_ID, MAZERUNNER_ID
from collector.envs import make
from collector.interface import interface_of
from stepwell._settings import override
from stepwell._wording import duration
from trainer.config import TrainConfig
from trainer.learner import Learner, make_accelerator
from trainer.recipes import RECIPES, own_settings, recipe

PAGE = ROOT / "docs" / "reference" / "training.md"
SPEEDS = ROOT / "trainer" / "recipe_speeds.toml"
LEAST_UPDATES = 2

Line = dict[str, Any]


DERIVED = {"updates": 6000, "data.window": 4, "data.batch": 64}
"""What is derived from 100,000 steps with dense rewards, for the recipes that derive settings."""

ONLINE = {
    "agent.trajectory_encoder.kind": "feed_forward",
    "agent.trajectory_encoder.d_model": 64,
    "agent.timestep_encoder.hide_previous": True,
    "updates": 20_000,
    "data.window": 8,
    "data.batch": 64,
}
"""What is derived for a small environment whose observations show the state."""


def typical(name: str) -> TrainConfig:
    """The config of a recipe; for those that derive settings, with DERIVED or ONLINE."""
    config, own = recipe(name), own_settings(name)
    if config.derive == "off":
        return config
    if config.derive == "online":
        return override(config, ONLINE)
    return override(config, {key: value for key, value in DERIVED.items() if key not in own})


def vectors(features: int, actions: int) -> Spaces:
    """Spaces with an observation vector and continuous actions."""
    low, high = (-1.0,) * actions, (1.0,) * actions
    box = ActionSpace(kind="continuous", shape=(actions,), low=low, high=high)
    return Spaces(observations={"observation": _floats(features)}, action=box)


def choices(features: int, n: int) -> Spaces:
    """Spaces with an observation vector and n discrete actions."""
    action = ActionSpace(kind="discrete", n=n)
    return Spaces(observations={"observation": _floats(features)}, action=action)


def _floats(features: int) -> ObsSpace:
    return ObsSpace(shape=(features,), dtype="float32")


USUAL = vectors(17, 6)
"""Spaces for recipes without an entry in SPACES or ENVIRONMENTS: the shapes of HalfCheetah."""
SPACES: dict[str, Spaces] = {
    "pendulum_stitch": vectors(3, 1),
    "bc": vectors(3, 1),
    "bc10": vectors(3, 1),
    "lunarlander_continuous": vectors(8, 2),
    "recall": choices(6, 4),
    "tmaze": choices(2, 4),
}
ENVIRONMENTS = {"pixels": FIND_BLOCK_ID, "mazerunner": MAZERUNNER_ID, "crafter": CRAFTER_ID}
"""Recipes for Stepwell environments whose observations are not a single vector."""


def spaces_for(name: str) -> Spaces:
    """The spaces with which a recipe is measured."""
    if env_id := ENVIRONMENTS.get(name):
        return Spaces.of_spec(interface_of(make(env_id), env_id).spec.to_json())
    return SPACES.get(name, USUAL)


def made_up(spaces: Spaces, windows: int, length: int) -> Batch:
    """A batch of full windows of random numbers, without padding and ends of episodes."""
    generator = torch.Generator().manual_seed(0)
    b, rows = windows, length + 1
    obs = {
        key: _noise((b, rows, *space.shape), space.dtype, space.n, generator)
        for key, space in spaces.observations.items()
    }
    yes = torch.ones(b, length, dtype=torch.bool)
    action = spaces.action
    dtype = "float32" if action.kind == "continuous" else "int64"
    top = 2 if action.kind == "multi_binary" else min(action.nvec, default=action.n)
    return Batch(
        obs=obs,
        prev_action=_noise((b, rows, *action.array_shape), dtype, top, generator) + action.start,
        prev_reward=torch.randn(b, rows, generator=generator),
        time_idx=torch.arange(rows).expand(b, -1),
        terminated=~yes,
        truncated=~yes,
        next_obs_valid=yes,
        mask=yes,
        action_known=yes,
        return_to_go=torch.randn(b, rows, generator=generator),
    )


def _noise(
    shape: tuple[int, ...], dtype: str, top: int | None, generator: torch.Generator
) -> torch.Tensor:
    """Random floats between -1 and 1, or integers below `top`."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return (2 * torch.rand(shape, generator=generator) - 1).to(kind)
    top = top or (2 if kind == torch.bool else 256)
    return torch.randint(0, top, shape, generator=generator).to(kind)


def measure(config: TrainConfig, spaces: Spaces, seconds: float, device: str) -> Line:
    """Updates per second and peak memory in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = make_accelerator(config.replace(device="cpu" if device == "cpu" else "auto"))
    agent = make_agent(config.agent, spaces).to(accelerator.device)
    learner = Learner(agent, config.optimizer, accelerator, seed=0, updates=config.updates)
    batch = made_up(spaces, config.data.batch, config.data.window).to(accelerator.device)
    on_gpu = accelerator.device.type == "cuda"

    # On a CPU, the CPU time of this process: other processes then have little influence.
    clock = time.perf_counter if on_gpu else time.process_time

    def update(number: int) -> float:
        began = clock()
        learner.update(number, batch)
        if on_gpu:
            torch.cuda.synchronize()
        return clock() - began

    warm = update(0)
    times: list[float] = []
    while len(times) < LEAST_UPDATES or warm + sum(times) < seconds:
        times.append(update(1 + len(times)))
    middle = statistics.median(times)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "updates_per_second": round(1 / middle, 3),
        "updates_measured": len(times),
        "whole_run_seconds": round(middle * config.updates),
        "peak_rss_mb": peak_rss_mb(),
        "peak_gpu_mb": round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else None,
        "parameters": sum(p.numel() for p in agent.trainable_parameters()),
    }


def peak_rss_mb() -> int:
    """Peak resident memory of this process. getrusage is not used, because on Linux its value
    includes the memory of the parent process at the fork."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found, "Linux says so"
    return round(int(found[1]) / 1024)


def in_a_fresh_process(name: str, seconds: float, device: str) -> Line:
    command = [sys.executable, "-m", "benchmarks.recipes", "--child", name]
    command += ["--seconds", str(seconds), "--device", device]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
    line: Line = json.loads(done.stdout.splitlines()[-1])
    return line


def measure_all(names: list[str], seconds: float) -> None:
    """Measure recipes and write the results. Recipes that no longer exist are removed."""
    devices = ["cpu", *(["gpu"] if torch.cuda.is_available() else [])]
    for name in names:
        config = typical(name)
        line: Line = {
            "updates": config.updates,
            "batch": config.data.batch,
            "window": config.data.window,
            "cpu": None,
            "gpu": None,
            "commit": provenance()["commit"],
        }
        for device in devices:
            line[device] = in_a_fresh_process(name, seconds, device)
        lines = {other: known for other, known in stored().items() if other in RECIPES}
        write("recipes", {"threads": 1, "recipes": {**lines, name: line}})
        print(name, json.dumps(line), flush=True)


def stored() -> dict[str, Line]:
    path = RESULTS / "recipes.json"
    found: dict[str, Line] = json.loads(path.read_text())["recipes"] if path.exists() else {}
    return found


# --------------------------------------------------------------------- docs/reference/training.md


def table(lines: dict[str, Line]) -> str:
    """The table of docs/reference/training.md, with a row for every recipe, measured or not."""
    rows = [
        "| recipe | updates | CPU: updates/s | whole run | memory | GPU: whole run | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in RECIPES:
        cells = [f"`{name}`", f"{typical(name).updates:,}"]
        line = lines.get(name, {})
        for device, memory in (("cpu", "peak_rss_mb"), ("gpu", "peak_gpu_mb")):
            if seen := line.get(device):
                if device == "cpu":
                    cells.append(f"{seen['updates_per_second']:.3g}")
                cells += [duration(seen["whole_run_seconds"]), f"{seen[memory] / 1000:.1f} GB"]
            else:
                cells += ["not measured"] * (3 if device == "cpu" else 2)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def speeds(lines: dict[str, Line]) -> str:
    """trainer/recipe_speeds.toml, from which forms estimate the time of a first run."""
    text = (
        "# Typical updates, and updates per second on a CPU: "
        "python -m benchmarks.recipes --write-docs\n"
    )
    for name in RECIPES:
        if seen := lines.get(name, {}).get("cpu"):
            speed = seen["updates_per_second"]
            updates = lines[name]["updates"]
            text += f"{name} = {{ updates = {updates}, updates_per_second = {speed} }}\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per recipe and device")
    parser.add_argument("--write-docs", action="store_true", help="also replace the docs' table")
    parser.add_argument("--only-docs", action="store_true", help="measure nothing, only do that")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        spaces = spaces_for(args.child)
        print(json.dumps(measure(typical(args.child), spaces, args.seconds, args.device)))
        return 0
    if not args.only_docs:
        measure_all(args.recipes or list(RECIPES), args.seconds)
    if args.write_docs or args.only_docs:
        place(PAGE, "recipes", table(stored()))
        SPEEDS.write_text(speeds(stored()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
