"""Causal attention over a sliding window of keys: one interface, several back-ends.

    rows 0..L-1, context = 3, n_sinks = 1          s: a sink   x: in the window

    row 5 sees     s  .  .  x  x  x                keys 0 and 3, 4, 5
                   0  1  2  3  4  5

    sdpa    torch's scaled_dot_product_attention: the default, everywhere
    math    its plain twin: everywhere, every option, slow; the reference of the others
    flex    torch's flex_attention: every pattern fused on a GPU; on a CPU forward only, unfused
    flash   the flash-attn package, 2 and newer, where installed and able: GPU, 16 bits

A back-end that cannot do what is asked is refused by name (`obstacle`); `auto` takes the best that
can. What cannot be known from its description is tried once, on a few rows (`_trial`). Acting
attends with one query over a cache of keys; there `math` stands in for what sdpa cannot do,
whatever the back-end, so a policy trained with flash-attn acts on any machine.

Windows of different length may come laid end to end (data/packing.py). flash and, on a GPU, flex
have a kernel for that; the others attend over one window at a time, or pad all of them again.

Letters: N sequences, H heads, L rows, K keys, E width of a head, M rows of all windows.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model.attention.flash import (
    attend_flash,
    attend_flash_packed,
    find_flash,
    flash_obstacle,
    flash_packs,
)
from amago_model.config import TransformerConfig
from amago_model.data.packing import Packing, pack
from amago_model.errors import ConfigError

FEW_ROWS = 16
"""Windows shorter than that, on average, are padded again: as many calls would cost more (measured
on a CPU: 32 windows of some 16 rows took a third less one by one, of 6 rows twice as long)."""


@dataclass(frozen=True)
class Pattern:
    """Which keys a row sees, and what is done to its scores before the softmax."""

    context: int
    """The last so many rows are seen, the row itself included."""
    n_sinks: int = 0
    """So many rows from the first on are seen for ever."""
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
    """[length, length] bool: row i sees keys i - context + 1 .. i, and 0 .. n_sinks - 1 up to i."""
    with torch.inference_mode(False):
        row = torch.arange(length, device=device)
        age = row[:, None] - row[None, :]
        return (age >= 0) & ((age < context) | (row[None, :] < n_sinks))


@lru_cache(maxsize=64)
def _sink_bias(n_keys: int, n_sinks: int, value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.where(torch.arange(n_keys, device=device) < n_sinks, value, 0.0)


# --------------------------------------------------------------------------------------- kernels
# mask: bool, broadcastable to [N, H, L, K], True where a key is seen; or causal: row i sees 0..i.


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
    """As attend_sdpa, and `clip` limits the scores."""
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


@lru_cache(maxsize=8)
def _flex_kernel(device_type: str):  # type: ignore[no-untyped-def]
    from torch.nn.attention.flex_attention import flex_attention  # slow to import, rarely used

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


@lru_cache(maxsize=64)
def _flex_blocks(length: int, pattern: Pattern, device: torch.device):  # type: ignore[no-untyped-def]
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(n: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        return (i >= j) & ((i - j < pattern.context) | (j < pattern.n_sinks))

    with torch.inference_mode(False):
        return create_block_mask(seen, None, None, length, length, device=str(device))


@lru_cache(maxsize=1)  # all layers of a Transformer use the same one
def _packed_flex_blocks(packing: Packing, pattern: Pattern):  # type: ignore[no-untyped-def]
    from torch.nn.attention.flex_attention import create_block_mask

    window, position = packing.window, packing.position
    length, device = len(window), window.device

    def seen(n: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        near = (i - j < pattern.context) | (position[j] < pattern.n_sinks)
        return (window[i] == window[j]) & (i >= j) & near

    with torch.inference_mode(False):
        # Compiled, it never makes the mask of all pairs of rows.
        return create_block_mask(
            seen,
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
            place = j if packing is None else packing.position[j]
            score = torch.where(place < n_sinks, score + bias, score)
        return score.clamp(-clip, clip) if clip else score

    if packing is None:
        blocks = _flex_blocks(q.shape[-2], pattern, q.device)
    else:
        blocks = _packed_flex_blocks(packing, pattern)
    with warnings.catch_warnings():
        # On a CPU it runs unfused on purpose: no compiler is asked for, and the sums are the same.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out: Tensor = _flex_kernel(q.device.type)(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            score_mod=modify if bias or clip else None,
            block_mask=blocks,
        )
        return out


# ------------------------------------------------------------------------------------- the choice


def obstacle(
    name: str, q: Tensor, pattern: Pattern, dropout: float, longest: int | None = None
) -> str | None:
    """Why this back-end cannot serve these queries, q [N, H, L, E]; None if it can.

    `longest`: rows of the longest window, if q is several laid end to end.
    """
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
            return "it has neither sinks nor clipped scores"
        case "flash":
            windowed = (longest or q.shape[-2]) > pattern.context
            why = flash_obstacle(q, dropout, windowed=windowed)
            return why or _trial(name, q.device, q.dtype, q.shape[-1])
    return None


@lru_cache(maxsize=64)
def _trial(
    name: str, device: torch.device, dtype: torch.dtype, width: int, packed: bool = False
) -> str | None:
    """What goes wrong in a small attention, forward and backward; None if nothing does."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(1, 1, 16, width, device=device, dtype=dtype, requires_grad=True)
            packing = None
            if packed:  # seven rows and nine
                packing = pack(torch.arange(8, device=device) < x.new_tensor([[6], [8]]))
            if name == "flex":
                out = attend_flex(x, x, x, Pattern(context=16), packing)
            elif packing is None:
                out = attend_flash(find_flash(), x, x, x, context=16, dropout=0.0)
            else:
                out = attend_flash_packed(x, x, x, packing, context=16, dropout=0.0)
            out.sum().backward()
    except Exception as error:  # noqa: BLE001 kernels and compilers fail in their own ways
        return f"a trial failed: {type(error).__name__}: {error}"
    return None


