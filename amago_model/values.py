"""Values of the actions of the data and of the policy, for data analysis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amago_model.agent import Agent
from amago_model.data.batch import Batch
from amago_model.errors import ConfigError
from amago_model.losses.metrics import mean_and_std


@dataclass(slots=True)
class Values:
    """Values of the actions of the data and of the policy: [B, T, G], as returns in the
    environment's units."""

    q: Tensor
    """Value of the data's action, mean over critics."""
    v: Tensor
    """Value of the policy's actions, mean over critics."""
    advantage: Tensor
    """Input of the advantage filter; see `losses.filter.advantage` for its unit."""
    weight: Tensor
    """Output of the advantage filter."""
    q_std: Tensor
    """Standard deviation of q over critics."""
    v_std: Tensor
    """Standard deviation of v over critics."""
    mask: Tensor
    """[B, T] bool: True where a transition exists and its action is known."""


@torch.no_grad()
def get_values(agent: Agent, batch: Batch) -> Values:
    """Compute the values of a batch in evaluation mode: no dropout, no update of statistics.

    Samples of the policy use torch's global generator.

    Raises:
        ConfigError: the agent has no critic.
        BatchError: a shape does not match the spaces.
    """
    if agent.critics is None:
        raise ConfigError("get_values: the agent has no critic; train an agent with a critic")
    batch.check(agent.spaces)
    popart, was_training = agent.critics.popart, agent.training
    agent.eval()
    try:
        tr = agent.encode(batch)
        evaluation = agent.evaluate(tr)
        advantage = agent.filter.advantage(evaluation, popart, batch, tr)
        weight = agent.filter(advantage, tr.bc_mask)
    finally:
        agent.train(was_training)
    scale = agent.config.losses.reward_multiplier
    q, v = (popart.to_return(x) / scale for x in (evaluation.q, evaluation.v))
    weight = torch.ones_like(advantage) if weight is None else weight
    fields = (*mean_and_std(q), *mean_and_std(v), advantage, weight)
    q, q_std, v, v_std, advantage, weight = (tr.unflatten(x) for x in fields)
    return Values(q, v, advantage, weight, q_std, v_std, tr.unflatten(tr.action_known))
