"""Which keys a query attends to: the last `context` timesteps, and the first ones as sinks.

timesteps 0..L-1, context = 3, n_sinks = 1     s: a sink   x: in the window

timestep 5 attends to   s  .  .  x  x  x       keys 0 and 3, 4, 5
                        0  1  2  3  4  5
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """Which keys a query attends to, and what changes its scores before the softmax."""

    context: int
    """The last so many timesteps are visible, the query's own included."""
    n_sinks: int = 0
    """So many timesteps from the first on are always visible."""
    sink_bias: float = 0.0
    """Added to the score of a sink."""
    logit_clip: float = 0.0
    """Scores are then limited to plus or minus this; 0 leaves them."""

    def bias(self, n_keys: int, device: torch.device) -> Tensor | None:
        """[K]: added to the scores, by key."""
        if not self.sink_bias:
            return None
        return _sink_bias(n_keys, self.n_sinks, self.sink_bias, device)


@lru_cache(maxsize=64)
def band_mask(length: int, context: int, device: torch.device, n_sinks: int = 0) -> Tensor:
    """[length, length] bool: query i sees keys i - context + 1 .. i, and the sinks up to i."""
    with torch.inference_mode(False):
        row = torch.arange(length, device=device)
        age = row[:, None] - row[None, :]
        return (age >= 0) & ((age < context) | (row[None, :] < n_sinks))


@lru_cache(maxsize=64)
def _sink_bias(n_keys: int, n_sinks: int, value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.where(torch.arange(n_keys, device=device) < n_sinks, value, 0.0)
