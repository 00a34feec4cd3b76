"""Losses of the actor: DPG and (filtered) behaviour cloning.

Letters: N transitions (windows and time flattened), C critics, G discounts. A mask is [N] bool; a
mean is over the transitions in the mask and all discounts, with equal weights. `count` replaces the
number of transitions in the mask.
"""

from __future__ import annotations

from torch import Tensor

from amago_model.running_statistics import masked_mean


def dpg_loss(value: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    """DPG loss: -min over critics of the values of the policy's actions [C, N, G] -> scalar."""
    return -masked_mean(value.amin(0), mask, count)


def bc_loss(log_prob: Tensor, weight: Tensor | None, mask: Tensor, count: Tensor | None) -> Tensor:
    """BC loss: -weight x log pi(data action), log_prob and weight [N, G] -> scalar.

    Without a weight this is plain behaviour cloning.
    """
    weighted = log_prob if weight is None else weight.detach() * log_prob
    return -masked_mean(weighted, mask, count)
