"""Bounds of a distribution's parameters that let go again.

softplus and tanh are flat far outside, and so have no gradient there: whatever a few bad updates
have pushed far enough stays for good, a policy frozen as a uniform distribution or a spike. So the
gradient far outside can be that of the nearest place where the function still rises, if it leads
back inside, and nothing if it leads further out. Of losses that share one pass of the actor their
sum decides, so that descending it is descending it from the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SOFTPLUS_EDGE = -4.0
"""Below it softplus and its slope, which is 1 at most, are less than 0.02."""
TANH_EDGE = 3.0
"""Beyond it tanh has less than a hundredth of its slope, and half a hundredth of its way left."""


def bounded_softplus(x: Tensor, low: float, high: float | None, *, gradient: bool) -> Tensor:
    """softplus(x) + low, and at most high, shaped like x; `gradient`: also where this is flat."""

    def rising(x: Tensor) -> Tensor:
        return F.softplus(x) + low

    if not gradient:
        return rising(x).clamp(min=low, max=high)
    top = math.inf if high is None else _inverse_softplus(high - low)
    return _held(rising, x, min(SOFTPLUS_EDGE, top), top, reach=top)


def bounded_exp(x: Tensor, low: float, high: float, *, gradient: bool) -> Tensor:
    """From low at minus infinity to high at infinity, by tanh on a log scale, shaped like x;
    `gradient`: also where this is flat."""
    middle, half = 0.5 * math.log(low * high), 0.5 * math.log(high / low)

    def rising(x: Tensor) -> Tensor:
        return (middle + half * x.tanh()).exp()

    return _held(rising, x, -TANH_EDGE, TANH_EDGE) if gradient else rising(x)


class _Inward(torch.autograd.Function):
    """Clamp, whose gradient is that of the bound, unless descending it would lead further out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high), (gradient,) = ctx.saved_tensors, ctx.bounds, gradients
        outward = ((x < low) & (gradient > 0.0)) | ((x > high) & (gradient < 0.0))
        return gradient.masked_fill(outward, 0.0), None, None


def _held(
    rising: Callable[[Tensor], Tensor],
    x: Tensor,
    low: float,
    high: float,
    *,
    reach: float = math.inf,
) -> Tensor:
    """rising(x), constant from `reach` on; its gradient is that of the nearest place within."""
    if _within(x, low, high):
        return rising(x)
    with torch.no_grad():
        value = rising(x.clamp(max=reach))
    if not torch.is_grad_enabled():
        return value
    inside = rising(_Inward.apply(x, low, high))  # type: ignore[no-untyped-call]
    return value + (inside - inside.detach())


def _within(x: Tensor, low: float, high: float) -> bool:
    """Whether all is known to be where it makes no difference, as it mostly is. A CPU knows it at
    once, a GPU only later, and a compiler never."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.numel():
        return False
    least, most = x.detach().aminmax()
    return bool(least >= low and most <= high)


def _inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))
