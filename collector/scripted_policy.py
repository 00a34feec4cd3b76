"""`stepwell evaluate --scripted MODULE:FUNCTION`: a policy written in Python.

The function gets an observation and returns an action of the environment. A class is a policy with
memory: each episode calls a new instance of it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from collector.config import UsageError
from collector.env_spaces import Arrays
from collector.interface import Interface
from collector.policy_actor import ActorError, ActorInputs
from stepwell._plugins import describe_error, import_named
from stepwell.spaces import DEFAULT_OBSERVATION

SCRIPTED = "scripted"
"""Name under which its episodes and scores are recorded, so it is one row of all leaderboards."""


def load_scripted(reference: str) -> Callable[..., Any]:
    """The function, class or static method that MODULE:FUNCTION names. Raises `UsageError`."""
    module, _, name = reference.partition(":")
    if not module or not name:
        example = "my_module:my_policy"
        raise UsageError(f"--scripted: expected MODULE:FUNCTION like {example}, got {reference!r}")
    words = f"--scripted {reference}"
    import_named(module, words, UsageError)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"{words}: {module} has no function {name!r}")
    return found  # type: ignore[no-any-return]


class ScriptedActor:
    """Acts by a function of the observation: the array, or a dict of them by key."""

    def __init__(self, interface: Interface, n: int, policy: Callable[..., Any]):
        self._interface, self._policy = interface, policy
        self._playing: list[Callable[[Any], Any]] = [policy] * n

    def reset(self, env_index: int, seed: int | None) -> None:  # noqa: ARG002 - not used here
        if isinstance(self._policy, type):
            with _reported():
                self._playing[env_index] = self._policy()

    def policy_id(self, env_index: int) -> str:  # noqa: ARG002 - the same everywhere
        return SCRIPTED

    def act(self, inputs: ActorInputs) -> Arrays:
        actions = {key: np.zeros_like(array) for key, array in inputs.prev_action.items()}
        for i in np.flatnonzero(inputs.playing):
            obs = {key: array[i].copy() for key, array in inputs.obs.items()}
            seen = obs[DEFAULT_OBSERVATION] if list(obs) == [DEFAULT_OBSERVATION] else obs
            with _reported():
                given = self._playing[i](seen)
                encoded = self._interface.clip_actions(self._interface.encode_action(given))
                self._interface.check_action(given, encoded)
            for key, array in encoded.items():
                actions[key][i] = array
        return actions


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # code of the user's may raise anything
        raise ActorError(f"the scripted policy failed: {describe_error(error)}") from error
