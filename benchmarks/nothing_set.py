"""`stepwell run ENV` with nothing set, beside Stable-Baselines3 with its defaults.

    python -m benchmarks.nothing_set [ENV …] [--half chosen|unseen] [--seeds 0-4] [--seconds 600]
        [--peers ppo dqn sac]

Of each environment all runs are made one after another, on the same machine in the same hours: a
seed of Stepwell, then the same seed of each peer that can play it. A run ends with the first policy
whose mean return over 20 fresh episodes has the target, or after --seconds. The clock of Stepwell
starts with the command: starting the service, collecting and evaluating count. That of a peer
starts with the creation of its environment, and evaluations do not count. Never reached is
recorded as such. The settings of `online` were chosen on the half `chosen` alone.

Peers need `pip install stable-baselines3==2.9.2`, and play no environment that needs a memory or
has observations or actions of a kind that they refuse. Results replace those of the same
environments in benchmarks/results/nothing_set.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learn_checks import EPISODES, Check, add, outcome, seeds_of
from benchmarks.report import RESULTS, provenance

NAME = "nothing_set"
PEERS = ("ppo", "dqn", "sac")
FIRST_SEED = 900_000
"""Of evaluation episodes, as `stepwell run` has them."""
SCORE_EVERY = 5.0
"""Seconds of a peer's own time between two scores."""


@dataclass(frozen=True, slots=True)
class Task:
    """An environment and the mean return to reach."""

    env: str
    target: float
    half: str
    """"chosen": settings were chosen on it; "unseen": not looked at before."""
    args: tuple[str, ...] = ()
    memory: bool = False
    """One observation does not show the state."""

    @property
    def words(self) -> tuple[str, ...]:
        return (self.env, *(("--env-args", *self.args) if self.args else ()))


TASKS = (
    Task("CartPole-v1", 475.0, "chosen"),
    Task("Acrobot-v1", -100.0, "chosen"),
    Task("MountainCar-v0", -150.0, "chosen"),
    Task("Pendulum-v1", -200.0, "chosen"),
    Task("LunarLander-v3", 100.0, "chosen"),
    Task("InvertedPendulum-v5", 900.0, "chosen"),
    Task("stepwell/TMazePassive-v0", 1.0, "chosen", ("corridor_length=20",), memory=True),
    Task("stepwell/MetaFrozenLake-v0", 3.8, "chosen", ("size=3", "attempts=5"), memory=True),
    Task("FrozenLake-v1", 0.7, "unseen"),
    Task("CliffWalking-v1", -20.0, "unseen"),
    Task("MountainCarContinuous-v0", 90.0, "unseen"),
    Task("LunarLanderContinuous-v3", 100.0, "unseen"),
    Task("InvertedDoublePendulum-v5", 5000.0, "unseen"),
    Task("Reacher-v5", -8.0, "unseen"),
    Task("stepwell/CartPolePosition-v0", 473.0, "unseen", memory=True),
    Task(
        "stepwell/DarkKeyDoor-v0", 8.0, "unseen", ("size=4", "limit=20", "horizon=100"), memory=True
    ),
)
"""Split before any setting was chosen."""


