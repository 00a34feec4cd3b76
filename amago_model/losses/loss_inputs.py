"""What one forward pass found out: all that the terms of a loss are made of.

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
    """Of all transitions of a batch, in parallel. What has a gradient says to what.

    Where there is no critic (behaviour cloning), what critics say is None.
    """

    transitions: Transitions
    """States before and after, actions, masks: see transitions.py."""
    counts: dict[str, Tensor]
    """By loss, what `mean` divides by instead of this batch's own number of transitions."""
    policy: Distribution
    """The actor before each transition, [N, G, …]. Gradient to the actor and the states."""
    log_prob: Tensor | None = None
    """[N, G] of the data's actions under `policy`; None with bc_weight=0."""
    answers: Tensor | None = None
    """[C, N, G, 1 or bins]: the critics' raw output on the data's actions. Gradient to critics and
    states."""
    q: Tensor | None = None
    """[C, N, G]: the same as one number each: the return that the bins expect; of a scalar critic
    what PopArt makes a return of (`agent.value_norm.value`)."""
    target: Tensor | None = None
    """[N, G], in units of the multiplied reward."""
    value: Tensor | None = None
    """[C, N, G]: what the critics (with lagged_critics: as they were a step ago), as constants, say
    of the policy's own actions, in deviations from the mean return. Gradient, through these, to the
    actor and the states (if dpg_weight is above 0; with dpg_detach_state to the actor)."""
    advantage: Tensor | None = None
    """[N, G] of the data's actions, as the filter sees it."""
    weight: Tensor | None = None
    """[N, G]: what the filter makes of it; None where nothing is filtered."""

    def mean(self, x: Tensor, over: Literal["critic", "dpg", "bc"]) -> Tensor:
        """The mean of x [N, …] over the transitions that a built-in term is a mean of: scalar.

        Also where the batch is one part of many: then the parts' means add up to the whole's.
        """
        return masked_mean(x, self.transitions.mask_of(over), self.counts.get(over))
