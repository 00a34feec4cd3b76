"""Configs that change many settings at once. Every one of these settings can be set by itself.

They are for discrete actions; `fitting(config, spaces)` drops what others have no use for.
"""

from __future__ import annotations

from dataclasses import replace

from amago_model.config import AgentConfig

DEVIATIONS: dict[str, str] = {
    "critic.subset_replacement": "the critics of a target are drawn with replacement, so a target "
    "may rest on one critic alone; here without, as REDQ does",
    "critic.soften_data_actions": "critics see one-hots of the data clipped to prob_low..prob_high "
    "and renormalised; here they see the action that was taken",
    "losses.targets_before_step": "the slow copies move before the optimiser's step; here after it",
    "losses.filter_advantage": "exp and leaky_relu filters see the critics' raw outputs, so their "
    "temperature drifts with PopArt; here deviations of the return",
    "losses.filter_min": "exp filter: no weight below 1e-7; here there is no such bound",
    "losses.filter_max": "exp filter: weights have no upper bound; here 20",
}
"""Where the default differs from AMAGO v3.3.0, by the setting that `published_v3` switches back.

Not all that differs can be switched back: docs/parity.md lists the rest, each with its reason.
"""


def published_v3(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with each deviation of `DEVIATIONS` switched back that it
    has a use for."""
    config = config or AgentConfig()
    if not config.losses.trains_critic:
        return config
    losses = replace(config.losses, targets_before_step=True)
    if not losses.fake_filter and losses.offline_weight > 0:
        losses = replace(losses, filter_advantage="raw")
    if losses.filter == "exp":
        losses = replace(losses, filter_min=1e-7, filter_max=1e30)
    critic = replace(config.critic, subset_replacement=True, soften_data_actions=True)
    return replace(config, critic=critic, losses=losses)


def multitask(config: AgentConfig | None = None) -> AgentConfig:
    """A config (default: the default) with AMAGO-2's multi-task agent and its usual companions."""
    config = config or AgentConfig()
    return replace(
        config,
        algorithm="multitask",
        critic=replace(config.critic, kind="twohot"),
        losses=replace(config.losses, online_weight=0.0, offline_weight=1.0, n_policy_actions=3),
    )
