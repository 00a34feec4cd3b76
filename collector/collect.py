"""`stepwell collect`: collect episodes and send them to a dataset.

    environments ─▶ policy ─▶ dataset ─▶ outbox ─▶ run ─▶ collect until stopped ─▶ send the rest

A missing policy, or one for another environment, is an error before a dataset or run is created.

While the service is unreachable, episodes wait in the outbox and the collector keeps its policy. If
unsent episodes remain at the end, the run has failed, but the episodes stay on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from collector.config import CollectConfig
from collector.control import Control
from collector.envs import Envs
from collector.exploration import make_exploration
from collector.interface import Interface
from collector.pacing import Pacing
from collector.policy_actor import Actor, ActorError, PolicyActor, RandomActor
from collector.policy_source import PolicySource
from collector.progress import show_progress
from collector.registered_run import (
    Run,
    configured_env,
    configured_interface,
    open_configured_envs,
    open_dataset,
    open_run,
    prepare,
    slug,
    unique_name,
)
from collector.rollout import Rollout
from collector.stats import CollectorStatistics, load_clock, save_clock
from collector.warm_up import WarmUpActor
from stepwell._signals import stop_signals
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import NotFound, Undelivered
from stepwell.messages import Capacity, MetricPoint
from stepwell.trajectory import TrajectoryMetadata

# Above the seeds of evaluations, so that no training data comes from a test episode.
FIRST_SEED, LAST_SEED = 1 << 20, 1 << 31
LONG_WARM_UP = 20
"""How many times `warm_up_steps` random steps are made, at most, while all episodes are alike."""
OUTBOX_FULL = 0.9


def collect(
    config: CollectConfig, *, control: Control | None = None, console: Console | None = None
) -> CollectorStatistics:
    """Play as `config` says until it is done or stopped. Raises typed errors only.

    `Undelivered` where all went well but the service has not taken every episode.
    """
    console = console or Console(stderr=True, quiet=True)
    control = control or Control()
    say = partial(console.print, soft_wrap=True, highlight=False)
    prepare(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_signals(lambda: control.command("stop")))

        # --- environments, the service, the policy, the dataset
        envs = stack.enter_context(open_configured_envs(config, config.envs))
        interface = configured_interface(config, envs, config.infos)
        interface = replace(
            interface,
            refuses_outside=config.out_of_bounds == "refuse",
            note=lambda text: say(f"note: {text}"),
        )
        client = stack.enter_context(Client(config.url, config.token))
        client.wait_ready(10.0)
        source = _policy_source(config, client, interface)
        if source is not None:
            stack.callback(source.close)
        capacity = Capacity(
            trajectories=config.capacity_trajectories or None, steps=config.capacity_steps or None
        )
        interface = open_dataset(
            client, config.dataset, interface, create=config.create, capacity=capacity
        )

        # --- an outbox that outlives this process, and a run
        seed = secrets.randbits(31) if config.seed is None else config.seed
        run = stack.enter_context(
            open_run(
                client,
                config.run or unique_name("collect", slug(config.env)),
                "collect",
                config,
                interface,
                dataset=config.dataset,
                seed=seed,
                say=say,
                partition=config.partition,
                max_bytes=config.outbox_bytes,
            )
        )
        stats = load_clock(run.outbox.directory)
        run.start_heartbeat(
            lambda: _status(config, control, run, stats, source),
            control.command,
            config.heartbeat_every,
        )

        # --- play
        try:
            warming = _warming(config, stats, source)
            if source is None or warming() or _wait_for_policy(source, config, control, say):
                pacing = Pacing(client, config.dataset, lambda: stats.steps)
                stack.callback(pacing.close)
                rollout = _rollout(config, envs, interface, source, run, stats, seed, pacing)
                if source is not None:
                    source.start()
                control.go()
                with show_progress(config, console, stats, run.outbox) as update:
                    stats.started = time.monotonic()
                    _play(config, control, rollout, run, stats, update, pacing, source, say)
                pacing.close()
            if run.outbox.pending:
                say(f"sending the last {pluralize(run.outbox.pending, 'episode')} …")
            run.outbox.drain(config.drain_timeout)
            run.status = "stopped" if control.stopping else "finished"
            if stats.broken.total and not stats.kept:
                run.status = "failed"
        finally:
            if source is not None:
                source.close()
            save_clock(run.outbox.directory, stats)
            run.broken = stats.broken.summary(stats.episodes)
            if stats.steps:
                interface.note_missing_infos()
            _print_summary(stats, say)
    if run.undelivered:
        raise Undelivered(run.undelivered)
    return stats


def _status(
    config: CollectConfig,
    control: Control,
    run: Run,
    stats: CollectorStatistics,
    source: PolicySource | None,
) -> dict[str, Any]:
    """The content of a heartbeat."""
    return {
        # After "stop" it still sends the last episodes; the last heartbeat says how it ended.
        "state": "draining" if control.stopping else _state(control, stats),
        "counters": {**stats.counters(), **run.outbox.counters()},
        "policy": source.current.policy_id if source and source.ready else config.policy,
        "last_error": (
            stats.stuck
            or stats.error
            or run.outbox.last_error
            or (source.last_error if source else "")
            or "; ".join(stats.remarks)
        ),
        "metrics": [
            MetricPoint(key=key, step=stats.clock, value=value, time=time.time())
            for key, value in stats.metrics().items()
        ],
    }


def _warming(
    config: CollectConfig, stats: CollectorStatistics, source: PolicySource | None
) -> Callable[[], bool]:
    """Whether an episode that begins now is random. The warm-up is longer while all episodes have
    the same return, and there is no policy: a trainer waits until some differ."""

    def warming() -> bool:
        if stats.clock < config.warm_up_steps:
            return True
        absent = source is not None and not source.ready
        early = stats.clock < LONG_WARM_UP * config.warm_up_steps
        return absent and early and stats.all_alike

    return warming


def _state(control: Control, stats: CollectorStatistics) -> str:
    return "waiting" if stats.waiting and control.state == "running" else control.state


def _policy_source(
    config: CollectConfig, client: Client, interface: Interface
) -> PolicySource | None:
    """The policy source, with the first policy loaded unless --wait-for-policy; None for random
    actions."""
    if not config.policy:
        return None
    source = PolicySource(
        client,
        config.policy,
        device=config.device,
        every=config.poll_every,
        accept=lambda policy: interface.check_policy(policy.spaces, config.policy),
    )
    if not config.wait_for_policy:
        try:
            source.poll()
        except NotFound as error:
            raise ActorError(f"{error}; --wait-for-policy would wait for it") from None
    return source


def _wait_for_policy(
    source: PolicySource, config: CollectConfig, control: Control, say: Callable[[str], object]
) -> bool:
    """Wait for a policy. Returns False if a stop was requested in the meantime."""
    if not source.ready:
        say(f"waiting for a policy of {config.policy} …")
        if not source.wait(lambda: control.stopping or control.state == "draining"):
            return False
    say(f"playing {source.current.policy_id} in {config.env}")
    return True


def _rollout(
    config: CollectConfig,
    envs: Envs,
    interface: Interface,
    source: PolicySource | None,
    run: Run,
    stats: CollectorStatistics,
    seed: int,
    pacing: Pacing,
) -> Rollout:
    # A resumed run plays new episodes, and so does each of several collectors that were started
    # with the same --seed on one machine: they differ by the number of their outbox slot.
    outbox_slot = 0 if config.outbox else int(run.outbox.directory.name)
    streams = np.random.SeedSequence([seed, stats.earlier_sessions, outbox_slot]).spawn(3)
    actor_seed, episodes_seed, noise_seed = (int(s.generate_state(1)[0]) for s in streams)
    actor: Actor
    warming = _warming(config, stats, source)
    if source is None:
        actor = RandomActor(interface, config.envs, seed=actor_seed)
    else:
        actor = PolicyActor(
            lambda: source.current,
            interface,
            config.envs,
            sample=config.sample,
            seed=actor_seed,
            device=config.device,
        )
        if warming():
            random = RandomActor(interface, config.envs, seed=actor_seed)
            actor = WarmUpActor(random, actor, config.envs, warming)
    by_policy = source is not None and getattr(config.epsilon, "clock", "own") == "policy"
    exploration = make_exploration(
        config.epsilon,
        interface.spec,
        config.envs,
        seed=noise_seed,
        clock=lambda: _policy_step(source) if source and by_policy else stats.clock,
    )
    return Rollout(
        envs,
        actor,
        interface,
        make_env=lambda: configured_env(config),
        seeds=episode_seeds(episodes_seed, config.episodes),
        sink=lambda trajectory, _: run.outbox.put(trajectory),
        metadata=TrajectoryMetadata(
            env=interface.env_id, collector=run.worker, run=run.name, tags=config.tags
        ),
        exploration=exploration,
        max_steps=config.max_steps,
        may_begin=lambda: not _waits_for(config, source, stats, pacing),
        policy_lag=lambda policy_id: None if source is None else source.lag(policy_id),
    )


def _policy_step(source: PolicySource) -> int:
    """The learner's step of the newest policy; 0 during a warm-up, before there is one."""
    return source.current.step if source.ready else 0


