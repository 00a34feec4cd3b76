"""Causal attention over a sliding window of keys: one kernel interface, two implementations.

    attend(q, k, v, mask=..., causal=...)   q [N, H, Lq, E], k and v [N, H, Lk, E] -> [N, H, Lq, E]

`sdpa` is torch's fused kernel. `math` is its plain twin, for checking. Both take either causal=True
(row i sees keys 0..i) or a boolean mask, broadcastable to [N, H, Lq, Lk], True where a key is seen.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)


def attend_math(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        mask = band_mask(q.shape[-2], q.shape[-2], q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return F.dropout(scores.softmax(dim=-1), dropout, training=dropout > 0) @ v


ATTENTION = {"sdpa": attend_sdpa, "math": attend_math}


@lru_cache(maxsize=64)
def band_mask(length: int, context: int, device: torch.device) -> Tensor:
    """[length, length] bool: row i sees keys i - context + 1 .. i."""
    with torch.inference_mode(False):
        row = torch.arange(length, device=device)
        age = row[:, None] - row[None, :]
        return (age >= 0) & (age < context)
