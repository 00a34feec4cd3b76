"""The whole agent's settings, and what would contradict between its parts."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from amago_model.config.base import Settings
from amago_model.config.encoders import TrajectoryEncoderConfig, TransformerConfig
from amago_model.config.heads import ActorConfig, CriticConfig, MLPActorConfig, ScalarCriticConfig
from amago_model.config.losses import LossConfig
from amago_model.config.timestep import ImageTimestepEncoderConfig, TimestepEncoderConfig


class CustomConfig(Settings):
    """Parts of your own instead of those built in, by the names they are registered under."""

    timestep_encoder: str = ""
    """Registered timestep encoder; empty takes the one built in, here and below."""
    trajectory_encoder: str = ""
    """Registered trajectory encoder."""
    actor: str = ""
    """Registered actor."""
    critic: str = ""
    """Registered critic ensemble."""
    filter: str = ""
    """Registered filter of advantages."""
    losses: tuple[str, ...] = ()
    """Registered terms of the loss, added to those built in."""
    loss_weights: tuple[float, ...] = ()
    """How much each of these losses counts, in their order; empty counts each once."""
    agent: str = ""
    """Registered agent."""
    settings: tuple[str, ...] = ()
    """Settings that these parts have of their own, each PART.NAME=VALUE, as in
    filter.temperature=2.0; of a loss, losses.LOSS.NAME=VALUE."""

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        taken = {"critic", "dpg", "bc", "total"}
        if not (len(set(self.losses) - taken) == len(self.losses) and all(self.losses)):
            raise ValueError(
                f"losses: expected names, each once, and none of {', '.join(sorted(taken))}; to "
                f"change a built-in term, override Agent.terms, got {self.losses}"
            )
        if self.loss_weights and len(self.loss_weights) != len(self.losses):
            raise ValueError(
                f"loss_weights: expected none, or one for each of the losses {self.losses}, got "
                f"{self.loss_weights}"
            )
        return self

    @model_validator(mode="after")
    def _settings_of_chosen_modules(self) -> Self:
        if not all(re.fullmatch(r"[^=]+\.[^=.]+=.*", setting) for setting in self.settings):
            raise ValueError(
                "settings: expected PART.NAME=VALUE each, as in filter.temperature=2.0, got "
                f"{self.settings}"
            )
        paths = [setting.partition("=")[0] for setting in self.settings]
        if len(set(paths)) < len(paths):
            raise ValueError(f"settings: expected each setting once, got {self.settings}")
        chosen = {name for name in MODULES if getattr(self, name)}
        chosen |= {f"losses.{name}" for name in self.losses}
        if strangers := sorted({path.rpartition(".")[0] for path in paths} - chosen):
            raise ValueError(
                f"settings: of {', '.join(strangers)}, but the custom modules are: "
                f"{', '.join(sorted(chosen)) or 'none'}; name the module, or leave its settings out"
            )
        return self

    def settings_of(self, part: str) -> dict[str, str]:
        """What `settings` says of a part, such as "filter" or "losses.mine": value by name."""
        found = {}
        for setting in self.settings:
            path, _, value = setting.partition("=")
            owner, _, name = path.rpartition(".")
            if owner == part:
                found[name] = value
        return found


MODULES = ("timestep_encoder", "trajectory_encoder", "actor", "critic", "filter", "agent")


class AgentConfig(Settings):
    """The whole agent. Saved in every policy file and rebuilt from it."""

    algorithm: Literal["agent", "multitask"] = "agent"
    """agent: the value of a discrete policy is the mean over all actions; multitask: discrete
    actions are sampled, as continuous ones are (AMAGO-2; the preset `multitask` does more)."""

    timestep_encoder: Annotated[
        TimestepEncoderConfig | ImageTimestepEncoderConfig, Field(discriminator="kind")
    ] = Field(default_factory=TimestepEncoderConfig)
    """One timestep to one vector."""
    trajectory_encoder: TrajectoryEncoderConfig = Field(default_factory=TransformerConfig)
    """Timestep vectors to state vectors: the memory."""
    actor: ActorConfig = Field(default_factory=MLPActorConfig)
    """State vector to action distribution."""
    critic: CriticConfig | None = Field(default_factory=ScalarCriticConfig)
    """State vector and action to value; behaviour cloning alone does without."""
    losses: LossConfig = Field(default_factory=LossConfig)
    """What is minimised."""
    custom: CustomConfig = Field(default_factory=CustomConfig)
    """Custom modules."""

    @model_validator(mode="after")
    def _critic_for_the_actor(self) -> Self:
        c = self.losses
        if self.critic is None and (c.dpg_weight > 0 or c.filter.kind != "behavior_cloning"):
            raise ValueError(
                f"critic: none, but DPG and filters follow one (dpg_weight={c.dpg_weight}, filter "
                f"kind {c.filter.kind!r}); set losses.dpg_weight=0 and losses.filter.kind="
                "'behavior_cloning', or leave a critic"
            )
        if self.critic is not None and c.critic_weight == 0:
            raise ValueError(
                "losses.critic_weight: 0 leaves the critic untrained; raise it, or do without a "
                "critic: behaviour cloning"
            )
        return self

    @model_validator(mode="after")
    def _gradient_for_dpg(self) -> Self:
        if self.actor.continuous.kind == "gmm" and self.losses.dpg_weight > 0:
            raise ValueError(
                "actor.continuous.kind: samples of 'gmm' have no gradient, so DPG cannot train the "
                f"actor, yet dpg_weight={self.losses.dpg_weight}; set losses.dpg_weight=0 or "
                "another distribution"
            )
        return self
