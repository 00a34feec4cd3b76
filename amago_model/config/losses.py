"""Settings of what is minimised."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from amago_model.config.base import Settings
from amago_model.config.names import Positive

Discount = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=1024)]


class BehaviorCloningConfig(Settings):
    """Every action of the data counts 1."""

    kind: Literal["behavior_cloning"] = "behavior_cloning"
    """behavior_cloning: no filter, every action is imitated."""


class _FilterConfig(Settings):
    """What all filters share, custom ones too."""

    advantage: Literal["normalized", "raw"] = "normalized"
    """What the filter sees: advantages in deviations of the return, or (as published) of the
    critics' outputs as they are, whose scale drifts with PopArt or follows the rewards."""
    batch_norm: bool = False
    """First bring the advantages of a batch to mean 0 and deviation 1, per discount."""


class BinaryFilterConfig(_FilterConfig):
    """Actions of the data count 1 where their advantage is large enough, else 0."""

    kind: Literal["binary"] = "binary"
    """binary: 1 above the threshold, else 0."""
    threshold: float = 0.0
    """Advantage above which an action is imitated."""


class ExpFilterConfig(_FilterConfig):
    """Actions of the data count exp(beta x advantage), at most 20."""

    kind: Literal["exp"] = "exp"
    """exp: exp(beta x advantage), at most 20."""
    beta: Positive = 1.0
    """Factor on the advantage, which is in units of the target's standard deviation."""


class LeakyReLUFilterConfig(_FilterConfig):
    """Weight of a data action by a bent line through its advantage."""

    kind: Literal["leaky_relu"] = "leaky_relu"
    """leaky_relu: a bent line through the advantage."""
    threshold: float = 0.01
    """Advantage at which the line bends."""
    beta: Positive = 2.0
    """Advantage that raises the weight by 1 above the bend."""
    slope: float = Field(0.05, ge=0)
    """Slope below the bend, as a part of that above it."""
    at_zero: float = 0.01
    """Weight at an advantage of 0, before the step."""
    smallest: float = Field(1e-7, ge=0)
    """Smallest weight."""
    largest: float = 10.0
    """Largest weight, before the step."""
    add_step: bool = True
    """Add 1 above the bend, as the binary filter would."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if not self.smallest < self.largest:
            raise ValueError(
                f"smallest: expected less than largest={self.largest:g}, got {self.smallest:g}"
            )
        return self


FilterConfig = Annotated[
    BinaryFilterConfig | ExpFilterConfig | LeakyReLUFilterConfig | BehaviorCloningConfig,
    Field(discriminator="kind"),
]
"""Weight of a data action by its advantage, by `kind`."""


class LossConfig(Settings):
    """The terms of the update: critic, DPG, advantage-filtered behaviour cloning (BC)."""

    gamma: Discount = 0.999
    """Discount of the policy that acts."""
    auxiliary_gammas: tuple[Discount, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)
    """Further discounts learned in parallel, to shape the state vector; may be empty. One that
    gamma is, too, is learned once, as gamma."""
    reward_multiplier: Positive = 10.0
    """Rewards are multiplied by this inside the losses (never in what the agent sees)."""
    n_step: Count = 1
    """Rewards summed before the target bootstraps."""
    td_lambda: float | None = Field(None, ge=0, le=1)
    """Instead of n_step: mix returns of all lengths, each step on weighing this much of the last.
    Later actions of the data are taken as they are, which biases values towards the data."""
    target_low: float | None = None
    """Targets are clipped to at least this, a return in the environment's units; none does not."""
    target_high: float | None = None
    """Targets are clipped to at most this, a return in the environment's units; none does not."""
    critic_weight: Weight = 10.0
    """Weight of the critic loss."""
    dpg_weight: Weight = 1.0
    """Weight of the DPG loss; above 0, targets are minima over the ensemble."""
    bc_weight: Weight = 0.1
    """Weight of the (filtered) behaviour cloning loss."""
    filter: FilterConfig = Field(default_factory=BinaryFilterConfig)
    """Weight of a data action by its advantage."""
    n_actions_in_critic_loss: Count = 1
    """Policy samples that estimate the value of the next state. Not for discrete actions, unless
    algorithm=multitask: critics answer for all of them."""
    n_actions_in_actor_loss: Count = 1
    """Policy samples in the advantage and in the DPG term, and for the logged entropy of continuous
    actions. Not for discrete actions, unless algorithm=multitask, as n_actions_in_critic_loss."""
    targets_before_step: bool = False
    """As published: the target networks move before the optimiser's step, not after it."""
    dpg_detach_state: bool = False
    """DPG trains the actor alone: the state that it acts on is a constant. Off, as published, the
    gradient goes on through the actor into the encoders. Critics always see a constant there."""
    lagged_critics: bool = False
    """As published: DPG, and advantages of critics that do not classify, ask copies of the
    critics from before the last step, one update old. One more set of critics in memory."""
    use_target_actor: bool = True
    """Next actions come from the target actor."""
    tau: float = Field(0.003, gt=0, le=1)
    """How far the target networks move towards the learned weights after each update."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.auxiliary_gammas)) < len(self.auxiliary_gammas):
            raise ValueError(
                f"auxiliary_gammas: expected each discount once, got {self.auxiliary_gammas}"
            )
        if self.td_lambda is not None and self.n_step > 1:
            raise ValueError(
                f"n_step: {self.n_step} beside td_lambda={self.td_lambda}, but they are two ways "
                "of doing the same; set n_step to 1 or leave out td_lambda"
            )
        low, high = self.target_low, self.target_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"target_low: expected less than target_high={high:g}, got {low:g}")
        if self.dpg_weight == 0 and self.bc_weight == 0:
            raise ValueError(
                "bc_weight: it and dpg_weight are both 0, so nothing would train the actor; raise "
                "one of them"
            )
        return self

    @property
    def gammas(self) -> tuple[float, ...]:
        """All discounts; the last one acts."""
        return (*(g for g in self.auxiliary_gammas if g != self.gamma), self.gamma)
