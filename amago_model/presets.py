"""Configs that change many settings at once. Every one of these settings can be set by itself.

They are for any actions and observations: what these have no use for is left alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from amago_model.config import AgentConfig, Settings, TwoHotCriticConfig


class Deviation(NamedTuple):
    """Where the default differs from AMAGO v3.3.0."""

    published: Any
    """The value of the setting that is AMAGO's formula."""
    what: str
    """That formula; here the default."""


DEVIATIONS: dict[str, Deviation] = {
    "timestep_encoder.kind": Deviation(
        "image", "one image has an encoder of its own; here one encoder takes any observations"
    ),
    "timestep_encoder.raw_numbers": Deviation(
        True, "categories and bytes are numbers; here one-hots, embeddings, and shares of 255"
    ),
    "actor.prob_low_gradient": Deviation(
        False, "actions less likely than prob_low have no gradient; here they have one"
    ),
    "actor.continuous.bound_gradient": Deviation(
        False,
        "deviations and concentrations far outside their bounds have no gradient; here one that "
        "leads back",
    ),
    "critic.subset_replacement": Deviation(
        True,
        "the critics of a target are drawn with replacement, so a target may rest on one critic "
        "alone; here without, as REDQ does",
    ),
    "critic.soften_data_actions": Deviation(
        True,
        "critics see one-hots of the data clipped to prob_low..prob_high and renormalised; here "
        "they see the action that was taken",
    ),
    "critic.renormalize": Deviation(
        True, "what of a HL-Gauss label lies outside is lost; here it belongs to the edge's bin"
    ),
    "losses.targets_before_step": Deviation(
        True, "the target networks move before the optimiser's step; here after it"
    ),
    "losses.lagged_critics": Deviation(
        True, "DPG and advantages ask critics one update old; here the critics as they are"
    ),
    "losses.filter_advantage": Deviation(
        "raw",
        "exp and leaky_relu filters see the critics' raw outputs, so their temperature drifts with "
        "PopArt; here deviations of the return",
    ),
}
"""By setting, the formula that the recipe `published_v3` switches back to.

docs/parity.md lists them all with their tests, and the differences without a setting.
"""


def published_v3(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with each deviation of `DEVIATIONS` switched back whose
    setting the chosen kinds have."""
    config = config or AgentConfig()
    for path, deviation in DEVIATIONS.items():
        config = _with(config, path.split("."), deviation.published)
    return config


def _with(config: Any, path: list[str], value: Any) -> Any:
    """A copy with the setting changed, where there is such a setting."""
    name, *inside = path
    if not isinstance(config, Settings) or not hasattr(config, name):
        return config
    return config.replace(
        **{name: _with(getattr(config, name), inside, value) if inside else value}
    )


def multitask(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with AMAGO-2's multi-task agent and its usual companions."""
    config = config or AgentConfig()
    shared = {
        name: value
        for name, value in config.critic.__dict__.items()
        if name in TwoHotCriticConfig.model_fields and name != "kind"
    }
    return config.replace(
        algorithm="multitask",
        critic=TwoHotCriticConfig(**shared),
        losses=config.losses.replace(dpg_weight=0.0, bc_weight=1.0, n_actions_in_actor_loss=3),
    )
