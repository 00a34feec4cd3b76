"""Copies of weights without gradients: target networks, lagged critics, averaged weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def frozen_copy(module: M) -> M:
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def polyak_update(
    pairs: Iterable[tuple[nn.Module, nn.Module]], tau: float, skip: Tensor | None
) -> None:
    """target += tau * (online - target) for pairs (target, online); skipped if `skip` [] is 1."""
    target: list[Tensor] = []
    online: list[Tensor] = []
    for a, b in pairs:
        target += a.parameters()
        online += b.parameters()
    if skip is None:
        torch._foreach_lerp_(target, online, tau)
        return
    step = torch._foreach_sub(online, target)
    torch._foreach_mul_(step, tau * (1.0 - skip))
    torch._foreach_add_(target, step)


@torch.no_grad()
def copy_weights(target: nn.Module, online: nn.Module, skip: Tensor | None) -> None:
    """target = online; skipped if `skip` [] is 1."""
    old: list[Tensor] = list(target.parameters())
    new: list[Tensor] = list(online.parameters())
    if skip is not None:
        new = [torch.where(skip > 0, a, b) for a, b in zip(old, new, strict=True)]
    torch._foreach_copy_(old, new)


class WeightAverage(nn.Module):
    """Exponential moving average (EMA) of the weights of a module, by parameter name.

        average += max(1 - decay, 9 / (updates + 10)) * (weight - average)

    The second term forgets the initial weights within the first hundreds of updates.
    """

    updates: Tensor

    def __init__(self, decay: float, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._decay = decay
        for name, weight in weights.items():
            self.register_buffer(_buffer_name(name), weight.detach().clone())
        self.register_buffer("updates", torch.zeros(()))

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], skip: Tensor | None) -> None:
        """Move the average towards `weights`; skipped if `skip` [] is 1."""
        made = torch.ones_like(self.updates) if skip is None else 1.0 - skip
        self.updates += made
        share = (9.0 / (self.updates + 10.0)).clamp(min=1.0 - self._decay)
        average = list(self.weights(weights).values())
        step = torch._foreach_sub(list(weights.values()), average)
        torch._foreach_mul_(step, share * made)
        torch._foreach_add_(average, step)

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The averages of some parameters, by name."""
        return {name: self.get_buffer(_buffer_name(name)) for name in names}


def _buffer_name(parameter: str) -> str:
    return parameter.replace(".", "/")
