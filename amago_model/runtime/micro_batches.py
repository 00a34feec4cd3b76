"""Gradient accumulation: the micro-batches of a batch make the update that the whole makes.

update_statistics(agent, batch)
with freeze_statistics(agent):
    for part in parts:
        agent(part, counts=counts)[0].backward()
"""

from __future__ import annotations

import torch
from torch import nn

from amago_model.agent import Agent
from amago_model.data.batch import Batch
from amago_model.errors import ConfigError
from amago_model.running_statistics import Statistics


@torch.no_grad()
def update_statistics(agent: Agent, batch: Batch) -> None:
    """Update every statistic as a forward pass over the whole batch does, without its gradients.

    Afterwards, and while the statistics are frozen, losses and gradients of the parts sum to those
    of the whole: given the whole's counts and noise, and but for dropout and image augmentation,
    which each part draws anew.

    Raises:
        ConfigError: a custom head has statistics: it sees a batch more than once in an update.
    """
    _reject_statistics("CustomConfig.actor", agent.policy.actor)
    critics = agent.critics
    if critics is not None:
        _reject_statistics("CustomConfig.critic", critics.online)
    transitions = agent.encode(batch)
    c = agent.config.losses.filter
    batch_norm = c.kind != "behavior_cloning" and c.batch_norm
    if critics is None or not (critics.popart.enabled or batch_norm):
        return
    critics.popart.update(agent.td_target(batch, transitions), transitions.critic_mask)
    if batch_norm:
        advantage = agent.filter.advantage(agent.evaluate(transitions), critics.popart)
        agent.filter(advantage, transitions.bc_mask)


def _reject_statistics(setting: str, head: nn.Module) -> None:
    for path, part in head.named_modules():
        if isinstance(part, Statistics):
            raise ConfigError(
                f"{setting}: statistics {path!r} of {type(head).__name__} would not change while a "
                "batch comes in parts; do without parts (optimizer.accumulate=1), or keep "
                "statistics in an encoder"
            )
