"""CartPolePosition: gymnasium's CartPole-v1 whose observation lacks both velocities.

    observation   [position of the cart, angle of the pole]
    rest          as CartPole-v1: 2 actions, reward 1 per step, at most 500 steps

A policy without memory keeps the pole up for some 40 steps; one that remembers a single observation
knows the velocities and reaches 500. The task of Wierstra et al. (ICANN 2007) and of POPGym.
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.typing import NDArray


class CartPolePosition(CartPoleEnv):
    """Observation: float32 (2,). The hidden state is `state`: position, velocity, angle, angular
    velocity. The time limit of 500 steps is registered with the environment."""

    metadata: dict[str, Any] = {**CartPoleEnv.metadata, "partially_observable": True}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        limits = self.observation_space
        assert isinstance(limits, spaces.Box)
        self.observation_space = spaces.Box(limits.low[::2], limits.high[::2], dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs[::2].copy(), info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return obs[::2].copy(), float(reward), terminated, truncated, info
