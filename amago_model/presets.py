"""Configs that change many settings at once. Every one of these settings can be set by itself.

They are for any actions and observations; `fitting(config, spaces)` drops what these have no use
for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from amago_model.checked import unfinished
from amago_model.config import AgentConfig
from amago_model.errors import UnusedError


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
    "timestep_encoder.tokens.nearest": Deviation(
        True, "a number that is no token is the nearest one; here unknown, or nothing"
    ),
    "timestep_encoder.images.augment_exact": Deviation(
        True, "an exact number of windows is shifted, the last ones; here each with a probability"
    ),
    "actor.prob_low_gradient": Deviation(
        False, "actions less likely than prob_low have no gradient; here they have one"
    ),
    "actor.mean_log_prob": Deviation(
        True, "log-probabilities of switches are averaged; here summed, as they are independent"
    ),
    "actor.bound_gradient": Deviation(
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
    "critic.bins.renormalize": Deviation(
        True, "what of a HL-Gauss label lies outside is lost; here it belongs to the edge's bin"
    ),
    "losses.targets_before_step": Deviation(
        True, "the target networks move before the optimiser's step; here after it"
    ),
    "losses.lagged_critics": Deviation(
        True, "DPG and advantages ask critics one update old; here the critics as they are"
    ),
    "losses.count_epsilon": Deviation(
        1e-5, "a loss is a sum over the count + 1e-5; here over the count"
    ),
    "losses.filter_advantage": Deviation(
        "raw",
        "exp and leaky_relu filters see the critics' raw outputs, so their temperature drifts with "
        "PopArt; here deviations of the return",
    ),
    "losses.filter_min": Deviation(
        1e-7, "exp filter: no weight below 1e-7; here there is no such bound"
    ),
    "losses.filter_max": Deviation(1e30, "exp filter: weights have no upper bound; here 20"),
}
"""By setting, the formula that the recipe `published_v3` switches back to.

The recipe does so, too, for the one such setting of the trainer, `optimizer.warmup_from_zero`.
docs/parity.md lists them all with their tests, and what is never switched back with its reason.
"""


def published_draft(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with every deviation switched back, also those that it has no
    use for: whoever puts it together with more must check it in the end."""
    data = (config or AgentConfig()).to_dict()
    for path, deviation in DEVIATIONS.items():
        *sections, name = path.split(".")
        part = data
        for section in sections:
            part = part[section]
        part[name] = deviation.published
    with unfinished():
        return AgentConfig.from_dict(data)


def published_v3(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with each deviation of `DEVIATIONS` switched back that it has
    a use for."""
    config = config or AgentConfig()
    data, plain = published_draft(config).to_dict(), config.to_dict()
    while True:
        try:
            return AgentConfig.from_dict(data)
        except UnusedError as error:
            unread = [path for path in DEVIATIONS if set(_names(config, path)) & {*error.settings}]
            changed = [path for path in unread if _put_back(data, plain, path)]
            if not changed:
                raise


def _names(config: Any, path: str) -> list[str]:
    """A setting and the sections that it is in, as `UnusedError` names them."""
    names = []
    for name in path.split("."):
        names.append(f"{type(config).__name__}.{name}")
        config = getattr(config, name)
    return names


def _put_back(data: dict[str, Any], plain: dict[str, Any], path: str) -> bool:
    """Set what is at a path of `data` to what is there in `plain`; whether it was another."""
    *sections, name = path.split(".")
    for section in sections:
        data, plain = data[section], plain[section]
    changed = bool(data[name] != plain[name])
    data[name] = plain[name]
    return changed


def multitask(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with AMAGO-2's multi-task agent and its usual companions."""
    config = config or AgentConfig()
    return replace(
        config,
        algorithm="multitask",
        critic=replace(config.critic, kind="twohot"),
        losses=replace(config.losses, dpg_weight=0.0, bc_weight=1.0, n_actions_in_actor_loss=3),
    )
