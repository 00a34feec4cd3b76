"""Every term of the update as a pure function: tensors and hyper-parameters in, tensors out.

Letters: N transitions (windows and time flattened), C critics, G discounts. A mask is [N] bool, and
a mean is over the transitions it leaves, all discounts and all critics, each weighing the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amago_model.moments import masked_mean


def ensemble_subset(q: Tensor, size: int, *, minimum: bool, noise: Tensor) -> Tensor:
    """[C, ...] -> [...]: the minimum (or mean) over `size` critics, drawn anew for each entry.

    Drawn without replacement (Chen et al. 2021, REDQ): those for which `noise`, independent and
    shaped like q, is largest. It is not read where size is C.
    """
    if size < q.shape[0]:
        q = q.gather(0, noise.topk(size, dim=0).indices)
    return q.amin(0) if minimum else q.mean(0)


def critic_loss(prediction: Tensor, target: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    """prediction [C, N, G], target [N, G], both normalised -> scalar mean squared error."""
    error = (prediction - target.detach()).square()
    return masked_mean(error.mean(0), mask, count)


def binary_filter(advantage: Tensor, threshold: float) -> Tensor:
    """1 where the data's action is better than the policy's own by more than the threshold."""
    return (advantage > threshold).to(advantage.dtype)


def exp_filter(advantage: Tensor, beta: float, largest: float) -> Tensor:
    """exp(beta x advantage), at most `largest` (CRR-exp, AWAC)."""
    return torch.exp(beta * advantage).clamp(max=largest)


def cloning_loss(
    log_prob: Tensor, weight: Tensor | None, mask: Tensor, count: Tensor | None
) -> Tensor:
    """-weight x log pi(data action), log_prob and weight [N, G]; no weight is behaviour cloning."""
    weighted = log_prob if weight is None else weight.detach() * log_prob
    return -masked_mean(weighted, mask, count)


def climbing_loss(value: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    """-min over critics of the value of the policy's own actions, [C, N, G] (DPG)."""
    return -masked_mean(value.amin(0), mask, count)
