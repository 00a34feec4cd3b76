"""`stepwell evaluate`: the score of a policy on fixed seeds, with a confidence interval.

An evaluation collects episodes with greedy actions in a dataset with purpose "eval". Each episode
has a fixed seed, and actions are computed in chunks of a constant size, so the results do not
depend on the number of parallel environments. Therefore videos are made afterwards: the episodes of
the first seeds are played again in one environment that renders.
"""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from amago_model.acting import ActingPolicy
from amago_model.policy_file import load_policy
from collector.broken_episodes import BrokenEpisodes
from collector.config import EvaluateConfig, UsageError, parse_reference
from collector.envs import Env, Envs, make, open_envs, parse_pairs
from collector.episode_recorder import BROKEN, EpisodeSummary
from collector.evaluation_result import EvaluationResult, summarise
from collector.interface import BrokenEnv, Interface, interface_of
from collector.policy_actor import Actor, LoadedPolicy, PolicyActor, RandomActor
from collector.policy_source import PolicySource
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
from collector.rollout import ENDLESS, ENDLESS_STEPS, Rollout
from collector.scripted_policy import SCRIPTED, ScriptedActor, load_scripted
from collector.video import RenderedEnv, open_rendered_env
from stepwell._progress import CommandProgress
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidSpace, StepwellError
from stepwell.messages import Capacity, Evaluation
from stepwell.spaces import env_name
from stepwell.trajectory import Trajectory, TrajectoryMetadata
from workbench.analysis.confidence_intervals import RESAMPLES

ATTEMPTS = 3
"""How often an episode is played whose environment fails, before the evaluation fails."""
WIDTH = 8
"""Rows per chunk; collector/policy_actor.py explains why it is constant."""

Player = ActingPolicy | Callable[[Interface, int], Actor]
"""A policy, or a function (interface, number of environments) → actor."""


def evaluate_policy(
    policy: Player,
    env_id: str,
    seeds: Sequence[int],
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    envs: int = 8,
    sample: bool = False,
    policy_id: str = "policy",
    device: str = "cpu",
) -> EvaluationResult:
    """Play one episode for each of `seeds` and summarise. Does not use the service.

    `policy` is the result of `amago_model.load_policy`, or a function that makes an actor. With
    sample=False, the result depends only on policy and seeds, not on `envs`. An episode whose
    environment fails is played again. Raises `BrokenEnv` if it fails three times: the mean of the
    remaining episodes is not a valid score.
    """

    def make_env() -> Env:
        return make(env_id, env_kwargs)

    with open_envs(make_env, min(envs, len(seeds))) as opened:
        interface = interface_of(opened[0], env_id)
        actor = _actor(policy, interface, len(opened), policy_id, sample, device)
        metadata = TrajectoryMetadata(env=interface.env_id, purpose="eval")
        broken = BrokenEpisodes()
        result = _play(
            opened, actor, interface, make_env, seeds, metadata, policy_id, lambda _: None, broken
        )
        if broken.total:
            warnings.warn(_played_again(broken), stacklevel=2)
        return result


def _actor(
    policy: Player, interface: Interface, n: int, policy_id: str, sample: bool, device: str
) -> Actor:
    if not isinstance(policy, ActingPolicy):
        return policy(interface, n)
    interface.check_policy(policy.spaces, policy_id)
    loaded = LoadedPolicy(policy_id, policy)
    return PolicyActor(lambda: loaded, interface, n, sample=sample, width=WIDTH, device=device)


