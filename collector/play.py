"""What `stepwell collect` does: play, and send every episode to a dataset. One collector's story.

    environment ─▶ policy ─▶ dataset ─▶ outbox ─▶ run ─▶ play until told to stop ─▶ empty the outbox

A policy that is not there, or for another environment, is found out before anything is made.

The service may come and go while it plays: episodes wait in the outbox, the policy stays in play.
What it has not taken in the end is a failure of the run, although nothing is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from collector.actor import Actor, ActorError, PolicyActor, RandomActor
from collector.config import CollectConfig
from collector.exploration import Exploration
from collector.lanes import open_outbox
from collector.policy_source import PolicySource
from collector.progress import Display
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
    worker_name,
)
from collector.tally import Tally, open_clock, write_clock
from collector.worker import Control, Heartbeat, State, signals
from stepwell.client import Client
from stepwell.errors import NotFound, Undelivered
from stepwell.messages import Capacity
from stepwell.outbox import Outbox
from stepwell.trajectory import About

# Seeds of collected episodes lie above those that evaluations use, so nobody trains on a test.
FIRST_SEED, LAST_SEED = 1 << 20, 1 << 31
OUTBOX_FULL = 0.9


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that belongs together while one collector plays."""

    config: CollectConfig
    client: Client
    control: Control
    console: Console
    slots: EnvSlots
    outbox: Outbox
    tally: Tally
    source: PolicySource | None
    """Of policies; None plays at random."""
    run: str
    seed: int
    lane: int
    """Number of the outbox among those of this machine: collectors of one --seed differ by it."""


def collect(
    config: CollectConfig, *, control: Control | None = None, console: Console | None = None
) -> Tally:
    """Play as `config` says until it is done or told to stop. Raises typed errors only.

    `Undelivered` where all went well but the service has not taken every episode.
    """
    console = console or Console(stderr=True, quiet=True)
    control = control or Control()
    prepare(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals(control))

        # --- act one: environments, the service, who plays, the dataset ----------------------
        envs = [make_env(config) for _ in range(config.envs)]
        face = interface_for(config, envs[0], config.infos)
        slots = EnvSlots(lambda: make_env(config), envs, face)
        stack.callback(slots.close)
        client = stack.enter_context(Client(config.url, config.token))
        client.wait_ready(10.0)
        source = _source(config, client, slots)
        if source is not None:
            stack.callback(source.close)
        capacity = Capacity(
            trajectories=config.capacity_trajectories or None, steps=config.capacity_steps or None
        )
        slots.interface = open_dataset(
            client, config.dataset, slots.interface, create=config.create, capacity=capacity
        )

        # --- act two: an outbox that outlives this process, and a run -------------------------
        outbox = open_outbox(
            client,
            config.dataset,
            slots.interface.spec,
            directory=config.outbox,
            partition=config.partition,
            max_bytes=config.outbox_bytes,
            say=lambda text: console.print(text, soft_wrap=True, highlight=False),
        )
        stack.callback(outbox.close, 0.0)
        seed = secrets.randbits(31) if config.seed is None else config.seed
        run = config.run or fresh("collect", slug(config.env))
        open_run(client, run, "collect", resolved(config, run=run, seed=seed), seed)
        session = Session(
            config,
            client,
            control,
            console,
            slots,
            outbox,
            open_clock(outbox.directory),
            source,
            run,
            seed,
            0 if config.outbox else int(outbox.directory.name),
        )

        # --- act three: play -------------------------------------------------------------------
        try:
            _play(session)
        except BaseException as error:
            _end(session, error)
            raise
        _end(session)
    return session.tally


def _end(session: Session, error: BaseException | None = None) -> None:
    """Let the run know how it went, and a person what there is and what is left.

    Raises `Undelivered` for what is left, unless an `error` is on its way already.
    """
    undelivered = session.outbox.undelivered()
    status = "stopped" if session.control.state == "stopped" else "finished"
    if error is not None:
        status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    if undelivered:
        status = "failed"
    reasons = (reason_of(error) if error is not None else "", undelivered)
    why = "; ".join(filter(None, reasons))
    close_run(session.client, session.run, status, why, session.outbox.directory)
    _summary(session)
    if undelivered and error is None:
        raise Undelivered(undelivered)
    if undelivered:
        session.console.print(undelivered, soft_wrap=True, highlight=False)


def _play(session: Session) -> None:
    """From the first policy to the last episode sent."""
    config, control, outbox, tally = session.config, session.control, session.outbox, session.tally
    source = session.source
    worker = worker_name()
    heart = Heartbeat(
        session.client,
        control,
        worker=worker,
        run=session.run,
        every=config.heartbeat_every,
        counters=lambda: {**tally.counters(), **outbox.counters()},
        policy=lambda: source.current.author if source and source.ready else config.policy,
        trouble=lambda: (
            tally.error
            or outbox.reason
            or outbox.last_error
            or (source.last_error if source else "")
        ),
        series=tally.series,
        token=config.token,
    )
    ending: State = "failed"
    try:
        if source is None or _first_policy(session, source):
            rollout = _rollout(session, worker)
            if source is not None:
                source.start()
            control.go()
            with Display(config, session.console) as display:
                tally.began = time.monotonic()
                _loop(session, rollout, display)
        _drain(session)
        ending = "failed" if session.outbox.undelivered() else "stopped"
    finally:
        if source is not None:
            source.close()
        write_clock(outbox.directory, tally)
        heart.close(ending)


