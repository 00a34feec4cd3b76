"""Record episodes of any policy: a person, a script, an agent of another library.

    env = collector.record.record(gymnasium.make("CartPole-v1"), "my-data", policy="by hand")
    …                      reset and step as usual
    env.close()            sends the rest

A gymnasium vector environment is recorded in the same way, in any autoreset mode.

Each finished episode goes to the dataset through an outbox on disk, which waits while the service
is down; `close` raises an error if episodes remain unsent. A missing dataset is created from the
environment's spaces.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsFloat, overload

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate
from gymnasium.wrappers import Autoreset

from collector.env_spaces import Arrays
from collector.envs import Env
from collector.episode_recorder import BROKEN, INTERRUPTED, MAX_STEPS, EpisodeRecorder
from collector.interface import Interface, interface_of
from collector.outbox_slots import open_outbox
from collector.registered_run import open_dataset
from collector.vector_env import Events, Reset, mapping_of
from stepwell._plugins import describe_error
from stepwell._wording import shown
from stepwell.client import Client
from stepwell.errors import InvalidTrajectory, Undelivered
from stepwell.flags import describe
from stepwell.outbox import Outbox
from stepwell.trajectory import Trajectory, TrajectoryMetadata

_UNRECORDED = (
    "steps after the end of an episode, or after one that failed, are not recorded until the next "
    "reset"
)


@overload
def record(
    env: Env,
    dataset: str,
    client: Client | None = ...,
    *,
    policy: str = ...,
    run: str = ...,
    env_id: str = ...,
    tags: Sequence[str] = ...,
    infos: Sequence[str] = ...,
    partition: str = ...,
    outbox: str | Path | None = ...,
    max_steps: int = ...,
) -> RecordTrajectories: ...


@overload
def record(
    env: VectorEnv[Any, Any, Any],
    dataset: str,
    client: Client | None = ...,
    *,
    policy: str = ...,
    run: str = ...,
    env_id: str = ...,
    tags: Sequence[str] = ...,
    infos: Sequence[str] = ...,
    partition: str = ...,
    outbox: str | Path | None = ...,
    max_steps: int = ...,
) -> RecordVectorTrajectories: ...


def record(
    env: Env | VectorEnv[Any, Any, Any],
    dataset: str,
    client: Client | None = None,
    *,
    policy: str = "",
    run: str = "",
    env_id: str = "",
    tags: Sequence[str] = (),
    infos: Sequence[str] = (),
    partition: str = "fifo",
    outbox: str | Path | None = None,
    max_steps: int = MAX_STEPS,
) -> RecordTrajectories | RecordVectorTrajectories:
    """Wrap `env` so that its episodes are sent to `dataset`.

    Args:
        client: default: of the service at STEPWELL_URL.
        policy: name of the player, a column of the dataset.
        infos: names of single numbers in the environment's infos that a dataset made here keeps.
        outbox: directory; default: stepwell-outbox/DATASET/… below the current folder.
        max_steps: longer episodes are stored in pieces.

    Raises:
        InvalidSpace: the environment does not fit the dataset.
        InvalidTrajectory: `tags` or `infos` is a text instead of a list.
        ServiceUnreachable: no service answers.
    """
    for what, names in (("tags", tags), ("infos", infos)):
        if isinstance(names, str):  # a sequence of letters
            raise InvalidTrajectory(what, expected=f"a list: {what}=[{names!r}]", got=repr(names))
    own = client is None
    client = client or Client()
    env_id = env_id or _name_of(env)
    try:
        interface = replace(interface_of(env, env_id, infos=infos), note=warnings.warn)
        interface = open_dataset(client, dataset, interface)
        queue = open_outbox(client, dataset, interface.spec, directory=outbox, partition=partition)
    except BaseException:
        if own:
            client.close()
        raise
    metadata = TrajectoryMetadata(env=env_id, policy=policy, run=run, tags=tuple(tags))
    sender = _Sender(queue, client if own else None)
    recorders = [
        EpisodeRecorder(
            interface.spec,
            metadata,
            sender.put,
            encode_info=interface.encode_info,
            max_steps=max_steps,
            env_index=i,
        )
        for i in range(env.num_envs if isinstance(env, VectorEnv) else 1)
    ]
    if isinstance(env, VectorEnv):
        return RecordVectorTrajectories(env, interface, recorders, sender)
    return RecordTrajectories(env, interface, recorders[0], sender)


def _name_of(env: Env | VectorEnv[Any, Any, Any]) -> str:
    """The id of the environment, or of the environments in a vector environment."""
    spec = env.spec
    if spec is None and isinstance(env.unwrapped, SyncVectorEnv):
        spec = env.unwrapped.envs[0].spec
    if spec is not None:
        return spec.id
    if isinstance(env.unwrapped, AsyncVectorEnv):
        # By its text: a spec that cannot be pickled, such as one with a lambda, ends the workers.
        named = re.search(r"<([^<>]+)>>", env.unwrapped.call("__str__")[0])
        if named and named[1] in gymnasium.registry:
            return named[1]
    name = type(env.unwrapped).__name__
    if isinstance(env, VectorEnv):
        warnings.warn(
            f"the episodes are those of {name!r}, because the vector environment does not say which"
            " environments it has; record(…, env_id=) names them",
            stacklevel=3,
        )
    return name


def _storable(seeds: Sequence[Any]) -> list[int | None]:
    """The seeds as they are stored; None, with one warning, for those of more than 63 bits."""
    whole = [None if seed is None else int(seed) for seed in seeds]
    large = [seed for seed in whole if seed is not None and not -(2**63) <= seed < 2**63]
    if large:
        numbers = shown([str(seed) for seed in large], 3)
        warnings.warn(
            f"seeds of more than 63 bits are not stored with their episodes: {numbers}",
            stacklevel=3,
        )
    return [None if seed in large else seed for seed in whole]


class _Sender:
    """The outbox of a wrapper, and the client that was made for it."""

    def __init__(self, outbox: Outbox, client: Client | None) -> None:
        self.outbox, self._client = outbox, client

    def put(self, trajectory: Trajectory, _: int) -> None:
        self.outbox.put(trajectory)

    def close(self, timeout: float) -> None:
        self.outbox.close(timeout)
        if self._client is not None:
            self._client.close()


def _has_wrapper(env: Any, kind: type) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, kind):
            return True
        env = env.env
    return False


class _BoundsWarning:
    """Warns of the first observation beyond the bounds of its space."""

    def __init__(self, interface: Interface):
        self._interface, self._warned = interface, False

    def look(self, obs: Arrays | None) -> None:
        if obs is not None and not self._warned and (why := self._interface.outside(obs)):
            self._warned = True
            warnings.warn(f"{why}; such values are recorded as they are", stacklevel=3)


class RecordTrajectories(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The wrapper of `record`. It behaves like the environment; `outbox` has the unsent items."""

    def __init__(
        self,
        env: Env,
        interface: Interface,
        recorder: EpisodeRecorder,
        sender: _Sender,
    ) -> None:
        super().__init__(env)
        self.outbox = sender.outbox
        self._interface, self._recorder, self._sender = interface, recorder, sender
        self._bounds = _BoundsWarning(interface)
        self._episodes, self._closed = 0, False
        self._resets_itself = _has_wrapper(env, Autoreset)
        self._ended = self._said = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; an unfinished episode is kept, tagged "interrupted"."""
        self._recorder.truncate(INTERRUPTED)
        obs, info = self.env.reset(seed=seed, options=options)
        self._start(self._interface.encode_observation(obs), _storable([seed])[0], info)
        return obs, info

    def _start(self, first: Arrays, seed: int | None, info: dict[str, Any]) -> None:
        self._bounds.look(first)
        self._recorder.start_episode(
            first, index=self._episodes, seed=seed, policy_id="", info=mapping_of(info)
        )
        self._episodes += 1
        self._ended = False

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step; if the environment raises, its episode is kept, tagged "broken".

        With gymnasium's wrapper Autoreset the step after an end is a reset and no transition.
        Raises `InvalidTrajectory`, before the step, for an action that cannot be recorded.
        """
        # A copy, because the environment may change it.
        recorded: Arrays = self._interface.encode_action(action, executed=True)
        if self._recorder.running:
            self._interface.check_action(action, recorded)
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
            number = self._interface.encode_reward(reward)
            next_obs = self._interface.encode_observation(obs)
            over = self._interface.encode_end(terminated, truncated)
        except Exception:
            self._recorder.truncate(BROKEN)
            raise
        if self._recorder.running:
            self._bounds.look(next_obs)
            self._recorder.add_step(recorded, number, next_obs, *over, mapping_of(info))
        elif self._resets_itself and self._ended:
            self._start(next_obs, None, info)
        elif not self._said:
            self._said = True
            warnings.warn(_UNRECORDED, stacklevel=2)
        self._ended = any(over)
        return obs, reward, terminated, truncated, info

    def close(self, timeout: float = 10.0) -> None:
        """Keep what was played, send for at most `timeout` seconds; the rest waits on disk.

        Raises `Undelivered`, once all is closed, if something is left.
        """
        if self._closed:
            return
        self._closed = True
        self._recorder.truncate(INTERRUPTED)
        if self._episodes:
            self._interface.note_missing_infos()
        self._sender.close(timeout)
        super().close()
        if undelivered := self.outbox.undelivered():
            raise Undelivered(undelivered)


