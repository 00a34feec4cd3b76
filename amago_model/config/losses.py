"""Settings of the losses: discounts, TD targets, weights and advantage filters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from amago_model.config.base import Settings
from amago_model.config.names import Positive

Discount = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=1024)]


class BehaviorCloningConfig(Settings):
    """No filter: each action of the data has weight 1."""

    kind: Literal["behavior_cloning"] = "behavior_cloning"
    """behavior_cloning: no filter; each action has weight 1."""


class _FilterConfig(Settings):
    """Settings shared by all filters, including custom ones."""

    advantage: Literal["normalized", "raw"] = "normalized"
    """Input of the filter: normalized: advantages in standard deviations of the return; raw, as
    published: differences of the critics' raw outputs, whose scale changes with PopArt or with the
    rewards."""
    batch_norm: bool = False
    """Normalise the advantages of each batch to mean 0 and standard deviation 1, per discount."""
    n_step: Count = 1
    """Number of the data's actions whose values are compared with V(s): n - 1 rewards and the value
    of the n-th action. The effect of one action may be smaller than the critics' errors. The end of
    a window counts fewer actions."""


class BinaryFilterConfig(_FilterConfig):
    """Weight 1 if the advantage of a data action exceeds the threshold, else 0."""

    kind: Literal["binary"] = "binary"
    """binary: weight 1 above the threshold, else 0."""
    threshold: float = 0.0
    """Advantage above which an action is imitated."""


class ExpFilterConfig(_FilterConfig):
    """Weight exp(beta x advantage), at most `largest`."""

    kind: Literal["exp"] = "exp"
    """exp: weight exp(beta x advantage), at most `largest`."""
    beta: Positive = 1.0
    """Factor of the advantage, which is in units of the target's standard deviation."""
    largest: Positive = 20.0
    """Maximum weight, so that no single transition dominates a batch."""


class LeakyReLUFilterConfig(_FilterConfig):
    """Weight by a leaky ReLU of the advantage."""

    kind: Literal["leaky_relu"] = "leaky_relu"
    """leaky_relu: weight by a leaky ReLU of the advantage."""
    threshold: float = 0.01
    """Advantage at the kink of the leaky ReLU."""
    beta: Positive = 2.0
    """Inverse slope above the threshold: the increase of advantage that adds 1 to the weight."""
    slope: float = Field(0.05, ge=0)
    """Slope below the threshold, as a fraction of the slope above it."""
    at_zero: float = 0.01
    """Weight at advantage 0, before add_step."""
    smallest: float = Field(1e-7, ge=0)
    """Minimum weight."""
    largest: float = 10.0
    """Maximum weight, before add_step."""
    add_step: bool = True
    """Add 1 above the threshold, like the binary filter."""

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
"""Advantage filter: the BC weight of each data action, by `kind`."""


