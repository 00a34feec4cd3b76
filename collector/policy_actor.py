"""Actors: choose actions by a published policy or at random, and keep the hidden state.

    ActorInputs, row i    obs      prev_action  prev_reward  time_idx  playing
    after reset           o0       (ignored)    (ignored)    0         T
    after one step        o1       a0           r0           1         T

An actor chooses the actions of all N environments at once. `reset` marks the environments in which
an episode begins: only there it resets the hidden state and switches to the newest policy
(policy_source.py). So each episode has a single policy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from amago_model.acting import ActingPolicy
from collector.env_spaces import Arrays
from collector.interface import Interface
from stepwell.errors import StepwellError
from stepwell.spaces import Array, EnvSpec

# Combined with the episode's seed, so that actions do not reuse the environment's random numbers.
_ACTION_STREAM = 0xAC710


class ActorError(StepwellError):
    """An actor cannot act: it has no policy, or the policy's actions are NaN."""


@dataclass(slots=True)
class ActorInputs:
    """Inputs of an actor for N environments; the arrays are modified in place."""

    obs: Arrays
    """By key [N, *shape]."""
    prev_action: Arrays
    """By key [N, *shape]; undefined where time_idx is 0."""
    prev_reward: NDArray[np.float32]
    """[N]; undefined where time_idx is 0."""
    time_idx: NDArray[np.int64]
    """[N]: steps since the start of the episode."""
    playing: NDArray[np.bool_]
    """[N]: False if the environment is idle and its action is ignored."""

    @classmethod
    def zeros(cls, spec: EnvSpec, n: int) -> ActorInputs:
        def arrays(spaces: Mapping[str, Any]) -> Arrays:
            return {k: np.zeros((n, *s.shape), s.dtype) for k, s in spaces.items()}

        return cls(
            arrays(spec.observations),
            arrays(spec.actions),
            np.zeros(n, np.float32),
            np.zeros(n, np.int64),
            np.zeros(n, np.bool_),
        )

    def reset(self, env_index: int, obs: Mapping[str, Array]) -> None:
        for key, array in obs.items():
            self.obs[key][env_index] = array
        self.time_idx[env_index] = 0

    def step(
        self, env_index: int, action: Mapping[str, Array], reward: float, obs: Mapping[str, Array]
    ) -> None:
        for key, array in obs.items():
            self.obs[key][env_index] = array
        for key, array in action.items():
            self.prev_action[key][env_index] = array
        self.prev_reward[env_index] = reward
        self.time_idx[env_index] += 1


class Actor(Protocol):
    """Where an episode begins the rollout calls reset and policy_id; then act, for all at once."""

    def reset(self, env_index: int, seed: int | None) -> None:
        """An episode, reset with `seed`, begins: forget the last one, take the newest policy."""
        ...

    def policy_id(self, env_index: int) -> str:
        """Which policy plays the running episode: run/version, or a free name."""
        ...

    def act(self, inputs: ActorInputs) -> Arrays:
        """Actions by key [N, *shape], in the environment's units."""
        ...


class RandomActor:
    """Every action sampled by the action space, seeded with the episode's seed."""

    def __init__(self, interface: Interface, n: int, seed: int = 0):
        self._interface = interface
        self._spaces = [copy.deepcopy(interface.action_space) for _ in range(n)]
        self._rng = np.random.default_rng(seed)

    def reset(self, env_index: int, seed: int | None) -> None:
        entropy = [int(self._rng.integers(2**31)) if seed is None else seed, _ACTION_STREAM]
        self._spaces[env_index].seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def policy_id(self, env_index: int) -> str:  # noqa: ARG002 - the same everywhere
        return "random"

    def act(self, inputs: ActorInputs) -> Arrays:
        actions = {key: np.zeros_like(array) for key, array in inputs.prev_action.items()}
        for i in np.flatnonzero(inputs.playing):
            for key, array in self._interface.encode_action(self._spaces[i].sample()).items():
                actions[key][i] = array
        return actions


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy, and under which name its episodes are recorded."""

    policy_id: str
    """run/version"""
    policy: ActingPolicy
    step: int = 0
    """The learner's step that it was published at."""

    @property
    def version(self) -> int:
        """0 for a name without a number."""
        version = self.policy_id.rpartition("/")[2]
        return int(version) if version.isdecimal() else 0