def _play(
    envs: Envs,
    actor: Actor,
    interface: Interface,
    make_env: Callable[[], Env] | None,
    seeds: Sequence[int],
    metadata: TrajectoryMetadata,
    policy_id: str,
    on_episode: Callable[[int], object],
    broken: BrokenEpisodes,
) -> EvaluationResult:
    """`broken` receives the episodes in which the environment failed."""
    found: dict[int, list[tuple[EpisodeSummary, list[Trajectory]]]] = defaultdict(list)
    played = 0
    for _ in range(ATTEMPTS):
        missing = Counter(seeds) - Counter({seed: len(scored) for seed, scored in found.items()})
        if not missing:
            break
        pieces: dict[int, list[Trajectory]] = defaultdict(list)
        rollout = Rollout(
            envs,
            actor,
            interface,
            make_env=make_env,
            seeds=iter(missing.elements()),
            sink=lambda trajectory, index, pieces=pieces: pieces[index].append(trajectory),  # type: ignore[misc]
            metadata=metadata,
            broken=broken,
        )
        while not rollout.done:
            for episode in rollout.step():
                if BROKEN not in episode.tags:
                    assert episode.seed is not None
                    found[episode.seed].append((episode, pieces[episode.index]))
                    played += 1
            on_episode(played)
    else:
        left = len(seeds) - played
        if left:
            raise BrokenEnv(
                f"{interface.env_id} failed {ATTEMPTS} times with {pluralize(left, 'seed')} of "
                f"{len(seeds)} ({broken.last}); a score with holes is none"
            )
    in_order = [found[seed].pop(0) for seed in seeds]
    episodes = [replace(episode, index=i) for i, (episode, _) in enumerate(in_order)]
    trajectories = [piece for _, of_one in in_order for piece in of_one]
    return summarise(interface.env_id, policy_id, episodes, trajectories)


def _played_again(broken: BrokenEpisodes) -> str:
    return (
        f"the environment failed in {pluralize(broken.total, 'episode')}, played again with the "
        "same seed; if failures depend on the policy, the score does, too: "
        + "; ".join(broken.lines())
    )


def run_evaluation(
    config: EvaluateConfig, console: Console, *, quiet: bool = False
) -> tuple[EvaluationResult, dict[str, Any]]:
    """Fetch the policy, play, upload. Returns the result and notes on where it was stored.

    Episodes are queued in an outbox, so episodes that the service does not accept are not lost: the
    notes then contain "undelivered", and the run has failed. "broken" in the notes says which
    episodes were played again, because the environment failed.
    """
    prepare(config)
    run: Run | None = None
    played, steps_since_end, endless = 0, 0, ""
    notes: dict[str, Any] = {}
    say = partial(console.print, soft_wrap=True, highlight=False)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(config.url, config.token))
        make_env = partial(configured_env, config)
        parallel = min(config.envs, config.episodes)
        envs = stack.enter_context(open_configured_envs(config, parallel))
        interface = replace(
            configured_interface(config, envs), note=lambda text: say(f"note: {text}")
        )
        rendered: RenderedEnv | None = None
        if config.videos:  # before anything is created at the service
            rendered = stack.enter_context(_open_rendered(config, envs))
        # Before anything is created at the service.
        policy_id, player = _player(config, client, interface)
        if config.upload:
            dataset, interface = _open_dataset(client, config, interface)
            made_up = unique_name("eval", slug(policy_id.replace("/", "-"), 60), slug(config.env))
            run = stack.enter_context(
                open_run(
                    client,
                    config.run or made_up,
                    "eval",
                    config,
                    interface,
                    dataset=dataset,
                    seed=config.seeds,
                    say=say,
                )
            )
            run.start_heartbeat(
                lambda: {
                    "policy": policy_id,
                    "counters": {"episodes": float(played)},
                    "last_error": endless,
                }
            )
        metadata = TrajectoryMetadata(
            env=interface.env_id,
            purpose="eval",
            run=run.name if run else "",
            collector="evaluate",
            tags=config.tags,
        )
        seeds = range(config.seeds, config.seeds + config.episodes)

        def check_command(_: int) -> None:
            if run is not None and run.command in ("stop", "drain"):
                raise KeyboardInterrupt

        actor = _actor(player, interface, parallel, policy_id, config.sample, config.device)
        with CommandProgress(console=console, quiet=quiet) as bar:
            task = bar.add_task(f"evaluate {policy_id}", total=len(seeds))

            def on_episode(done: int) -> None:
                nonlocal played, steps_since_end, endless
                if done != played:
                    played, steps_since_end, endless = done, 0, ""
                steps_since_end += 1
                if steps_since_end == ENDLESS_STEPS:
                    endless = f"no episode has ended for {ENDLESS_STEPS:,} steps; {ENDLESS}"
                    say(endless)
                bar.update(task, completed=done)
                check_command(done)

            broken = BrokenEpisodes()
            result = _play(
                *(envs, actor, interface, make_env, seeds, metadata, policy_id, on_episode),
                broken,
            )
        interface.note_missing_infos()
        if broken.total and run is not None:
            run.broken = _played_again(broken)
        if run is not None:
            notes = _upload(config, run, result)
            if rendered is not None and "evaluation" in notes:
                play = _replay(
                    config, player, policy_id, rendered, interface, metadata, check_command
                )
                scored = list(zip(result.seeds, result.returns, result.lengths, strict=True))
                notes["videos"] = _add_videos(
                    run, notes["evaluation"], rendered, play, scored[: config.videos], say
                )
    if broken.total:
        notes["broken"] = _played_again(broken)
    if run is not None and run.undelivered:
        notes["undelivered"] = run.undelivered
    return result, notes