class LossConfig(Settings):
    """The terms of the update: critic, DPG, advantage-filtered behaviour cloning (BC)."""

    gamma: Discount = 0.999
    """Discount of the policy that acts."""
    auxiliary_gammas: tuple[Discount, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)
    """Additional discounts learned in parallel, to shape the state vector; may be empty. A discount
    equal to gamma is learned only once."""
    reward_multiplier: Positive = 10.0
    """Factor of the rewards inside the losses; the agent's inputs are not scaled."""
    n_step: Count = 1
    """Number of rewards summed before the TD target bootstraps."""
    td_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of lambda returns, which replace n_step; none: use n_step. There is no off-policy
    correction, so values are biased towards the actions of the data."""
    target_low: float | None = None
    """Lower bound of TD targets, a return in the environment's units; none: no bound."""
    target_high: float | None = None
    """Upper bound of TD targets, a return in the environment's units; none: no bound."""
    value_expectile: float | None = Field(None, gt=0, lt=1)
    """Expectile of a state value V(s), learned from the data's actions only (IQL; Kostrikov et al.
    2022): TD targets bootstrap from V, and advantages are Q - V. none: both use the policy's
    actions instead."""
    target_reduction: Literal["auto", "min", "mean"] = "auto"
    """Value of a critic subset in TD targets, and in the targets and advantages of
    value_expectile; auto: the minimum if dpg_weight is above 0, else the mean."""
    critic_weight: Weight = 10.0
    """Weight of the critic loss, and of the value loss with value_expectile."""
    dpg_weight: Weight = 1.0
    """Weight of the DPG loss."""
    dpg_normalization: Literal["popart", "mean_abs_q"] = "popart"
    """Unit of the values that DPG maximises; popart: standard deviations of the return; mean_abs_q:
    their mean absolute value in the batch, per discount (TD3+BC; Fujimoto & Gu 2021)."""
    bc_target_penalty: Weight = 0.0
    """Penalty on next values: this factor times the squared error between the policy's next action
    and that of the data, in units of the multiplied reward (ReBRAC; Tarasov et al. 2023). Where the
    next action is unknown the critics learn nothing: after the last transition of a window, unless
    it terminates. Needs actor.continuous.kind deterministic."""
    bc_weight: Weight = 0.1
    """Weight of the (filtered) behaviour cloning loss."""
    filter: FilterConfig = Field(default_factory=BinaryFilterConfig)
    """Advantage filter: the BC weight of each data action."""
    n_actions_in_critic_loss: Count = 1
    """Number of policy samples that estimate the value of the next state. Unused for discrete
    actions (critics output a value for each action), unless algorithm=multitask."""
    n_actions_in_actor_loss: Count = 1
    """Number of policy samples in the advantage, in the DPG loss and in the logged entropy of
    continuous actions. Unused for discrete actions, unless algorithm=multitask."""
    targets_before_step: bool = False
    """Published behaviour: update the target networks before the optimiser step, not after it."""
    dpg_detach_state: bool = False
    """Detach the actor's input state in the DPG loss, so that DPG trains only the actor. False, as
    published: DPG also trains the encoders through the actor. The critics' input state is always
    detached."""
    lagged_critics: bool = False
    """Published behaviour: DPG and the advantages of scalar critics use a copy of the critics from
    before the last optimiser step. Needs memory for another set of critics."""
    use_target_actor: bool = True
    """Sample next actions from the target actor."""
    tau: float = Field(0.003, gt=0, le=1)
    """Step size of the target networks' Polyak update after each optimiser step."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.auxiliary_gammas)) < len(self.auxiliary_gammas):
            raise ValueError(
                f"auxiliary_gammas: expected each discount once, got {self.auxiliary_gammas}"
            )
        if self.td_lambda is not None and self.n_step > 1:
            raise ValueError(
                f"n_step: expected 1 with td_lambda={self.td_lambda}, got {self.n_step}; set "
                "n_step to 1 or leave out td_lambda"
            )
        low, high = self.target_low, self.target_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"target_low: expected less than target_high={high:g}, got {low:g}")
        if self.dpg_weight == 0 and self.bc_weight == 0:
            raise ValueError(
                "bc_weight: bc_weight and dpg_weight are both 0, so no loss trains the actor; "
                "raise one of them"
            )
        return self

    @property
    def target_minimum(self) -> bool:
        """Whether target critics are reduced by their minimum; False: by their mean."""
        if self.target_reduction == "auto":
            return self.dpg_weight > 0
        return self.target_reduction == "min"

    @property
    def gammas(self) -> tuple[float, ...]:
        """All discounts; the last one is that of the acting policy."""
        return (*(g for g in self.auxiliary_gammas if g != self.gamma), self.gamma)

    @property
    def scaled_bounds(self) -> tuple[float | None, float | None]:
        """target_low and target_high in units of the multiplied reward."""
        low, high = (
            None if bound is None else bound * self.reward_multiplier
            for bound in (self.target_low, self.target_high)
        )
        return low, high
