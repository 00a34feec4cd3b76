"""Effect and cost of hindsight relabeling: offline training on random play with and without it.

    python -m benchmarks.relabel [--task mazerunner] [--seeds 0 1 2] [--updates 600]

The data are episodes of a random policy in one 7 x 7 maze, where it seldom reaches both goals in
time. With --task crafter they are episodes in one small Crafter world, where it seldom achieves
its single goal. The task's recipe trains offline with the strategies none, some and all, and with
the same data, updates and seeds. Each policy is then evaluated greedily in unseen episodes.

Also measured, for several relabeler settings: the CPU time of a batch of 24 windows of 128 steps,
from episodes of the environment's default settings. Writes benchmarks/results/relabel.json or
relabel_crafter.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator

from amago_model.agent import Agent, make_agent
from amago_model.config import Spaces
from benchmarks.loader import Folder
from benchmarks.report import write
from collector.builtin import CRAFTER_ID, MAZERUNNER_ID
from collector.interface import interface_of
from stepwell import EnvSpec, Trajectory
from stepwell.codec import to_batch
from stepwell.schema import arrow_schema
from trainer.config import DataConfig, TrainConfig
from trainer.data.cache import Cache
from trainer.data.fields import fields_of
from trainer.data.loader import Loader, open_view
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import manifest_from_table
from trainer.learner import Learner
from trainer.recipes import recipe


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task to learn. Its name in TASKS is also the name of its recipe and its relabeler."""

    env: str
    """Gymnasium id of the environment."""
    args: dict[str, Any]
    """Arguments of the environment."""
    episodes: int
    """Number of episodes with random actions: the data."""
    updates: int
    """Default number of updates."""


TASKS = {
    "mazerunner": Task(
        env=MAZERUNNER_ID,
        args={"size": 7, "min_goals": 2, "max_goals": 2, "time_limit": 40, "maze_seed": 0},
        episodes=300,
        updates=600,
    ),
    "crafter": Task(
        env=CRAFTER_ID,
        args={
            "among": [
                *("collect wood", "collect sapling", "collect drink"),
                *("place plant", "place table"),
                *("travel 20 15", "travel 15 20", "travel 15 10", "travel 20 20"),
                *("travel 20 10", "travel 10 15", "travel 10 10"),
            ],
            "min_goals": 1,
            "max_goals": 1,
            "time_limit": 60,
            "area": 32,
            "world_seed": 2,
        },
        episodes=500,
        updates=1000,
    ),
}
UNSEEN = 1_000_000
"""Reset seed of the first evaluation episode; the seeds of the data start at 0."""


def random_play(
    episodes: int, seed: int, args: dict[str, Any], env_id: str = MAZERUNNER_ID
) -> tuple[EnvSpec, list[Trajectory]]:
    """Whole episodes of uniformly random actions, as trajectories."""
    env = gymnasium.make(env_id, disable_env_checker=True, **args).unwrapped
    spec = interface_of(env, env_id).spec
    rng = np.random.default_rng(seed)
    found = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed * episodes + episode)
        rows, actions, rewards, terminated, truncated = [obs], [], [], False, False
        while not (terminated or truncated):
            action = rng.integers(env.action_space.n)
            obs, reward, terminated, truncated, info = env.step(action)
            rows.append(obs)
            actions.append(int(action))
            rewards.append(reward)
        found.append(
            Trajectory.from_arrays(
                obs={key: np.stack([row[key] for row in rows]) for key in spec.observations},
                actions=np.array(actions),
                rewards=np.array(rewards, np.float32),
                terminated=terminated,
                truncated=truncated,
                spec=spec,
                env=env_id,
                metrics={"success": info["log/success"]},
            )
        )
    return spec, found


def loader_of(
    folder: Path, spec: EnvSpec, found: Sequence[Trajectory], config: DataConfig, seed: int
) -> Loader:
    """A loader of these trajectories, from one shard in `folder` and the trainer's cache."""
    schema, tables, rows = arrow_schema(spec), [], []
    at = 0
    for index, t in enumerate(found):
        count = len(t) + 1
        place = [np.full(count, index, np.int32), np.arange(count, dtype=np.int32)]
        batch = to_batch(t, spec, schema)
        names = ["traj_idx", "t", *batch.schema.names]
        tables.append(pa.table([*map(pa.array, place), *batch.columns], names=names))
        row = {"id": t.id, "shard": "s0", "traj_idx": index, "row_start": at, "length": len(t)}
        row |= {"first_step": 0, "component": 0, "weight": 1.0, "terminated": t.terminated}
        rows.append(row | {"truncated": t.truncated, "final_obs_valid": True})
        at += count
    pq.write_table(pa.concat_tables(tables), folder / "s0", compression="zstd")
    metadata = {"snapshot": "sn", "digest": "benchmark", "shares": "[1.0]"}
    table = pa.Table.from_pylist(rows).replace_schema_metadata(metadata)
    manifest, fields = manifest_from_table(table, spec), fields_of(spec, config)
    cache = Cache(folder / "cache", 1e9, Folder(folder))  # type: ignore[arg-type]
    cache.ensure(manifest, fields)
    return Loader([open_view(cache, fields, WindowSampler(manifest, config, seed))], config)


