"""Speed of acting: steps per second of a collector's rollout.

    python -m benchmarks.acting [--rounds 5]

In CartPole, whose steps cost little, so that everything else shows. Each round measures in turn,
for each number of environments:

    bare       a gymnasium loop with actions drawn beforehand, nothing recorded
    random     the rollout with uniformly random actions: conversion and recording
    policy     the rollout with a Transformer of 64 x 2, its keys and values cached
    uncached   that policy alone, which encodes its whole context anew for each step

and, for each context, one step of the policy with and without the cache (8 environments).
Trajectories are recorded and dropped. Ratios are computed in each round; results are medians over
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from amago_model import ActingPolicy, AgentConfig, Spaces
from benchmarks.report import ROOT, write
from collector.envs import make
from collector.interface import Interface, interface_of
from collector.policy_actor import Actor, LoadedPolicy, PolicyActor, RandomActor
from collector.rollout import Rollout

ENV = "CartPole-v1"
ENVS = (1, 8, 64)
CONTEXTS = (32, 128, 512, 2048)
CONTEXT = 128
SECONDS = 1.0


def policy(context: int) -> ActingPolicy:
    torch.manual_seed(0)
    memory = {"kind": "transformer", "d_model": 64, "n_heads": 4, "d_ff": 256, "n_layers": 2}
    config = AgentConfig.from_dict(
        {
            "timestep_encoder": {"kind": "any", "d_hidden": 128, "d_output": 64},
            "trajectory_encoder": {**memory, "context": context},
            "actor": {"kind": "mlp", "d_hidden": 128},
        }
    )
    env = make(ENV)
    spaces = Spaces.of_spec(interface_of(env, ENV).spec.to_json())
    return ActingPolicy(config, spaces).eval().requires_grad_(False)


def bare(n: int) -> Callable[[], int]:
    """One step of each of n environments."""
    envs = [make(ENV) for _ in range(n)]
    actions = np.random.default_rng(0).integers(0, 2, 4096)
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    counter = iter(range(1 << 62))

    def step() -> int:
        for env in envs:
            _, _, terminated, truncated, _ = env.step(actions[next(counter) % 4096])
            if terminated or truncated:
                env.reset()
        return n

    return step


def rollout(n: int, actor: Callable[[Interface, int], Actor]) -> Callable[[], int]:
    """One step of a rollout in n environments."""
    envs = [make(ENV) for _ in range(n)]
    interface = interface_of(envs[0], ENV)
    seeds: Iterator[int] = iter(range(1 << 62))
    played = Rollout(envs, actor(interface, n), interface, seeds=seeds, sink=lambda *_: None)

    def step() -> int:
        played.step()
        return n

    return step


def cached(loaded: ActingPolicy, n: int) -> Callable[[], int]:
    """One action for n environments, in the middle of long episodes."""
    hidden = loaded.initial_hidden(n)
    obs = {"observation": torch.zeros(n, 4)}
    action, reward = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    time_idx = torch.full((n,), 5000)

    def step() -> int:
        nonlocal hidden
        _, hidden = loaded.act(obs, action, reward, time_idx, hidden)
        return n

    return step


def uncached(loaded: ActingPolicy, n: int, context: int) -> Callable[[], int]:
    """The same action by encoding the last `context` timesteps."""
    obs = {"observation": torch.zeros(n, context, 4)}
    action, reward = torch.zeros(n, context, dtype=torch.int64), torch.zeros(n, context)
    time_idx = torch.arange(5000, 5000 + context).repeat(n, 1)

    def step() -> int:
        with torch.no_grad():
            timesteps = loaded.encode_timesteps(obs, action, reward, time_idx)
            state = loaded.encode_trajectory(timesteps, time_idx)[:, -1]
            loaded.actor.acting(state, None).sample()
        return n

    return step


def rate(step: Callable[[], int]) -> float:
    """Steps of environments per second."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        steps += step()
    return steps / (time.perf_counter() - began)


def compare(
    contenders: dict[str, Callable[[], int]], rounds: int, to: str
) -> tuple[dict[str, int], dict[str, float]]:
    """Median rates, and median ratios to the contender `to`; the first round is a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, step in contenders.items():
            found = rate(step)
            if round_:
                rates[name].append(found)
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(each, rates[to], strict=True)), 3)
        for name, each in rates.items()
        if name != to
    }
    return {name: round(statistics.median(each)) for name, each in rates.items()}, ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = policy(CONTEXT)
    by_envs: list[dict[str, Any]] = []
    for n in ENVS:
        contenders = {
            "bare": bare(n),
            "random": rollout(n, RandomActor),
            "policy": rollout(
                n,
                lambda interface, n: PolicyActor(lambda: LoadedPolicy("p/1", loaded), interface, n),
            ),
            "uncached": uncached(loaded, n, CONTEXT),
        }
        rates, ratios = compare(contenders, args.rounds, "bare")
        by_envs.append({"envs": n, "steps_per_second": rates, "of_bare": ratios})
        print(by_envs[-1], flush=True)
    by_context: list[dict[str, Any]] = []
    for context in CONTEXTS:
        long = policy(context)
        pair = {"uncached": uncached(long, 8, context), "cached": cached(long, 8)}
        rates, ratios = compare(pair, args.rounds, "uncached")
        by_context.append({"context": context, "steps_per_second": rates, "of_uncached": ratios})
        print(by_context[-1], flush=True)
    result: dict[str, Any] = {"by_envs": by_envs, "by_context": by_context}
    print(f"written to {write('acting', result).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
