"""Losses of the critics: mean squared error, or cross-entropy over bins; of V(s): expectiles.

Letters: N transitions (windows and time flattened), C critics, G discounts. A mask is [N] bool; a
mean is over the transitions in the mask, all discounts and all critics, with equal weights. `count`
replaces the number of transitions in the mask.
"""

from __future__ import annotations

from torch import Tensor

from amago_model.critics import Critics
from amago_model.losses.loss_inputs import LossInputs
from amago_model.running_statistics import masked_mean


def critic_term(inputs: LossInputs, critics: Critics) -> Tensor:
    """The critic loss, a scalar: `critic_loss`, or `classification_loss` for critics over bins."""
    assert inputs.critic_output is not None and inputs.q_values is not None
    assert inputs.td_target is not None
    mask, count = inputs.transitions.critic_mask, inputs.counts.get("critic")
    if critics.online.bins is not None:
        label = critics.online.bins.label(inputs.td_target)
        return classification_loss(inputs.critic_output, label, mask, count)
    prediction = critics.popart.to_normalized(inputs.q_values)
    return critic_loss(prediction, critics.popart.normalize(inputs.td_target), mask, count)


def value_term(inputs: LossInputs, critics: Critics, expectile: float) -> Tensor:
    """The value loss, a scalar: `expectile_loss` over the transitions of the critic loss."""
    assert inputs.state_value is not None
    value, target = (critics.popart.to_normalized(x) for x in inputs.state_value)
    mask, count = inputs.transitions.critic_mask, inputs.counts.get("critic")
    return expectile_loss(value, target, expectile, mask, count)


def critic_loss(prediction: Tensor, target: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    """Mean squared error of prediction [C, N, G] and target [N, G], both normalised -> scalar."""
    error = (prediction - target.detach()).square()
    return masked_mean(error.mean(0), mask, count)


def classification_loss(
    logits: Tensor, label: Tensor, mask: Tensor, count: Tensor | None
) -> Tensor:
    """Cross-entropy of logits [C, N, G, bins] and labels [N, G, bins] -> scalar."""
    error = -(label.detach() * logits.log_softmax(-1)).sum(-1)
    return masked_mean(error.mean(0), mask, count)


def expectile_loss(
    value: Tensor, target: Tensor, expectile: float, mask: Tensor, count: Tensor | None
) -> Tensor:
    """Mean of |expectile - 1[error < 0]| error^2 with error = target - value (IQL; Kostrikov et
    al. 2022), for value and target [N, G], both normalised -> scalar."""
    error = target.detach() - value
    weight = (expectile - (error < 0).to(error.dtype)).abs()
    return masked_mean(weight * error.square(), mask, count)
