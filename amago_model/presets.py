"""Configs that change many settings at once. Every one of these settings can be set by itself.

They are for any actions and observations: what these have no use for is left alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from amago_model.config import AgentConfig, TwoHotCriticConfig


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
    "losses.filter.advantage": Deviation(
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
    tree = (config or AgentConfig()).to_dict()
    for path, deviation in DEVIATIONS.items():
        *sections, name = path.split(".")
        section = tree
        for inside in sections:
            section = section.get(inside) or {}
        if name in section:
            section[name] = deviation.published
    return AgentConfig.from_dict(tree)


def multitask(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with AMAGO-2's multi-task agent and its usual companions."""
    config = config or AgentConfig()
    if config.critic is not None:
        fields = TwoHotCriticConfig.model_fields.keys() - {"kind"}
        shared = {k: v for k, v in config.critic.__dict__.items() if k in fields}
        config = config.replace(critic=TwoHotCriticConfig(**shared))
    return config.replace(
        algorithm="multitask",
        losses=config.losses.replace(dpg_weight=0.0, bc_weight=1.0, n_actions_in_actor_loss=3),
    )
