"""Losses of the actor: DPG and (filtered) behaviour cloning.

Letters: N transitions (windows and time flattened), C critics, G discounts. A mask is [N] bool, and
a mean is over the transitions it leaves, all discounts and all critics, each weighing the same.
"""

from __future__ import annotations

from torch import Tensor

from amago_model.running_statistics import masked_mean


def dpg_loss(value: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    """-min over critics of the value of the policy's actions, [C, N, G] (DPG)."""
    return -masked_mean(value.amin(0), mask, count)


def bc_loss(log_prob: Tensor, weight: Tensor | None, mask: Tensor, count: Tensor | None) -> Tensor:
    """-weight x log pi(data action), log_prob and weight [N, G]; no weight is behaviour cloning."""
    weighted = log_prob if weight is None else weight.detach() * log_prob
    return -masked_mean(weighted, mask, count)
