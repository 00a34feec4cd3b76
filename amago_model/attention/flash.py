"""The flash-attn package (Dao 2023) behind our interface, in whichever version is installed.

Its function takes and gives [N, L, H, E] in 16 bits. Versions differ in three ways that matter:

    version   module                  dropout_p   window_size   returns
    2         flash_attn              yes         from 2.3 on   out
    3         flash_attn_interface    no          yes           out, in early releases (out, lse)
    4         flash_attn.cute         no          yes           (out, lse)

A second one, flash_attn_varlen_func, takes windows laid end to end, [M, H, E], with the rows before
each as int32 (cu_seqlens_q, cu_seqlens_k) and the length of the longest (max_seqlen_q,
max_seqlen_k), by name, for their order differs; its options and returns are those above. In the
first releases of version 4 it takes no lengths and has no gradient: the trial in
causal_attention.py fails, and it is not called.

Nothing here is measured: no machine with the package was at hand. It is tested against stand-ins
with these signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amago_model.data.packing import Packing

_MODULES = ("flash_attn_interface", "flash_attn", "flash_attn.cute")


@lru_cache(maxsize=1)
def _find_module() -> Any:
    """The installed package; None if there is none that can be imported."""
    for name in _MODULES:
        try:
            found = importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112 a broken CUDA build raises whatever it likes
            continue
        if hasattr(found, "flash_attn_func"):
            return found
    return None


def find_flash() -> Callable[..., Any] | None:
    """`flash_attn_func` of the installed package; None if there is none that can be imported."""
    return getattr(_find_module(), "flash_attn_func", None)


def _find_packed() -> Callable[..., Any] | None:
    return getattr(_find_module(), "flash_attn_varlen_func", None)


def _takes(function: Callable[..., Any], option: str) -> bool:
    return option in inspect.signature(function).parameters


def flash_obstacle(q: Tensor, dropout: float, *, windowed: bool) -> str | None:
    """Why flash-attn cannot serve these queries, q [N, H, L, E]; None if it can."""
    function = find_flash()
    if function is None:
        return "the package flash-attn is not installed (pip install flash-attn, on a GPU machine)"
    if not _able(q.device):
        return f"flash-attn needs a GPU of the Ampere generation or newer, not '{q.device}'"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"flash-attn needs heads of a width divisible by 8, up to 256, not {q.shape[-1]}"
    if dropout and not _takes(function, "dropout_p"):
        return "the installed version of flash-attn has no dropout on attention weights"
    if windowed and not _takes(function, "window_size"):
        return "the installed version of flash-attn has no sliding window; 2.3 and later have one"
    return None


def flash_packs(dropout: float, *, windowed: bool) -> bool:
    """Whether the installed version has a function for windows laid end to end, with what is asked.
    That it can serve such queries at all is for `flash_obstacle` to say."""
    function = _find_packed()
    if function is None or (dropout and not _takes(function, "dropout_p")):
        return False
    return _takes(function, "window_size") or not windowed


@lru_cache(maxsize=16)
def _able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def attend_flash(
    function: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: int,
    dropout: float,
) -> Tensor:
    """q, k, v [N, H, L, E] -> [N, H, L, E] in the type of q; computed in 16 bits (bfloat16 if q
    has more)."""
    assert function is not None  # `flash_obstacle` said so
    half = _kernel_dtype(q.dtype)
    options = _options(q.shape[-2], context, dropout)
    out = function(*(x.transpose(1, 2).to(half) for x in (q, k, v)), **options)
    return _output(out).transpose(1, 2).to(q.dtype)


def attend_flash_packed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, context: int, dropout: float
) -> Tensor:
    """Windows laid end to end: q, k, v [1, H, M, E] -> [1, H, M, E], as `attend_flash`."""
    function = _find_packed()
    assert function is not None  # `flash_packs` said so
    half, longest = _kernel_dtype(q.dtype), packing.longest
    out = function(
        *(x[0].transpose(0, 1).to(half) for x in (q, k, v)),
        cu_seqlens_q=packing.starts,
        cu_seqlens_k=packing.starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **_options(longest, context, dropout),
    )
    return _output(out).transpose(0, 1).unsqueeze(0).to(q.dtype)


def _options(length: int, context: int, dropout: float) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": True}
    if length > context:  # keys up to so many rows to the left, and none to the right
        options["window_size"] = (context - 1, 0)
    if dropout:
        options["dropout_p"] = dropout
    return options


def _output(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned  # type: ignore[no-any-return]
