"""Observations as an input of custom heads, beside the state.

An actor has them by an argument `obs` of both `forward` and `acting`, a critic by one of
`project_state` and of `action_values`, if it has these:

    def forward(self, state, legal=None, *, obs):   # obs[key] [N, *shape], as the data have them
    def acting(self, state, legal=None, *, obs):

Actors get the roles policy and mask, which exist when acting; critics the role critic besides. The
built-in heads take none.
"""

from __future__ import annotations

import inspect

from torch import nn

from amago_model.config import Spaces
from amago_model.errors import ConfigError


def actor_observation_keys(actor: nn.Module, spaces: Spaces) -> tuple[str, ...]:
    """The observations of an actor; none unless it has the argument.

    Raises:
        ConfigError: it has the argument when learning and not when acting, or the other way round.
    """
    if not _has_obs(actor, ("forward", "acting")):
        return ()
    return (*spaces.keys("policy"), *spaces.keys("mask"))


def critic_observation_keys(critic: nn.Module, spaces: Spaces) -> tuple[str, ...]:
    """The observations of a critic ensemble; none unless it has the argument.

    Raises:
        ConfigError: one of its methods has the argument and another does not.
    """
    methods = (
        ("project_state", "action_values")
        if getattr(critic, "table", False)
        else ("project_state",)
    )
    if not _has_obs(critic, methods):
        return ()
    return (*spaces.keys("policy"), *spaces.keys("mask"), *spaces.keys("critic"))


def _has_obs(head: nn.Module, methods: tuple[str, ...]) -> bool:
    having = [m for m in methods if "obs" in inspect.signature(getattr(head, m)).parameters]
    if having and len(having) < len(methods):
        lacking = next(m for m in methods if m not in having)
        raise ConfigError(
            f"{type(head).__name__}.{lacking}: {having[0]} takes `obs` and {lacking} does not, so "
            "their inputs would differ; give both of them the argument, or neither"
        )
    return bool(having)