def _loop(session: Session, rollout: Rollout, display: Display) -> None:
    config, control, tally = session.config, session.control, session.tally
    draining = False
    last_saved = time.monotonic()
    try:
        while not rollout.done:
            control.wait_while_paused()
            if control.stopping or (config.steps and tally.steps >= config.steps):
                break
            if control.state == "draining" and not draining:
                draining = True
                rollout.finish()
            if session.outbox.pending_bytes > OUTBOX_FULL * config.outbox_bytes:
                tally.error = f"the outbox is full: {session.outbox.last_error}"
                time.sleep(0.2)
                continue
            for episode in rollout.step():
                tally.count(episode)
            tally.steps = rollout.steps
            tally.broken, tally.error = rollout.broken, rollout.last_error

            # once in a while: the clock of the exploration schedule survives a crash
            if time.monotonic() - last_saved > 5.0:
                write_clock(session.outbox.directory, tally)
                last_saved = time.monotonic()
            display.update(tally, session.outbox)
    finally:
        # However it ends, what was played is kept.
        for episode in rollout.interrupt():
            tally.count(episode)


def _source(config: CollectConfig, client: Client, slots: EnvSlots) -> PolicySource | None:
    """Where policies come from, with the first one at hand unless we are to wait for it."""
    if not config.policy:
        return None
    source = PolicySource(
        client,
        config.policy,
        device=config.device,
        every=config.poll_every,
        accept=lambda policy: slots.interface.check_policy(policy.spaces, config.policy),
    )
    if not config.wait_for_policy:
        try:
            source.poll()
        except NotFound as error:
            raise ActorError(f"{error}; --wait-for-policy would wait for it") from None
    return source


def _first_policy(session: Session, source: PolicySource) -> bool:
    """True once there is one to play; False if told to stop while waiting."""
    config, control, console = session.config, session.control, session.console
    if not source.ready:
        console.print(f"waiting for a policy of {config.policy} …", soft_wrap=True, highlight=False)
        if not source.wait(lambda: control.stopping or control.state == "draining"):
            return False
    console.print(
        f"playing {source.current.author} in {config.env}", soft_wrap=True, highlight=False
    )
    return True


def _rollout(session: Session, worker: str) -> Rollout:
    config, slots, tally = session.config, session.slots, session.tally
    source = session.source
    # Session and lane are part of every stream: a run that is taken up again plays new episodes,
    # and so does each of several collectors that were started with the same words.
    streams = np.random.SeedSequence([session.seed, tally.sessions, session.lane]).spawn(3)
    for_actor, for_episodes, for_noise = (int(s.generate_state(1)[0]) for s in streams)
    face, clock = slots.interface, (lambda: tally.clock)
    actor: Actor
    if source is None:
        actor = RandomActor(face, slots.count, seed=for_actor)
    else:
        actor = PolicyActor(
            lambda: source.current,
            face,
            slots.count,
            sample=config.sample,
            seed=for_actor,
            device=config.device,
        )
        if config.epsilon.clock == "policy":
            clock = lambda: source.current.step  # noqa: E731 - one of two clocks
    return Rollout(
        slots,
        actor,
        seeds=episode_seeds(for_episodes, config.episodes),
        sink=lambda trajectory, _: session.outbox.put(trajectory),
        about=About(env=config.env, collector=worker, run=session.run, tags=config.tags),
        exploration=Exploration(
            config.epsilon, face.spec, slots.count, seed=for_noise, clock=clock
        ),
        max_steps=config.max_steps,
    )


def episode_seeds(seed: int, episodes: int = 0) -> Iterator[int]:
    """A seed for every episode, without end where `episodes` is 0."""
    rng = np.random.default_rng(seed)
    counter = itertools.count() if episodes == 0 else range(episodes)
    return (int(rng.integers(FIRST_SEED, LAST_SEED)) for _ in counter)


def _drain(session: Session) -> None:
    outbox = session.outbox
    if outbox.pending:
        session.console.print(
            f"sending the last {outbox.pending} episodes …", soft_wrap=True, highlight=False
        )
    outbox.flush(session.config.drain_timeout)


def _summary(session: Session) -> None:
    tally, console = session.tally, session.console
    returns = [e.total_reward for e in tally.recent]
    mean = f", mean return {np.mean(returns):.1f}" if returns else ""
    broken = f", {tally.broken} broken: {tally.error}" if tally.broken else ""
    console.print(
        f"{tally.episodes} episodes, {tally.steps} steps{mean}{broken}",
        soft_wrap=True,
        highlight=False,
    )
