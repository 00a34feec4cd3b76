"""Observations as an additional input of custom heads.

An actor gets them if `forward` and `acting` have an argument `obs`; a critic if `project_state`
(and for table critics `action_values`) has one:

    def forward(self, state, legal=None, *, obs):   # obs[key] [N, *shape], as the data have them
    def acting(self, state, legal=None, *, obs):

Actors get the roles policy and mask, which are also available in acting; critics also get the role
critic. The built-in heads do not use them.
"""

from __future__ import annotations

import inspect

from torch import nn

from amago_model.config import Spaces
from amago_model.errors import ConfigError


def actor_observation_keys(actor: nn.Module, spaces: Spaces) -> tuple[str, ...]:
    """The keys of an actor's observations; empty if it has no argument `obs`.

    Raises:
        ConfigError: only one of `forward` and `acting` has the argument.
    """
    if not _has_obs(actor, ("forward", "acting")):
        return ()
    return (*spaces.keys("policy"), *spaces.keys("mask"))


def critic_observation_keys(critic: nn.Module, spaces: Spaces) -> tuple[str, ...]:
    """The keys of a critic ensemble's observations; empty if it has no argument `obs`.

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
            f"{type(head).__name__}.{lacking}: {having[0]} has an argument `obs`, but {lacking} "
            "has none; add it to both or to neither"
        )
    return bool(having)
