"""The flash-attn package (Dao 2023), version 2.7 or newer: 16 bits, on Ampere or newer GPUs.

It is tested against stand-ins with the published signatures, not with the package.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amago_model.data.packing import Packing


@lru_cache(maxsize=1)
def flash_attn() -> Any:
    """The package; None if it cannot be imported."""
    try:
        return importlib.import_module("flash_attn")
    except Exception:  # noqa: BLE001 a broken CUDA build may raise any exception
        return None


def flash_obstacle(q: Tensor) -> str | None:
    """Why flash-attn does not support the queries q [N, H, L, E]; None if it does."""
    if flash_attn() is None:
        return "the package flash-attn is not installed (pip install flash-attn, on a GPU machine)"
    if not _supports(q.device):
        return f"flash-attn needs a GPU of the Ampere generation or newer, not '{q.device}'"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"flash-attn needs a head width divisible by 8 and at most 256, not {q.shape[-1]}"
    return None


@lru_cache(maxsize=16)
def _supports(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def attend_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: int,
    dropout: float,
    packing: Packing | None = None,
) -> Tensor:
    """q, k, v [N, H, L, E] -> [N, H, L, E] in the dtype of q; with a packing [1, H, M, E]."""
    dtype, half = q.dtype, _kernel_dtype(q.dtype)
    longest = q.shape[-2] if packing is None else packing.longest
    # (left, right): how many keys before and after a query are visible.
    window = (-1, -1) if longest <= context else (context - 1, 0)
    options = {"causal": True, "dropout_p": dropout, "window_size": window}
    q, k, v = (x.transpose(1, 2).to(half) for x in (q, k, v))
    if packing is None:
        out = flash_attn().flash_attn_func(q, k, v, **options)
    else:
        out = flash_attn().flash_attn_varlen_func(
            q[0],
            k[0],
            v[0],
            cu_seqlens_q=packing.starts,
            cu_seqlens_k=packing.starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )[None]
    result: Tensor = out.transpose(1, 2).to(dtype)
    return result
