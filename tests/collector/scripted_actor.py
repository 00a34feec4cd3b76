"""A player without a network: a function of what it sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from collector.env_spaces import Arrays
from collector.interface import Interface
from collector.policy_actor import ActorInputs
from stepwell.spaces import Array


class ScriptedActor:
    """A function of one environment's observation and episode time.

    `function(obs by key, t)` gives what the environment's `step` takes.
    """

    def __init__(
        self, interface: Interface, name: str, function: Callable[[Mapping[str, Array], int], Any]
    ):
        self._interface, self._name, self._function = interface, name, function

    def reset(self, env_index: int, seed: int | None) -> None:
        pass  # no memory

    def policy_id(self, env_index: int) -> str:  # noqa: ARG002 - the same everywhere
        return self._name

    def act(self, inputs: ActorInputs) -> Arrays:
        actions = {key: np.zeros_like(array) for key, array in inputs.prev_action.items()}
        for i in np.flatnonzero(inputs.playing):
            obs = {key: array[i] for key, array in inputs.obs.items()}
            action = self._function(obs, int(inputs.time_idx[i]))
            for key, array in self._interface.encode_action(action).items():
                actions[key][i] = array
        return actions
