"""The inputs of every loss term, from one forward pass.

Letters: N transitions, A action width, C critics, G discounts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from amago_model.data.transitions import Transitions
from amago_model.heads.distributions import Distribution
from amago_model.running_statistics import masked_mean


@dataclass(slots=True)
class LossInputs:
    """For all transitions of a batch. Fields with a gradient name where it leads.

    Without a critic (behaviour cloning) the fields of critics are None.
    """

    transitions: Transitions
    """States before and after, actions, masks: see data/transitions.py."""
    counts: dict[str, Tensor]
    """By loss, the divisor of `mean`, where it is not this batch's number of transitions."""
    policy: Distribution
    """The actor before each transition, [N, G, …]. Gradient to the actor and the states."""
    log_prob: Tensor | None = None
    """[N, G] of the data's actions under `policy`; None with bc_weight=0."""
    critic_output: Tensor | None = None
    """[C, N, G, 1 or bins]: the critics on the data's actions. Gradient to critics and states."""
    q_values: Tensor | None = None
    """[C, N, G]: the same as one number each: the return that the bins expect, or the output of a
    scalar critic. `agent.popart.to_normalized` and `to_return` give it a unit."""
    td_target: Tensor | None = None
    """[N, G], in units of the multiplied reward."""
    policy_values: Tensor | None = None
    """[C, N, G]: values of the policy's actions, in deviations from the mean return, by constant
    critics (with lagged_critics: those of the last step). Gradient to the actor and the states (if
    dpg_weight is above 0; with dpg_detach_state to the actor alone)."""
    advantage: Tensor | None = None
    """[N, G] of the data's actions: the filter's input."""
    filter_weight: Tensor | None = None
    """[N, G]: the filter's output; None without a filter."""

    def mean(self, x: Tensor, over: Literal["critic", "dpg", "bc"]) -> Tensor:
        """The mean of x [N, …] over the transitions that a built-in term is a mean of: scalar.

        Where the batch is one of several micro-batches, their means add up to the whole's.
        """
        return masked_mean(x, self.transitions.loss_mask(over), self.counts.get(over))
