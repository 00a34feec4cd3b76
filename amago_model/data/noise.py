"""The random numbers of an update: all drawn at once, as standard normal noise.

So padding, micro-batches, several processes and a second pass over a batch change no draw.
Letters: B windows, T transitions, N of them, G discounts, C critics, K action samples, W noise of
one sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amago_model.config import AgentConfig


@dataclass(frozen=True)
class UpdateNoise:
    """Shapes of the noise of one transition, by purpose."""

    target: tuple[int, int, int]
    """K_c, G, W: samples of its next action, for its target."""
    policy: tuple[int, int, int]
    """K_a, G, W: samples of the policy's action."""
    ensemble: tuple[int, int]
    """C, G: the order of critics, which picks those of each target."""

    @classmethod
    def of(cls, config: AgentConfig, *, width: int) -> UpdateNoise:
        """width: W, which is 0 where actions are not sampled."""
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
        """[B, T, width], standard normal.

        In one draw, time first: padding on the right changes nothing for the transitions before it
        (on a CPU), nor does asking for metrics.
        """
        size = n_windows, sum(self.sizes)
        # A CPU draws sixteen numbers at a time, and the last sixteen of a draw in another way.
        drawn = -(-math.prod(size) // 16) * 16
        noise = torch.randn((n_transitions, drawn), device=device)
        out: Tensor = noise[:, : math.prod(size)].unflatten(1, size).transpose(0, 1)
        return out

    def split(self, noise: Tensor) -> dict[str, Tensor]:
        """[N, width] -> by purpose: [K_c, N, G, W], [K_a, N, G, W] and [C, N, G]."""
        shapes = {
            "target_noise": self.target,
            "policy_noise": self.policy,
            "ensemble_noise": self.ensemble,
        }
        parts = zip(shapes.items(), noise.split(self.sizes, dim=1), strict=True)
        return {name: part.unflatten(1, shape).transpose(0, 1) for (name, shape), part in parts}
