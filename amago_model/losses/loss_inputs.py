"""The inputs of all loss terms, computed in one forward pass.

Letters: N transitions, A action width, C critics, G discounts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from amago_model.data.transitions import Transitions
from amago_model.heads.distributions import Distribution
from amago_model.losses.critic_evaluation import StateValue
from amago_model.running_statistics import masked_mean


@dataclass(slots=True)
class LossInputs:
    """Inputs of the loss terms, for all transitions of a batch.

    Fields with a gradient state its destination. Without a critic (behaviour cloning) the fields of
    critics are None.
    """

    transitions: Transitions
    """States before and after, actions and masks; see data/transitions.py."""
    counts: dict[str, Tensor]
    """By loss: the divisor of `mean`, if it differs from the batch's number of transitions."""
    policy: Distribution
    """The policy in the state before each transition, [N, G, …]. Gradient to actor and states."""
    log_prob: Tensor | None = None
    """[N, G]: log-probabilities of the data's actions under `policy`; None if bc_weight is 0."""
    critic_output: Tensor | None = None
    """[C, N, G, 1 or bins]: critic outputs for the data's actions. Gradient to critics and
    states."""
    q_values: Tensor | None = None
    """[C, N, G]: `critic_output` as scalars: the expected return over the bins, or the raw output
    of scalar critics. Convert it with `agent.critics.popart`, `to_normalized` or `to_return`."""
    td_target: Tensor | None = None
    """[N, G]: TD targets, in units of the multiplied reward."""
    policy_values: Tensor | None = None
    """[C, N, G]: values of the policy's actions in the unit of DPG, by detached critics (with
    lagged_critics: those from before the last step). If dpg_weight is above 0, gradient to the
    actor and the states; with dpg_detach_state to the actor only."""
    state_value: StateValue | None = None
    """V(s) and its target, [N, G] each; None without value_expectile."""
    advantage: Tensor | None = None
    """[N, G]: advantages of the data's actions, the input of the filter."""
    filter_weight: Tensor | None = None
    """[N, G]: the output of the filter; None without a filter."""

    def mean(self, x: Tensor, over: Literal["critic", "dpg", "bc"]) -> Tensor:
        """Mean of x [N, …] over the transitions in the mask of a built-in loss -> scalar.

        For micro-batches, these means sum to the mean of the whole batch.
        """
        return masked_mean(x, self.transitions.loss_mask(over), self.counts.get(over))