def _packs(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    dropout: float,
    *,
    windowed: bool,
) -> bool:
    """Whether this back-end has a kernel for windows laid end to end, with heads of this width.
    That of flex would compute every pair of rows on a CPU."""
    if name == "flash":
        able = flash_packs(dropout, windowed=windowed)
    else:
        able = name == "flex" and device.type == "cuda"
    return able and _trial(name, device, dtype, width, packed=True) is None


def choose(
    wanted: str, q: Tensor, pattern: Pattern, dropout: float, longest: int | None = None
) -> str:
    """The name of the back-end to use: the one wanted, or the best that can if that is 'auto'.

    Raises:
        ConfigError: the one wanted cannot; it says why and which can.
    """
    if wanted != "auto":
        if why := obstacle(wanted, q, pattern, dropout, longest):
            able = [n for n in BACKENDS if obstacle(n, q, pattern, dropout, longest) is None]
            raise ConfigError(
                f"TransformerConfig.attention: {wanted!r} cannot be used here: {why}. "
                f"These can: {', '.join(able)}; or set attention='auto'"
            )
        return wanted
    # flash-attn would round 32-bit numbers to 16 bits, which nobody asked for by 'auto'.
    half = q.dtype in (torch.float16, torch.bfloat16)
    order = [*(["flash"] if half else []), "sdpa", *(["flex"] if q.is_cuda else []), "math"]
    return next(n for n in order if obstacle(n, q, pattern, dropout, longest) is None)


BACKENDS = ("sdpa", "math", "flex", "flash")


class Attention:
    """The attention of one Transformer: its pattern, its back-end, and the name of the latter.

    `name` is for logs: the back-end of the last whole window, or what was asked for before one.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.wanted: str = config.attention
        self.name: str = config.attention
        self.dropout = config.dropout_attn
        self.pattern = Pattern(config.context, config.n_sinks, config.sink_bias, config.logit_clip)

    def plan(self, device: torch.device, dtype: torch.dtype, heads: int, width: int) -> str:
        """The name of the back-end that would learn from whole windows there; as `choose`."""
        q = torch.empty(1, heads, 1, width, device=device, dtype=dtype, requires_grad=True)
        return choose(self.wanted, q, self.pattern, self.dropout)

    def packs(self, device: torch.device, dtype: torch.dtype, heads: int, width: int) -> bool:
        """Whether the back-end of `plan` has a kernel for windows laid end to end."""
        name = self.plan(device, dtype, heads, width)
        return _packs(name, device, dtype, width, self.dropout, windowed=False)

    def windows(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Rows over their own keys: q, k, v [N, H, L, E] -> [N, H, L, E]."""
        self.name = choose(self.wanted, q, self.pattern, dropout)
        return self._windows(q, k, v, dropout, q.shape[-2])

    def packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, dropout: float) -> Tensor:
        """The same of windows laid end to end: q, k, v [1, H, M, E] -> [1, H, M, E]."""
        p, longest = self.pattern, packing.longest
        self.name = name = choose(self.wanted, q, p, dropout, longest)
        windowed = longest > p.context
        if _packs(name, q.device, q.dtype, q.shape[-1], dropout, windowed=windowed):
            if name == "flash":
                return attend_flash_packed(q, k, v, packing, p.context, dropout)
            return attend_flex(q, k, v, p, packing)
        lengths = [n for n in packing.lengths if n]
        if q.device.type != "cpu" or q.shape[-2] < FEW_ROWS * len(lengths):
            rows = (x.transpose(1, 2) for x in (q, k, v))  # [1, M, H, E]
            q, k, v = (packing.windows(x, longest).transpose(1, 2) for x in rows)
            out = self._windows(q, k, v, dropout, longest)
            return packing.rows(out.transpose(1, 2)).transpose(1, 2)
        parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        outs = [self._windows(*qkv, dropout, longest).transpose(1, 2) for qkv in parts]  # type: ignore[call-arg]
        return torch.cat(outs, dim=1).transpose(1, 2)

    def _windows(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, longest: int) -> Tensor:
        """As `windows`, by the back-end of `name`; `longest` is the length of the mask to cut."""
        p, name, length = self.pattern, self.name, q.shape[-2]
        if name == "flash":
            return attend_flash(find_flash(), q, k, v, p.context, dropout)
        if name == "flex":
            return attend_flex(q, k, v, p)
        # The kernel's own causal flag is faster than a mask, and the same while the window fits.
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

    def cached(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """One row, q [N, H, 1, E], over keys [N, H, K, E], sinks first; seen [N, 1, 1, K] bool."""
        p = self.pattern
        bias = p.bias(keys.shape[-2], q.device)
        if self.wanted == "math" or p.logit_clip:
            return attend_math(
                q,
                keys,
                values,
                mask=seen,
                causal=False,
                dropout=0.0,
                bias=bias,
                clip=p.logit_clip,
            )
        return attend_sdpa(q, keys, values, mask=seen, causal=False, dropout=0.0, bias=bias)
