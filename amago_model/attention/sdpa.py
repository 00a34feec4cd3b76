"""torch's scaled_dot_product_attention, and a plain reference implementation with all options.

`mask`: bool, broadcastable to [N, H, L, K], True if a key is visible; or `causal`: query i attends
to keys 0..i. Letters: N sequences, H heads, L queries, K keys, E width of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model.attention.pattern import band_mask


def attend_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    bias: Tensor | None = None,
) -> Tensor:
    """q [N, H, L, E], k and v [N, H, K, E], bias [K] -> [N, H, L, E]."""
    if bias is not None:
        if mask is None:
            mask = band_mask(q.shape[-2], q.shape[-2], q.device)
        mask = torch.where(mask, bias.to(q.dtype), -math.inf)
        causal = False
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)


def attend_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    bias: Tensor | None = None,
    clip: float = 0.0,
) -> Tensor:
    """Like attend_sdpa; scores are clipped to plus or minus `clip`, unless it is 0."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if clip:
        scores = scores.clamp(-clip, clip)
    if causal:
        mask = band_mask(q.shape[-2], q.shape[-2], q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim=-1).to(v.dtype)  # a bias is in float32
    return F.dropout(weights, dropout, training=dropout > 0) @ v