class _ActivePolicy:
    """A policy that plays at least one episode, with its memory for every chunk."""

    def __init__(self, loaded: LoadedPolicy, chunks: int, width: int, device: str):
        self.policy_id, self.policy = loaded.policy_id, loaded.policy
        self._width, self._device = width, device
        self.hidden = [self.policy.initial_hidden(width, device) for _ in range(chunks)]

    def reset(self, env_index: int) -> None:
        chunk, row = divmod(env_index, self._width)
        done = torch.zeros(self._width, dtype=torch.bool, device=self._device)
        done[row] = True
        self.hidden[chunk] = self.policy.reset_hidden(self.hidden[chunk], done)


class PolicyActor:
    """Acts by the newest policy that `source` gives when an episode begins.

    Environments are computed in chunks of `width` rows, the last one filled up with zeros. Matrix
    products of different heights differ in their last bits (seen on CPU below 4 rows), and an
    environment makes a different episode of that: with a fixed width, an episode does not depend on
    how many others are played beside it. By default all are one chunk, which is the fastest.
    """

    def __init__(
        self,
        source: Callable[[], LoadedPolicy],
        interface: Interface,
        n: int,
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
        self._source, self._n, self._sample, self._device = source, n, sample, device
        self._width = width or n
        self._chunks = -(-n // self._width)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._padded = ActorInputs.zeros(spec, self._chunks * self._width)
        self._active: list[_ActivePolicy] = []
        self._policy_of: list[_ActivePolicy | None] = [None] * n

    def reset(self, env_index: int, seed: int | None) -> None:  # noqa: ARG002 - not used here
        newest = self._source()
        if not self._active or self._active[-1].policy is not newest.policy:
            self._active.append(_ActivePolicy(newest, self._chunks, self._width, self._device))
        self._active[-1].reset(env_index)
        self._policy_of[env_index] = self._active[-1]
        used = {id(p) for p in self._policy_of}
        self._active = [p for p in self._active[:-1] if id(p) in used] + self._active[-1:]

    def renew(self, env_index: int) -> bool:
        """In the middle of an episode: take the newest policy, without memory of what it has not
        seen. False if it plays already."""
        active = self._policy_of[env_index]
        if active is not None and active.policy is self._source().policy:
            return False
        self.reset(env_index, None)
        return True

    def policy_id(self, env_index: int) -> str:
        active = self._policy_of[env_index]
        return active.policy_id if active is not None else ""

    def act(self, inputs: ActorInputs) -> Arrays:
        padded, n = self._padded, self._n
        for key, array in inputs.obs.items():
            padded.obs[key][:n] = array
        padded.prev_action[self._key][:n] = inputs.prev_action[self._key]
        padded.prev_reward[:n], padded.time_idx[:n] = inputs.prev_reward, inputs.time_idx
        actions = np.zeros_like(inputs.prev_action[self._key])
        for active in self._active:
            mine = np.array([p is active for p in self._policy_of]) & inputs.playing
            for chunk in range(self._chunks):
                rows = slice(chunk * self._width, min((chunk + 1) * self._width, n))
                if mine[rows].any():
                    chosen = self._act(active, chunk)[: rows.stop - rows.start]
                    actions[rows][mine[rows]] = chosen[mine[rows]]
        return {self._key: actions}

    def _act(self, active: _ActivePolicy, chunk: int) -> Array:
        rows = slice(chunk * self._width, (chunk + 1) * self._width)

        def tensor(array: Array) -> torch.Tensor:
            return torch.from_numpy(array[rows]).to(self._device)

        padded = self._padded
        actions, active.hidden[chunk] = active.policy.act(
            {key: tensor(array) for key, array in padded.obs.items()},
            tensor(padded.prev_action[self._key]),
            tensor(padded.prev_reward),
            tensor(padded.time_idx),
            active.hidden[chunk],
            sample=self._sample,
            generator=self._generator,
        )
        array: Array = actions.cpu().numpy()
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ActorError(
                f"policy {active.policy_id} answered NaN or infinity; evaluate an earlier version "
                "and look at the losses of its run"
            )
        return array
