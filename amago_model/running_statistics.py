"""Means over what a mask leaves, and the running statistics built on them. Never NaN.

An empty mask gives a mean of 0 and leaves running statistics untouched. Where several processes
train together, statistics are those of the union of their batches, so all ranks keep the same ones.
So they are where a batch comes in parts: `collecting` and `settle_in_turn` let every part be seen
before a statistic moves, and `still` keeps it there while the parts are learned from (see
`Agent.observe`).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amago_model.errors import ConfigError


def masked_mean(x: Tensor, mask: Tensor, count: Tensor | None = None) -> Tensor:
    """Mean of x [*mask.shape, ...] over the True rows of the mask and all trailing dimensions.

    `count`, if given, replaces the number of True rows (for sums normalised across micro-batches).
    Masked values are not read, be they inf or NaN. An empty mask gives 0.
    """
    trailing = x.shape[mask.ndim :]
    # A given count may be a fraction: the union's, shared out over processes.
    rows = mask.sum().clamp(min=1) if count is None else count.clamp(min=1e-9)
    if not (_at_once(x) and mask.all()):
        x = torch.where(mask.reshape(*mask.shape, *(1,) * len(trailing)), x, 0.0)
    return x.sum() / (rows * trailing.numel())


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor | int, Tensor, Tensor]:
    """(count, mean [...], variance [...]) of x [*mask.shape, ...] over the mask's True rows.

    Over the batches of all processes, where several train together. Zeros where nothing is left.
    The count is a number where that is known at once, and else a scalar tensor.
    """
    features = x.shape[mask.ndim :]
    rows = x.detach().reshape(-1, *features)
    keep = mask.reshape(-1)
    if _at_once(rows) and not _shared():
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


def _at_once(x: Tensor) -> bool:
    """Whether numbers can be looked at without waiting for a device or breaking a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _shared() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sum_over_processes(x: Tensor) -> None:
    if _shared():
        dist.all_reduce(x)


class Phased(nn.Module, ABC):
    """What moves in training by itself, unless it is to wait (collecting) or to rest (still)."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Literal["moving", "collecting", "still"] = "moving"

    @abstractmethod
    def settle(self) -> None:
        """Make the move that was put off while collecting."""


class Statistics(Phased):
    """What moves by being shown batches, one or several as one. A subclass says how, in `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._collected: list[tuple[Tensor, Tensor]] = []
        self._first_shown = math.inf

    @abstractmethod
    def take(self, x: Tensor, mask: Tensor) -> None:
        """Take in x [*mask.shape, ...] where the mask is True, as a whole batch."""

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor) -> None:
        """Take in x [*mask.shape, ...] where the mask is True, or what the phase makes of that."""
        if self.phase == "moving":
            self.take(x, mask)
        elif self.phase == "collecting":
            self._first_shown = min(self._first_shown, next(_clock))
            self._collected.append((x.flatten(0, mask.ndim - 1), mask.flatten()))

    @torch.no_grad()
    def settle(self) -> None:
        """Take in what was collected, as one batch."""
        xs, masks = zip(*self._collected, strict=True) if self._collected else ((), ())
        self.forget()
        if xs:
            self.take(torch.cat(xs), torch.cat(masks))

    def forget(self) -> None:
        """Drop what was collected."""
        self._collected, self._first_shown = [], math.inf


_clock = itertools.count()


@contextmanager
def still(*modules: nn.Module) -> Iterator[None]:
    """Nothing inside these modules moves by itself."""
    with _in_phase("still", _inside(modules)):
        yield


@contextmanager
def collecting(*modules: nn.Module) -> Iterator[None]:
    """What statistics inside these modules are shown is kept, and taken in as one at the end."""
    found = list(_inside(modules))
    with _in_phase("collecting", found):
        yield
    for part in found:
        part.settle()


def move_unshown(module: nn.Module) -> None:
    """Let everything inside the module move once that has to be shown nothing for it."""
    for part in _inside((module,)):
        if not isinstance(part, Statistics):
            part.settle()


def settle_in_turn(module: nn.Module, show: Callable[[], None]) -> None:
    """Let each statistic inside the module take in, as one, what `show` shows it in parts.

    In the order in which they are shown something, calling `show` once for each: what one is shown
    may depend on those before it.
    """
    waiting = [part for part in module.modules() if isinstance(part, Statistics)]
    while waiting:
        with _in_phase("collecting", waiting):
            show()
        first = min(waiting, key=lambda part: part._first_shown)
        if first._first_shown == math.inf:
            return
        first.settle()
        waiting.remove(first)
        for part in waiting:
            part.forget()


def refuse_statistics(setting: str, head: nn.Module) -> None:
    """Heads see a batch too late for their statistics to wait for all of its parts.

    Raises:
        ConfigError: a head of one's own, of the setting named, has statistics.
    """
    for path, part in head.named_modules():
        if isinstance(part, Statistics):
            raise ConfigError(
                f"{setting}: statistics {path!r} of {type(head).__name__} would not move while a "
                "batch comes in parts; do without parts (optimizer.accumulate=1), or keep "
                "statistics in an encoder"
            )


def _inside(modules: Iterable[nn.Module]) -> Iterator[Phased]:
    inside = (part for module in modules for part in module.modules())
    return (part for part in inside if isinstance(part, Phased))


@contextmanager
def _in_phase(phase: Literal["collecting", "still"], parts: Iterable[Phased]) -> Iterator[None]:
    with ExitStack() as back:
        for part in parts:
            back.callback(setattr, part, "phase", part.phase)
            part.phase = phase
        yield


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
        step = self._step(count)
        shift = mean - self.mean
        self.variance.lerp_(variance + (1.0 - step) * shift.square(), step)
        self.mean.lerp_(mean, step)

    def _step(self, count: Tensor | int) -> Tensor | float:
        """How far to move towards a batch of so many rows; counts it, if it has any."""
        # 1 - (1 - beta)^k by expm1: in float32 the plain form is off in the fourth digit.
        if isinstance(count, int):
            self.updates += min(count, 1)
            moved = -math.expm1(float(self.updates) * math.log1p(-self.beta))
            return min(count, 1) * self.beta / moved
        any_row = (count > 0).to(self.updates.dtype)
        self.updates += any_row
        return any_row * self.beta / -torch.expm1(self.updates * math.log1p(-self.beta))
