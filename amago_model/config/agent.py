"""The whole agent's settings, and what would contradict between its parts."""

from __future__ import annotations

import dataclasses
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import (
    Checked,
    Unused,
    made_anew,
    parts_read,
    read_elsewhere,
    refuse,
    unused,
)
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
    losses: tuple[str, ...] = ()
    """Registered terms of the loss, added to those built in."""
    loss_weights: tuple[float, ...] = ()
    """How much each of these losses counts, in their order; empty counts each once."""
    agent: str = ""
    """Registered agent."""
    settings: tuple[str, ...] = ()
    """Settings that these parts have of their own, each PART.NAME=VALUE, as in
    filter.temperature=2.0; of a loss, losses.LOSS.NAME=VALUE."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_settings()
        taken = {"critic", "dpg", "bc", "total"}
        own = len(set(self.losses) - taken) == len(self.losses) and all(self.losses)
        names = f"names, each once, and none of {', '.join(sorted(taken))}; to change a built-in "
        self.require("losses", own, names + "term, override Agent.terms")
        counted = not self.loss_weights or len(self.loss_weights) == len(self.losses)
        self.require("loss_weights", counted, f"none, or one for each of the losses {self.losses}")

    def settings_of(self, part: str) -> dict[str, str]:
        """What `settings` says of a part, such as "filter" or "losses.mine": value by name."""
        found = {}
        for setting in self.settings:
            path, _, value = setting.partition("=")
            owner, _, name = path.rpartition(".")
            if owner == part:
                found[name] = value
        return found

    def parts(self) -> list[str]:
        """The parts that are chosen, as "filter.mine"."""
        named = [f"{kind}.{name}" for kind in _PARTS if (name := getattr(self, kind))]
        return named + [f"loss.{name}" for name in self.losses]

    def _check_settings(self) -> None:
        formed = all(re.fullmatch(r"[^=]+\.[^=.]+=.*", setting) for setting in self.settings)
        self.require("settings", formed, "PART.NAME=VALUE each, as in filter.temperature=2.0")
        paths = [setting.partition("=")[0] for setting in self.settings]
        owners = {path.rpartition(".")[0] for path in paths}
        self.require("settings", len(set(paths)) == len(paths), "each setting once")
        own = {name for name in _PARTS if getattr(self, name)}
        own |= {f"losses.{name}" for name in self.losses}
        if strangers := sorted(owners - own):
            there = ", ".join(sorted(own)) or "none"
            sentence = (
                f"CustomConfig.settings: settings of {', '.join(strangers)}, but the parts of your "
                f"own are: {there}; name the part, or leave its settings out"
            )
            refuse([Unused(("CustomConfig.settings",), sentence)])


_PARTS = ("timestep_encoder", "trajectory_encoder", "actor", "critic", "filter", "agent")


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
        with self.own_parts_read():
            if read_elsewhere():
                self._check_sections()
            refuse(self._unused())
        if self.actor.continuous == "gmm" and self.losses.dpg_weight > 0:
            raise ConfigError(
                "ActorConfig.continuous: samples of 'gmm' have no gradient, so DPG cannot train "
                f"the actor, yet dpg_weight={self.losses.dpg_weight}; set losses.dpg_weight=0 or "
                "another distribution"
            )

    def own_parts_read(self) -> AbstractContextManager[None]:
        """Inside, settings that parts of one's own say they read are not refused as unused."""
        return parts_read(read_elsewhere(self.custom.parts()))

    def _check_sections(self) -> None:
        """Again: what a part of one's own reads was let through, whether it is chosen or not."""
        for name in self.setting_names():
            if dataclasses.is_dataclass(section := getattr(self, name)):
                made_anew(section)

    def _unused(self) -> list[Unused]:
        """What of one part nothing would read because of another: told all at once."""
        losses = self.losses
        found: list[Unused] = []
        if not losses.filters:
            why = "with behavior_cloning or bc_weight=0 no advantage is filtered"
            found += unused(why, (losses, OF_ADVANTAGES), (self.custom, ["filter"]))
        elif self.custom.filter:
            why = f"CustomConfig.filter={self.custom.filter!r} takes the place of it"
            found += unused(why, (losses, OF_THE_FILTER))
        if not losses.trains_critic:
            why = "behaviour cloning (behavior_cloning with dpg_weight=0) has no critic"
            critics = (self.critic, self.critic.setting_names()), (self.custom, ["critic"])
            found += unused(why, (losses, OF_CRITICS), *critics, (self, ["algorithm"]))
        elif self.critic.kind != "scalar" and not losses.dpg_weight:
            why = "there is no DPG, and advantages ask critics that classify as they are"
            found += unused(why, (losses, ["lagged_critics"]))
        if not losses.bc_weight:
            why = "with bc_weight=0 nothing asks for the probability of a data action"
            found += unused(why, (self.actor, ["log_prob_clip", "mean_log_prob"]))
        return found