def learn(loader: Loader, config: TrainConfig, spec: EnvSpec) -> Agent:
    """Train the agent of a config for its number of updates."""
    torch.manual_seed(config.seed)
    agent = make_agent(config.agent, Spaces.of_spec(spec.to_json()))
    learner = Learner(
        agent, config.optimizer, Accelerator(cpu=True), seed=config.seed, updates=config.updates
    )
    for update in range(config.updates):
        learner.update(update, next(loader).batch)
    return agent.eval()


def play(agent: Agent, episodes: int, task: Task) -> dict[str, float]:
    """Greedy evaluation in unseen episodes, run as one batch: fractions of successful episodes
    and of goals reached."""
    envs = [
        gymnasium.make(task.env, disable_env_checker=True, **task.args).unwrapped
        for _ in range(episodes)
    ]
    obs = [env.reset(seed=UNSEEN + i)[0] for i, env in enumerate(envs)]
    hidden = agent.policy.initial_hidden(episodes)
    action, reward = torch.zeros(episodes, dtype=torch.int64), torch.zeros(episodes)
    last: list[dict[str, float]] = [{} for _ in envs]
    for t in range(envs[0].time_limit):
        stacked = {k: torch.from_numpy(np.stack([o[k] for o in obs])) for k in obs[0]}
        now = torch.full((episodes,), t)
        action, hidden = agent.policy.act(stacked, action, reward, now, hidden, sample=False)
        for i, env in enumerate(envs):
            if not last[i]:
                obs[i], reward[i], _, _, last[i] = env.step(np.int64(action[i]))
    return {name: float(np.mean([x[f"log/{name}"] for x in last])) for name in ("success", "goals")}


def outcome(
    strategy: str, seed: int, updates: int = 0, name: str = "mazerunner"
) -> dict[str, float]:
    """Train on random play with a relabeling strategy, then evaluate in 200 unseen episodes."""
    task = TASKS[name]
    spec, found = random_play(task.episodes, seed, task.args, task.env)
    config = recipe(name).replace(seed=seed, updates=updates or task.updates)
    config = config.replace(data=config.data.replace(relabel=(f"{name}:strategy={strategy}",)))
    with tempfile.TemporaryDirectory() as folder:
        with closing(loader_of(Path(folder), spec, found, config.data, seed)) as loader:
            agent = learn(loader, config, spec)
    data = fmean(t.metadata.metrics["success"] for t in found)
    return {"data_success": data, **play(agent, 200, task)}


def cost(name: str) -> dict[str, float]:
    """Median CPU milliseconds to load a batch, by relabeler setting."""
    spec, found = random_play(100, 0, {}, TASKS[name].env)
    words: dict[str, tuple[str, ...]] = {
        "no relabeler": (),
        "strategy none": (f"{name}:strategy=none",),
        "strategy some": (f"{name}:strategy=some,rarity=none",),
        "strategy all": (f"{name}:strategy=all,rarity=none",),
        "some, rare goals": (f"{name}:rarity=both",),
    }
    times: dict[str, float] = {}
    for what, relabel in words.items():
        config = DataConfig(batch=24, window=128, relabel=relabel)
        with tempfile.TemporaryDirectory() as folder:
            with closing(loader_of(Path(folder), spec, found, config, 0)) as loader:
                taken = []
                for step in range(60):
                    began = time.thread_time()
                    loader.load(step)
                    taken.append(1e3 * (time.thread_time() - began))
        times[what] = round(median(taken[10:]), 3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=0, help="default: by task")
    parser.add_argument("--task", choices=list(TASKS), default="mazerunner")
    args = parser.parse_args()
    task = TASKS[args.task]
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, float]]] = {}
    for strategy in ("none", "some", "all"):
        for seed in args.seeds:
            runs.setdefault(strategy, []).append(outcome(strategy, seed, args.updates, args.task))
            print(f"{strategy:5} seed {seed}: {runs[strategy][-1]}", flush=True)
    means = {
        strategy: {name: round(fmean(run[name] for run in found), 3) for name in found[0]}
        for strategy, found in runs.items()
    }
    result = {"env": task.env, "args": task.args, "episodes": task.episodes, "seeds": args.seeds}
    result |= {"updates": args.updates or task.updates, "mean": means, "runs": runs}
    name = "relabel" if args.task == "mazerunner" else f"relabel_{args.task}"
    path = write(name, {**result, "batch_cpu_ms": cost(args.task)})
    print(f"{means}\nwritten to {path}")


if __name__ == "__main__":
    main()
