"""Gradient accumulation: the micro-batches of a batch make the same update as the whole batch.

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
from amago_model.running_statistics import SelfUpdating


@torch.no_grad()
def update_statistics(agent: Agent, batch: Batch) -> None:
    """Update all statistics like a forward pass over the whole batch, without gradients.

    Afterwards, with frozen statistics and with the counts and noise of the whole batch, the losses
    and gradients of the micro-batches sum to those of the whole batch. Dropout and image
    augmentation differ: each micro-batch draws new random numbers.

    Raises:
        ConfigError: a custom head has statistics, which this function does not update.
    """
    _reject_statistics("CustomConfig.actor", agent.policy.actor)
    critics = agent.critics
    if critics is not None:
        _reject_statistics("CustomConfig.critic", critics.online)
    transitions = agent.encode(batch)
    c = agent.config.losses
    batch_norm = c.filter.kind != "behavior_cloning" and c.filter.batch_norm
    mean_abs_q = c.dpg_weight > 0 and c.dpg_normalization == "mean_abs_q"
    if critics is None or not (critics.popart.enabled or batch_norm or mean_abs_q):
        return
    critics.popart.update(agent.td_target(batch, transitions), transitions.critic_mask)
    if not (batch_norm or mean_abs_q):
        return
    evaluation = agent.evaluate(transitions)
    agent.policy_values(evaluation, transitions)
    agent.filter(
        agent.filter.advantage(evaluation, critics.popart, batch, transitions), transitions.bc_mask
    )


def _reject_statistics(setting: str, head: nn.Module) -> None:
    for path, part in head.named_modules():
        if isinstance(part, SelfUpdating):
            raise ConfigError(
                f"{setting}: gradient accumulation does not update the statistics {path!r} of "
                f"{type(head).__name__}; set optimizer.accumulate=1, or move the statistics to an "
                "encoder"
            )
