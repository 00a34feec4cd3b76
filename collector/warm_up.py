"""Random actions at first, then a policy: episodes that begin during the warm-up are random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collector.env_spaces import Arrays
from collector.policy_actor import Actor, ActorInputs


class WarmUpActor:
    """Plays with `random` the episodes that begin while `warming()`, all others with `policy`."""

    def __init__(self, random: Actor, policy: Actor, n: int, warming: Callable[[], bool]):
        self._random, self._policy, self._warming = random, policy, warming
        self._is_random = np.zeros(n, np.bool_)

    def reset(self, env_index: int, seed: int | None) -> None:
        self._is_random[env_index] = self._warming()
        self._of(env_index).reset(env_index, seed)

    def policy_id(self, env_index: int) -> str:
        return self._of(env_index).policy_id(env_index)

    def act(self, inputs: ActorInputs) -> Arrays:
        if not (random := self._is_random & inputs.playing).any():
            return self._policy.act(inputs)
        chosen = self._random.act(inputs)
        if (rest := inputs.playing & ~random).any():
            for key, actions in self._policy.act(inputs).items():
                chosen[key][rest] = actions[rest]
        return chosen

    def _of(self, env_index: int) -> Actor:
        return self._random if self._is_random[env_index] else self._policy
