"""Scores of the ablation recipes and of their base recipes, over several training seeds.

    python -m benchmarks.ablations [--seeds 0 1 2] [--recipes …] [--updates N] [--keep]

For each recipe and seed, the trainer runs in this process on generated data from a local service.
Then the last policy plays 30 greedy episodes with the demo's evaluation seeds. A base recipe and
its ablations train on the same samples in the same order.

All recipes are measured with the first seed, then all with the second, and so on. The result is
written after each run, so an interrupted measurement is usable. --keep continues it: it skips
existing runs, except those with another DPG formula (dpg_detach_state) than the recipe's.

Writes benchmarks/results/ablations.json and, from it, the last column of the tables in
docs/reference/method.md. With --write-docs nothing is measured and only the tables are updated.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from amago_model.policy_file import load_policy
from benchmarks.report import RESULTS, ROOT, provenance, write
from collector.builtin import FIND_BLOCK_ID, MAZERUNNER_ID, TMAZE_PASSIVE_ID
from collector.builtin.generate import generate
from collector.builtin.generate_lunarlander import LunarLanderNoisy
from collector.builtin.generate_pendulum import PendulumStitch
from collector.builtin.generate_tmaze import TMazePassiveCoin
from collector.collect import collect
from collector.config import CollectConfig
from collector.evaluate import evaluate_policy
from stepwell.client import Client
from trainer.config import ScheduleConfig
from trainer.loop import RunInfo, train
from trainer.recipes import ABLATIONS, recipe
from workbench.demo import EVALUATION_SEEDS, FIRST_EVALUATION_SEED

CORRIDOR = 20
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "pendulum_stitch": ("Pendulum-v1", {}),
    "lunarlander_continuous": ("LunarLanderContinuous-v3", {}),
    "tmaze": (TMAZE_PASSIVE_ID, {"corridor_length": CORRIDOR}),
    "pixels": (FIND_BLOCK_ID, {}),
    "mazerunner": (
        MAZERUNNER_ID,
        {"size": 7, "min_goals": 2, "max_goals": 2, "time_limit": 40, "maze_seed": 0},
    ),
}
"""Environment and its arguments, by base recipe; ablations use those of their base."""

RANDOM_EPISODES = {"pixels": 1000, "mazerunner": 300}
"""Number of episodes with random actions that are the data of these recipes."""

Row = dict[str, Any]


def base_of(name: str) -> str:
    return ABLATIONS[name].base if name in ABLATIONS else name


@functools.cache
def detaches(name: str) -> bool:
    """Whether DPG has no gradient to the encoders (dpg_detach_state) in a recipe. Older versions
    of all recipes had this setting."""
    return recipe(name).agent.losses.dpg_detach_state


def as_recipe(row: Row) -> bool:
    """Whether a run or summary line was measured with its recipe's current dpg_detach_state."""
    now = detaches(row["recipe"])
    return bool(row.get("dpg_detach_state", now) == now)


def without_stale(rows: list[Row], name: str, seed: int) -> list[Row]:
    """Remove this recipe's run with this seed, and its runs with an outdated dpg_detach_state."""
    return [r for r in rows if r["recipe"] != name or (as_recipe(r) and r["seed"] != seed)]


def serve(folder: Path) -> tuple[subprocess.Popen[bytes], Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(folder / "data")]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error"], stdout=subprocess.DEVNULL
    )
    client = Client(f"http://127.0.0.1:{port}")
    client.wait_ready(60)
    return process, client


def fill_dataset(client: Client, folder: Path, base: str) -> None:
    """Create the dataset of a base recipe, with the recipe's name. Uses the built-in generators,
    as the demo does, or random actions."""
    path, (env, kwargs) = folder / f"{base}.hdf5", TASKS[base]
    if episodes := RANDOM_EPISODES.get(base):
        config = CollectConfig(
            env=env,
            env_args=tuple(f"{name}={value}" for name, value in kwargs.items()),
            dataset=base,
            random=True,
            episodes=episodes,
            seed=0,
            url=client.url,
            outbox=folder / f"outbox-{base}",
            progress=False,
        )
        collect(config)
        client.flush(base)
        return
    if base == "pendulum_stitch":
        generate(PendulumStitch, path)
    elif base == "lunarlander_continuous":
        generate(LunarLanderNoisy, path)
    else:
        generate(TMazePassiveCoin, path, corridor_length=CORRIDOR)
    client.upload(base, path, format="d4rl", env=env)


def measure(client: Client, folder: Path, name: str, seed: int, updates: int | None) -> Row:
    """Train one recipe with one seed and evaluate its last policy."""
    base = base_of(name)
    chosen = recipe(name)
    config = chosen.replace(
        run=f"{name}-{seed}",
        dataset=base,
        seed=seed,
        updates=updates or chosen.updates,
        output=folder / "runs",
        schedule=ScheduleConfig(log_every=500, publish_every=0, checkpoint_every=0),
    )
    config = config.replace(data=config.data.replace(cache=folder / "cache"))
    info = RunInfo(origins={}, git_commit="", command="benchmarks.ablations")
    began = time.perf_counter()
    if train(config, client, info, lambda _: None) != "finished":
        raise SystemExit(f"stopped in {config.run}; what was measured is in {RESULTS}")
    trained = time.perf_counter() - began
    policy = load_policy(config.output / config.run / "policies" / f"{config.updates}.safetensors")
    env, kwargs = TASKS[base]
    seeds = range(FIRST_EVALUATION_SEED, FIRST_EVALUATION_SEED + EVALUATION_SEEDS)
    score = evaluate_policy(policy, env, seeds, env_kwargs=kwargs)
    return {
        "recipe": name,
        "seed": seed,
        "mean": score.mean,
        "low": score.ci_low,
        "high": score.ci_high,
        "updates": config.updates,
        "dpg_detach_state": config.agent.losses.dpg_detach_state,
        "train_seconds": round(trained, 1),
        "commit": provenance()["commit"],
    }