class RecordVectorTrajectories(VectorWrapper):
    """The wrapper of `record` for a vector environment; each sub-environment has its episodes."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        interface: Interface,
        recorders: Sequence[EpisodeRecorder],
        sender: _Sender,
    ) -> None:
        super().__init__(env)
        self.outbox = sender.outbox
        self._interface, self._recorders, self._sender = interface, recorders, sender
        self._events = Events(env, interface)
        self._bounds = _BoundsWarning(interface)
        self._episodes, self._closed, self._said = 0, False, False

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start episodes; unfinished ones are kept, tagged "interrupted"."""
        mask = (options or {}).get("reset_mask")
        chosen = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        given: Any = seed  # gymnasium's own take a list, too
        obs, infos = self.env.reset(seed=given, options=options)
        seeds = _storable(self._seeds(seed))
        for i, reset in self._events.of_reset(chosen, obs, infos).items():
            self._recorders[i].truncate(INTERRUPTED)
            self._start(i, reset, seeds[i])
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step; if the environment raises, all episodes are kept, tagged "broken".

        Raises `InvalidTrajectory`, before the step, for an action that cannot be recorded.
        """
        # Copies, because the environment may change them.
        rows = self._rows_of(actions)
        recorded = [self._interface.encode_action(action, executed=True) for action in rows]
        for recorder, action, arrays in zip(self._recorders, rows, recorded, strict=True):
            if recorder.running:  # others are reset, whatever the action is
                self._interface.check_action(action, arrays)
        try:
            returned = self.env.step(actions)
            events = list(self._events.of_step(*returned))
        except Exception:
            for recorder in self._recorders:
                recorder.truncate(BROKEN)
            raise
        for i, event in events:
            self._bounds.look(event.obs)
            if isinstance(event, Reset):
                self._start(i, event, None)
            elif self._recorders[i].running:
                self._recorders[i].add_step(
                    recorded[i],
                    event.reward,
                    event.obs,
                    event.terminated,
                    event.truncated,
                    event.info,
                )
            elif not self._said:
                self._said = True
                warnings.warn(_UNRECORDED, stacklevel=2)
        return returned

    def close(self, timeout: float = 10.0, **kwargs: Any) -> None:
        """Keep what was played, send for at most `timeout` seconds; the rest waits on disk.

        Raises `Undelivered`, once all is closed, if something is left.
        """
        if self._closed:
            return
        self._closed = True
        for recorder in self._recorders:
            recorder.truncate(INTERRUPTED)
        if self._episodes:
            self._interface.note_missing_infos()
        self._sender.close(timeout)
        super().close(**kwargs)
        if undelivered := self.outbox.undelivered():
            raise Undelivered(undelivered)

    def _rows_of(self, actions: Any) -> list[Any]:
        """The action of each sub-environment. Raises `InvalidTrajectory`."""
        try:
            rows = list(iterate(self.action_space, actions))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            rows, got = [], f"{describe(actions)}: {describe_error(error)}"
        else:
            got = f"actions for {len(rows)}"
        if len(rows) != self.num_envs:
            raise InvalidTrajectory(
                "actions",
                expected=f"actions for {self.num_envs} environments, of the form "
                f"{str(self.action_space)[:200]}",
                got=got,
            )
        self._interface.note_undeclared("actions", self.action_space, actions)
        return rows

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        """The seed of each sub-environment, as far as it is known."""
        if not self._events.seeds_each or seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + i for i in range(self.num_envs)]
        return seed

    def _start(self, env_index: int, reset: Reset, seed: int | None) -> None:
        self._recorders[env_index].start_episode(
            reset.obs, index=self._episodes, seed=seed, policy_id="", info=reset.info
        )
        self._episodes += 1
