"""Causal attention over a sliding window of keys: one interface, several back-ends.

    sdpa    torch's scaled_dot_product_attention: the default, all devices
    math    a plain implementation: all devices and options, slow; the reference of the others
    flex    torch's flex_attention: every pattern fused on a GPU; on a CPU forward only, unfused
    flash   the flash-attn package, if installed and supported: GPU, 16 bits

`obstacle` returns why a back-end cannot compute a pattern; `auto` selects the fastest one that can.
Kernels that may fail on a machine are tried once on a few timesteps (`_trial`). Acting attends with
one query over a cache of keys. It uses sdpa, or math if sdpa lacks an option, whatever the
configured back-end is, so a policy trained with flash-attn can act on any machine.

Windows of different lengths may be packed (data/packing.py). flash and, on a GPU, flex have kernels
for packed windows; the others attend over one window at a time, or over padded windows.

Letters: N sequences, H heads, L queries, K keys, E width of a head, M timesteps of all windows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from amago_model.attention.flash import attend_flash, flash_obstacle
from amago_model.attention.flex import attend_flex
from amago_model.attention.pattern import Pattern, band_mask
from amago_model.attention.sdpa import attend_math, attend_sdpa
from amago_model.config import TransformerConfig
from amago_model.data.packing import Packing, make_packing
from amago_model.errors import ConfigError

BACKENDS = ("sdpa", "math", "flex", "flash")

MIN_WINDOW = 16
"""Packed windows shorter than this on average are padded, because one call per window would be
slower (measured on a CPU, one call per window: 32 windows of about 16 timesteps took a third less
time, windows of 6 twice as long)."""


def obstacle(name: str, q: Tensor, pattern: Pattern, dropout: float) -> str | None:
    """Why this back-end does not support the queries q [N, H, L, E]; None if it does."""
    match name:
        case "sdpa" if pattern.logit_clip:
            return "it cannot clip scores"
        case "flex" if dropout:
            return "it has no dropout on attention weights"
        case "flex" if q.device.type != "cuda" and q.requires_grad:
            return (
                f"it has no gradients on device '{q.device.type}'; it can only be evaluated there"
            )
        case "flex" if q.device.type == "cuda":
            return _trial(name, q.device, q.dtype, q.shape[-1])
        case "flash" if pattern.n_sinks or pattern.logit_clip:
            return "it supports neither sinks nor clipped scores"
        case "flash":
            return flash_obstacle(q) or _trial(name, q.device, q.dtype, q.shape[-1])
    return None


@lru_cache(maxsize=64)
def _trial(
    name: str, device: torch.device, dtype: torch.dtype, width: int, packed: bool = False
) -> str | None:
    """The error of a small trial, forward and backward; None if it succeeds."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(1, 1, 16, width, device=device, dtype=dtype, requires_grad=True)
            packing = None
            if packed:  # windows of 7 and 9 timesteps
                packing = make_packing(torch.arange(8, device=device) < x.new_tensor([[6], [8]]))
            if name == "flex":
                out = attend_flex(x, x, x, Pattern(context=16), packing)
            else:
                out = attend_flash(x, x, x, context=16, dropout=0.0, packing=packing)
            out.sum().backward()
    except Exception as error:  # noqa: BLE001 kernels and compilers may raise any exception
        return f"a trial failed: {type(error).__name__}: {error}"
    return None


