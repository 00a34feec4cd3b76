"""Windows of different length laid end to end: a batch without its padding.

    windows [B = 3, L = 4]        packed [1, M = 7]

    a0 a1 a2 a3                   a0 a1 a2 a3 b0 b1 c0
    b0 b1 .  .      window         0  0  0  0  1  1  2
    c0 .  .  .      position       0  1  2  3  0  1  0        starts 0, 4, 6, 7

A window's timesteps reach to the one after its last transition; one before that whose observation
was never recorded is among them, since later ones attend to it. Letters: B windows, L timesteps of
each with padding, M timesteps without.
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
    """Which timesteps of a batch exist, and where. Made once for a batch, by `make_packing`."""

    lengths: tuple[int, ...]
    """B: timesteps of each window; 0 where there is nothing but padding."""
    index: Tensor
    """[M] int64: where they are among the batch's B * L timesteps."""
    padded_length: int
    """L: timesteps of each window with padding."""

    @property
    def longest(self) -> int:
        """Timesteps of the longest window."""
        return max(self.lengths)

    @cached_property
    def window(self) -> Tensor:
        """[M] int64: the window of each timestep."""
        return torch.div(self.index, self.padded_length, rounding_mode="floor")

    @cached_property
    def position(self) -> Tensor:
        """[M] int64: its position in that window."""
        return self.index % self.padded_length

    @cached_property
    def starts(self) -> Tensor:
        """[B + 1] int32: where each window begins in the sequence, and where the last one ends."""
        starts = list(itertools.accumulate(self.lengths, initial=0))
        return torch.tensor(starts, dtype=torch.int32, device=self.index.device)

    def pack(self, x: Tensor) -> Tensor:
        """[B, length, ...] -> [1, M, ...]: the timesteps that exist, in order."""
        # Not by two indices, which is many times slower for images in bytes.
        return x.flatten(0, 1).index_select(0, self._index(x.shape[1])).unsqueeze(0)

    def unpack(self, x: Tensor, length: int | None = None) -> Tensor:
        """[1, M, ...] -> [B, length, ...], zeros at padding; length is L by default."""
        b, length = len(self.lengths), length or self.padded_length
        full = x.new_zeros(b * length, *x.shape[2:]).index_copy(0, self._index(length), x[0])
        out: Tensor = full.unflatten(0, (b, length))
        return out

    def _index(self, length: int) -> Tensor:
        """As `index`, in windows of another length."""
        return self.index if length == self.padded_length else self.window * length + self.position

    def timestep_before(self, transition: Tensor) -> Tensor:
        """[N] int64: the timestep before each transition, in the sequence; the next is after it.

        transition [N]: where they are among the batch's B * (L - 1); all of them exist.
        """
        window = torch.div(transition, self.padded_length - 1, rounding_mode="floor")
        return transition - window * (self.padded_length - 1) + self.starts[window]


def make_packing(mask: Tensor) -> Packing | None:
    """The packing of windows whose transitions exist where mask [B, T] is True.

    None where no padding is there, or nothing else. On a GPU this makes the processor wait, twice.
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
    """Whether the forward of a module has an argument `packing`."""
    return _supports_packing(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _supports_packing(kind: type[nn.Module]) -> bool:
    return "packing" in inspect.signature(kind.forward).parameters
