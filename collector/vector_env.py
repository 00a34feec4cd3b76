"""Converts a gymnasium vector environment to episodes. Only this file handles autoreset modes.

One sub-environment, an episode of two steps, then the next episode:

    call to step   1      2          3           4
    DISABLED       o1     o2 end     o1'         o2'     reset in between, with an entry of seeds
    NEXT_STEP      o1     o2 end     o0'         o1'     call 3 only resets and ignores its action
    SAME_STEP      o1     o0' end    o1'         o2'     o2 is in info["final_obs"], and what came
                                                         with it in info["final_info"]

All three yield the same events: Reset(o0), Step(o1), Step(o2, end), Reset(o0'), Step(o1'), …
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from collector.env_spaces import Arrays
from collector.interface import BrokenEnv, Interface
from stepwell._plugins import describe_error


@dataclass(frozen=True, slots=True)
class Reset:
    """The first observation of an episode."""

    obs: Arrays
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One transition. `obs` is the observation after it, also at the end of an episode; None if the
    vector environment overwrote it."""

    obs: Arrays | None
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Events:
    """Reads what happened to each sub-environment from what a vector environment returns."""

    def __init__(self, env: VectorEnv[Any, Any, Any], interface: Interface):
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise BrokenEnv(
                f"{interface.env_id}: metadata['autoreset_mode'] is {mode!r}; set it to one of "
                "gymnasium.vector.AutoresetMode: it says where an episode ends"
            )
        self.mode, self._env, self._interface = mode, env, interface
        self.seeds_each = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        """Whether each sub-environment has a seed of its own; others take one for all."""
        self.ended = np.zeros(env.num_envs, np.bool_)
        """[N]: whether the episode has ended, and no other has begun."""
        self._before: dict[int, Arrays] = {}
        """The last observation of each."""
        self._said: set[str] = set()

    def of_reset(
        self, env_indices: Iterable[int], obs: Any, infos: Mapping[str, Any]
    ) -> dict[int, Reset]:
        """Return the resets of these sub-environments."""
        rows = self._rows(obs)
        found = {}
        for i in env_indices:
            self.ended[i] = False
            self._before[i] = self._interface.encode_observation(rows[i])
            found[i] = Reset(self._before[i], _info_of(infos, i, len(rows)))
        return found

    def _rows(self, obs: Any) -> list[Any]:
        """The observation of each sub-environment."""
        space = self._env.observation_space
        rows = list(iterate(space, obs))  # without members that the space does not declare
        self._interface.note_undeclared("observations", space, obs)
        return rows

    def of_step(
        self, obs: Any, rewards: Any, terminated: Any, truncated: Any, infos: Mapping[str, Any]
    ) -> Iterator[tuple[int, Reset | Step]]:
        """Yield the events of a step, as (index, event)."""
        n = self._env.num_envs
        terminated = self._interface.encode_ends("terminated", terminated, n)
        truncated = self._interface.encode_ends("truncated", truncated, n)
        had_ended, self.ended = self.ended, terminated | truncated
        for i, row in enumerate(self._rows(obs)):
            info = _info_of(infos, i, n)
            after = self._interface.encode_observation(row)
            previous, self._before[i] = self._before.get(i), after
            if self.mode is AutoresetMode.NEXT_STEP and had_ended[i]:
                yield i, Reset(after, info)
                continue
            reward = self._interface.encode_reward(rewards[i])
            step = Step(after, reward, bool(terminated[i]), bool(truncated[i]), info)
            if self.mode is not AutoresetMode.SAME_STEP or not self.ended[i]:
                yield i, step
                continue
            final_info = info.pop("final_info", None)
            last = self._final(i, info, after, previous)
            if final_info is None:
                final_info, info = info, {}
                if final_info:
                    self._say_once(
                        "infos",
                        "the step in which an episode ends has no info['final_info']: its infos "
                        "are taken as those of the end, and the next episode begins without infos",
                    )
            if "episode" in info:  # gymnasium's vector RecordEpisodeStatistics speaks of the end
                final_info = {**mapping_of(final_info), "episode": info.pop("episode")}
            yield i, replace(step, obs=last, info=final_info)
            yield i, Reset(after, info)

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._interface.note(text)

    def _final(
        self, env_index: int, info: dict[str, Any], after: Arrays, before: Arrays | None
    ) -> Arrays | None:
        """The final observation of an episode, which `after` follows in the next; None: unknown.

        Gymnasium keeps a reference, so an environment that writes its observations into the same
        memory has overwritten the final one, or a part of it, with the one after the reset.
        """
        given = info.pop("final_obs", None)
        last = None if given is None else self._interface.encode_observation(given)
        why = ""
        if last is None:
            why = "it is not in the infos"
        elif (shared := self._overwritten(env_index, given)) is True:
            why = "the environment has overwritten it in its reset"
        elif shared is None and _looks_overwritten(last, after, before):
            why = "it equals the one after the reset"
        if why:
            self._say_once(
                "final_obs",
                f"the final observation of an episode is unknown: {why}; an environment returns a "
                "new array in each step, and a vector environment info['final_obs']",
            )
        return None if why else last

    def _overwritten(self, env_index: int, final: Any) -> bool | None:
        """Whether the final observation has the memory of the next; None where it cannot be seen:
        in other processes, and behind wrappers, which may have made new arrays."""
        inner: Any = self._env.unwrapped
        newest = getattr(inner, "_env_obs", None) if isinstance(inner, SyncVectorEnv) else None
        shared = None if newest is None else _same_memory(final, newest[env_index])
        return None if shared is False and inner is not self._env else shared


