"""Configs that change several settings at once. Each of these settings can also be set separately.

Presets work with all action and observation spaces; settings that a space does not use have no
effect.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from amago_model.config import AgentConfig, TwoHotCriticConfig


class Deviation(NamedTuple):
    """A setting whose default differs from AMAGO v3.3.0."""

    published: Any
    """The value of the setting that reproduces AMAGO."""
    what: str
    """What AMAGO does, and what Stepwell does by default."""


DEVIATIONS: dict[str, Deviation] = {
    "timestep_encoder.kind": Deviation(
        "image",
        "AMAGO has a separate encoder for single images; Stepwell has one encoder for all "
        "observations",
    ),
    "timestep_encoder.raw_numbers": Deviation(
        True,
        "AMAGO uses categories and uint8 values as numbers; Stepwell uses one-hots or embeddings, "
        "and fractions of 255",
    ),
    "actor.prob_low_gradient": Deviation(
        False,
        "in AMAGO actions less likely than prob_low have no gradient; in Stepwell they have one",
    ),
    "actor.continuous.bound_gradient": Deviation(
        False,
        "in AMAGO standard deviations and concentrations have no gradient where their bounds "
        "saturate; in Stepwell a gradient leads back inside",
    ),
    "critic.subset_replacement": Deviation(
        True,
        "AMAGO draws the critics of a TD target with replacement, so a target may use only one "
        "critic; Stepwell draws without replacement, like REDQ",
    ),
    "critic.soften_data_actions": Deviation(
        True,
        "in AMAGO the critics' input is the data's one-hot action, clipped to prob_low..prob_high "
        "and renormalised; in Stepwell it is the action itself",
    ),
    "critic.renormalize": Deviation(
        True,
        "AMAGO drops the mass of an HL-Gauss label outside the support; Stepwell adds it to the "
        "outer bins",
    ),
    "losses.targets_before_step": Deviation(
        True,
        "AMAGO updates the target networks before the optimiser step; Stepwell updates them after "
        "it",
    ),
    "losses.lagged_critics": Deviation(
        True,
        "AMAGO computes DPG and advantages with critics one update old; Stepwell uses the current "
        "critics",
    ),
    "losses.filter.advantage": Deviation(
        "raw",
        "in AMAGO the exp and leaky_relu filters use the critics' raw outputs, so their "
        "temperature drifts with PopArt; in Stepwell they use standard deviations of the return",
    ),
}
"""The deviations from AMAGO that have a setting, by setting; `published_v3` reverts them.

docs/reference/parity.md lists them with their tests, and also the deviations without a setting.
"""


def published_v3(config: AgentConfig | None = None) -> AgentConfig:
    """A copy of a config (None: the default) with AMAGO's values of the settings in `DEVIATIONS`.

    Settings that the selected kinds do not have are skipped.
    """
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
    """A copy of a config (None: the default) with AMAGO-2's multi-task agent: sampled discrete
    actions, two-hot critics, filtered BC without DPG, 3 action samples in the actor loss."""
    config = config or AgentConfig()
    if config.critic is not None:
        fields = TwoHotCriticConfig.model_fields.keys() - {"kind"}
        shared = {k: v for k, v in config.critic.__dict__.items() if k in fields}
        config = config.replace(critic=TwoHotCriticConfig(**shared))
    return config.replace(
        algorithm="multitask",
        losses=config.losses.replace(dpg_weight=0.0, bc_weight=1.0, n_actions_in_actor_loss=3),
    )
