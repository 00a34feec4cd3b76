"""Packing: the windows of a batch concatenated into one sequence, without padding.

    windows [B = 3, L = 4]        packed [1, M = 7]

    a0 a1 a2 a3                   a0 a1 a2 a3 b0 b1 c0
    b0 b1 .  .      window         0  0  0  0  1  1  2
    c0 .  .  .      position       0  1  2  3  0  1  0        starts 0, 4, 6, 7

A packed window ends with the timestep after its last transition. It includes earlier timesteps
without a recorded observation, because later ones attend to them. Letters: B windows, L timesteps
per window with padding, M timesteps of all windows without padding.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Packing:
    """The timesteps of a batch that are not padding. `make_packing` creates it once per batch."""

    lengths: tuple[int, ...]
    """Timesteps of each of the B windows; 0 for a window of padding only."""
    index: Tensor
    """[M] int64: their indices in the batch's B * L timesteps."""
    padded_length: int
    """L: timesteps per window with padding."""

    @property
    def longest(self) -> int:
        """Timesteps of the longest window."""
        return max(self.lengths)

    @cached_property
    def window(self) -> Tensor:
        """[M] int64: the window index of each timestep."""
        return torch.div(self.index, self.padded_length, rounding_mode="floor")

    @cached_property
    def position(self) -> Tensor:
        """[M] int64: the position of each timestep in its window."""
        return self.index % self.padded_length

    @cached_property
    def starts(self) -> Tensor:
        """[B + 1] int32: the start of each window in the packed sequence, and its total length."""
        starts = list(itertools.accumulate(self.lengths, initial=0))
        return torch.tensor(starts, dtype=torch.int32, device=self.index.device)

    def pack(self, x: Tensor) -> Tensor:
        """Pack [B, length, ...] -> [1, M, ...]."""
        # One flat index: indexing by two tensors is many times slower for uint8 images.
        return x.flatten(0, 1).index_select(0, self._index(x.shape[1])).unsqueeze(0)

    def unpack(self, x: Tensor, length: int | None = None) -> Tensor:
        """Unpack [1, M, ...] -> [B, length, ...], zeros at padding; length is L by default."""
        b, length = len(self.lengths), length or self.padded_length
        full = x.new_zeros(b * length, *x.shape[2:]).index_copy(0, self._index(length), x[0])
        out: Tensor = full.unflatten(0, (b, length))
        return out

    def _index(self, length: int) -> Tensor:
        """`index` for windows padded to another length."""
        return self.index if length == self.padded_length else self.window * length + self.position

    def timestep_before(self, transition: Tensor) -> Tensor:
        """[N] int64: the index in the packed sequence of the timestep before each transition.

        `transition` [N] int64: indices in the batch's B * (L - 1) transitions, without padding.
        """
        window = torch.div(transition, self.padded_length - 1, rounding_mode="floor")
        return transition - window * (self.padded_length - 1) + self.starts[window]


def make_packing(mask: Tensor) -> Packing | None:
    """The packing of windows with the transition mask [B, T].

    Returns None if there is no padding, or only padding. On a GPU this synchronises twice.
    """
    t = mask.shape[1]
    position = torch.arange(t + 1, device=mask.device)
    reach = (mask * position[1:]).amax(dim=1)
    lengths = tuple(n + 1 if n else 0 for n in reach.tolist())
    if min(lengths) > t or not max(lengths):
        return None
    exists = position < (reach + (reach > 0)).unsqueeze(1)
    return Packing(lengths, exists.flatten().nonzero().squeeze(1), t + 1)


def supports_packing(module: nn.Module) -> bool:
    """Whether the forward method of a module has an argument `packing`."""
    return _supports_packing(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _supports_packing(kind: type[nn.Module]) -> bool:
    return "packing" in inspect.signature(kind.forward).parameters