class VectorEnvAdapter:
    """Resets and steps a vector environment in any autoreset mode.

    Its failures cannot be assigned to one sub-environment, so they raise `BrokenEnv`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], interface: Interface):
        self._env, self._interface, self.num_envs = env, interface, env.num_envs
        self._events = Events(env, interface)
        self._idle_action = env.single_action_space.sample()
        self._started = False

    @property
    def seeds_each(self) -> bool:
        """Whether each sub-environment has a seed of its own; others take one for all."""
        return self._events.seeds_each

    @property
    def resets_itself(self) -> bool:
        """Whether later episodes begin within `step`, without a seed of Stepwell."""
        return self._started and self._events.mode is not AutoresetMode.DISABLED

    def reset(self, seeds: Mapping[int, int | None]) -> dict[int, Reset]:
        """Start an episode in each sub-environment in `seeds`, with its seed if `seeds_each`."""
        assert not self.resets_itself
        options = None
        if self._started:
            options = {"reset_mask": np.array([i in seeds for i in range(self.num_envs)])}
        wanted: Any = [seeds.get(i) for i in range(self.num_envs)]
        if not self.seeds_each:
            wanted = next(iter(seeds.values()))
        with _as_broken(f"{self._interface.env_id}: reset"):
            obs, infos = self._env.reset(seed=wanted, options=options)
        self._started = True
        return self._events.of_reset(seeds, obs, infos)

    def step(self, actions: Arrays, playing: Sequence[bool]) -> Iterator[tuple[int, Reset | Step]]:
        """Step all; yields (index, event). `actions` [N, *shape] are used where `playing`."""
        ended = self._events.ended
        if self._events.mode is AutoresetMode.DISABLED and ended.any():
            # All are stepped, and gymnasium refuses to step one that has ended.
            self.reset(dict.fromkeys(np.flatnonzero(ended).tolist()))
        decode, single = self._interface.decode_action, self._env.single_action_space
        native: Any = [
            decode({k: a[i] for k, a in actions.items()}) if playing[i] else self._idle_action
            for i in range(self.num_envs)
        ]
        out: Any = create_empty_array(single, self.num_envs)
        batch = concatenate(single, native, out)
        with _as_broken(f"{self._interface.env_id}: step"):
            returned = self._env.step(batch)
        yield from self._events.of_step(*returned)


@contextlib.contextmanager
def _as_broken(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an environment may raise anything
        raise BrokenEnv(f"{what} failed: {describe_error(error)}") from error


def _same_memory(one: Any, other: Any) -> bool | None:
    """Whether two observations have memory in common; None if one has parts of unknown types."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    if isinstance(one, Mapping | list | tuple) and isinstance(other, type(one)):
        if one is other and not isinstance(one, tuple):
            return True
        keys = one if isinstance(one, Mapping) else range(len(one))
        found = [_same_memory(one[key], other[key]) for key in keys]
        return True if True in found else None if None in found else False
    plain = np.ndarray | np.generic | int | float | str
    return False if isinstance(one, plain) and isinstance(other, plain) else None


def _looks_overwritten(last: Arrays, after: Arrays, before: Arrays | None) -> bool:
    """Whether all of a final observation equals the one after the reset, or a part of it that has
    changed in the last step: others may be constant."""
    equal = [key for key in last if np.array_equal(last[key], after[key])]
    return len(equal) == len(last) or any(
        before is None or not np.array_equal(last[key], before[key]) for key in equal
    )


def mapping_of(info: Any) -> Mapping[str, Any]:
    """An environment's info, or none if it is something else: infos are for people."""
    return info if isinstance(info, Mapping) else {}


def _info_of(infos: Any, env_index: int, n: int) -> dict[str, Any]:
    """One sub-environment's info, of `n`; a vector environment masks each key by "_key".

    Left out are infos "x" and "_x" of one environment: the second and the mask are mixed up.
    """
    infos, found = mapping_of(infos), dict[str, Any]()
    for key, value in infos.items():
        if not isinstance(key, str) or (key.startswith("_") and key[1:] in infos):
            continue
        mask: Any = infos.get(f"_{key}")
        if f"__{key}" in infos or (_has_rows(mask, n) and not mask[env_index]):
            continue
        if isinstance(value, Mapping):
            found[key] = _info_of(value, env_index, n)
        else:
            found[key] = value[env_index] if _has_rows(value, n) else value
    return found


def _has_rows(value: Any, n: int) -> bool:
    """Whether a value of an info has an entry for each of `n` sub-environments."""
    rows = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return rows and len(value) == n
