"""The data of one update, and the encoding of actions and previous steps.

A window of T transitions has L = T + 1 timesteps. The fields of a timestep are known when its
observation arrives:

    timestep t  | obs[t]   prev_action[t]  prev_reward[t]  time_idx[t]
    transition t| action[t] = prev_action[t+1], reward[t] = prev_reward[t+1], then obs[t+1]

    timestep    0        1        2        3 = T
    obs         o0       o1       o2       o3
    prev_action -        a0       a1       a2        '-' = ignored where time_idx is 0, and
    prev_reward -        r0       r1       r2              otherwise from before the window
    time_idx    7        8        9        10
    transition      0        1        2
    mask            T        T        T              False: this transition is padding
    terminated      F        F        x              True: the task ended, there is no next value
    truncated       F        F        y              True: recording stopped, bootstrap
    next_obs_valid  T        T        z              False: obs[t+1] was not recorded

Padding is on the right, where `mask` is False; padded values are not used. Training and acting use
the same encoding functions. All inputs are in the environment's units: discrete actions with its
indices, continuous actions unscaled.

Letters: B windows, T transitions, L = T + 1 timesteps, A width of an encoded action.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from amago_model.config import ActionSpace, ObsSpace, Spaces
from amago_model.errors import BatchError


@dataclass(slots=True)
class Batch:
    """B windows of T transitions; see the picture above. The trainer builds batches in
    trainer/data/alignment.py."""

    obs: dict[str, Tensor]
    """By key: [B, L, *shape], in the storage dtype."""
    prev_action: Tensor
    """[B, L, *array_shape] in the environment's units: int64, or float32 if continuous."""
    prev_reward: Tensor
    """[B, L] float32, unscaled."""
    time_idx: Tensor
    """[B, L] int64: steps since the start of the episode; at 0 there is no previous step."""
    terminated: Tensor
    """[B, T] bool: transition t ended the task."""
    truncated: Tensor
    """[B, T] bool: transition t is the last one recorded, but did not end the task."""
    next_obs_valid: Tensor
    """[B, T] bool: the observation after transition t exists."""
    mask: Tensor
    """[B, T] bool: transition t exists (is not padding)."""
    action_known: Tensor
    """[B, T] bool: the action of transition t was recorded."""
    noise: Tensor | None = None
    """[B, T, width]: random numbers of the update, from `Agent.draw_noise`; None: the forward pass
    draws them. Micro-batches that share the noise of a batch make the same update as that batch."""
    actor_mask: Tensor | None = None
    """[B, T] bool: the BC and DPG losses include transition t; None: all transitions. Critics,
    returns and the memory also use the excluded transitions."""
    return_to_go: Tensor | None = None
    """[B, L] float32, unscaled: sum of the rewards from timestep t to the end of the trajectory
    (not of the window); needed by AgentConfig.return_conditioning. Padded values are not used."""
    critic_mask: Tensor | None = None
    """[B, T] bool: the critic loss and the statistics of returns include transition t; None: all
    transitions."""

    @property
    def action(self) -> Tensor:
        """[B, T, ...]: the action at timestep t."""
        return self.prev_action[:, 1:]

    @property
    def reward(self) -> Tensor:
        """[B, T]: the reward of that action."""
        return self.prev_reward[:, 1:]

    @property
    def timestep_mask(self) -> Tensor:
        """[B, L] bool: timestep t has an observation (timestep 0 does if any transition exists)."""
        return torch.cat((self.mask[:, :1], self.mask & self.next_obs_valid), dim=1)

    @property
    def previous_known(self) -> Tensor:
        """[B, L] bool: prev_action[t] was recorded; always True for timestep 0 of a window that is
        not empty."""
        return torch.cat((self.mask[:, :1], self.mask & self.action_known), dim=1)

    def encoder_inputs(self) -> dict[str, Any]:
        """The keyword arguments of ActingPolicy.encode_timesteps."""
        return {
            "obs": self.obs,
            "prev_action": self.prev_action,
            "prev_reward": self.prev_reward,
            "time_idx": self.time_idx,
            "valid": self.timestep_mask,
            "previous_known": self.previous_known,
            "return_to_go": self.return_to_go,
        }

    def _map(self, f) -> Self:  # type: ignore[no-untyped-def]
        values = {name: getattr(self, name) for name in _TENSOR_FIELDS}
        mapped = {name: f(value) for name, value in values.items() if value is not None}
        return type(self)(obs={key: f(value) for key, value in self.obs.items()}, **mapped)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """A copy of the batch on a device; tensors already there are not copied."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def windows(self, first: int, end: int) -> Self:
        """A batch of windows first .. end - 1, as views."""
        return self._map(lambda x: x[first:end])

    def padded(self, n_transitions: int) -> Self:
        """The batch padded to n_transitions; losses and gradients are unchanged."""
        more = n_transitions - self.mask.shape[1]
        if more == 0:
            return self

        def longer(x: Tensor) -> Tensor:
            return torch.cat((x, x.new_zeros(x.shape[0], more, *x.shape[2:])), dim=1)

        return self._map(longer)

    def pin_memory(self) -> Self:
        """A copy of the batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def check(self, spaces: Spaces) -> None:
        """Compare all shapes and mask dtypes with the spaces. It does not read values, so it is
        cheap on any device.

        Raises:
            BatchError: a shape or dtype is wrong; the message names the field, the expected and the
                actual shape or dtype.
        """
        if self.mask.ndim != 2:
            raise BatchError(f"Batch.mask: expected shape [B, T], got {list(self.mask.shape)}")
        b, t = self.mask.shape
        expected = {
            "prev_action": (b, t + 1, *spaces.action.array_shape),
            "prev_reward": (b, t + 1),
            "time_idx": (b, t + 1),
            **dict.fromkeys(_TRANSITION_FIELDS, (b, t)),
        }
        masks = [name for name in LOSS_MASKS if getattr(self, name) is not None]
        expected |= dict.fromkeys(masks, (b, t))
        if self.return_to_go is not None:
            expected["return_to_go"] = (b, t + 1)
        for name, shape in expected.items():
            _check_shape(f"Batch.{name}", getattr(self, name), shape)
        for name in (*_TRANSITION_FIELDS, *masks):
            if getattr(self, name).dtype != torch.bool:
                raise BatchError(f"Batch.{name}: expected bool, got {getattr(self, name).dtype}")
        for key, space in spaces.observations.items():
            if space.role not in ("policy", "mask", "critic"):
                continue  # the agent does not use it, so the trainer need not load it
            if key not in self.obs:
                raise BatchError(
                    f"Batch.obs: key {key!r} is missing; its keys are {sorted(self.obs)}. "
                    "Check that the spaces belong to this dataset"
                )
            _check_shape(f"Batch.obs[{key!r}]", self.obs[key], (b, t + 1, *space.shape))


