"""Rollouts: N environments and one actor produce episodes.

    reset(seed) → o0    step(a0) → r0, o1    …    step → terminated or truncated: the episode ends

Environments in a list are stepped independently: each episode has its own seed, and a failure of
one environment does not affect the others. Its episode is truncated before the failure and tagged
"broken", and the environment is created again. vector_env.py steps gymnasium vector environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gymnasium.vector import VectorEnv

from collector.broken_episodes import BrokenEpisodes
from collector.env_spaces import Arrays
from collector.envs import Env, Envs
from collector.episode_recorder import (
    BROKEN,
    INTERRUPTED,
    MAX_STEPS,
    EpisodeRecorder,
    EpisodeSummary,
    Sink,
)
from collector.exploration import Exploration, explore
from collector.interface import BrokenEnv, Interface
from collector.policy_actor import Actor, ActorInputs, PolicyActor
from collector.process_env import begin, end
from collector.vector_env import Reset, VectorEnvAdapter, mapping_of
from stepwell._plugins import describe_error
from stepwell.trajectory import TrajectoryMetadata

ENDLESS_STEPS = 10_000
"""Steps of an episode after which a note says that it may have no end."""
ENDLESS = "if episodes have no end, limit them: --env-args max_episode_steps=1000"
MAX_FAILURES = 10
"""Number of consecutive failures, without a successful step, after which `BrokenEnv` is raised."""


class Rollout:
    """Collects episodes in all of `envs`; `step` takes one action in each environment.

    `seeds` has the reset seed of each episode. When it is exhausted, environments become idle after
    their episodes, and `done` is true when all are idle. The actor updates its policy only at the
    start of an episode, and of a piece where one is stored in pieces. `make_env` replaces a broken
    environment, in the list `envs` itself, so that its owner can close all environments.

    `envs` may be a gymnasium `VectorEnv` in any autoreset mode. A failure in it, or in a list
    without `make_env`, raises `BrokenEnv`. If it resets automatically, only the first episode of
    each sub-environment is seeded; each later one consumes an entry of `seeds` without using it.

    While `may_begin` is false, no episode begins, except where environments reset themselves.
    `policy_lag(policy_id)` is stored as a metric of each episode, unless it is None.
    """

    def __init__(
        self,
        envs: Envs,
        actor: Actor,
        interface: Interface,
        *,
        make_env: Callable[[], Env] | None = None,
        seeds: Iterator[int | None],
        sink: Sink,
        metadata: TrajectoryMetadata | None = None,
        exploration: Exploration | None = None,
        max_steps: int = MAX_STEPS,
        may_begin: Callable[[], bool] = lambda: True,
        policy_lag: Callable[[str], int | None] = lambda _: None,
        broken: BrokenEpisodes | None = None,
    ):
        self._may_begin = may_begin
        self._vector: VectorEnvAdapter | None = None
        self._envs: list[Env] = []
        if isinstance(envs, VectorEnv):
            self._vector, n = VectorEnvAdapter(envs, interface), envs.num_envs
        else:
            self._envs, n = envs, len(envs)
        self._actor, self._interface = actor, interface
        self._make_env, self._seeds, self._exploration = make_env, seeds, exploration
        metadata = metadata or TrajectoryMetadata(env=interface.env_id)
        self._recorders = [
            EpisodeRecorder(
                interface.spec,
                metadata,
                sink,
                encode_info=interface.encode_info,
                max_steps=max_steps,
                env_index=i,
                policy_lag=policy_lag,
            )
            for i in range(n)
        ]
        self.inputs = ActorInputs.zeros(interface.spec, n)
        self.steps = 0
        """Transitions played, all environments together."""
        self.broken = BrokenEpisodes() if broken is None else broken
        self.outside = ""
        """The first observation outside of its declared space, in words."""
        self.endless = ""
        """Report that an episode may have no end."""
        self._idle = set(range(n))
        self._failures = [0] * n
        self._started = 0
        self._exhausted = False

    @property
    def done(self) -> bool:
        """Whether no episode runs and none will begin."""
        return self._exhausted and not self.playing

    @property
    def playing(self) -> bool:
        """Whether an episode runs."""
        return any(recorder.running for recorder in self._recorders)

    def step(self) -> list[EpisodeSummary]:
        """One action everywhere; the episodes that ended, in order of environments."""
        self._start_episodes()
        playing = [recorder.running for recorder in self._recorders]
        # An idle vector environment resets itself in its next step.
        if not any(playing) and not (self._vector and self._idle):
            return []
        self.inputs.playing[:] = playing
        actions = self._actor.act(self.inputs)
        if self._exploration is not None:
            actions = explore(self._exploration, actions, self.inputs)
        actions = self._interface.clip_actions(actions)
        if self._vector is not None:
            ended = self._step_vector(self._vector, actions, playing)
        else:
            rows = {i: _row(actions, i) for i in range(len(playing)) if playing[i]}
            given = {i: self._interface.decode_action(row) for i, row in rows.items()}
            for i in rows:  # those with a process of their own step at the same time
                begin(self._envs[i], "step", given[i])
            ended = [self._step_env(i, row, given[i]) for i, row in rows.items()]
        return [episode for episode in ended if episode is not None]

    def finish(self) -> None:
        """Begin no further episode; those that run may end."""
        self._exhausted, self._idle = True, set()

    def interrupt(self) -> list[EpisodeSummary]:
        """Stop now: running episodes become truncated trajectories tagged "interrupted"."""
        self.finish()
        cut = [recorder.truncate(INTERRUPTED) for recorder in self._recorders]
        return [episode for episode in cut if episode is not None]

    def _start_episodes(self) -> None:
        """Reset every idle environment, each with the next seed."""
        if self._vector is not None and self._vector.resets_itself:
            return
        if self._idle and not self._may_begin():
            return
        seeds = self._draw_seeds(sorted(self._idle))
        if self._vector is not None:
            resets = self._vector.reset(seeds) if seeds else {}
            for env_index, reset in resets.items():
                seed = seeds[env_index] if self._vector.seeds_each else None
                self._on_reset(env_index, seed, reset.obs, mapping_of(reset.info))
            return
        for env_index, seed in seeds.items():
            begin(self._envs[env_index], "reset", seed=seed)
        for env_index, seed in seeds.items():
            try:
                answer = end(self._envs[env_index], "reset", seed=seed)
                if not isinstance(answer, tuple) or len(answer) != 2:
                    raise BrokenEnv(
                        "reset did not return obs, info; gym before 0.26 returned the observation "
                        "alone (the package shimmy converts)"
                    )
                raw, info = answer
                obs = self._interface.encode_observation(raw)
            except (Exception, SystemExit) as error:  # an environment may raise anything
                self._on_error(env_index, f"reset failed: {_describe(error)}", seed)
            else:
                self._on_reset(env_index, seed, obs, mapping_of(info))

    def _draw_seeds(self, env_indices: Sequence[int]) -> dict[int, int | None]:
        """The next seed for each; none for those that come after the last seed."""
        seeds = dict(zip(env_indices, self._seeds, strict=False))
        self._idle.difference_update(seeds)
        if len(seeds) < len(env_indices):
            self.finish()
        return seeds

    def _step_vector(
        self, vector: VectorEnvAdapter, actions: Arrays, playing: Sequence[bool]
    ) -> list[EpisodeSummary | None]:
        ended: list[EpisodeSummary | None] = []
        for i, event in vector.step(actions, playing):
            info = mapping_of(event.info)
            if isinstance(event, Reset):
                if not self._exhausted and self._draw_seeds([i]):
                    self._on_reset(i, None, event.obs, info)  # it reset itself: no seed was used
            elif playing[i]:
                over = event.terminated, event.truncated
                episode = self._on_step(i, _row(actions, i), event.reward, event.obs, *over, info)
                ended.append(episode)
        return ended

    def _step_env(self, env_index: int, action: Arrays, given: Any) -> EpisodeSummary | None:
        try:
            answer = end(self._envs[env_index], "step", given)
            if len(answer) == 4:
                raise BrokenEnv(
                    "step returned 4 values, as gym before 0.26 did; gymnasium's returns obs, "
                    "reward, terminated, truncated, info (the package shimmy converts)"
                )
            raw, reward, terminated, truncated, info = answer
            number = self._interface.encode_reward(reward)
            obs = self._interface.encode_observation(raw)
            over = self._interface.encode_end(terminated, truncated)
        except (Exception, SystemExit) as error:  # an environment may raise anything
            return self._on_error(env_index, f"step failed: {_describe(error)}")
        return self._on_step(env_index, action, number, obs, *over, mapping_of(info))

    def _on_reset(
        self, env_index: int, seed: int | None, obs: Arrays, info: Mapping[str, Any]
    ) -> None:
        self._look(obs, seed, 0)
        self._actor.reset(env_index, seed)
        if self._exploration is not None:
            self._exploration.reset(env_index)
        self.inputs.reset(env_index, obs)
        policy_id = self._actor.policy_id(env_index)
        self._recorders[env_index].start_episode(
            obs, index=self._started, seed=seed, policy_id=policy_id, info=info
        )
        self._started += 1

    def _on_step(
        self,
        env_index: int,
        action: Arrays,
        reward: float,
        obs: Arrays | None,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> EpisodeSummary | None:
        self._failures[env_index] = 0
        self.steps += 1
        if obs is not None:
            self.inputs.step(env_index, action, reward, obs)
        recorder = self._recorders[env_index]
        self._look(obs, recorder.seed, recorder.length + 1)
        episode = recorder.add_step(action, reward, obs, terminated, truncated, info)
        if recorder.running and recorder.length == ENDLESS_STEPS:
            self.endless = (
                f"an episode has run for {ENDLESS_STEPS:,} steps and has not ended (seed"
                f" {recorder.seed}); {ENDLESS}"
            )
        if episode is not None and not self._exhausted:
            self._idle.add(env_index)
        # Else an environment whose episodes never end would be played by its first policy for ever.
        actor = self._actor
        if recorder.at_border and isinstance(actor, PolicyActor) and actor.renew(env_index):
            recorder.change_policy(actor.policy_id(env_index))
        return episode

    def _look(self, obs: Arrays | None, seed: int | None, step: int) -> None:
        if obs is not None and not self.outside and (why := self._interface.outside(obs)):
            self.outside = f"{why} (seed {seed}, step {step})"

    def _on_error(
        self, env_index: int, error: str, seed: int | None = None
    ) -> EpisodeSummary | None:
        """`seed`: of the reset that failed."""
        recorder = self._recorders[env_index]
        seed = recorder.seed if recorder.running else seed
        self.broken.add(error, seed=seed, step=recorder.length)
        episode = recorder.truncate(BROKEN)
        self._failures[env_index] += 1
        if self._failures[env_index] >= MAX_FAILURES:
            raise BrokenEnv(
                f"{self._interface.env_id} failed {MAX_FAILURES} times in a row without one step; "
                f"last: {error}"
            )
        if self._make_env is None:
            raise BrokenEnv(f"{self._interface.env_id}: {error}")
        try:
            self._envs[env_index].close()
        except Exception:  # noqa: S110 - it is broken already
            pass
        self._envs[env_index] = self._make_env()
        if not self._exhausted:
            self._idle.add(env_index)
        return episode


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, BrokenEnv) else describe_error(error)


def _row(actions: Arrays, env_index: int) -> Arrays:
    return {key: array[env_index].copy() for key, array in actions.items()}
