"""A policy that plays one environment: arrays in, an action out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from amago_model.acting import ActingPolicy
from amago_model.config.names import join_key
from amago_model.errors import BatchError
from amago_model.export import export_policy

DEFAULT_KEY = "observation"
"""Key of an observation that is not a dict."""


class Player:
    """Acts in one environment with a policy, and keeps its memory of the episode.

    Call `reset` where an episode begins, then `act` for each step.

    Args:
        policy: from `load_policy` of this package.
        sample: sample from the policy instead of taking its greedy actions.
        seed: of the samples.
        device: where the policy's tensors are.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        *,
        sample: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.policy = policy.eval()
        self.sample, self._device = sample, device
        self._generator = torch.Generator(device).manual_seed(seed)
        space = policy.spaces.action
        self._discrete = space.kind != "continuous"
        self._shape = space.array_shape
        self._low = np.reshape(space.low, self._shape) if space.low else None
        self._high = np.reshape(space.high, self._shape) if space.high else None
        self._keys = policy.spaces.keys("policy") + policy.spaces.keys("mask")
        self.reset()

    def reset(self) -> None:
        """An episode begins: forget the last one."""
        self._hidden = self.policy.initial_hidden(1, self._device)
        dtype = torch.int64 if self._discrete else torch.float32
        self._action = torch.zeros((1, *self._shape), dtype=dtype, device=self._device)
        self._time = 0

    def act(self, obs: Any, reward: float = 0.0) -> NDArray[Any] | np.int64 | np.float32:
        """The next action, in the environment's units.

        Args:
            obs: an array, or a dict or tuple of arrays as the environment returns it; keys of
                nested ones are joined by "/". Texts are not encoded:
                docs/reference/collecting.md#texts.
            reward: of the last step; 0 at the first one. Needed by policies with memory.

        Raises:
            BatchError: a key is missing, or an array has another shape than in training.
        """
        tensors = {key: self._tensor(key, value) for key, value in self._arrays(obs).items()}
        self._action, self._hidden = self.policy.act(
            tensors,
            self._action,
            torch.tensor([float(reward)], device=self._device),
            torch.tensor([self._time], device=self._device),
            self._hidden,
            sample=self.sample,
            generator=self._generator,
        )
        self._time += 1
        action = self._action[0].cpu().numpy()
        if not np.isfinite(action).all():
            raise BatchError("the policy's action is NaN or infinite; try an earlier version")
        if self._low is not None:
            action = np.clip(action, self._low, self._high).astype(np.float32)
            # The policy is shown the action that is executed.
            self._action = torch.from_numpy(action[None]).to(self._device)
        if action.shape:
            return action
        return np.int64(action) if self._low is None else np.float32(action)

    def export(self) -> bytes:
        """The policy as a torch.export program (export.py), which acts without this package."""
        return export_policy(self.policy, sample=self.sample)

    def _arrays(self, obs: Any) -> dict[str, Any]:
        """The inputs of the policy by key."""
        if isinstance(obs, Mapping):
            given = dict(_flat(obs, ""))
        elif DEFAULT_KEY in self._keys:  # a tuple, too, may be one array
            given = {DEFAULT_KEY: obs}
        else:
            given = dict(_flat(obs, DEFAULT_KEY))
        if missing := sorted(set(self._keys) - given.keys()):
            raise BatchError(f"obs: expected the keys {sorted(self._keys)}, {missing} are missing")
        return {key: given[key] for key in self._keys}

    def _tensor(self, key: str, value: Any) -> torch.Tensor:
        space = self.policy.spaces.observations[key]
        if isinstance(value, str):
            raise BatchError(
                f"obs[{key!r}] is a text; the policy takes {space.shape} ids of its tokens: encode "
                "it with the vocabulary of the dataset"
            )
        array = np.array(value, dtype=space.dtype)
        if array.shape != space.shape:
            raise BatchError(f"obs[{key!r}]: expected the shape {space.shape}, got {array.shape}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BatchError(f"obs[{key!r}] holds NaN or infinity")
        return torch.from_numpy(array[None]).to(self._device)


def _flat(obs: Any, name: str) -> list[tuple[str, Any]]:
    """The arrays of nested dicts and tuples, with names as collectors give them."""
    if isinstance(obs, Mapping):
        parts = list(obs.items())
    elif isinstance(obs, tuple):
        parts = list(enumerate(obs))
    else:
        return [(name, obs)]
    return [one for key, value in parts for one in _flat(value, join_key(name, key))]