LOSS_MASKS = ("actor_mask", "critic_mask")
_TRANSITION_FIELDS = ("terminated", "truncated", "next_obs_valid", "mask", "action_known")
_TENSOR_FIELDS = tuple(f.name for f in dataclasses.fields(Batch) if f.name != "obs")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise BatchError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


def only_valid(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [B, L, *shape] or [N, *shape], with zeros where valid [B, L] or [N] is False."""
    if valid is None:
        return x
    return x.masked_fill(~valid.reshape(*valid.shape, *[1] * (x.ndim - valid.ndim)), 0)


# ---------------------------------------------------------------------------------------- encoding


@lru_cache(maxsize=64)
def _bounds(space: ActionSpace, device: torch.device) -> tuple[Tensor, Tensor]:
    # Cached, because a new tensor from Python numbers needs a host-to-device copy in each update.
    # Created outside inference mode, because autograd rejects inference tensors.
    with torch.inference_mode(False):
        low = torch.tensor(space.low, dtype=torch.float32, device=device)
        high = torch.tensor(space.high, dtype=torch.float32, device=device)
        return low, high


@lru_cache(maxsize=64)
def _middle(space: ActionSpace, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        low, high = _bounds(space, device)
        return (low + high) / 2.0, (high - low) / 2.0


@lru_cache(maxsize=64)
def _categories(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(n, device=device)


@lru_cache(maxsize=64)
def _offsets(starts: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(starts, dtype=torch.int64, device=device)


def category_index(space: ObsSpace, flat: Tensor) -> Tensor:
    """Categories of an observation [..., elements] -> 0..n-1; others may be out of range."""
    return flat.to(torch.int64) - _offsets(space.starts, flat.device) if space.starts else flat


def one_hot(index: Tensor, n: int) -> Tensor:
    """Integers [...] -> one-hots [..., n] float32. Numbers outside 0..n-1 become zeros."""
    return (index.unsqueeze(-1) == _categories(n, index.device)).to(torch.float32)


def action_index(space: ActionSpace, action: Tensor) -> Tensor:
    """The environment's action indices -> 0..n-1, int64. Unknown actions may be out of range."""
    return action.to(torch.int64) - space.start


def encode_action(space: ActionSpace, action: Tensor) -> Tensor:
    """Encode actions in the environment's units as network inputs [..., A] float32.

    Discrete [...]: one-hot (zeros for an index that is no action). Multi_discrete [..., parts]:
    concatenated one-hots. Multi_binary [..., n]: ones and zeros. Continuous [..., *shape]:
    flattened, scaled from low..high to -1..1 and clipped.
    """
    if space.kind == "discrete":
        return one_hot(action_index(space, action), space.n)
    if space.kind == "multi_binary":
        return (action == 1).to(torch.float32)
    if space.kind == "multi_discrete":
        if space.starts:
            action = action - _offsets(space.starts, action.device)
        parts = zip(action.unbind(-1), space.nvec, strict=True)
        return torch.cat([one_hot(part, n) for part, n in parts], dim=-1)
    center, half = _middle(space, action.device)
    flat = action.reshape(*action.shape[: action.ndim - len(space.shape)], space.width)
    return (flat.to(torch.float32) - center).div_(half).clamp_(-1.0, 1.0)


def decode_action(space: ActionSpace, x: Tensor) -> Tensor:
    """Decode actions of a policy to the environment's units.

    Discrete: indices 0..n-1 [...] -> int64 [...]. Multi_binary: [..., n] ones and zeros -> int64.
    Multi_discrete: one-hots [..., A] -> int64 [..., parts]. Continuous: [..., A] in -1..1 ->
    float32 [..., *shape] in low..high.
    """
    if space.kind == "discrete":
        return x.to(torch.int64) + space.start
    if space.kind == "multi_binary":
        return (x > 0.5).to(torch.int64)
    if space.kind == "multi_discrete":
        index = torch.stack([part.argmax(-1) for part in x.split(space.nvec, dim=-1)], dim=-1)
        return index + _offsets(space.starts, x.device) if space.starts else index
    low, high = _bounds(space, x.device)
    # Rounding can exceed a bound by one part in 10^7, which strict environments reject.
    action = torch.clamp(low + (high - low) * (x + 1.0) / 2.0, low, high)
    return action.reshape(*x.shape[:-1], *space.shape)


def previous_features(
    spaces: Spaces,
    prev_action: Tensor,
    prev_reward: Tensor,
    time_idx: Tensor,
    known: Tensor | None = None,
    show_reset: bool = False,
) -> Tensor:
    """Encode the previous step as network input: [B, L, 1 + A] float32, [reward | encoded action].

    Where time_idx is 0 (the start of an episode) all are zeros, whatever prev_action and
    prev_reward are. Where `known` [B, L] bool is False the action part is zeros. With `show_reset`
    the output is [B, L, 2 + A]: the last number is 1 where time_idx is 0, else 0.
    """
    exists = time_idx > 0
    reward = torch.where(exists, prev_reward.to(torch.float32), 0.0)
    visible = exists if known is None else exists & known
    action = torch.where(visible.unsqueeze(-1), encode_action(spaces.action, prev_action), 0.0)
    parts = [reward.unsqueeze(-1), action]
    if show_reset:
        parts.append((~exists).to(torch.float32).unsqueeze(-1))
    return torch.cat(parts, dim=-1)
