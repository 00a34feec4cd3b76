"""The whole agent's settings, and what would contradict between its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import Checked, refuse, unused
from amago_model.config.encoders import TrajectoryEncoderConfig
from amago_model.config.heads import ActorConfig, CriticConfig
from amago_model.config.losses import OF_ADVANTAGES, OF_CRITICS, OF_THE_FILTER, LossConfig
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
        refuse(self._unused())
        if self.actor.continuous == "gmm" and self.losses.online_weight > 0:
            raise ConfigError(
                "ActorConfig.continuous: samples of 'gmm' have no gradient, so nothing can climb "
                f"the critic with online_weight={self.losses.online_weight}; set "
                "losses.online_weight=0 or another distribution"
            )

    def _unused(self) -> list[str]:
        """What of one part nothing would read because of another: told all at once."""
        losses, found = self.losses, []
        if not losses.filters:
            why = "with fake_filter or offline_weight=0 no advantage is filtered"
            found += unused(why, (losses, OF_ADVANTAGES), (self.custom, ["filter"]))
        elif self.custom.filter:
            why = f"CustomConfig.filter={self.custom.filter!r} takes the place of it"
            found += unused(why, (losses, OF_THE_FILTER))
        if not losses.trains_critic:
            why = "behaviour cloning (fake_filter with online_weight=0) has no critic"
            critics = (self.critic, self.critic.settings()), (self.custom, ["critic"])
            found += unused(why, (losses, OF_CRITICS), *critics)
        if not losses.offline_weight:
            why = "with offline_weight=0 nothing asks for the probability of a data action"
            found += unused(why, (self.actor, ["log_prob_clip"]))
        return found
