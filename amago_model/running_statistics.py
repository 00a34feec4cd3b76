"""Masked means, and the running statistics built on them. Never NaN.

An empty mask gives a mean of 0 and leaves running statistics unchanged. Where several processes
train together, statistics are those of the union of their batches, so all ranks keep the same ones.
For gradient accumulation `freeze_statistics` keeps them constant (runtime/micro_batches.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


def masked_mean(x: Tensor, mask: Tensor, count: Tensor | None = None) -> Tensor:
    """Mean of x [*mask.shape, ...] where the mask is True, and over all trailing dimensions.

    `count`, if given, replaces the number of True entries (for sums over several micro-batches).
    Masked values are not read, be they inf or NaN. An empty mask gives 0.
    """
    trailing = x.shape[mask.ndim :]
    # A given count may be a fraction: the union's, shared out over processes.
    rows = mask.sum().clamp(min=1) if count is None else count.clamp(min=1e-9)
    if not (_on_cpu(x) and mask.all()):
        x = torch.where(mask.reshape(*mask.shape, *(1,) * len(trailing)), x, 0.0)
    return x.sum() / (rows * trailing.numel())


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor | int, Tensor, Tensor]:
    """(count, mean [...], variance [...]) of x [*mask.shape, ...] where the mask is True.

    Over the batches of all processes, where several train together. Zeros where nothing is left.
    The count is a number where that is known at once, and else a scalar tensor.
    """
    features = x.shape[mask.ndim :]
    rows = x.detach().reshape(-1, *features)
    keep = mask.reshape(-1)
    if _on_cpu(rows) and not _distributed():
        if not keep.all():
            rows = rows[keep]
        n = max(len(rows), 1)
        mean = rows.sum(0) / n
        return len(rows), mean, (rows - mean).square_().sum(0) / n
    keep = keep.reshape(-1, *(1,) * len(features))
    rows = torch.where(keep, rows, 0.0)
    total = torch.cat((mask.sum(dtype=rows.dtype).reshape(1), rows.sum(0).reshape(-1)))
    _sum_over_processes(total)
    count, mean = total[0], (total[1:] / total[0].clamp(min=1)).reshape(features)
    square = torch.where(keep, rows - mean, 0.0).square().sum(0)
    _sum_over_processes(square)
    return count, mean, square / count.clamp(min=1)


def _on_cpu(x: Tensor) -> bool:
    """Whether values can be read without waiting for a device or breaking a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _distributed() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sum_over_processes(x: Tensor) -> None:
    if _distributed():
        dist.all_reduce(x)


class SelfUpdating(nn.Module):
    """A module that changes its own buffers in training forward passes, unless frozen."""

    frozen = False


class Statistics(SelfUpdating, ABC):
    """Statistics of batches. A subclass implements `apply_batch`."""

    @abstractmethod
    def apply_batch(self, x: Tensor, mask: Tensor) -> None:
        """Update with x [*mask.shape, ...], where the mask is True, as one whole batch."""

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor) -> None:
        """Update with x [*mask.shape, ...] where the mask is True, unless frozen."""
        if not self.frozen:
            self.apply_batch(x, mask)


@contextmanager
def freeze_statistics(module: nn.Module) -> Iterator[None]:
    """Nothing inside the module updates itself."""
    parts = [part for part in module.modules() if isinstance(part, SelfUpdating)]
    before = [part.frozen for part in parts]
    try:
        for part in parts:
            part.frozen = True
        yield
    finally:
        for part, frozen in zip(parts, before, strict=True):
            part.frozen = frozen


class BatchMoments(Statistics):
    """Mean and variance [*features] of the current batch; frozen, of the last one before."""

    mean: Tensor
    variance: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [*mask.shape, *features] -> (mean, variance) over what the mask leaves."""
        self.update(x, mask)
        return self.mean, self.variance

    def apply_batch(self, x: Tensor, mask: Tensor) -> None:
        _, self.mean, self.variance = masked_moments(x, mask)


class RunningMoments(Statistics):
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

    def apply_batch(self, x: Tensor, mask: Tensor) -> None:
        count, mean, variance = masked_moments(x.to(self.mean.dtype), mask)
        step = self._step(count)
        shift = mean - self.mean
        self.variance.lerp_(variance + (1.0 - step) * shift.square(), step)
        self.mean.lerp_(mean, step)

    def _step(self, count: Tensor | int) -> Tensor | float:
        """Step size for a batch with `count` entries; counts the batch, if it has any."""
        # 1 - (1 - beta)^k by expm1: in float32 the plain form is off in the fourth digit.
        if isinstance(count, int):
            self.updates += min(count, 1)
            total = -math.expm1(float(self.updates) * math.log1p(-self.beta))
            return min(count, 1) * self.beta / total
        any_row = (count > 0).to(self.updates.dtype)
        self.updates += any_row
        return any_row * self.beta / -torch.expm1(self.updates * math.log1p(-self.beta))
