"""mountaincar-noisy, mountaincar-continuous-noisy and acrobot-noisy: gymnasium's classic control.

Pushing the way that it already moves swings a car, or an arm, ever higher. The policies do so, and
each episode draws how much noise they have: with much of it, few episodes reach the goal.
"""

import numpy as np
from numpy.typing import NDArray

from collector.builtin.noisy import EpsilonGreedy, GaussianNoise, Uniform


class MountainCarNoisy(EpsilonGreedy):
    """Accelerates in the direction of the velocity; the probability of a random action is uniform
    in 0.2 … 1.

    observations float32 (N, 2), actions int32 (N,) in 0..2. Every reward is -1. An episode ends
    with a terminal (the goal) or, at 200 steps, a timeout. With the default number of steps the
    mean return is about -187 and the best 10% of episodes exceed about -156; without noise the
    mean is about -126.
    """

    env_id = "MountainCar-v0"
    noise = Uniform(0.2, 1.0)
    steps = 60_000
    about = "MountainCar-v0; pushes along the velocity, with random actions"

    @staticmethod
    def greedy(observation: NDArray[np.float32]) -> int:
        return 2 if observation[1] > 0 else 0


class MountainCarContinuousNoisy(GaussianNoise):
    """The same with a force of 0.6; the standard deviation of the noise is 0.3, 1 or 3.

    observations float32 (N, 2), actions float32 (N, 1) in [-1, 1]. The reward is 100 at the goal,
    minus a tenth of the squared force in every step. An episode ends with a terminal (the goal) or,
    at 999 steps, a timeout. With the default number of steps the mean return is about 82 and the
    best 10% of episodes exceed about 94.8, as the policy without noise does.
    """

    env_id = "MountainCarContinuous-v0"
    steps = 60_000
    noise = (0.3, 1.0, 3.0)
    about = "MountainCarContinuous-v0; pushes along the velocity, with noise"

    @staticmethod
    def mean_action(observation: NDArray[np.float32]) -> NDArray[np.float64]:
        return 0.6 * np.sign(observation[1:])


class AcrobotNoisy(EpsilonGreedy):
    """Applies the torque along the sum of the second joint's velocity and half of the first one's;
    the probability of a random action is uniform in 0.1 … 1.

    observations float32 (N, 6), actions int32 (N,) in 0..2. Every reward is -1, but 0 at the goal.
    An episode ends with a terminal (the goal) or, at 500 steps, a timeout. With the default number
    of steps the mean return is about -233 and the best 10% of episodes exceed about -107, the mean
    of the policy without noise.
    """

    env_id = "Acrobot-v1"
    noise = Uniform(0.1, 1.0)
    steps = 60_000
    about = "Acrobot-v1; pushes along the velocity, with random actions"

    @staticmethod
    def greedy(observation: NDArray[np.float32]) -> int:
        return 2 if observation[5] + 0.5 * observation[4] > 0 else 0
