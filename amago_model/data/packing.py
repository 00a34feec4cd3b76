"""Windows of different length laid end to end: a batch without its padding.

    windows [B = 3, L = 4]        one sequence [1, M = 7]

    a0 a1 a2 a3                   a0 a1 a2 a3 b0 b1 c0
    b0 b1 .  .      window         0  0  0  0  1  1  2
    c0 .  .  .      position       0  1  2  3  0  1  0        starts 0, 4, 6, 7

A window's rows reach to the one after its last transition; a row before that whose observation was
never recorded is among them, since later rows see it. Letters: B windows, L rows of each with
padding, M rows without.
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
    """Which rows of a batch exist, and where they lie. Made once for a batch, by `pack`."""

    lengths: tuple[int, ...]
    """B: rows of each window; 0 where there is nothing but padding."""
    place: Tensor
    """[M] int64: which of the batch's B * L rows they are."""
    padded: int
    """L: rows of each window with padding."""

    @property
    def longest(self) -> int:
        """Rows of the longest window."""
        return max(self.lengths)

    @cached_property
    def window(self) -> Tensor:
        """[M] int64: the window that each row is of."""
        return torch.div(self.place, self.padded, rounding_mode="floor")

    @cached_property
    def position(self) -> Tensor:
        """[M] int64: its place in that window."""
        return self.place % self.padded

    @cached_property
    def starts(self) -> Tensor:
        """[B + 1] int32: where each window begins in the sequence, and where the last one ends."""
        starts = list(itertools.accumulate(self.lengths, initial=0))
        return torch.tensor(starts, dtype=torch.int32, device=self.place.device)

    def rows(self, x: Tensor) -> Tensor:
        """[B, length, ...] -> [1, M, ...]: what exists of it, in order."""
        # Not by two indices, which is many times slower for images in bytes.
        return x.flatten(0, 1).index_select(0, self._place(x.shape[1])).unsqueeze(0)

    def windows(self, x: Tensor, length: int | None = None) -> Tensor:
        """[1, M, ...] -> [B, length, ...], zeros where no row is; L, unless another is wanted."""
        b, length = len(self.lengths), length or self.padded
        full = x.new_zeros(b * length, *x.shape[2:]).index_copy(0, self._place(length), x[0])
        out: Tensor = full.unflatten(0, (b, length))
        return out

    def _place(self, length: int) -> Tensor:
        """As `place`, in windows of another length."""
        return self.place if length == self.padded else self.window * length + self.position

    def before(self, place: Tensor) -> Tensor:
        """[N] int64: the row before each transition, in the sequence; the next one is after it.

        place [N]: which of the batch's B * (L - 1) transitions they are, all of them existing.
        """
        window = torch.div(place, self.padded - 1, rounding_mode="floor")
        return place - window * (self.padded - 1) + self.starts[window]


def pack(mask: Tensor) -> Packing | None:
    """The rows of windows whose transitions exist where mask [B, T] is True.

    None where none is missing, or there is none. On a GPU this makes the processor wait, twice.
    """
    t = mask.shape[1]
    row = torch.arange(t + 1, device=mask.device)
    reach = (mask * row[1:]).amax(dim=1)
    lengths = tuple(n + 1 if n else 0 for n in reach.tolist())
    if min(lengths) > t or not max(lengths):
        return None
    exists = row < (reach + (reach > 0)).unsqueeze(1)
    return Packing(lengths, exists.flatten().nonzero().squeeze(1), t + 1)


def takes_packing(module: nn.Module) -> bool:
    """Whether the forward of a module has an argument `packing`."""
    return _takes_packing(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _takes_packing(kind: type[nn.Module]) -> bool:
    return "packing" in inspect.signature(kind.forward).parameters
