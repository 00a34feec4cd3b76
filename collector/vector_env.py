"""Converts a gymnasium vector environment to episodes. Only this file handles autoreset modes.

One sub-environment, an episode of two steps, then the next episode:

    call to step   1      2          3           4
    DISABLED       o1     o2 end     o1'         o2'     reset in between, with an entry of seeds
    NEXT_STEP      o1     o2 end     o0'         o1'     call 3 only resets and ignores its action
    SAME_STEP      o1     o0' end    o1'         o2'     o2 is in info["final_obs"]

All three yield the same events: Reset(o0), Step(o1), Step(o2, end), Reset(o0'), Step(o1'), …
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from collector.envs import Arrays, BrokenEnv, Interface
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


class VectorEnvAdapter:
    """Resets and steps a vector environment in any autoreset mode.

    Its failures cannot be assigned to one sub-environment, so they raise `BrokenEnv`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], interface: Interface):
        self._env, self._interface, self.num_envs = env, interface, env.num_envs
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise BrokenEnv(
                f"{interface.env_id}: metadata['autoreset_mode'] is {mode!r}; set it to one of "
                "gymnasium.vector.AutoresetMode: it says where an episode ends"
            )
        self._mode = mode
        self._idle_action = env.single_action_space.sample()
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._started = False

    @property
    def resets_itself(self) -> bool:
        """Whether later episodes begin within `step`, without a seed of Stepwell."""
        return self._started and self._mode is not AutoresetMode.DISABLED

    def reset(self, seeds: Mapping[int, int | None]) -> dict[int, Reset]:
        """Start an episode in each sub-environment in `seeds`, with its seed."""
        assert not self.resets_itself
        options = None
        if self._started:
            options = {"reset_mask": np.array([i in seeds for i in range(self.num_envs)])}
        wanted: Any = [seeds.get(i) for i in range(self.num_envs)]
        with _as_broken(f"{self._interface.env_id}: reset"):
            obs, infos = self._env.reset(seed=wanted, options=options)
        self._started = True
        self._ended[list(seeds)] = False
        rows = list(iterate(self._env.observation_space, obs))
        encode = self._interface.encode_observation
        return {i: Reset(encode(rows[i]), _info_of(infos, i)) for i in seeds}

    def step(self, actions: Arrays, playing: Sequence[bool]) -> Iterator[tuple[int, Reset | Step]]:
        """Step all; yields (index, event). `actions` [N, *shape] are used where `playing`."""
        if self._mode is AutoresetMode.DISABLED and self._ended.any():
            # All are stepped, and gymnasium refuses to step one that has ended.
            self.reset(dict.fromkeys(np.flatnonzero(self._ended).tolist()))
        decode, single = self._interface.decode_action, self._env.single_action_space
        native: Any = [
            decode({k: a[i] for k, a in actions.items()}) if playing[i] else self._idle_action
            for i in range(self.num_envs)
        ]
        out: Any = create_empty_array(single, self.num_envs)
        batch = concatenate(single, native, out)
        with _as_broken(f"{self._interface.env_id}: step"):
            obs, rewards, terminated, truncated, infos = self._env.step(batch)
        had_ended, self._ended = self._ended, terminated | truncated
        for i, row in enumerate(iterate(self._env.observation_space, obs)):
            info = _info_of(infos, i)
            after = self._interface.encode_observation(row)
            if self._mode is AutoresetMode.NEXT_STEP and had_ended[i]:
                yield i, Reset(after, info)
                continue
            reward = self._interface.encode_reward(rewards[i])
            step = Step(after, reward, bool(terminated[i]), bool(truncated[i]), info)
            if self._mode is not AutoresetMode.SAME_STEP or not self._ended[i]:
                yield i, step
                continue
            last = self._interface.encode_observation(info.pop("final_obs"))
            final_info = info.pop("final_info", {})
            # Gymnasium keeps a reference: an environment that writes all observations into one
            # buffer has already overwritten the final one. Then it is unknown.
            lost = all(np.array_equal(last[key], after[key]) for key in last)
            yield i, replace(step, obs=None if lost else last, info=final_info)
            yield i, Reset(after, info)


@contextlib.contextmanager
def _as_broken(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an environment may raise anything
        raise BrokenEnv(f"{what} failed: {describe_error(error)}") from error


def _info_of(infos: Mapping[str, Any], env_index: int) -> dict[str, Any]:
    """One sub-environment's info; a vector environment masks each key by "_key"."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if (key.startswith("_") and key[1:] in infos) or (mask is not None and not mask[env_index]):
            continue
        if isinstance(value, Mapping):
            found[key] = _info_of(value, env_index)
        else:
            found[key] = value[env_index] if isinstance(value, np.ndarray | list | tuple) else value
    return found
