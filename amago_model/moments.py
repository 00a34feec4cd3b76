"""Means over what a mask leaves, and the running statistics built on them. Never NaN.

An empty mask gives a mean of 0 and leaves running statistics untouched. Where several processes
train together, statistics are those of the union of their batches, so all ranks keep the same ones.
So they are where a batch comes in parts: `collecting` lets every part be seen before any statistic
moves, and `still` keeps them there while the parts are learned from (see `Agent.observe`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

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


class Statistics(nn.Module):
    """What moves by being shown batches. A subclass says how, in `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Literal["moving", "collecting", "still"] = "moving"
        self._collected: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor) -> None:
        """Take in x [*mask.shape, ...] where the mask is True; nothing if it is nowhere."""
        if self.phase == "moving":
            self.take(x, mask)
        elif self.phase == "collecting":
            self._collected.append((x.flatten(0, mask.ndim - 1), mask.flatten()))

    def take(self, x: Tensor, mask: Tensor) -> None:
        """What `update` does to a whole batch."""
        raise NotImplementedError

    @torch.no_grad()
    def settle(self) -> None:
        """Take in what was collected, as one batch."""
        collected, self._collected = self._collected, []
        if collected:
            xs, masks = zip(*collected, strict=True)
            self.take(torch.cat(xs), torch.cat(masks))


@contextmanager
def still(*modules: nn.Module) -> Iterator[None]:
    """No statistic inside these modules moves."""
    with _in_phase("still", modules):
        yield


@contextmanager
def collecting(*modules: nn.Module) -> Iterator[None]:
    """What statistics inside these modules are shown is kept, and taken in as one at the end."""
    with _in_phase("collecting", modules) as found:
        yield
        for statistics in found:
            statistics.settle()


@contextmanager
def _in_phase(
    phase: Literal["collecting", "still"], modules: tuple[nn.Module, ...]
) -> Iterator[list[Statistics]]:
    inside = (part for module in modules for part in module.modules())
    found = [part for part in inside if isinstance(part, Statistics)]
    with ExitStack() as back:
        for statistics in found:
            back.callback(setattr, statistics, "phase", statistics.phase)
            statistics.phase = phase
        yield found


class BatchMoments(Statistics):
    """Mean and variance [*features] of the batch at hand, and of the whole of one in parts."""

    mean: Tensor
    variance: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [*mask.shape, *features] -> (mean, variance) over what the mask leaves."""
        self.update(x, mask)
        return self.mean, self.variance

    def take(self, x: Tensor, mask: Tensor) -> None:
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

    def take(self, x: Tensor, mask: Tensor) -> None:
        count, mean, variance = masked_moments(x.to(self.mean.dtype), mask)
        any_row = (count > 0).to(self.updates.dtype)
        self.updates += any_row
        # 1 - (1 - beta)^k by expm1: in float32 the plain form is off in the fourth digit.
        step = any_row * self.beta / -torch.expm1(self.updates * math.log1p(-self.beta))
        shift = mean - self.mean
        self.variance.lerp_(variance + (1.0 - step) * shift.square(), step)
        self.mean += step * shift