def _waits_for(
    config: CollectConfig, source: PolicySource | None, stats: CollectorStatistics, pacing: Pacing
) -> str:
    """Why no episode begins now; empty if one may."""
    if source is not None and not source.ready and not _warming(config, stats, source)():
        return source.last_error or f"no policy {config.policy} yet"
    return pacing.ahead if config.when_ahead == "wait" else ""


def _outbox_is_full(config: CollectConfig, run: Run) -> bool:
    """The service has been away for so long that playing waits."""
    return run.outbox.pending_bytes > OUTBOX_FULL * config.outbox_bytes


def _play(
    config: CollectConfig,
    control: Control,
    rollout: Rollout,
    run: Run,
    stats: CollectorStatistics,
    show: Callable[[], None],
    pacing: Pacing,
    source: PolicySource | None,
    say: Callable[[str], object],
) -> None:
    """Run until all episodes or steps are collected, or a stop is requested."""
    draining = False
    last_saved = time.monotonic()
    try:
        while not rollout.done:
            control.wait_while_paused()
            if control.stopping or (config.steps and stats.steps >= config.steps):
                break
            if control.state == "draining" and not draining:
                draining = True
                rollout.finish()
            if _outbox_is_full(config, run):
                stats.error = f"the outbox is full: {run.outbox.last_error}"
                time.sleep(0.2)
                continue
            run.outbox.held = config.when_ahead != "wait" and pacing.full
            stats.stepping_since = time.monotonic()
            for episode in rollout.step():
                stats.add_episode(episode)
            stats.steps, stats.stepping_since = rollout.steps, None
            stats.broken, stats.error = rollout.broken, rollout.broken.last
            for remark in (rollout.outside, rollout.endless):
                if remark and remark not in stats.remarks:
                    say(remark)
                    stats.remarks.append(remark)
            if run.outbox.held and config.when_ahead == "drop-oldest":
                stats.dropped += run.outbox.drop_oldest(config.envs)
            stats.waiting = "" if rollout.playing else _waits_for(config, source, stats, pacing)
            if stats.waiting:
                show()
                time.sleep(0.05)
                continue
            # once in a while: the clock of the exploration schedule survives a crash
            if time.monotonic() - last_saved > 5.0:
                save_clock(run.outbox.directory, stats)
                last_saved = time.monotonic()
            show()
    finally:
        # However it ends, what was played is kept.
        for episode in rollout.interrupt():
            stats.add_episode(episode)


def episode_seeds(seed: int, episodes: int = 0) -> Iterator[int]:
    """Yield a seed for each episode; infinite if `episodes` is 0."""
    rng = np.random.default_rng(seed)
    counter = itertools.count() if episodes == 0 else range(episodes)
    return (int(rng.integers(FIRST_SEED, LAST_SEED)) for _ in counter)


def _print_summary(stats: CollectorStatistics, say: Callable[[str], object]) -> None:
    mean = "" if stats.mean_return is None else f", mean return {stats.mean_return:.1f}"
    say(f"{pluralize(stats.episodes, 'episode')}, {pluralize(stats.steps, 'step')}{mean}")
    if stats.broken.total:
        say(stats.broken.summary(stats.episodes))
