"""Metrics of an update, in addition to its losses. All are detached.

Metrics are computed for the discount of the acting policy, only in logged updates. They do not use
random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amago_model.config import LossConfig
from amago_model.data.transitions import Transitions
from amago_model.heads.distributions import Categorical, Distribution, MultiBinary, OneHots
from amago_model.heads.popart import PopArt
from amago_model.losses.loss_inputs import LossInputs
from amago_model.running_statistics import masked_mean

ACCEPTED = 0.1
"""BC weight above which the filter counts as accepting an action; a binary filter's are 0 and 1."""
SATURATED = 0.99
"""Absolute value above which an action in [-1, 1] counts as saturated."""


def mean_and_std(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [...] and standard deviation [...] of x [C, ...] over the first dimension."""
    mean = x.mean(0)
    return mean, (x - mean).square().mean(0).sqrt()


@torch.no_grad()
def update_metrics(
    inputs: LossInputs, popart: PopArt | None, losses: LossConfig
) -> dict[str, Tensor]:
    """Metrics by name; popart is None without a critic."""
    tr, found = inputs.transitions, dict[str, Tensor]()
    if popart is not None:
        assert inputs.q_values is not None and inputs.td_target is not None
        assert inputs.advantage is not None
        q = popart.to_return(inputs.q_values)
        found |= _critic_metrics(tr, q, inputs.td_target, inputs.advantage, popart, losses)
    if inputs.log_prob is not None:
        found |= _actor_metrics(tr, inputs.policy, inputs.log_prob, inputs.filter_weight)
    if not isinstance(inputs.policy, Categorical | OneHots | MultiBinary):
        chosen = inputs.policy.greedy()[:, -1]
        found["policy/saturation"] = masked_mean(_saturated(chosen), tr.bc_mask)
        found["policy/saturation_of_data"] = masked_mean(_saturated(tr.action), tr.bc_mask)
    return found


def _critic_metrics(
    tr: Transitions,
    q: Tensor,
    target: Tensor,
    advantage: Tensor,
    norm: PopArt,
    losses: LossConfig,
) -> dict[str, Tensor]:
    """Metrics of the critics, as returns in the environment's units.

    Values of the data's actions q [C, N, G] and targets [N, G] are the reward multiplier times
    these; advantage is [N, G].
    """
    scale = losses.reward_multiplier
    mean, deviation = mean_and_std(q[..., -1] / scale)
    y = target[:, -1] / scale
    found = {
        "value/q_mean": masked_mean(mean, tr.critic_mask),
        "value/q_min": -_masked_max(-mean, tr.critic_mask),
        "value/q_max": _masked_max(mean, tr.critic_mask),
        "value/q_std_over_critics": masked_mean(deviation, tr.critic_mask),
        "value/target_mean": masked_mean(y, tr.critic_mask),
        "value/target_min": -_masked_max(-y, tr.critic_mask),
        "value/target_max": _masked_max(y, tr.critic_mask),
        "value/td_error": masked_mean((mean - y).abs(), tr.critic_mask),
        "value/advantage_mean": masked_mean(advantage[:, -1], tr.bc_mask),
        "popart/mean": norm.mean[-1] / scale,
        "popart/sigma": norm.sigma[-1] / scale,
        "popart/w": norm.w[-1].clone(),
        "popart/b": norm.b[-1].clone(),
        "count/critic": tr.critic_mask.sum(),
    }
    if (bounds := losses.scaled_bounds) != (None, None):
        at_bound = torch.zeros_like(tr.critic_mask)
        for bound in bounds:
            if bound is not None:
                at_bound = at_bound | (target[:, -1] == bound)
        found["value/target_at_bound"] = masked_mean(at_bound.to(y.dtype), tr.critic_mask)
    return found


def _actor_metrics(
    tr: Transitions, policy: Distribution, log_prob: Tensor, weight: Tensor | None
) -> dict[str, Tensor]:
    """Metrics of the policy; log_prob and the filter's weight are [N, G]."""
    entropy = policy.entropy(tr.policy_noise)[:, -1]
    metrics = {
        "policy/log_prob": masked_mean(log_prob[:, -1], tr.bc_mask),
        "policy/entropy": masked_mean(entropy, tr.exists),
        "count/bc": tr.bc_mask.sum(),
        "count/transitions": tr.exists.sum(),
    }
    if weight is not None:
        metrics["policy/filter_mean"] = masked_mean(weight[:, -1], tr.bc_mask)
        accepted = (weight[:, -1] > ACCEPTED).to(weight.dtype)
        metrics["policy/filter_acceptance"] = masked_mean(accepted, tr.bc_mask)
    return metrics


def _saturated(action: Tensor) -> Tensor:
    """1 where an action in [-1, 1] is at its bounds, else 0."""
    return (action.abs() > SATURATED).to(torch.float32)


def _masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Maximum of x [N] where the mask is True; 0 if it is empty."""
    largest = torch.where(mask, x, -torch.inf).amax() if x.numel() else x.sum() - torch.inf
    return torch.where(mask.any(), largest, 0.0)
