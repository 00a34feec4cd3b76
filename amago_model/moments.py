"""Means over what a mask leaves, and the running statistics built on them. Never NaN.

An empty mask gives a mean of 0 and leaves running statistics untouched. Where several processes
train together, statistics are those of the union of their batches, so all ranks keep the same ones.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn


def masked_mean(x: Tensor, mask: Tensor, count: Tensor | None = None) -> Tensor:
    """Mean of x [*mask.shape, ...] over the True rows of the mask and all trailing dimensions.

    `count`, if given, replaces the number of True rows (for sums normalised across micro-batches).
    Masked values are not read, be they inf or NaN. An empty mask gives 0.
    """
    trailing = x.shape[mask.ndim :]
    wide = mask.reshape(*mask.shape, *(1,) * len(trailing))
    # A given count may be a fraction: the union's, shared out over processes.
    rows = mask.sum().clamp(min=1) if count is None else count.clamp(min=1e-9)
    return torch.where(wide, x, 0.0).sum() / (rows * trailing.numel())


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(count [], mean [...], variance [...]) of x [*mask.shape, ...] over the mask's True rows.

    Over the batches of all processes, where several train together. Zeros where nothing is left.
    """
    features = x.shape[mask.ndim :]
    rows = x.detach().reshape(-1, *features)
    keep = mask.reshape(-1, *(1,) * len(features))
    rows = torch.where(keep, rows, 0.0)
    total = torch.cat((mask.sum(dtype=rows.dtype).reshape(1), rows.sum(0).reshape(-1)))
    _sum_over_processes(total)
    count, mean = total[0], (total[1:] / total[0].clamp(min=1)).reshape(features)
    square = torch.where(keep, rows - mean, 0.0).square().sum(0)
    _sum_over_processes(square)
    return count, mean, square / count.clamp(min=1)


def _sum_over_processes(x: Tensor) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x)


class RunningMoments(nn.Module):
    """Debiased running mean and variance of [*features], as buffers.

    Update k uses the step beta / (1 - (1 - beta)^(k + 1)), so that early batches weigh nearly
    alike: .500025, .333358, ... for beta = 1e-4. The variance is tracked as such, not as
    E[x^2] - E[x]^2 (equal in exact arithmetic), which would lose every digit of a feature whose
    mean is large beside its spread.
    """

    def __init__(self, features: tuple[int, ...], *, beta: float, init_nu: float) -> None:
        super().__init__()
        self.beta = beta
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.full(features, init_nu))
        self.register_buffer("updates", torch.tensor(1.0))

    mean: Tensor
    variance: Tensor
    updates: Tensor

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor) -> None:
        """Take in x [*mask.shape, *features] where the mask is True; nothing if it is nowhere."""
        count, mean, variance = masked_moments(x, mask)
        any_row = (count > 0).to(self.updates.dtype)
        self.updates += any_row
        # 1 - (1 - beta)^k by expm1: in float32 the plain form is off in the fourth digit.
        step = any_row * self.beta / -torch.expm1(self.updates * math.log1p(-self.beta))
        shift = mean - self.mean
        self.variance.lerp_(variance + (1.0 - step) * shift.square(), step)
        self.mean += step * shift