def _has_packed_kernel(name: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether this back-end has a kernel for packed windows with this head width. flex has none on
    a CPU, where it would compute every pair of timesteps."""
    able = name == "flash" or (name == "flex" and device.type == "cuda")
    return able and _trial(name, device, dtype, width, packed=True) is None


def choose(wanted: str, q: Tensor, pattern: Pattern, dropout: float) -> str:
    """The back-end to use: `wanted`, or for 'auto' the fastest one that supports the pattern.

    Raises:
        ConfigError: `wanted` does not support it; the message names the reason and the back-ends
            that do.
    """
    if wanted != "auto":
        if why := obstacle(wanted, q, pattern, dropout):
            able = [n for n in BACKENDS if obstacle(n, q, pattern, dropout) is None]
            raise ConfigError(
                f"TransformerConfig.attention: {wanted!r} cannot be used: {why}. "
                f"Set attention to one of {', '.join(able)}, or to 'auto'"
            )
        return wanted
    # flash-attn rounds 32-bit numbers to 16 bits, so 'auto' uses it only for 16-bit queries.
    half = q.dtype in (torch.float16, torch.bfloat16)
    order = [*(["flash"] if half else []), "sdpa", *(["flex"] if q.is_cuda else []), "math"]
    return next(n for n in order if obstacle(n, q, pattern, dropout) is None)


class Attention:
    """The attention of a Transformer: its pattern and its back-end.

    `name` is for logs: the back-end of the last window, or the setting before the first window.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.wanted: str = config.attention
        self.name: str = config.attention
        self.dropout = config.dropout_attn
        self.pattern = Pattern(config.context, config.n_sinks, config.sink_bias, config.logit_clip)

    def plan(self, device: torch.device, dtype: torch.dtype, heads: int, width: int) -> str:
        """The back-end for training on windows on this device; raises like `choose`."""
        q = torch.empty(1, heads, 1, width, device=device, dtype=dtype, requires_grad=True)
        return choose(self.wanted, q, self.pattern, self.dropout)

    def has_packed_kernel(
        self, device: torch.device, dtype: torch.dtype, heads: int, width: int
    ) -> bool:
        """Whether the back-end of `plan` has a kernel for packed windows."""
        name = self.plan(device, dtype, heads, width)
        return _has_packed_kernel(name, device, dtype, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Whole windows: q, k, v [N, H, L, E] -> [N, H, L, E]."""
        self.name = choose(self.wanted, q, self.pattern, dropout)
        return self._windows(q, k, v, dropout, q.shape[-2])

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, dropout: float
    ) -> Tensor:
        """Packed windows: q, k, v [1, H, M, E] -> [1, H, M, E]."""
        p, longest = self.pattern, packing.longest
        self.name = name = choose(self.wanted, q, p, dropout)
        if _has_packed_kernel(name, q.device, q.dtype, q.shape[-1]):
            if name == "flash":
                return attend_flash(q, k, v, p.context, dropout, packing)
            return attend_flex(q, k, v, p, packing)
        lengths = [n for n in packing.lengths if n]
        if q.device.type != "cpu" or q.shape[-2] < MIN_WINDOW * len(lengths):
            inputs = (x.transpose(1, 2) for x in (q, k, v))  # [1, M, H, E]
            q, k, v = (packing.unpack(x, longest).transpose(1, 2) for x in inputs)
            out = self._windows(q, k, v, dropout, longest)
            return packing.pack(out.transpose(1, 2)).transpose(1, 2)
        parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        outs = [self._windows(*qkv, dropout, longest).transpose(1, 2) for qkv in parts]  # type: ignore[call-arg]
        return torch.cat(outs, dim=1).transpose(1, 2)

    def _windows(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, longest: int) -> Tensor:
        """Attend by back-end `name`; the cached mask of length `longest` is sliced."""
        p, name, length = self.pattern, self.name, q.shape[-2]
        if name == "flash":
            return attend_flash(q, k, v, p.context, dropout)
        if name == "flex":
            return attend_flex(q, k, v, p)
        # The kernel's causal flag is faster than a mask, and equal if the window fits the context.
        fits = length <= p.context
        mask = None
        if not fits:
            mask = band_mask(longest, p.context, q.device, p.n_sinks)[:length, :length]
        bias = p.bias(length, q.device)
        if name == "math":
            return attend_math(
                q, k, v, mask=mask, causal=fits, dropout=dropout, bias=bias, clip=p.logit_clip
            )
        return attend_sdpa(q, k, v, mask=mask, causal=fits, dropout=dropout, bias=bias)

    def attend_cached(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """One query [N, H, 1, E] over keys [N, H, K, E], sinks first; visible [N, 1, 1, K] bool."""
        p = self.pattern
        bias = p.bias(keys.shape[-2], q.device)
        if self.wanted == "math" or p.logit_clip:
            return attend_math(
                q,
                keys,
                values,
                mask=visible,
                causal=False,
                dropout=0.0,
                bias=bias,
                clip=p.logit_clip,
            )
        return attend_sdpa(q, keys, values, mask=visible, causal=False, dropout=0.0, bias=bias)
