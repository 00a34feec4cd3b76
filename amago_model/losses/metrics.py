"""What there is to say about an update beside its losses. All of the acting discount, detached.

Computed where an update is logged, so it may cost something; it draws no random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amago_model.data.transitions import Transitions
from amago_model.heads.distributions import Distribution
from amago_model.heads.popart import PopArt
from amago_model.losses.values import over_critics
from amago_model.running_statistics import masked_mean


@torch.no_grad()
def critic_metrics(
    tr: Transitions, q: Tensor, target: Tensor, advantage: Tensor, norm: PopArt, scale: float
) -> dict[str, Tensor]:
    """Values of the data's actions q [C, N, G] and targets [N, G], both in multiplied reward, which
    is `scale` times the environment's; advantage [N, G]. The metrics are in the environment's."""
    mean, deviation = over_critics(q[..., -1] / scale)
    y = target[:, -1] / scale
    return {
        "value/q_mean": masked_mean(mean, tr.critic_mask),
        "value/q_std_over_critics": masked_mean(deviation, tr.critic_mask),
        "value/target_mean": masked_mean(y, tr.critic_mask),
        "value/target_min": -_masked_max(-y, tr.critic_mask),
        "value/target_max": _masked_max(y, tr.critic_mask),
        "value/advantage_mean": masked_mean(advantage[:, -1], tr.bc_mask),
        "popart/mean": norm.mean[-1] / scale,
        "popart/sigma": norm.sigma[-1] / scale,
        "popart/w": norm.w[-1].clone(),
        "popart/b": norm.b[-1].clone(),
        "count/critic": tr.critic_mask.sum(),
    }


@torch.no_grad()
def actor_metrics(
    tr: Transitions, policy: Distribution, log_prob: Tensor, weight: Tensor | None
) -> dict[str, Tensor]:
    """The policy before each transition; log_prob and the filter's weight [N, G]."""
    entropy = policy.entropy(tr.own_noise)[:, -1]
    metrics = {
        "policy/log_prob": masked_mean(log_prob[:, -1], tr.bc_mask),
        "policy/entropy": masked_mean(entropy, tr.exists),
        "count/bc": tr.bc_mask.sum(),
        "count/transitions": tr.exists.sum(),
    }
    if weight is not None:
        metrics["policy/filter_mean"] = masked_mean(weight[:, -1], tr.bc_mask)
    return metrics


def _masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest x [N] that the mask leaves; 0 if there is none."""
    largest = torch.where(mask, x, -torch.inf).amax() if x.numel() else x.sum() - torch.inf
    return torch.where(mask.any(), largest, 0.0)