def with_environment(config: EvaluateConfig) -> EvaluateConfig:
    """With the environment that the policy learned in, as the service knows it.

    Raises `UsageError` if it does not, or if a module would be imported that nobody here has named;
    and errors of the service.
    """
    name, _ = parse_reference(config.policy)
    env, args, plugins = "", config.env_args, config.plugin
    with Client(config.url, config.token) as client:
        client.wait_ready(10.0)
        dataset = str(client.run(name).config.get("dataset") or "").partition("@")[0]
        if dataset:
            collected = (run.config for run in client.runs(kind="collect"))  # newest first
            found = next((c for c in collected if c.get("dataset") == dataset), {})
            env = found.get("env") or client.dataset(dataset).spec.get("env") or ""
            args = args or tuple(found.get("env_args", ()))
            plugins = plugins or tuple(found.get("plugin", ()))
    if not env:
        raise UsageError(f"env: the data of run {name} do not tell its environment; give --env ID")
    if ":" in env or plugins != config.plugin:
        words = ["--env", env, *(["--env-args", *args] if args else [])]
        words += ["--plugin", *plugins] if plugins else []
        raise UsageError(
            f"env: run {name} learned in one that a module registers, which is only imported if "
            f"you name it: {shlex.join(words)}"
        )
    return config.replace(env=env, env_args=args)


def _open_dataset(
    client: Client, config: EvaluateConfig, interface: Interface
) -> tuple[str, Interface]:
    """The dataset of the episodes, and the interface that records with its spec."""
    default = f"eval-{slug(env_name(config.env))}"
    names = [config.dataset or default]
    if not config.dataset:  # an environment's arguments may change its spaces
        names.append(f"{default}-{interface.spec.digest[:8]}")
    # At least the number of new episodes: a score must not lose its episodes.
    keep = max(config.keep, config.episodes) if config.keep else None
    for name in names:
        try:
            return name, open_dataset(
                client,
                name,
                interface,
                capacity=Capacity(trajectories=keep),
                description=f"evaluations in {config.env}",
            )
        except InvalidSpace:
            if name == names[-1]:
                raise
    raise AssertionError("the last name returns or raises")


def _player(config: EvaluateConfig, client: Client, interface: Interface) -> tuple[str, Player]:
    """(policy id, policy that fits the environment, or function that makes an actor)"""
    policy_id, player = _load(config, client)
    if isinstance(player, ActingPolicy):
        interface.check_policy(player.spaces, policy_id)
        if config.target_return is not None:
            _aim_at(player, policy_id, config.target_return)
    return policy_id, player


def _load(config: EvaluateConfig, client: Client) -> tuple[str, Player]:
    """(policy id, policy or function that makes an actor)"""
    if config.random:
        return "random", RandomActor
    if config.scripted:
        return SCRIPTED, partial(ScriptedActor, policy=load_scripted(config.scripted))
    if config.file is not None:
        try:
            return config.file.name, load_policy(config.file, device=config.device)
        except OSError as error:
            raise UsageError(f"--file {config.file}: {error.strerror}") from None
    client.wait_ready(10.0)
    source = PolicySource(client, config.policy, device=config.device)
    source.poll()
    return source.current.policy_id, source.current.policy


def _aim_at(policy: ActingPolicy, policy_id: str, target_return: float) -> None:
    if policy.config.return_conditioning is None:
        raise UsageError(
            f"--target-return: {policy_id} is not return-conditioned; leave it out, or evaluate a "
            "policy of the recipe dt"
        )
    policy.target_return = target_return


