"""Settings of what is minimised."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import Checked, Unused, either_or, of_other_choices, refuse, unused
from amago_model.errors import ConfigError

OF_THE_FILTER = (
    *("filter", "filter_threshold", "filter_beta", "filter_min", "filter_max", "leaky_filter"),
)
"""Settings of how advantages become weights: a filter of one's own does without them."""
OF_ADVANTAGES = (*OF_THE_FILTER, "filter_batch_norm", "filter_advantage")
"""Settings of nothing else than the filtering of advantages."""
OF_CRITICS = (
    *("reward_multiplier", "n_step", "td_lambda", "target_low", "target_high", "critic_weight"),
    *(
        "n_actions_in_critic_loss",
        "targets_before_step",
        "lagged_critics",
        "use_target_actor",
        "tau",
    ),
)
"""Settings of what critics learn, and of target networks."""


@dataclass(frozen=True, kw_only=True)
class LeakyFilterConfig(Checked):
    """Weight of a data action by a bent line through its advantage."""

    threshold: float = 0.01
    """Advantage at which the line bends."""
    beta: float = 2.0
    """Advantage that raises the weight by 1 above the bend."""
    slope: float = 0.05
    """Slope below the bend, as a part of that above it."""
    at_zero: float = 0.01
    """Weight at an advantage of 0, before the step."""
    smallest: float = 1e-7
    """Smallest weight."""
    largest: float = 10.0
    """Largest weight, before the step."""
    add_step: bool = True
    """Add 1 above the bend, as the binary filter would."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("beta", self.beta > 0, "a positive number")
        self.require("slope", self.slope >= 0, "a number of at least 0")
        self.require("smallest", 0 <= self.smallest < self.largest, "0 <= smallest < largest")


@dataclass(frozen=True, kw_only=True)
class LossConfig(Checked):
    """The terms of the update: critic, DPG, advantage-filtered behaviour cloning (BC)."""

    gamma: float = 0.999
    """Discount of the policy that acts."""
    auxiliary_gammas: tuple[float, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)
    """Further discounts learned in parallel, to shape the state vector; may be empty. One that
    gamma is, too, is learned once, as gamma."""
    reward_multiplier: float = 10.0
    """Rewards are multiplied by this inside the losses (never in what the agent sees)."""
    n_step: int = 1
    """Rewards summed before the target bootstraps."""
    td_lambda: float | None = None
    """Instead of n_step: mix returns of all lengths, each step on weighing this much of the last.
    Later actions of the data are taken as they are, which biases values towards the data."""
    target_low: float | None = None
    """Targets are clipped to at least this, a return in the environment's units; none does not."""
    target_high: float | None = None
    """Targets are clipped to at most this, a return in the environment's units; none does not."""
    critic_weight: float = 10.0
    """Weight of the critic loss."""
    dpg_weight: float = 1.0
    """Weight of the DPG loss; above 0, targets are minima over the ensemble."""
    bc_weight: float = 0.1
    """Weight of the (filtered) behaviour cloning loss."""
    filter: Literal["binary", "exp", "leaky_relu"] = "binary"
    """Weight of a data action by its advantage: 1 above the threshold, exp(beta x advantage), or a
    bent line (leaky_filter)."""
    filter_batch_norm: bool = False
    """First bring the advantages of a batch to mean 0 and deviation 1, per discount."""
    leaky_filter: LeakyFilterConfig = field(default_factory=LeakyFilterConfig)
    """Settings of filter=leaky_relu."""
    filter_threshold: float = 0.0
    """binary: advantage above which an action is imitated."""
    filter_beta: float = 1.0
    """exp: factor on the advantage, which is in units of the target's standard deviation."""
    filter_min: float = 0.0
    """exp: smallest weight; published: 1e-7."""
    filter_max: float = 20.0
    """exp: largest weight."""
    behavior_cloning: bool = False
    """Imitate every action: behaviour cloning. With dpg_weight 0 there is no critic at all."""
    n_actions_in_critic_loss: int = 1
    """Policy samples that estimate the value of the next state. Not for discrete actions, unless
    algorithm=multitask: critics answer for all of them."""
    n_actions_in_actor_loss: int = 1
    """Policy samples in the advantage and in the DPG term, and for the logged entropy of continuous
    actions. Not for discrete actions, unless algorithm=multitask, as n_actions_in_critic_loss."""
    filter_advantage: Literal["normalized", "raw"] = "normalized"
    """What the filter sees: advantages in deviations of the return, or (as published) of the
    critics' outputs as they are, whose scale drifts with PopArt or follows the rewards."""
    targets_before_step: bool = False
    """As published: the target networks move before the optimiser's step, not after it."""
    dpg_detach_state: bool = False
    """DPG trains the actor alone: the state that it acts on is a constant. Off, as published, the
    gradient goes on through the actor into the encoders. Critics always see a constant there."""
    lagged_critics: bool = False
    """As published: DPG, and advantages of critics that do not classify, ask copies of the
    critics from before the last step, one update old. One more set of critics in memory."""
    count_epsilon: float = 0.0
    """Added to the number of terms that each loss is a mean of; published: 1e-5."""
    use_target_actor: bool = True
    """Next actions come from the target actor."""
    tau: float = 0.003
    """How far the copies move towards the learned weights after each update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("gamma", (self.gamma,)), ("auxiliary_gammas", self.auxiliary_gammas)):
            self.require(name, all(0 <= g < 1 for g in values), "discounts in [0, 1)")
        once = len(set(self.auxiliary_gammas)) == len(self.auxiliary_gammas)
        self.require("auxiliary_gammas", once, "each discount once")
        self.require_sizes(n_step=1024, n_actions_in_critic_loss=1024, n_actions_in_actor_loss=1024)
        for name in ("critic_weight", "dpg_weight", "bc_weight"):
            value = getattr(self, name)
            self.require(name, math.isfinite(value) and value >= 0, "a finite number, at least 0")
        self.require("tau", 0 < self.tau <= 1, "a number in (0, 1]")
        self.require("reward_multiplier", self.reward_multiplier > 0, "a positive number")
        epsilon = self.count_epsilon
        self.require("count_epsilon", 0 <= epsilon < math.inf, "a finite number, at least 0")
        self.require("filter_beta", self.filter_beta > 0, "a positive number")
        self.require("filter_max", self.filter_max > 0, "a positive number")
        self.require("filter_min", 0 <= self.filter_min < self.filter_max, "from 0 to filter_max")
        self._check_targets()
        refuse(self._unused())
        if self.dpg_weight == 0 and self.bc_weight == 0:
            raise ConfigError(
                "LossConfig.bc_weight: it and dpg_weight are both 0, so nothing would "
                "train the actor; raise one of them"
            )
        if self.trains_critic and self.critic_weight == 0:
            raise ConfigError(
                "LossConfig.critic_weight: 0 leaves the critic untrained while the actor follows "
                "it; raise it, or set behavior_cloning with dpg_weight=0 for behaviour cloning"
            )

    def _check_targets(self) -> None:
        if self.td_lambda is not None:
            self.require("td_lambda", 0 <= self.td_lambda <= 1, "a number in [0, 1]")
        low, high = self.target_low, self.target_high
        self.require("target_low", low is None or math.isfinite(low), "a finite number")
        self.require("target_high", high is None or math.isfinite(high), "a finite number")
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"LossConfig.target_low: {low} is not below target_high={high}")

    def _unused(self) -> list[Unused]:
        found = either_or(self, "td_lambda", "n_step", "they are two ways of doing the same")
        if self.dpg_weight == 0:
            why = "with dpg_weight=0 there is no DPG"
            found += unused(why, (self, ["dpg_detach_state"]), instead="raise dpg_weight or ")
        if self.bc_weight == 0:
            why = "with bc_weight=0 no action of the data is imitated"
            found += unused(why, (self, ["behavior_cloning"]), instead="raise bc_weight or ")
        if self.filters:
            kinds = {
                "leaky_relu": ("leaky_filter",),
                "binary": ("filter_threshold",),
                "exp": ("filter_beta", "filter_min", "filter_max"),
            }
            found += of_other_choices(self, "filter", kinds)
        return found

    @property
    def gammas(self) -> tuple[float, ...]:
        """All discounts; the last one acts."""
        return (*(g for g in self.auxiliary_gammas if g != self.gamma), self.gamma)

    @property
    def trains_critic(self) -> bool:
        """False for pure behaviour cloning, which builds no critic."""
        return not (self.behavior_cloning and self.dpg_weight == 0)

    @property
    def filters(self) -> bool:
        """Whether the advantage decides how much an action of the data is imitated."""
        return self.bc_weight > 0 and not self.behavior_cloning
