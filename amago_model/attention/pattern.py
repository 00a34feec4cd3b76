"""The attention pattern: a query attends to the last `context` timesteps and to the sinks.

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
    """The keys that a query attends to, and changes of the scores before the softmax."""

    context: int
    """Number of visible timesteps, including that of the query."""
    n_sinks: int = 0
    """Number of timesteps at the start that are always visible."""
    sink_bias: float = 0.0
    """Added to the scores of sinks."""
    logit_clip: float = 0.0
    """Scores are then clipped to plus or minus this value; 0: no clipping."""

    def bias(self, n_keys: int, device: torch.device) -> Tensor | None:
        """[K]: the bias of the scores, by key; None without a bias."""
        if not self.sink_bias:
            return None
        return _sink_bias(n_keys, self.n_sinks, self.sink_bias, device)


@lru_cache(maxsize=64)
def band_mask(length: int, context: int, device: torch.device, n_sinks: int = 0) -> Tensor:
    """[length, length] bool: query i attends to keys i - context + 1 .. i and sinks up to i."""
    with torch.inference_mode(False):
        row = torch.arange(length, device=device)
        age = row[:, None] - row[None, :]
        return (age >= 0) & ((age < context) | (row[None, :] < n_sinks))


@lru_cache(maxsize=64)
def _sink_bias(n_keys: int, n_sinks: int, value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.where(torch.arange(n_keys, device=device) < n_sinks, value, 0.0)
