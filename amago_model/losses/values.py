"""What an agent thinks of the actions in the data, for people and programs that look at data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Values:
    """Of each transition and discount, [B, T, G], in units of the environment's return."""

    q: Tensor
    """Value of the data's action, mean over critics."""
    v: Tensor
    """Value of the policy's own actions, mean over critics."""
    advantage: Tensor
    """What the filter sees: see LossConfig.filter_advantage for its unit."""
    weight: Tensor
    """What the filter makes of it."""
    q_std: Tensor
    """Deviation of q over critics."""
    v_std: Tensor
    """Deviation of v over critics."""
    mask: Tensor
    """[B, T] bool: False where there is no transition, or its action is not known."""


def over_critics(x: Tensor) -> tuple[Tensor, Tensor]:
    """[C, ...] -> mean [...] and deviation [...]."""
    mean = x.mean(0)
    return mean, (x - mean).square().mean(0).sqrt()
