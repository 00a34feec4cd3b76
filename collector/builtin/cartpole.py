"""CartPolePosition, CartPoleVelocity: gymnasium's CartPole-v1 with half of its observation.

    CartPolePosition   [position of the cart, angle of the pole]
    CartPoleVelocity   [velocity of the cart, angular velocity of the pole]
    rest               as CartPole-v1: 2 actions, reward 1 per step, at most 500 steps

A policy without memory keeps the pole up for some 40 steps by positions. One that remembers a
single observation knows the velocities and reaches 500; from velocities, positions are a sum over
the episode. Tasks of Wierstra et al. (ICANN 2007) and of POPGym.
"""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.typing import NDArray


class CartPolePosition(CartPoleEnv):
    """Observation: float32 (2,). The hidden state is `state`: position, velocity, angle, angular
    velocity. The time limit of 500 steps is registered with the environment."""

    metadata: dict[str, Any] = {**CartPoleEnv.metadata, "partially_observable": True}
    observed: ClassVar[slice] = slice(0, None, 2)
    """Which of the four numbers of the state are observed."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        limits = self.observation_space
        assert isinstance(limits, spaces.Box)
        low, high = limits.low[self.observed], limits.high[self.observed]
        self.observation_space = spaces.Box(low, high, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs[self.observed].copy(), info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return obs[self.observed].copy(), float(reward), terminated, truncated, info


class CartPoleVelocity(CartPolePosition):
    """Observation: float32 (2,), the velocities."""

    observed = slice(1, None, 2)