def _upload(config: EvaluateConfig, run: Run, result: EvaluationResult) -> dict[str, Any]:
    """Send episodes and score. Returns where they are stored."""
    for trajectory in result.trajectories:
        run.outbox.put(trajectory)
    run.outbox.drain(config.drain_timeout)
    notes = {"dataset": run.outbox.dataset, "run": run.name}
    row = result.to_json()
    details = {
        **{name: row.pop(name) for name in ("bottom_quintile", "successes", "metrics", "tasks")},
        "statistic": "mean",
        "bootstrap": RESAMPLES,
        "greedy": not config.sample,
        "env_args": parse_pairs(config.env_args, "--env-args"),
    }
    if config.target_return is not None:
        details["target_return"] = config.target_return
    if config.scripted:
        details["scripted"] = config.scripted
    try:
        evaluation = run.client.create_evaluation(**row, **notes, details=details)
    except StepwellError as error:
        run.problem = f"the score was not recorded: {error}"
        return notes
    return {"evaluation": evaluation.id, **notes}


def record_videos(config: EvaluateConfig, evaluation: Evaluation, console: Console) -> None:
    """Store those videos of `config` that a score lacks: its first episodes, played again.

    Raises `UsageError` if the environment does not render, `StepwellError` if the service refuses.
    """
    say = partial(console.print, soft_wrap=True, highlight=False)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(config.url, config.token))
        envs = stack.enter_context(open_configured_envs(config, 1))
        interface = configured_interface(config, envs)
        rendered = stack.enter_context(_open_rendered(config, envs))
        policy_id, player = _player(config, client, interface)
        play = _replay(config, player, policy_id, rendered, interface, TrajectoryMetadata())
        have = {video.seed for video in client.videos(evaluation.id)}
        first = zip(evaluation.seeds, evaluation.returns, evaluation.lengths, strict=True)
        for seed, total_reward, length in list(first)[: config.videos]:
            if seed not in have:
                _add_video(client, evaluation.id, rendered, play, (seed, total_reward, length), say)


def _open_rendered(config: EvaluateConfig, envs: Envs) -> AbstractContextManager[RenderedEnv]:
    declared = envs[0].metadata if isinstance(envs, list) else envs.metadata
    return open_rendered_env(config, declared or {})


def _replay(
    config: EvaluateConfig,
    player: Player,
    policy_id: str,
    env: RenderedEnv,
    interface: Interface,
    metadata: TrajectoryMetadata,
    on_episode: Callable[[int], object] = lambda _: None,
) -> Callable[[list[int]], EvaluationResult]:
    """Plays the episodes of seeds in the environment that renders."""
    actor = _actor(player, interface, 1, policy_id, config.sample, config.device)
    return partial(
        _play,
        [env],
        actor,
        interface,
        None,
        metadata=metadata,
        policy_id=policy_id,
        on_episode=on_episode,
        broken=BrokenEpisodes(),
    )


def _add_videos(
    run: Run,
    evaluation: str,
    env: RenderedEnv,
    play: Callable[[list[int]], EvaluationResult],
    scored: Sequence[tuple[int, float, int]],
    say: Callable[[str], object],
) -> int:
    """Play episodes, given as (seed, return, length), again, and store a video of each. Returns
    their number; a failure is the run's problem, as the score is stored already."""
    for number, episode in enumerate(scored):
        try:
            _add_video(run.client, evaluation, env, play, episode, say)
        except (StepwellError, OSError) as error:
            run.problem = f"the video of seed {episode[0]} was not recorded: {error}"
            return number
    return len(scored)


def _add_video(
    client: Client,
    evaluation: str,
    env: RenderedEnv,
    play: Callable[[list[int]], EvaluationResult],
    episode: tuple[int, float, int],
    say: Callable[[str], object],
) -> None:
    """Play an episode (seed, return, length) again, and store its video."""
    seed, total_reward, length = episode
    with env.recording(length) as encoder:
        shown = play([seed])
        data = encoder.finish()
    client.put_video(
        evaluation,
        seed,
        data,
        media_type=encoder.media_type,
        total_reward=shown.returns[0],
        length=shown.lengths[0],
    )
    if shown.returns[0] != total_reward:
        say(
            f"the video of seed {seed} shows another episode than the score: its return is "
            f"{shown.returns[0]:.6g}, not {total_reward:.6g}; sampled actions, or the "
            "environment, do not repeat with the seed"
        )