def summary(rows: list[Row]) -> list[Row]:
    """One line per recipe: the mean per seed, and the mean difference to the base, seed by seed."""
    scores: dict[str, dict[int, float]] = {}
    updates = {row["recipe"]: row["updates"] for row in rows}
    stale = {row["recipe"] for row in rows if not as_recipe(row)}
    for row in rows:
        scores.setdefault(row["recipe"], {})[row["seed"]] = row["mean"]
    lines = []
    for name, by_seed in scores.items():
        base = base_of(name)
        of_base = scores.get(base, {}) if (name in stale) == (base in stale) else {}
        paired = [by_seed[seed] - of_base[seed] for seed in by_seed if seed in of_base]
        line: Row = {
            "recipe": name,
            "base": base,
            "changes": dict(ABLATIONS[name].changes) if name in ABLATIONS else {},
            "mean_per_seed": {str(seed): by_seed[seed] for seed in sorted(by_seed)},
            "updates": updates[name],
            "mean": statistics.mean(by_seed.values()),
            "lowest": min(by_seed.values()),
            "highest": max(by_seed.values()),
        }
        if name in stale:
            line["dpg_detach_state"] = not detaches(name)
        if name in ABLATIONS and paired:
            line["mean_difference_to_base"] = statistics.mean(paired)
        lines.append(line)
    return lines


def store(rows: list[Row]) -> Path:
    return write(
        "ablations",
        {
            "episodes_per_seed": EVALUATION_SEEDS,
            "first_episode_seed": FIRST_EVALUATION_SEED,
            "tasks": {base: {"env": env, **kwargs} for base, (env, kwargs) in TASKS.items()},
            "summary": summary(rows),
            "runs": rows,
        },
    )


def stored() -> dict[str, Any]:
    path = RESULTS / "ablations.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def run_all(names: list[str], seeds: list[int], updates: int | None, rows: list[Row]) -> None:
    done = {(row["recipe"], row["seed"]) for row in rows if as_recipe(row)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        process, client = serve(folder)
        try:
            with client:
                for base in dict.fromkeys(map(base_of, names)):
                    fill_dataset(client, folder, base)
                for seed in seeds:
                    for name in names:
                        if (name, seed) not in done:
                            row = measure(client, folder, name, seed, updates)
                            rows[:] = [*without_stale(rows, name, seed), row]
                            store(rows)
                            print(json.dumps(rows[-1]), flush=True)
        finally:
            process.terminate()
            process.wait(30)


# ----------------------------------------------------------------------- docs/reference/method.md


def cell(line: Row | None, updates: int) -> str:
    """The table cell of one recipe: mean over seeds, lowest and highest mean of a seed, and each
    deviation from the standard measurement (3 seeds, the recipe's `updates` and
    dpg_detach_state)."""
    if line is None:
        return "not measured"
    digits = 0 if abs(line["highest"] - line["lowest"]) > 20 or abs(line["mean"]) > 100 else 2
    mean, low, high = (f"{line[key]:.{digits}f}" for key in ("mean", "lowest", "highest"))
    text, n = f"{mean} ({low} … {high})", len(line["mean_per_seed"])
    text += "" if n == 3 else f", {n} seed{'s' * (n > 1)}"
    text += "" if as_recipe(line) else ", DPG detached"
    return text + (f", {line['updates']} updates" if line["updates"] != updates else "")


def fill(text: str, lines: Iterable[Row]) -> str:
    """Fill in the last cell of every table row that names a recipe."""
    by_name = {line["recipe"]: line for line in lines}
    names = {*ABLATIONS, *TASKS}

    def filled(found: re.Match[str]) -> str:
        *cells, _ = found[0].strip("|").split(" | ")
        name = cells[-1].strip(" `") if cells else ""
        if name not in names:
            return found[0]
        return "|" + " | ".join([*cells, cell(by_name.get(name), recipe(name).updates)]) + " |"

    return re.sub(r"^\|.*\|$", filled, text, flags=re.MULTILINE)


def write_docs() -> None:
    path = ROOT / "docs" / "reference" / "method.md"
    path.write_text(fill(path.read_text(), stored().get("summary", [])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", choices=[*TASKS, *ABLATIONS], metavar="RECIPE")
    parser.add_argument("--updates", type=int, help="per run (default: as in the recipe)")
    parser.add_argument("--keep", action="store_true", help="measure only missing runs")
    parser.add_argument("--write-docs", action="store_true", help="only update method.md")
    args = parser.parse_args()
    if not args.write_docs:
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally`: stops the service
        rows = stored().get("runs", []) if args.keep else []
        run_all(args.recipes or [*TASKS, *ABLATIONS], args.seeds, args.updates, rows)
    write_docs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
