"""Advantage filters: advantages [N, G] to the BC weights [N, G] of the data's actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amago_model.config import AgentConfig, FilterConfig, LeakyReLUFilterConfig
from amago_model.data.batch import Batch
from amago_model.data.transitions import Transitions, has_next_value, multiplied_reward
from amago_model.heads.popart import PopArt
from amago_model.losses.critic_evaluation import CriticEvaluation
from amago_model.losses.td_targets import n_step_sums
from amago_model.registry import custom_module
from amago_model.running_statistics import BatchMoments


def binary_filter(advantage: Tensor, threshold: float) -> Tensor:
    """1 where the advantage exceeds the threshold, else 0."""
    return (advantage > threshold).to(advantage.dtype)


def exp_filter(advantage: Tensor, beta: float, largest: float) -> Tensor:
    """exp(beta x advantage), at most `largest` (AWAC, CRR-exp, IQL)."""
    return torch.exp(beta * advantage).clamp(max=largest)


def leaky_relu_filter(advantage: Tensor, c: LeakyReLUFilterConfig) -> Tensor:
    """A leaky ReLU of the advantage: slope 1 / beta above the threshold and slope / beta below it,
    at_zero at advantage 0 (if 0 is below the threshold), clipped to [smallest, largest]; add_step
    then adds 1 above the threshold."""
    bias = c.at_zero + c.slope * c.threshold / c.beta
    line = bias + F.leaky_relu((advantage - c.threshold) / c.beta, c.slope)
    weight = line.clamp(c.smallest, c.largest)
    return weight + binary_filter(advantage, c.threshold) if c.add_step else weight


def advantage_weight(advantage: Tensor, config: FilterConfig) -> Tensor:
    """Weights by the built-in filter of the config; the shape is that of the advantages."""
    match config.kind:
        case "binary":
            return binary_filter(advantage, config.threshold)
        case "exp":
            return exp_filter(advantage, config.beta, config.largest)
        case "leaky_relu":
            return leaky_relu_filter(advantage, config)
        case "behavior_cloning":
            return torch.ones_like(advantage)


def normalized_advantage(advantage: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Advantages [N, G] standardised by the mean and variance [G] of each discount."""
    return (advantage - mean) / (variance + 1e-10).sqrt()


def n_step_values(reward: Tensor, usable: Tensor, value: Tensor, gammas: Tensor, n: int) -> Tensor:
    """Values of n actions of the data: n - 1 rewards, then the value of the n-th action.

        y[t] = r[t] + g r[t+1] + ... + g^(n-1) q[t+n-1]

    Shapes: reward, usable [B, T], value q [B, T, G] of each action alone, gammas [G] -> [B, T, G].
    Fewer actions before an unusable transition and at the end of the window.
    """
    return n_step_sums(value, reward, gammas, usable[:, :-1] & usable[:, 1:], n)


class AdvantageFilter(nn.Module):
    """The built-in or custom filter of a config: maps advantages to BC weights."""

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        self.config, custom = config.losses.filter, config.custom
        self.weight: Callable[[Tensor], Tensor] = (
            custom_module(custom, "filter", custom.filter)
            if custom.filter
            else partial(advantage_weight, config=self.config)
        )
        self.moments = BatchMoments()
        self.multiplier = config.losses.reward_multiplier
        self.register_buffer("gammas", torch.tensor(config.losses.gammas), persistent=False)

    gammas: Tensor

    def advantage(
        self, evaluation: CriticEvaluation, popart: PopArt, batch: Batch, tr: Transitions
    ) -> Tensor:
        """The filter's input [N, G], without gradient; the setting `advantage` gives its unit."""
        c = self.config
        if c.kind == "behavior_cloning":
            return popart.normalized_difference(evaluation.advantage)
        if c.n_step == 1:
            advantage = evaluation.advantage
            return advantage if c.advantage == "raw" else popart.normalized_difference(advantage)
        usable = has_next_value(batch) & batch.action_known
        reward = multiplied_reward(batch, self.multiplier)
        q = tr.unflatten(popart.to_return(evaluation.action_value))
        values = tr.flatten(n_step_values(reward, usable, q, self.gammas, c.n_step))
        advantage = popart.normalize(values) - popart.to_normalized(evaluation.policy_value)
        return popart.output_difference(advantage) if c.advantage == "raw" else advantage

    def forward(self, advantage: Tensor | None, mask: Tensor) -> Tensor | None:
        """Advantages [N, G] -> weights [N, G]; None without a filter or without advantages.

        With `batch_norm` the statistics are those of the transitions in mask [N].
        """
        if self.config.kind == "behavior_cloning" or advantage is None:
            return None
        if self.config.batch_norm:
            advantage = normalized_advantage(advantage, *self.moments(advantage, mask))
        return self.weight(advantage)
