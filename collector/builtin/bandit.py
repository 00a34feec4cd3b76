"""Bandit: episodes of one step. The reward depends on the context and the action.

    context x          uniform in [-1, 1]^4, the only observation
    discrete action    Discrete(5); mean reward 0.8 for the best arm of x, 0.2 for the others
    continuous action  Box(-1, 1, (2,)); mean reward 1 - |a - best(x)|^2 / 2, best(x) = tanh(W x)

A uniformly random policy has a mean reward of 0.32 (discrete) or about 0.2 (continuous). The reward
of the discrete task is 0 or 1; that of the continuous task has Gaussian noise.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require_step

CONTEXT, ARMS, DIMENSIONS = 4, 5, 2
BEST, OTHER = 0.8, 0.2  # probability of the reward 1
NOISE = 0.3  # standard deviation of the continuous reward
# The task is the same in every process and version: its weights are drawn from a fixed seed.
_ARM_WEIGHTS = np.random.RandomState(17).standard_normal((ARMS, CONTEXT))
_ACTION_WEIGHTS = np.random.RandomState(12).standard_normal((DIMENSIONS, CONTEXT))


def best_arm(context: NDArray[np.float32]) -> int:
    """The arm with the highest mean reward."""
    return int(np.argmax(_ARM_WEIGHTS @ context))


def best_action(context: NDArray[np.float32]) -> NDArray[np.float32]:
    """The continuous action with the highest mean reward, float32 (2,)."""
    return np.tanh(_ACTION_WEIGHTS @ context).astype(np.float32)


class Bandit(gymnasium.Env[NDArray[np.float32], Any]):
    """A contextual bandit. Every episode is one step and ends with `terminated`; the observation
    after it is 0."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, continuous: bool = False, render_mode: None = None) -> None:
        self.continuous = continuous
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (CONTEXT,), np.float32)
        self.action_space = (
            spaces.Box(-1.0, 1.0, (DIMENSIONS,), np.float32)
            if continuous
            else spaces.Discrete(ARMS)
        )
        self._context: NDArray[np.float32] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._context = self.np_random.uniform(-1.0, 1.0, CONTEXT).astype(np.float32)
        return self._context.copy(), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._context is None)
        assert self._context is not None
        context, self._context = self._context, None
        if self.continuous:
            distance = np.square(action - best_action(context)).sum()
            reward = 1.0 - float(distance) / 2 + NOISE * self.np_random.standard_normal()
        else:
            chance = BEST if int(action) == best_arm(context) else OTHER
            reward = float(self.np_random.random() < chance)
        return np.zeros(CONTEXT, np.float32), reward, True, False, {}
