"""The settings of the complete agent, and the checks between its sections."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from amago_model.config.base import Settings
from amago_model.config.encoders import TrajectoryEncoderConfig, TransformerConfig
from amago_model.config.heads import ActorConfig, CriticConfig, MLPActorConfig, ScalarCriticConfig
from amago_model.config.losses import LossConfig
from amago_model.config.names import Positive
from amago_model.config.timestep import ImageTimestepEncoderConfig, TimestepEncoderConfig


class ReturnConditioningConfig(Settings):
    """Condition the policy on the return that it shall reach (Decision Transformer; Chen et al.
    2021).

    Every timestep shows the return-to-go: the undiscounted sum of the rewards from this step to the
    end of the trajectory. In acting it is `target_return` minus the rewards received so far.
    """

    target_return: float | None = None
    """Return-to-go at the start of an episode in acting, in the environment's units; none: training
    cannot start unless it is derived from the dataset."""
    scale: Positive = 1.0
    """Factor of the return-to-go as an input, which is not normalised otherwise; best such that
    returns differ by about 3."""


class CustomConfig(Settings):
    """Custom modules by registered name, in place of the built-in ones (see registry.py)."""

    timestep_encoder: str = ""
    """Name of a registered timestep encoder; empty: the built-in one."""
    trajectory_encoder: str = ""
    """Name of a registered trajectory encoder; empty: the built-in one."""
    actor: str = ""
    """Name of a registered actor; empty: the built-in one."""
    critic: str = ""
    """Name of a registered critic ensemble; empty: the built-in one."""
    filter: str = ""
    """Name of a registered advantage filter; empty: the built-in one."""
    losses: tuple[str, ...] = ()
    """Names of registered loss terms, added to the built-in terms."""
    loss_weights: tuple[float, ...] = ()
    """Weights of these loss terms, in the same order; empty: 1 each."""
    agent: str = ""
    """Name of a registered agent; empty: the built-in one."""
    settings: tuple[str, ...] = ()
    """Settings of the custom modules, each as MODULE.NAME=VALUE, e.g. filter.temperature=2.0; for
    a loss term losses.LOSS.NAME=VALUE."""

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        taken = {"critic", "value", "dpg", "bc", "total"}
        if not (len(set(self.losses) - taken) == len(self.losses) and all(self.losses)):
            raise ValueError(
                f"losses: expected each name once and none of {', '.join(sorted(taken))}; to "
                f"change a built-in term, override Agent.terms, got {self.losses}"
            )
        if self.loss_weights and len(self.loss_weights) != len(self.losses):
            raise ValueError(
                f"loss_weights: expected one weight for each of the losses {self.losses}, or none, "
                f"got {self.loss_weights}"
            )
        return self

    @model_validator(mode="after")
    def _settings_of_chosen_modules(self) -> Self:
        if not all(re.fullmatch(r"[^=]+\.[^=.]+=.*", setting) for setting in self.settings):
            raise ValueError(
                "settings: expected MODULE.NAME=VALUE each, e.g. filter.temperature=2.0, got "
                f"{self.settings}"
            )
        paths = [setting.partition("=")[0] for setting in self.settings]
        if len(set(paths)) < len(paths):
            raise ValueError(f"settings: expected each setting once, got {self.settings}")
        chosen = {name for name in MODULES if getattr(self, name)}
        chosen |= {f"losses.{name}" for name in self.losses}
        if unknown := sorted({path.rpartition(".")[0] for path in paths} - chosen):
            raise ValueError(
                f"settings: given for {', '.join(unknown)}, but the custom modules are: "
                f"{', '.join(sorted(chosen)) or 'none'}; name the module or remove its settings"
            )
        return self

    def settings_of(self, part: str) -> dict[str, str]:
        """The settings of one module, such as "filter" or "losses.mine": {name: value}."""
        found = {}
        for setting in self.settings:
            path, _, value = setting.partition("=")
            owner, _, name = path.rpartition(".")
            if owner == part:
                found[name] = value
        return found


MODULES = ("timestep_encoder", "trajectory_encoder", "actor", "critic", "filter", "agent")


class AgentConfig(Settings):
    """The settings of the complete agent. Every policy file contains them."""

    algorithm: Literal["agent", "multitask"] = "agent"
    """agent: the value of a discrete policy is the exact expectation over all actions; multitask:
    discrete actions are sampled, like continuous ones (AMAGO-2; the preset `multitask` also sets
    the critic and the loss weights)."""

    timestep_encoder: Annotated[
        TimestepEncoderConfig | ImageTimestepEncoderConfig, Field(discriminator="kind")
    ] = Field(default_factory=TimestepEncoderConfig)
    """Maps each timestep to a vector."""
    trajectory_encoder: TrajectoryEncoderConfig = Field(default_factory=TransformerConfig)
    """The memory: maps timestep vectors to state vectors."""
    actor: ActorConfig = Field(default_factory=MLPActorConfig)
    """Maps state vectors to action distributions."""
    critic: CriticConfig | None = Field(default_factory=ScalarCriticConfig)
    """Maps states and actions to values; none: pure behaviour cloning."""
    return_conditioning: ReturnConditioningConfig | None = None
    """Show the return-to-go to the policy, which then aims at a target return (recipe dt); none: do
    not. Only for behaviour cloning without a critic."""
    losses: LossConfig = Field(default_factory=LossConfig)
    """Loss terms, their weights and the TD targets."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay per update of the exponential moving average (EMA) of the weights that published
    policies have; 0: they have the newest weights."""
    custom: CustomConfig = Field(default_factory=CustomConfig)
    """Custom modules."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        c, kind = self.losses, self.actor.continuous.kind
        if self.critic is None and (c.dpg_weight > 0 or c.filter.kind != "behavior_cloning"):
            raise ValueError(
                f"critic: none, but DPG and advantage filters need one (dpg_weight={c.dpg_weight}, "
                f"filter kind {c.filter.kind!r}); set losses.dpg_weight=0 and losses.filter.kind="
                "'behavior_cloning', or configure a critic"
            )
        if self.critic is not None and c.critic_weight == 0:
            raise ValueError(
                "losses.critic_weight: 0 leaves the critic untrained; raise it, or set critic to "
                "none for pure behaviour cloning"
            )
        if self.return_conditioning is not None and self.critic is not None:
            raise ValueError(
                "return_conditioning: critics would read their target from the input; set critic "
                "to none, losses.dpg_weight=0 and losses.filter.kind='behavior_cloning', or leave "
                "out return_conditioning"
            )
        if c.value_expectile is not None and getattr(self.critic, "kind", "") != "scalar":
            critic = "none" if self.critic is None else f"kind {self.critic.kind!r}"
            raise ValueError(
                f"losses.value_expectile: needs critics of kind 'scalar', but critic is {critic}; "
                "set critic.kind='scalar' or leave out value_expectile"
            )
        if c.bc_target_penalty > 0 and kind != "deterministic":
            raise ValueError(
                f"losses.bc_target_penalty: needs actor.continuous.kind 'deterministic', got "
                f"{kind!r}; set it to 0 or choose that kind"
            )
        if kind == "gmm" and c.dpg_weight > 0:
            raise ValueError(
                "actor.continuous.kind: samples of 'gmm' have no gradient, so DPG cannot train the "
                f"actor, but dpg_weight={c.dpg_weight}; set losses.dpg_weight=0 or "
                "choose another distribution"
            )
        return self
