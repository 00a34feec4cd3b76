"""torch's flex_attention: every pattern fused on a GPU; on a CPU forward only, unfused."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from amago_model.attention.pattern import Pattern
from amago_model.data.packing import Packing


@lru_cache(maxsize=8)
def _flex_kernel(device_type: str):  # type: ignore[no-untyped-def]
    from torch.nn.attention.flex_attention import flex_attention  # slow to import, rarely used

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


@lru_cache(maxsize=64)
def _flex_blocks(length: int, pattern: Pattern, device: torch.device):  # type: ignore[no-untyped-def]
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(n: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        return (i >= j) & ((i - j < pattern.context) | (j < pattern.n_sinks))

    with torch.inference_mode(False):
        return create_block_mask(visible, None, None, length, length, device=str(device))


@lru_cache(maxsize=1)  # all layers of a Transformer use the same mask
def _packed_flex_blocks(packing: Packing, pattern: Pattern):  # type: ignore[no-untyped-def]
    from torch.nn.attention.flex_attention import create_block_mask

    window, position = packing.window, packing.position
    length, device = len(window), window.device

    def visible(n: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        near = (i - j < pattern.context) | (position[j] < pattern.n_sinks)
        return (window[i] == window[j]) & (i >= j) & near

    with torch.inference_mode(False):
        # Compiled, this does not materialise the mask of all pairs of timesteps.
        return create_block_mask(
            visible,
            None,
            None,
            length,
            length,
            device=str(device),
            _compile=device.type == "cuda",
        )


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, packing: Packing | None = None
) -> Tensor:
    """Whole windows, q, k, v [N, H, L, E] -> [N, H, L, E]; with a packing [1, H, M, E]."""
    bias, clip, n_sinks = pattern.sink_bias, pattern.logit_clip, pattern.n_sinks

    def modify(score: Tensor, n: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        if bias:
            position = j if packing is None else packing.position[j]
            score = torch.where(position < n_sinks, score + bias, score)
        return score.clamp(-clip, clip) if clip else score

    if packing is None:
        blocks = _flex_blocks(q.shape[-2], pattern, q.device)
    else:
        blocks = _packed_flex_blocks(packing, pattern)
    with warnings.catch_warnings():
        # On a CPU it runs unfused on purpose: it needs no compiler, and the results are the same.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out: Tensor = _flex_kernel(q.device.type)(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            score_mod=modify if bias or clip else None,
            block_mask=blocks,
        )
        return out
