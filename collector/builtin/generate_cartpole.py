"""cartpole-position, cartpole-velocity: a scripted controller that knows the whole state, with
random actions.

Cloning needs memory, because the actions depend on what the observations do not contain.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.builtin import CARTPOLE_POSITION_ID, CARTPOLE_VELOCITY_ID
from collector.builtin.generate import Behaviour

_NOISE_LEVELS = (0.2, 0.6, 0.8, 1.0)


def expert_push(state: Any) -> int:
    """The push (0 left, 1 right) for position, velocity, angle and angular velocity; without noise
    it reaches 500 steps."""
    position, velocity, angle, angular_velocity = (float(value) for value in state)
    return int(0.1 * position + 0.2 * velocity + angle + 0.3 * angular_velocity > 0)


class CartPolePositionNoisy(Behaviour):
    """Each episode draws the probability of a random action from 0.2, 0.6, 0.8 and 1.

    observations float32 (N, 2), actions int32 (N,) in 0..1. An episode ends with a terminal (the
    pole fell) or, at 500 steps, a timeout.
    """

    env_id = CARTPOLE_POSITION_ID
    algorithm = "scripted+eps"
    about = "CartPole-v1 without velocities (memory); a scripted controller with noise"

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._noise = float(rng.choice(_NOISE_LEVELS))

    def act(self, observation: NDArray[np.float32]) -> int:  # noqa: ARG002
        if self._rng.random() < self._noise:
            return int(self._rng.integers(2))
        return expert_push(self.env.state)


class CartPoleVelocityNoisy(CartPolePositionNoisy):
    """The same episodes, of which the velocities are recorded."""

    env_id = CARTPOLE_VELOCITY_ID
    about = "CartPole-v1 without positions (memory); a scripted controller with noise"
