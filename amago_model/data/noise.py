"""The random numbers of an update, drawn at once as standard normal noise.

Drawing them in advance makes them independent of padding, micro-batches, the number of processes
and repeated passes over a batch.
Letters: B windows, T transitions, N of them, G discounts, C critics, K action samples, W noise
width of one sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amago_model.config import AgentConfig


@dataclass(frozen=True)
class UpdateNoise:
    """Shapes of the noise of one transition, by use."""

    target: tuple[int, int, int]
    """K_c, G, W: samples of the next action, for the TD target."""
    policy: tuple[int, int, int]
    """K_a, G, W: samples of the policy's action."""
    ensemble: tuple[int, int]
    """C, G: selects the critics of each TD target."""

    @classmethod
    def of(cls, config: AgentConfig, *, width: int) -> UpdateNoise:
        """The shapes for a config. `width` is W; 0 if actions are not sampled."""
        g, c = len(config.losses.gammas), config.critic
        all_critics = c is None or (c.n_critics_target == c.n_critics and not c.subset_replacement)
        return cls(
            (config.losses.n_actions_in_critic_loss, g, width),
            (config.losses.n_actions_in_actor_loss, g, width),
            (0 if c is None or all_critics else c.n_critics, g),
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return math.prod(self.target), math.prod(self.policy), math.prod(self.ensemble)

    def draw(self, n_windows: int, n_transitions: int, device: torch.device) -> Tensor:
        """Draw noise [B, T, width], standard normal.

        It is drawn at once with time as the first dimension, so that padding on the right (on a
        CPU) and logging metrics do not change the noise of other transitions.
        """
        size = n_windows, sum(self.sizes)
        # torch on a CPU draws blocks of 16 numbers, and the last 16 by another algorithm.
        drawn = -(-math.prod(size) // 16) * 16
        noise = torch.randn((n_transitions, drawn), device=device)
        out: Tensor = noise[:, : math.prod(size)].unflatten(1, size).transpose(0, 1)
        return out

    def split(self, noise: Tensor) -> dict[str, Tensor]:
        """Split noise [N, width] by use: [K_c, N, G, W], [K_a, N, G, W] and [C, N, G]."""
        shapes = {
            "target_noise": self.target,
            "policy_noise": self.policy,
            "ensemble_noise": self.ensemble,
        }
        parts = zip(shapes.items(), noise.split(self.sizes, dim=1), strict=True)
        return {name: part.unflatten(1, shape).transpose(0, 1) for (name, shape), part in parts}
