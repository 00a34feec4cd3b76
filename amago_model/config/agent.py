"""The whole agent's settings, and what would contradict between its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import Checked
from amago_model.config.encoders import TrajectoryEncoderConfig
from amago_model.config.heads import ActorConfig, CriticConfig
from amago_model.config.losses import LossConfig
from amago_model.config.timestep import TimestepEncoderConfig
from amago_model.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CustomConfig(Checked):
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
    agent: str = ""
    """Registered agent."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Checked):
    """The whole agent. Saved in every policy file and rebuilt from it."""

    algorithm: Literal["agent", "multitask"] = "agent"
    """How values of the policy's discrete actions are had: agent takes the mean over all actions,
    multitask samples them (see agent.py; its usual companions are in presets.py)."""

    timestep_encoder: TimestepEncoderConfig = field(default_factory=TimestepEncoderConfig)
    """One row to one vector."""
    trajectory_encoder: TrajectoryEncoderConfig = field(default_factory=TrajectoryEncoderConfig)
    """Row vectors to state vectors: the memory."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """State vector to action distribution."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """State vector and action to value."""
    losses: LossConfig = field(default_factory=LossConfig)
    """What is minimised."""
    custom: CustomConfig = field(default_factory=CustomConfig)
    """Parts of your own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unfiltered = self.losses.fake_filter or self.losses.offline_weight == 0
        other = self.losses.filter != "binary" or self.losses.filter_threshold != 0
        if self.custom.filter and (unfiltered or other):
            raise ConfigError(
                f"CustomConfig.filter: {self.custom.filter!r} would not be used, or another filter "
                "beside it; leave losses.filter, filter_threshold and fake_filter at their "
                "defaults and offline_weight above 0, or unset it"
            )
        if self.critic != CriticConfig() and not self.losses.trains_critic:
            raise ConfigError(
                "AgentConfig.critic: set, but behaviour cloning (fake_filter with online_weight=0) "
                "builds no critic; leave it at its defaults"
            )
        if self.actor.log_prob_clip != ActorConfig.log_prob_clip and not self.losses.offline_weight:
            raise ConfigError(
                f"ActorConfig.log_prob_clip: {self.actor.log_prob_clip}, but with offline_weight=0 "
                "nothing asks for the probability of a data action; leave it at its default"
            )
        if self.custom.critic and not self.losses.trains_critic:
            raise ConfigError(
                f"CustomConfig.critic: {self.custom.critic!r}, but behaviour cloning builds no "
                "critic; unset it"
            )
        if self.actor.continuous == "gmm" and self.losses.online_weight > 0:
            raise ConfigError(
                "ActorConfig.continuous: samples of 'gmm' have no gradient, so nothing can climb "
                f"the critic with online_weight={self.losses.online_weight}; set "
                "losses.online_weight=0 or another distribution"
            )