def ours(task: Task, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    """One run of `stepwell run` with nothing but the environment."""
    key = task.env.rpartition("/")[2].lower()
    check = Check(key, task.env, task.target, seconds, (), task.words, plain=True)
    return outcome(check, seed, folder / f"{key}-{seed}")


def peer(name: str, task: Task, seed: int, seconds: float) -> dict[str, Any]:
    """One run of a peer, in a process of its own."""
    words = ["--peer", name, task.env, "--seeds", str(seed), "--seconds", str(seconds)]
    command = [sys.executable, "-m", "benchmarks.nothing_set", *words]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def play_peer(name: str, task: Task, seed: int, seconds: float) -> dict[str, Any]:
    """Learn with defaults until the target or the end of the time, in the process of `peer`."""
    import gymnasium
    import stable_baselines3  # type: ignore[import-not-found,unused-ignore]
    import torch

    torch.set_num_threads(1)
    begun, paused, due = time.monotonic(), 0.0, SCORE_EVERY
    env, other = gymnasium.make(task.env), gymnasium.make(task.env)
    scores: list[dict[str, Any]] = []
    model = getattr(stable_baselines3, name.upper())("MlpPolicy", env, seed=seed, device="cpu")

    def score() -> float:
        total = 0.0
        for episode in range(EPISODES):
            obs, ended = other.reset(seed=FIRST_SEED + episode)[0], False
            while not ended:
                action = model.predict(obs, deterministic=True)[0]
                obs, reward, terminated, truncated, _ = other.step(
                    action.item() if action.ndim == 0 else action
                )
                total, ended = total + float(reward), terminated or truncated
        return total / EPISODES

    def goes_on(_locals: Any, _globals: Any) -> bool:
        nonlocal paused, due
        own = time.monotonic() - begun - paused
        if own < due:
            return True
        at = time.monotonic()
        scores.append({"seconds": round(own, 1), "mean": score(), "frames": model.num_timesteps})
        paused += time.monotonic() - at
        due = own + SCORE_EVERY
        return scores[-1]["mean"] < task.target and own < seconds

    model.learn(sys.maxsize, callback=goes_on)
    reached = scores[-1] if scores and scores[-1]["mean"] >= task.target else None
    best = max((one["mean"] for one in scores), default=None)
    return {"seed": seed, "reached": reached, "best": best, "scores": scores}


def can_play(name: str, task: Task) -> bool:
    """Whether a peer has an algorithm for the spaces of an environment without hidden state."""
    import gymnasium

    if task.memory:
        return False
    space = gymnasium.make(task.env).action_space
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    return name == "ppo" or (name == "dqn") == discrete


def seconds_of(runs: Sequence[dict[str, Any]], limit: float) -> float:
    """The median time to the target; a run that never had it counts as the limit."""
    return statistics.median(r["reached"]["seconds"] if r["reached"] else limit for r in runs)


def shown(runs: Sequence[dict[str, Any]]) -> str:
    """Times to the target, as words."""
    times = [f"{r['reached']['seconds']:.0f}" if r["reached"] else "never" for r in runs]
    return ", ".join(times)


def measure(task: Task, seeds: Sequence[int], seconds: float, peers: Sequence[str], folder: Path,
            ) -> dict[str, Any]:  # fmt: skip
    """All runs of an environment."""
    able = [name for name in peers if can_play(name, task)]
    runs: dict[str, list[dict[str, Any]]] = {"stepwell": [], **{name: [] for name in able}}
    for seed in seeds:
        runs["stepwell"].append(ours(task, seed, seconds, folder))
        for name in able:
            runs[name].append(peer(name, task, seed, seconds))
        latest = ", ".join(f"{name} {shown(found[-1:])}" for name, found in runs.items())
        print(f"{task.env} {task.target:g}, seed {seed}: {latest}", flush=True)
    best = min((seconds_of(runs[name], seconds) for name in able), default=None)
    ratio = None if best is None else seconds_of(runs["stepwell"], seconds) / best
    about = {"target": task.target, "half": task.half, "limit": seconds, "ratio": ratio}
    return {**about, "runs": runs, **provenance()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("envs", nargs="*", metavar="ENV", help="all of the half")
    parser.add_argument("--half", choices=["chosen", "unseen"], help="default: both")
    parser.add_argument("--seeds", type=seeds_of, default=range(5), help="default: 0-4")
    parser.add_argument("--seconds", type=float, default=600.0, help="of a run (default: 600)")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.envs) - {task.env for task in TASKS}:
        parser.error(f"no task {sorted(unknown)}; there are {', '.join(t.env for t in TASKS)}")
    chosen = [t for t in TASKS if (t.env in args.envs or not args.envs)
              and args.half in (None, t.half)]  # fmt: skip
    if args.peer:
        print(json.dumps(play_peer(args.peer, chosen[0], args.seeds[0], args.seconds)))
        return 0
    with tempfile.TemporaryDirectory(prefix="stepwell-nothing-set-") as folder:
        for task in chosen:
            found = measure(task, args.seeds, args.seconds, args.peers, Path(folder))
            add({task.env: found}, RESULTS / f"{NAME}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
