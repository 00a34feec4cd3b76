"""cartpole-position, cartpole-velocity: a scripted controller that knows the whole state, with
random actions.

Cloning needs memory, because the actions depend on what the observations do not contain.
"""

from typing import Any

from collector.builtin import CARTPOLE_POSITION_ID, CARTPOLE_VELOCITY_ID
from collector.builtin.noisy import EpsilonGreedy


def expert_push(state: Any) -> int:
    """The push (0 left, 1 right) for position, velocity, angle and angular velocity; without noise
    it reaches 500 steps."""
    position, velocity, angle, angular_velocity = (float(value) for value in state)
    return int(0.1 * position + 0.2 * velocity + angle + 0.3 * angular_velocity > 0)


class CartPolePositionNoisy(EpsilonGreedy):
    """Each episode draws the probability of a random action from 0.2, 0.6, 0.8 and 1.

    observations float32 (N, 2), actions int32 (N,) in 0..1. An episode ends with a terminal (the
    pole fell) or, at 500 steps, a timeout.
    """

    env_id = CARTPOLE_POSITION_ID
    noise = (0.2, 0.6, 0.8, 1.0)
    about = "CartPole-v1 without velocities (memory); a scripted controller with noise"

    def greedy(self, observation: Any) -> int:  # noqa: ARG002
        return expert_push(self.env.state)


class CartPoleVelocityNoisy(CartPolePositionNoisy):
    """The same episodes, of which the velocities are recorded."""

    env_id = CARTPOLE_VELOCITY_ID
    about = "CartPole-v1 without positions (memory); a scripted controller with noise"
