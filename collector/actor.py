"""Who decides: a published policy, a function, or chance. Memory lives here, one row per slot.

    Seen, row = slot      obs     prev_action  prev_reward  time_idx  playing
    episode begins        o0      (ignored)    (ignored)    0         T
    after one step        o1      a0           r0           1         T

An actor answers for all slots at once and is told where an episode begins: there, and only there,
it forgets and takes its newest policy. So one episode has one author, also while policies change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from collector.envs import Arrays, Interface
from stepwell.errors import StepwellError
from stepwell.spaces import Array, EnvSpec

# Beside the episode's seed: an action stream equal to the environment's own would be no chance.
_ACTION_STREAM = 0xAC710


class ActorError(StepwellError):
    """An actor cannot act: no policy, or one that answers NaN."""


@dataclass(slots=True)
class Seen:
    """What is known in each slot before it acts; the arrays are written in place."""

    obs: Arrays
    """By key [N, *shape]."""
    prev_action: Arrays
    """By key [N, *shape]; meaningless where time_idx is 0."""
    prev_reward: NDArray[np.float32]
    """[N]; meaningless where time_idx is 0."""
    time_idx: NDArray[np.int64]
    """[N] steps since the episode began."""
    playing: NDArray[np.bool_]
    """[N]; elsewhere no episode runs, and any answer will do."""

    @classmethod
    def blank(cls, spec: EnvSpec, slots: int) -> Seen:
        def zeros(spaces: Mapping[str, Any]) -> Arrays:
            return {k: np.zeros((slots, *s.shape), s.dtype) for k, s in spaces.items()}

        return cls(
            zeros(spec.observations),
            zeros(spec.actions),
            np.zeros(slots, np.float32),
            np.zeros(slots, np.int64),
            np.zeros(slots, np.bool_),
        )

    def begin(self, slot: int, obs: Mapping[str, Array]) -> None:
        for key, array in obs.items():
            self.obs[key][slot] = array
        self.time_idx[slot] = 0

    def step(
        self, slot: int, action: Mapping[str, Array], reward: float, obs: Mapping[str, Array]
    ) -> None:
        for key, array in obs.items():
            self.obs[key][slot] = array
        for key, array in action.items():
            self.prev_action[key][slot] = array
        self.prev_reward[slot] = reward
        self.time_idx[slot] += 1


class Actor(Protocol):
    """The loop that uses it: where an episode begins, begin and author; then act for all slots."""

    def begin(self, slot: int, seed: int | None) -> None:
        """An episode, reset with `seed`, begins in `slot`: forget, and take the newest policy."""
        ...

    def author(self, slot: int) -> str:
        """Who plays the episode in `slot`: run/version, or a free name."""
        ...

    def act(self, seen: Seen) -> Arrays:
        """Actions by key [N, *shape], in the environment's units."""
        ...


class RandomActor:
    """Every action drawn by the action space itself, from a stream of the episode's own seed."""

    def __init__(self, interface: Interface, slots: int, seed: int = 0):
        self._interface = interface
        self._spaces = [copy.deepcopy(interface.action_space) for _ in range(slots)]
        self._rng = np.random.default_rng(seed)

    def begin(self, slot: int, seed: int | None) -> None:
        entropy = [int(self._rng.integers(2**31)) if seed is None else seed, _ACTION_STREAM]
        self._spaces[slot].seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def author(self, slot: int) -> str:  # noqa: ARG002 - the same in all slots
        return "random"

    def act(self, seen: Seen) -> Arrays:
        actions = {k: np.zeros_like(a) for k, a in seen.prev_action.items()}
        for slot in np.flatnonzero(seen.playing):
            for key, array in self._interface.action_arrays(self._spaces[slot].sample()).items():
                actions[key][slot] = array
        return actions


class ScriptedActor:
    """A function of one slot's observation and episode time, for baselines and tests.

    `function(obs by key, t)` gives what the environment's `step` takes.
    """

    def __init__(
        self, interface: Interface, name: str, function: Callable[[Mapping[str, Array], int], Any]
    ):
        self._interface, self._name, self._function = interface, name, function

    def begin(self, slot: int, seed: int | None) -> None:
        pass  # it remembers nothing

    def author(self, slot: int) -> str:  # noqa: ARG002 - the same in all slots
        return self._name

    def act(self, seen: Seen) -> Arrays:
        actions = {k: np.zeros_like(a) for k, a in seen.prev_action.items()}
        for slot in np.flatnonzero(seen.playing):
            obs = {k: a[slot] for k, a in seen.obs.items()}
            native = self._function(obs, int(seen.time_idx[slot]))
            for key, array in self._interface.action_arrays(native).items():
                actions[key][slot] = array
        return actions


