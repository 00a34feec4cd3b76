"""swimmer-noisy, reacher-noisy, inverted-double-pendulum-noisy and pusher-noisy: MuJoCo.

Four hand-written controllers with Gaussian noise, whose standard deviation each episode draws: a
clock, two arms that are pulled towards something, and linear state feedback.
"""

import numpy as np
from numpy.typing import NDArray

from collector.builtin.noisy import GaussianNoise, Uniform

_FREQUENCY, _LAG = 0.9, 1.7  # of the swimmer's waves, in Hz and radians
_UPPER_ARM, _FOREARM = 0.1, 0.11  # of the reacher, in metres
# Of the pendulum's cart, first and second angle, and their velocities. An LQR of the linearised
# model, with the costs 1, 10, 10, 0.1, 0.1, 0.1 and 10 for the action.
_GAINS = (0.12, 1.0, 4.12, 0.19, 0.59, 0.61)


class SwimmerNoisy(GaussianNoise):
    """Two sine waves, the second behind the first, whatever the observation is: the deviation is
    uniform in 0.1 … 1.

    observations float32 (N, 8), actions float32 (N, 2) in [-1, 1]; every 1000th row is a timeout.
    The waves alone swim backwards, with a return of about -23; with noise the swimmer turns, and
    its direction is chance. With the default number of steps the mean return is about -2 and the
    best 10% of episodes exceed about 32.
    """

    env_id = "Swimmer-v5"
    package = "gymnasium[mujoco]"
    noise = Uniform(0.1, 1.0)
    about = "Swimmer-v5; two sine waves with noise (needs MuJoCo)"

    def begin(self, rng: np.random.Generator) -> None:
        super().begin(rng)
        self._time = 0.0

    def mean_action(self, observation: NDArray[np.float32]) -> NDArray[np.float64]:  # noqa: ARG002
        self._time += self.env.dt
        phase = 2 * np.pi * _FREQUENCY * self._time
        return np.sin([phase, phase - _LAG])


class ReacherNoisy(GaussianNoise):
    """The transpose of the arm's Jacobian pulls the fingertip to the target: the deviation is 0.1,
    0.5 or 1.

    observations float32 (N, 10), actions float32 (N, 2) in [-1, 1]; every 50th row is a timeout.
    With the default number of steps the mean return is about -47 and the best 10% of episodes
    exceed about -15; without noise the best 10% exceed about -7, but the mean is about -33, since
    the arm oscillates around some targets.
    """

    env_id = "Reacher-v5"
    steps = 60_000
    package = "gymnasium[mujoco]"
    noise = (0.1, 0.5, 1.0)
    about = "Reacher-v5; an arm pulled to the target, with noise (needs MuJoCo)"

    def mean_action(self, observation: NDArray[np.float32]) -> NDArray[np.float64]:
        cosine, cosine2, sine, sine2 = observation[:4]
        velocities, from_target = observation[6:8], observation[8:10]
        forearm_x = _FOREARM * (cosine * cosine2 - sine * sine2)
        forearm_y = _FOREARM * (sine * cosine2 + cosine * sine2)
        x, y = _UPPER_ARM * cosine + forearm_x, _UPPER_ARM * sine + forearm_y
        jacobian = np.array([[-y, -forearm_y], [x, forearm_x]], np.float64)
        return -60.0 * jacobian.T @ from_target - 0.02 * velocities


class InvertedDoublePendulumNoisy(GaussianNoise):
    """Linear state feedback: the deviation is uniform in 0.1 … 0.5.

    observations float32 (N, 9), actions float32 (N, 1) in [-1, 1]. An episode ends with a terminal
    (the pendulum fell) or, at 1000 steps, a timeout. With the default number of steps the mean
    return is about 1900 and the best 10% of episodes exceed about 9340; without noise it is 9360.
    """

    env_id = "InvertedDoublePendulum-v5"
    steps = 60_000
    package = "gymnasium[mujoco]"
    noise = Uniform(0.1, 0.5)
    about = "InvertedDoublePendulum-v5; linear state feedback with noise (needs MuJoCo)"

    @staticmethod
    def mean_action(observation: NDArray[np.float32]) -> NDArray[np.float64]:
        state = observation[[0, 1, 2, 5, 6, 7]]  # position, sines of the angles, velocities
        return -np.array([np.dot(_GAINS, state)])


class PusherNoisy(GaussianNoise):
    """The transpose of the arm's Jacobian pulls the tip to the object, which it moves little: the
    deviation is uniform in 0.1 … 1.

    observations float32 (N, 23), actions float32 (N, 7) in [-2, 2]; every 100th row is a timeout.
    With the default number of steps the mean return is about -65 and the best 10% of episodes
    exceed about -40, the mean of the policy without noise.
    """

    env_id = "Pusher-v5"
    steps = 60_000
    package = "gymnasium[mujoco]"
    noise = Uniform(0.1, 1.0)
    about = "Pusher-v5; an arm pulled to the object, with noise (needs MuJoCo)"

    def mean_action(self, observation: NDArray[np.float32]) -> NDArray[np.float64]:
        import mujoco  # only here, as it may not be installed

        model, data = self.env.model, self.env.data
        jacobian = np.zeros((3, model.nv))
        mujoco.mj_jacBody(model, data, jacobian, None, model.body("tips_arm").id)
        arm = jacobian[:, :7]
        velocities, tip, target = observation[7:14], observation[14:17], observation[17:20]
        return arm.T @ (6.0 * (target - tip) - 2.0 * arm @ velocities)
