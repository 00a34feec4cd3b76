"""`stepwell evaluate`: a policy's score on fixed seeds, its uncertainty, and its episodes kept.

Evaluation is collection: greedy, purpose "eval". Episode i is reset with seed i and computed in
chunks of one fixed width, so the numbers do not depend on how many environments run side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from amago_model.acting import ActingPolicy
from amago_model.policy_file import load_policy
from collector.actor import Actor, Authored, Policy, PolicyActor, RandomActor
from collector.config import EvaluateConfig, UsageError
from collector.envs import BrokenEnv, Interface, interface_of, make, parse_pairs
from collector.lanes import open_outbox
from collector.policy_source import PolicySource
from collector.recorder import Episode
from collector.reference_scores import normalised_score
from collector.rollout import EnvSlots, Rollout
from collector.session import (
    close_run,
    fresh,
    interface_for,
    make_env,
    open_dataset,
    open_run,
    prepare,
    reason_of,
    resolved,
    slug,
)
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.intervals import RESAMPLES, bootstrap_mean, iqm
from stepwell.messages import Capacity
from stepwell.outbox import Outbox
from stepwell.trajectory import About, Trajectory

WIDTH = 8
"""Rows of a chunk (collector/actor.py says why it is fixed)."""

Player = Policy | Callable[[Interface, int], Actor]
"""A policy, or a function (interface, slots) → actor for scripted and random ones."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What a policy scored; lists are in the order of `seeds`."""

    env: str
    policy: str
    seeds: list[int]
    returns: list[float]
    """Undiscounted sums of rewards."""
    lengths: list[int]
    successes: list[bool | None]
    mean: float
    iqm: float
    """Mean of the middle half of the returns (Agarwal et al., 2021)."""
    ci_low: float
    """Bootstrap interval of the mean: percentiles of 10,000 seeded resamples."""
    ci_high: float
    confidence: float
    normalised: float | None
    """0 … 100 on D4RL's scale where it has a reference for the environment."""
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    """Every episode, in the order of `seeds` (long ones in several pieces)."""

    def to_json(self) -> dict[str, Any]:
        """All but the trajectories."""
        return {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "trajectories"}

    def table(self) -> Table:
        table = Table(title=f"{self.policy} in {self.env}")
        table.add_column("")
        table.add_column("value", justify="right")
        rows = {
            "episodes": f"{len(self.returns)} (seeds {self.seeds[0]} … {self.seeds[-1]})",
            "mean return": f"{self.mean:.2f}",
            f"{100 * self.confidence:.0f}% interval": f"{self.ci_low:.2f} … {self.ci_high:.2f}",
            "interquartile mean": f"{self.iqm:.2f}",
            "lowest … highest": f"{min(self.returns):.2f} … {max(self.returns):.2f}",
            "mean length": f"{np.mean(self.lengths):.1f}",
        }
        if self.normalised is not None:
            rows["normalised (0 … 100)"] = f"{self.normalised:.1f}"
        if known := [s for s in self.successes if s is not None]:
            rows["success"] = f"{100 * np.mean(known):.1f}%"
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def evaluate_policy(
    policy: Player,
    env_id: str,
    seeds: Sequence[int],
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    envs: int = 8,
    sample: bool = False,
    author: str = "policy",
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Play one episode for each of `seeds` and summarise. Needs no service.

    `policy` is what `amago_model.load_policy` gives, or a function that makes an actor. With
    sample=False the result depends on policy and seeds alone, not on `envs`. Raises `BrokenEnv` if
    the environment fails: a score with holes is none.
    """
    makers = [make(env_id, env_kwargs) for _ in range(min(envs, len(seeds)))]
    face = interface_of(makers[0], env_id)
    slots = EnvSlots(lambda: make(env_id, env_kwargs), makers, face)
    return _evaluate(
        policy, slots, seeds, About(env=env_id, purpose="eval"), author, sample, device, progress
    )


def _evaluate(
    policy: Player,
    slots: EnvSlots,
    seeds: Sequence[int],
    about: About,
    author: str,
    sample: bool,
    device: str,
    progress: Callable[[int, int], None] | None,
) -> EvaluationResult:
    face = slots.interface
    pieces: list[tuple[int, Trajectory]] = []
    episodes: dict[int, Episode] = {}
    try:
        rollout = Rollout(
            slots,
            _actor(policy, face, slots.count, author, sample, device),
            seeds=iter(seeds),
            sink=lambda trajectory, index: pieces.append((index, trajectory)),
            about=about,
        )
        while not rollout.done:
            for episode in rollout.step():
                episodes[episode.index] = episode
                if progress is not None:
                    progress(len(episodes), len(seeds))
            if rollout.broken:
                raise BrokenEnv(
                    f"{face.env_id} failed ({rollout.last_error}); a score with holes is none"
                )
    finally:
        slots.close()
    played = [episodes[i] for i in sorted(episodes)]
    assert [e.seed for e in played] == list(seeds), "episodes begin in the order of their seeds"
    # A stable sort: the pieces of one episode stay in order.
    ordered = [t for _, t in sorted(pieces, key=lambda pair: pair[0])]
    return summarise(face.env_id, author, played, ordered)


def summarise(
    env: str, author: str, episodes: Sequence[Episode], trajectories: Sequence[Trajectory] = ()
) -> EvaluationResult:
    returns = [e.total_reward for e in episodes]
    interval = bootstrap_mean(returns)
    return EvaluationResult(
        env=env,
        policy=author,
        seeds=[e.seed or 0 for e in episodes],
        returns=returns,
        lengths=[e.length for e in episodes],
        successes=[e.success for e in episodes],
        mean=interval.value,
        iqm=iqm(returns),
        ci_low=interval.low,
        ci_high=interval.high,
        confidence=interval.confidence,
        normalised=normalised_score(env, interval.value),
        trajectories=list(trajectories),
    )


def _actor(
    policy: Player, face: Interface, slots: int, author: str, sample: bool, device: str
) -> Actor:
    if not isinstance(policy, Policy):
        return policy(face, slots)
    if isinstance(policy, ActingPolicy):
        face.check_policy(policy.spaces, author)
    authored = Authored(author, policy)
    return PolicyActor(lambda: authored, face, slots, sample=sample, width=WIDTH, device=device)


def run_evaluation(
    config: EvaluateConfig, console: Console
) -> tuple[EvaluationResult, dict[str, Any]]:
    """The command: fetch the policy, play, upload. Returns the result and where it was put.

    Episodes wait in an outbox, so those that the service does not take are not lost: then the notes
    say what is "undelivered", and the run has failed.
    """
    prepare(config)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(config.url, config.token))
        envs = [make_env(config) for _ in range(min(config.envs, config.episodes))]
        face = interface_for(config, envs[0])
        author, player = _player(config, client)
        if isinstance(player, ActingPolicy):  # before anything is made at the service
            face.check_policy(player.spaces, author)
        dataset = run = ""
        outbox: Outbox | None = None
        if config.upload:
            dataset = config.dataset or f"eval-{slug(config.env)}"
            run = config.run or fresh("eval", slug(author.replace("/", "-"), 60), slug(config.env))
            # Never fewer than are about to come: a score whose episodes are gone proves nothing.
            keep = max(config.keep, config.episodes) if config.keep else None
            face = open_dataset(
                client,
                dataset,
                face,
                capacity=Capacity(trajectories=keep),
                description=f"evaluations in {config.env}",
            )
            outbox = open_outbox(
                client,
                dataset,
                face.spec,
                directory=config.outbox,
                say=lambda text: console.print(text, soft_wrap=True, highlight=False),
            )
            stack.callback(outbox.close, 0.0)
            open_run(client, run, "eval", resolved(config, run=run, dataset=dataset), config.seeds)
        about = About(env=config.env, purpose="eval", run=run, collector="evaluate")
        seeds = range(config.seeds, config.seeds + config.episodes)
        slots = EnvSlots(lambda: make_env(config), envs, face)
        notes: dict[str, Any] = {}
        try:
            with _progress(console, quiet=config.json) as progress:
                bar = progress.add_task(f"evaluate {author}", total=len(seeds))
                result = _evaluate(
                    player,
                    slots,
                    seeds,
                    about,
                    author,
                    config.sample,
                    config.device,
                    lambda done, _: progress.update(bar, completed=done),
                )
            if outbox is not None:
                notes = _upload(config, client, outbox, result, run)
        except BaseException as error:
            if config.upload:
                stopped = isinstance(error, KeyboardInterrupt)
                status = "stopped" if stopped else "failed"
                folder = None if outbox is None else outbox.directory
                close_run(client, run, status, reason_of(error), folder)
            raise
        if outbox is not None:
            trouble = notes.get("undelivered", "")
            close_run(client, run, "failed" if trouble else "finished", trouble, outbox.directory)
    return result, notes


def _upload(
    config: EvaluateConfig, client: Client, outbox: Outbox, result: EvaluationResult, run: str
) -> dict[str, Any]:
    """Send episodes and score; where they are, or what is undelivered and why."""
    notes: dict[str, Any] = {"dataset": outbox.dataset, "run": run}
    for trajectory in result.trajectories:
        outbox.put(trajectory)
    outbox.flush(config.drain_timeout)
    lost = outbox.undelivered()
    try:
        row = _evaluation_row(config, result, outbox.dataset, run)
        notes = {"evaluation": client.create_evaluation(**row).id, **notes}
    except StepwellError as error:
        lost = "; ".join(filter(None, (lost, f"the score was not recorded: {error}")))
    return {**notes, "undelivered": lost} if lost else notes


def _player(config: EvaluateConfig, client: Client) -> tuple[str, Player]:
    """(author, policy or actor maker)"""
    if config.random:
        return "random", lambda face, slots: RandomActor(face, slots)
    if config.file is not None:
        try:
            return config.file.name, load_policy(config.file, device=config.device)
        except OSError as error:
            raise UsageError(f"--file {config.file}: {error}") from None
    source = PolicySource(client, config.policy, device=config.device)
    source.poll()
    return source.current.author, source.current.policy


def _evaluation_row(
    config: EvaluateConfig, result: EvaluationResult, dataset: str, run: str
) -> dict[str, Any]:
    row = result.to_json()
    successes = row.pop("successes")
    return {
        **row,
        "run": run,
        "dataset": dataset,
        "details": {
            "statistic": "mean",
            "bootstrap": RESAMPLES,
            "greedy": not config.sample,
            "env_args": parse_pairs(config.env_args, "--env-args"),
            "successes": successes,
        },
    }


def _progress(console: Console, *, quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
    )
