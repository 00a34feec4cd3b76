"""N environments and one actor: episodes out. The environments are stepped one by one.

    reset(seed) → o0    step(a0) → r0, o1    …    step → terminated or truncated: the episode ends

Every episode has its own seed. An environment that fails harms no other: its episode is truncated
before the failure and tagged "broken", and the environment is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from collector.actor import Actor, ActorInputs
from collector.envs import Arrays, BrokenEnv, Env, Interface
from collector.exploration import Exploration
from collector.recorder import BROKEN, INTERRUPTED, MAX_STEPS, EpisodeSummary, Recorder, Sink
from stepwell._plugins import describe_error
from stepwell.trajectory import TrajectoryMetadata

MAX_FAILURES = 10
"""Failures in a row, without one good step between, after which an environment is given up."""


class Rollout:
    """Plays episodes in all of `envs`; `step` is one action in each.

    `seeds` says how many episodes there will be and how each is reset: when it is exhausted,
    environments fall idle as their episodes end, and `done` is true when all have. The actor is
    asked for its newest policy only where an episode begins. `make_env` replaces a broken
    environment, in the list `envs` itself, so that its owner can close them all.
    """

    def __init__(
        self,
        envs: list[Env],
        actor: Actor,
        interface: Interface,
        *,
        make_env: Callable[[], Env],
        seeds: Iterator[int | None],
        sink: Sink,
        metadata: TrajectoryMetadata | None = None,
        exploration: Exploration | None = None,
        max_steps: int = MAX_STEPS,
    ):
        self._envs, self._actor, self._interface = envs, actor, interface
        self._make_env, self._seeds, self._exploration = make_env, seeds, exploration
        metadata = metadata or TrajectoryMetadata(env=interface.env_id)
        self._recorders = [
            Recorder(interface.spec, metadata, sink, max_steps=max_steps, env_index=i)
            for i in range(len(envs))
        ]
        self.inputs = ActorInputs.zeros(interface.spec, len(envs))
        self.steps = 0
        """Transitions played, all environments together."""
        self.broken = 0
        """How often an environment failed."""
        self.last_error = ""
        """How it failed last."""
        self._idle = set(range(len(envs)))
        self._failures = [0] * len(envs)
        self._started = 0
        self._exhausted = False

    @property
    def done(self) -> bool:
        """Whether no episode runs and none will begin."""
        return self._exhausted and not any(r.running for r in self._recorders)

    def step(self) -> list[EpisodeSummary]:
        """One action everywhere; the episodes that ended, in order of environments."""
        self._start_episodes()
        playing = [i for i, recorder in enumerate(self._recorders) if recorder.running]
        if not playing:
            return []
        self.inputs.playing[:] = [recorder.running for recorder in self._recorders]
        actions = self._actor.act(self.inputs)
        if self._exploration is not None:
            actions = self._exploration.apply(actions, self.inputs)
        actions = self._interface.clip_actions(actions)
        ended = [self._step_env(i, {k: a[i].copy() for k, a in actions.items()}) for i in playing]
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
        for env_index in sorted(self._idle):
            try:
                seed = next(self._seeds)
            except StopIteration:
                self.finish()
                return
            self._idle.discard(env_index)
            try:
                raw, info = self._envs[env_index].reset(seed=seed)
                obs = self._interface.encode_observation(raw)
            except Exception as error:  # an environment may raise anything
                self._on_error(env_index, f"reset(seed={seed}) failed: {describe_error(error)}")
            else:
                self._on_reset(env_index, seed, obs, _mapping(info))

    def _step_env(self, env_index: int, action: Arrays) -> EpisodeSummary | None:
        try:
            given = self._interface.decode_action(action)
            raw, reward, terminated, truncated, info = self._envs[env_index].step(given)
            number = float(reward)
            if not abs(number) <= np.finfo(np.float32).max:
                raise BrokenEnv(f"the reward is {number}; a finite float32 is needed")
            obs = self._interface.encode_observation(raw)
            over = bool(terminated), bool(truncated)
        except Exception as error:  # an environment may raise anything
            return self._on_error(env_index, f"step failed: {describe_error(error)}")
        return self._on_step(env_index, action, number, obs, *over, _mapping(info))

    def _on_reset(
        self, env_index: int, seed: int | None, obs: Arrays, info: Mapping[str, Any]
    ) -> None:
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
        obs: Arrays,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> EpisodeSummary | None:
        self._failures[env_index] = 0
        self.steps += 1
        self.inputs.step(env_index, action, reward, obs)
        recorder = self._recorders[env_index]
        episode = recorder.add_step(action, reward, obs, terminated, truncated, info)
        if episode is not None and not self._exhausted:
            self._idle.add(env_index)
        return episode

    def _on_error(self, env_index: int, error: str) -> EpisodeSummary | None:
        episode = self._recorders[env_index].truncate(BROKEN, error)
        self._failures[env_index] += 1
        self.broken, self.last_error = self.broken + 1, error
        if self._failures[env_index] >= MAX_FAILURES:
            raise BrokenEnv(
                f"{self._interface.env_id} failed {MAX_FAILURES} times in a row without one step; "
                f"last: {error}"
            )
        try:
            self._envs[env_index].close()
        except Exception:  # noqa: S110 - it is broken already
            pass
        self._envs[env_index] = self._make_env()
        if not self._exhausted:
            self._idle.add(env_index)
        return episode


def _mapping(info: Any) -> Mapping[str, Any]:
    return info if isinstance(info, Mapping) else {}
