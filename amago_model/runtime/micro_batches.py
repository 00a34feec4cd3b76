"""Gradient accumulation: the micro-batches of a batch make the update that the whole makes.

update_statistics(agent, parts)
with freeze_statistics(agent):
    for part in parts:
        agent(part, counts=counts)[0].backward()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from amago_model.agent import Agent
from amago_model.data.batch import Batch
from amago_model.errors import ConfigError
from amago_model.running_statistics import (
    Statistics,
    accumulate_statistics,
    freeze_statistics,
    update_in_order,
    update_without_data,
)


@torch.no_grad()
def update_statistics(agent: Agent, parts: Sequence[Batch]) -> None:
    """Update every statistic with a batch that comes in parts, as `forward` does with a whole one.

    Afterwards, and while the statistics are frozen, losses and gradients of the parts sum to those
    of the whole: given the whole's counts and noise, and but for dropout and image augmentation,
    which each part draws anew.

    Raises:
        ConfigError: a custom head has statistics, which would not change.
    """
    _reject_statistics("CustomConfig.actor", agent.policy.actor)
    if agent.critic is not None:
        _reject_statistics("CustomConfig.critic", agent.critic)
    update_without_data(agent)
    policy = agent.policy
    with freeze_statistics(agent):
        update_in_order(
            policy.timestep_encoder,
            lambda: [policy.encode_timesteps(**part.encoder_inputs()) for part in parts],
        )
        update_in_order(
            policy.trajectory_encoder, lambda: [policy.encode_windows(part) for part in parts]
        )
        if agent.critic is not None and agent.privileged_encoder.width:
            privileged = agent.privileged_encoder
            update_in_order(
                privileged, lambda: [privileged(part.obs, part.timestep_mask) for part in parts]
            )
        batch_norm = agent.config.losses.filter_batch_norm
        if agent.critic is None or not (agent.popart.enabled or batch_norm):
            return
        transitions = [agent.encode(part) for part in parts]
        with accumulate_statistics(agent.popart):
            for part, tr in zip(parts, transitions, strict=True):
                if agent.training:
                    agent.popart.update(agent.td_target(part, tr), tr.critic_mask)
        with accumulate_statistics(agent.advantage_moments):
            for tr in transitions if batch_norm else ():
                advantage = agent.advantage(agent.evaluate(tr))
                agent.advantage_moments.update(advantage, tr.bc_mask)


def _reject_statistics(setting: str, head: nn.Module) -> None:
    """Heads see a batch too late for their statistics to wait for all of its parts."""
    for path, part in head.named_modules():
        if isinstance(part, Statistics):
            raise ConfigError(
                f"{setting}: statistics {path!r} of {type(head).__name__} would not change while a "
                "batch comes in parts; do without parts (optimizer.accumulate=1), or keep "
                "statistics in an encoder"
            )
