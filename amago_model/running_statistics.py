"""Masked means and running statistics. An empty mask never causes NaN.

With an empty mask the mean is 0 and running statistics do not change. In distributed training,
statistics are computed over the union of all batches, so they are equal on all ranks. For gradient
accumulation `freeze_statistics` keeps them constant (runtime/micro_batches.py).
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
    """Mean of x [*mask.shape, ...] over all trailing dimensions and where the mask is True.

    `count` replaces the number of True entries (for sums over micro-batches). Masked values may be
    inf or NaN. The mean over an empty mask is 0.
    """
    trailing = x.shape[mask.ndim :]
    # `count` may be fractional: the count of all processes divided by their number.
    rows = mask.sum().clamp(min=1) if count is None else count.clamp(min=1e-9)
    if not (_on_cpu(x) and mask.all()):
        x = torch.where(mask.reshape(*mask.shape, *(1,) * len(trailing)), x, 0.0)
    return x.sum() / (rows * trailing.numel())


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor | int, Tensor, Tensor]:
    """(count, mean [...], variance [...]) of x [*mask.shape, ...] where the mask is True.

    In distributed training, over the batches of all processes. All are 0 for an empty mask. The
    count is an int if it is known without a device synchronisation, else a scalar tensor.
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
    """Whether reading values needs no device synchronisation and no graph break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _distributed() -> bool:
    """Whether training is distributed over several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sum_over_processes(x: Tensor) -> None:
    if _distributed():
        dist.all_reduce(x)


class SelfUpdating(nn.Module):
    """A module that updates its buffers in the forward pass in training mode, unless frozen."""

    frozen = False


class Statistics(SelfUpdating, ABC):
    """Base class of batch statistics. Subclasses implement `apply_batch`."""

    @abstractmethod
    def apply_batch(self, x: Tensor, mask: Tensor) -> None:
        """Update with a batch x [*mask.shape, ...], where the mask is True."""

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor) -> None:
        """Update with x [*mask.shape, ...] where the mask is True, unless frozen."""
        if not self.frozen:
            self.apply_batch(x, mask)


@contextmanager
def freeze_statistics(module: nn.Module) -> Iterator[None]:
    """Context manager that freezes all `SelfUpdating` modules inside `module`."""
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
    """Mean and variance [*features] of the current batch; if frozen, of the last batch before."""

    mean: Tensor
    variance: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [*mask.shape, *features] -> (mean, variance) where the mask is True."""
        self.update(x, mask)
        return self.mean, self.variance

    def apply_batch(self, x: Tensor, mask: Tensor) -> None:
        _, mean, variance = masked_moments(x, mask)
        if x.is_cuda and hasattr(self, "mean"):
            # In place: a CUDA graph repeats its writes to the same memory.
            self.mean.copy_(mean)
            self.variance.copy_(variance)
        else:
            self.mean, self.variance = mean, variance


class RunningMoments(Statistics):
    """Debiased running mean and variance [*features], stored as buffers.

    Update k uses the step size beta / (1 - (1 - beta)^(k + 1)), so that early batches have nearly
    equal weights: .500025, .333358, ... for beta = 1e-4. With an `init_nu` of 0 they begin with 1,
    so that nothing of the initial values remains. The variance is tracked directly, because
    E[x^2] - E[x]^2 (equal in exact arithmetic) is imprecise for features with a large mean and a
    small variance.
    """

    def __init__(self, features: tuple[int, ...], *, beta: float, init_nu: float) -> None:
        super().__init__()
        self.beta = beta
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.full(features, init_nu))
        self.register_buffer("updates", torch.tensor(1.0 if init_nu > 0.0 else 0.0))

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
        """Step size for a batch with `count` entries; counts the update unless count is 0."""
        # 1 - (1 - beta)^k by expm1: in float32 the direct formula is wrong in the fourth digit.
        if isinstance(count, int):
            if count == 0:
                return 0.0
            self.updates += 1
            return self.beta / -math.expm1(float(self.updates) * math.log1p(-self.beta))
        any_row = (count > 0).to(self.updates.dtype)
        self.updates += any_row
        total = -torch.expm1(self.updates.clamp(min=1.0) * math.log1p(-self.beta))
        return any_row * self.beta / total
