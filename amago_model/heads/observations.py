"""Observations for heads of one's own that ask for them, beside the state.

An actor asks by an argument `obs` of both `forward` and `acting`, a critic by one of `state_part`
and of `action_values`, as far as it is asked by these:

    def forward(self, state, legal=None, *, obs):   # obs[key] [N, *shape], as the data have them
    def acting(self, state, legal=None, *, obs):

An actor is shown what there is when it acts: the roles policy and mask. A critic sees the role
critic besides. The heads that are built in ask for nothing.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from amago_model.config import Spaces
from amago_model.data.batch import Batch, only_valid
from amago_model.data.transitions import Shown, ends, row_before
from amago_model.errors import ConfigError


def keys_for_actor(actor: nn.Module, spaces: Spaces) -> list[str]:
    """The observations that an actor is to be shown; none unless it asks.

    Raises:
        ConfigError: it asks when learning and not when acting, or the other way round.
    """
    if not _asks(actor, ("forward", "acting")):
        return []
    return spaces.keys("policy") + spaces.keys("mask")


def keys_for_critic(critic: nn.Module, spaces: Spaces) -> list[str]:
    """The observations that a critic ensemble is to be shown; none unless it asks.

    Raises:
        ConfigError: one of the ways to ask it for values takes them and another does not.
    """
    ways = ("state_part", "action_values") if getattr(critic, "table", False) else ("state_part",)
    if not _asks(critic, ways):
        return []
    return [*spaces.keys("policy"), *spaces.keys("mask"), *spaces.keys("critic")]


def shown(batch: Batch, keys: list[str], place: torch.Tensor | None) -> tuple[Shown, Shown]:
    """Of the rows before and after each transition, zeros in those that were never recorded.

    `place` [N]: the transitions wanted, see `places`; None takes all of them.
    """
    if not keys:
        return {}, {}
    row = row_before(place, batch)
    valid = ends(row, batch.row_mask, batch.row_mask)
    both = {key: ends(row, batch.obs[key], batch.obs[key]) for key in keys}
    before, after = ({key: only_valid(x[i], valid[i]) for key, x in both.items()} for i in (0, 1))
    return {"obs": before}, {"obs": after}


def _asks(head: nn.Module, methods: tuple[str, ...]) -> bool:
    asking = [m for m in methods if "obs" in inspect.signature(getattr(head, m)).parameters]
    if asking and len(asking) < len(methods):
        silent = next(m for m in methods if m not in asking)
        raise ConfigError(
            f"{type(head).__name__}.{silent}: {asking[0]} takes `obs` and {silent} does not, so "
            "they would not see the same; give both of them the argument, or neither"
        )
    return bool(asking)