@runtime_checkable
class Policy(Protocol):
    """What is used of amago_model's ActingPolicy."""

    def act(
        self,
        obs: dict[str, torch.Tensor],
        prev_action: torch.Tensor,
        prev_reward: torch.Tensor,
        time_idx: torch.Tensor,
        hidden: Any,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, Any]: ...

    def initial_hidden(self, n: int, device: torch.device | str = "cpu") -> Any: ...

    def reset_hidden(self, hidden: Any, done: torch.Tensor) -> Any: ...


@dataclass(frozen=True, slots=True)
class Authored:
    """A policy and its name, run/version."""

    author: str
    policy: Policy


class _Member:
    """One policy in play, with its memory of every chunk of slots."""

    def __init__(self, authored: Authored, chunks: int, width: int, device: str):
        self.author, self.policy = authored.author, authored.policy
        self._width, self._device = width, device
        self.hidden = [self.policy.initial_hidden(width, device) for _ in range(chunks)]

    def forget(self, slot: int) -> None:
        chunk, row = divmod(slot, self._width)
        done = torch.zeros(self._width, dtype=torch.bool, device=self._device)
        done[row] = True
        self.hidden[chunk] = self.policy.reset_hidden(self.hidden[chunk], done)


class PolicyActor:
    """Acts by the newest policy that `source` gives when an episode begins.

    Slots are computed in chunks of `width` rows, the last one filled up with zeros. Matrix products
    of different heights differ in their last bits (seen on CPU below 4 rows), and an environment
    makes a different episode of that: with a fixed width, an episode does not depend on how many
    others are played beside it. By default all slots are one chunk, which is the fastest.
    """

    def __init__(
        self,
        source: Callable[[], Authored],
        interface: Interface,
        slots: int,
        *,
        sample: bool = True,
        seed: int = 0,
        width: int | None = None,
        device: str = "cpu",
    ):
        spec = interface.spec
        if len(spec.actions) != 1:
            raise ActorError(
                f"a policy plays one action array; {interface.env_id} has {sorted(spec.actions)}"
            )
        (self._key,) = spec.actions
        self._source, self._slots, self._sample, self._device = source, slots, sample, device
        self._width = width or slots
        self._chunks = -(-slots // self._width)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._rows = Seen.blank(spec, self._chunks * self._width)
        self._members: list[_Member] = []
        self._member_of: list[_Member | None] = [None] * slots

    def begin(self, slot: int, seed: int | None) -> None:  # noqa: ARG002 - not what it acts by
        newest = self._source()
        if not self._members or self._members[-1].policy is not newest.policy:
            self._members.append(_Member(newest, self._chunks, self._width, self._device))
        self._members[-1].forget(slot)
        self._member_of[slot] = self._members[-1]
        used = {id(m) for m in self._member_of}
        self._members = [m for m in self._members[:-1] if id(m) in used] + self._members[-1:]

    def author(self, slot: int) -> str:
        member = self._member_of[slot]
        return member.author if member is not None else ""

    def act(self, seen: Seen) -> Arrays:
        rows, n = self._rows, self._slots
        for key, array in seen.obs.items():
            rows.obs[key][:n] = array
        rows.prev_action[self._key][:n] = seen.prev_action[self._key]
        rows.prev_reward[:n], rows.time_idx[:n] = seen.prev_reward, seen.time_idx
        actions = np.zeros_like(seen.prev_action[self._key])
        for member in self._members:
            mine = np.array([m is member for m in self._member_of]) & seen.playing
            for chunk in range(self._chunks):
                where = slice(chunk * self._width, min((chunk + 1) * self._width, n))
                if mine[where].any():
                    answer = self._act(member, chunk)[: where.stop - where.start]
                    actions[where][mine[where]] = answer[mine[where]]
        return {self._key: actions}

    def _act(self, member: _Member, chunk: int) -> Array:
        where = slice(chunk * self._width, (chunk + 1) * self._width)

        def tensor(array: Array) -> torch.Tensor:
            return torch.from_numpy(array[where]).to(self._device)

        rows = self._rows
        answer, member.hidden[chunk] = member.policy.act(
            {key: tensor(array) for key, array in rows.obs.items()},
            tensor(rows.prev_action[self._key]),
            tensor(rows.prev_reward),
            tensor(rows.time_idx),
            member.hidden[chunk],
            sample=self._sample,
            generator=self._generator,
        )
        array = answer.cpu().numpy()
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ActorError(
                f"policy {member.author} answered NaN or infinity; evaluate an earlier version "
                "and look at the losses of its run"
            )
        return array
