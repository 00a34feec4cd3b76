"""Every term of the update as a pure function: tensors and hyper-parameters in, tensors out.

Letters: N transitions (windows and time flattened), C critics, G discounts. A mask is [N] bool, and
a mean is over the transitions it leaves, all discounts and all critics, each weighing the same.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model.config import LossConfig
from amago_model.moments import masked_mean


def subset_indices(
    n_critics: int, size: int, noise: Tensor, *, replacement: bool = False
) -> Tensor | None:
    """Which critics each entry is given: [size, ...] from noise [C, ...]; None for all of them.

    Drawn without replacement (Chen et al. 2021, REDQ): those for which `noise`, independent and
    standard normal, is largest. With replacement, it is read as C equally likely ranges.
    """
    if replacement:
        uniform = torch.special.ndtr(noise[:size])
        out: Tensor = (uniform * n_critics).long().clamp(max=n_critics - 1)
        return out
    return noise.topk(size, dim=0).indices if size < n_critics else None


def ensemble_subset(
    q: Tensor, size: int, *, minimum: bool, noise: Tensor, replacement: bool = False
) -> Tensor:
    """[C, ...] -> [...]: the minimum (or mean) over `size` critics, drawn anew for each entry.

    `noise`, shaped like q, is not read where size is C and all are drawn: see `subset_indices`.
    """
    indices = subset_indices(len(q), size, noise, replacement=replacement)
    return over_subset(q, indices, minimum=minimum)


def over_subset(q: Tensor, indices: Tensor | None, *, minimum: bool) -> Tensor:
    """q [C, ...], indices [size, ...] -> [...]: the minimum (or mean) over the critics chosen."""
    if indices is not None:
        q = q.gather(0, indices)
    return q.amin(0) if minimum else q.mean(0)


def critic_loss(prediction: Tensor, target: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    """prediction [C, N, G], target [N, G], both normalised -> scalar mean squared error."""
    error = (prediction - target.detach()).square()
    return masked_mean(error.mean(0), mask, count)


def classification_loss(
    logits: Tensor, label: Tensor, mask: Tensor, count: Tensor | None
) -> Tensor:
    """Cross-entropy of logits [C, N, G, bins] with labels [N, G, bins] -> scalar."""
    error = -(label.detach() * logits.log_softmax(-1)).sum(-1)
    return masked_mean(error.mean(0), mask, count)


def binary_filter(advantage: Tensor, threshold: float) -> Tensor:
    """1 where the data's action is better than the policy's own by more than the threshold."""
    return (advantage > threshold).to(advantage.dtype)


def exp_filter(advantage: Tensor, beta: float, largest: float, *, smallest: float = 0.0) -> Tensor:
    """exp(beta x advantage), within `smallest` … `largest` (CRR-exp, AWAC)."""
    return torch.exp(beta * advantage).clamp(smallest, largest)


def leaky_relu_filter(
    advantage: Tensor,
    *,
    threshold: float,
    beta: float,
    slope: float,
    at_zero: float,
    smallest: float,
    largest: float,
    add_step: bool,
) -> Tensor:
    """A line bent at the threshold: at_zero at advantage 0 (if that is below the threshold), rising
    by 1 / beta above the bend and by slope / beta below; clipped, plus a step of 1 at the bend."""
    bias = at_zero + slope * threshold / beta
    line = bias + F.leaky_relu((advantage - threshold) / beta, slope)
    weight = line.clamp(smallest, largest)
    return weight + binary_filter(advantage, threshold) if add_step else weight


def advantage_weight(advantage: Tensor, config: LossConfig) -> Tensor:
    """Weights of the data's actions by the filter of the settings, shaped like the advantages."""
    if config.filter == "binary":
        return binary_filter(advantage, config.filter_threshold)
    if config.filter == "leaky_relu":
        return leaky_relu_filter(advantage, **dataclasses.asdict(config.leaky_filter))
    return exp_filter(advantage, config.filter_beta, config.filter_max, smallest=config.filter_min)


def normalized_advantage(advantage: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """[N, G] to mean 0 and deviation 1, given those of each discount [G]."""
    return (advantage - mean) / (variance + 1e-10).sqrt()


def clipped_target(target: Tensor, low: float | None, high: float | None) -> Tensor:
    """Targets no further than returns can go, in the units of the target; None is no bound."""
    return target if low is None and high is None else target.clamp(min=low, max=high)


def bc_loss(log_prob: Tensor, weight: Tensor | None, mask: Tensor, count: Tensor | None) -> Tensor:
    """-weight x log pi(data action), log_prob and weight [N, G]; no weight is behaviour cloning."""
    weighted = log_prob if weight is None else weight.detach() * log_prob
    return -masked_mean(weighted, mask, count)


def dpg_loss(value: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    """-min over critics of the value of the policy's own actions, [C, N, G] (DPG)."""
    return -masked_mean(value.amin(0), mask, count)
