"""Copies of networks without gradients: target networks and lagged critics."""

from __future__ import annotations

import copy
from collections.abc import Iterable
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
