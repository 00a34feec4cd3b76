"""pendulum-stitch and pendulum-mixed: Pendulum-v1 with a random, a weak and an expert controller.

Half of the time the torque is smooth random, a quarter of the time a weak expert with much noise
acts, a quarter of the time an expert with little noise. pendulum-mixed draws the controller once
per episode: a quarter of the episodes are good. pendulum-stitch switches about every 12 steps
within an episode: its episodes have low returns but contain good segments. Behaviour cloning fails
on it, and on the best 10% of its episodes. An algorithm that combines good segments of different
episodes succeeds. The demo uses pendulum-stitch.
"""

import math

import numpy as np
from numpy.typing import NDArray

from collector.builtin.generate import Behaviour

_RANDOM, _WEAK, _EXPERT = range(3)
_KIND_PROBABILITIES = (0.5, 0.25, 0.25)
_SWITCH_PROBABILITY = 1 / 12
_MAX_TORQUE = 2.0


def expert_torque(observation: NDArray[np.float32]) -> float:
    """Swing up by energy control, balance with a PD controller; torque in [-2, 2].

    In units of Pendulum-v1 (m = l = 1, g = 10, a rod with inertia 1/3) the energy is
    w^2/6 + 5 cos(angle), which is 5 when the pendulum is upright and at rest.
    """
    cosine, sine, velocity = (float(value) for value in observation)
    angle = math.atan2(sine, cosine)
    if abs(angle) < 1.0:
        return _clip(-12.0 * angle - 3.0 * velocity)
    if velocity == 0.0:
        return _MAX_TORQUE
    return _clip((5.0 - velocity**2 / 6.0 - 5.0 * cosine) * velocity)


class PendulumStitch(Behaviour):
    """A mixture of controllers: the active one is drawn again with probability 1/12 at every step.

    observations float32 (N, 3), actions float32 (N, 1) in [-2, 2]; every 200th row is a timeout,
    no row is terminal. With the defaults: 500 episodes with a mean return of about -850; the best
    10% exceed about -590. The scripted expert without noise has a return of about -150.
    """

    env_id = "Pendulum-v1"
    algorithm = "scripted-mixture"
    about = "Pendulum-v1; a random, a weak and an expert controller alternate within episodes"

    switch_probability = _SWITCH_PROBABILITY
    """Probability of drawing the controller again, at every step."""

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._random_torque = 0.0
        self._draw_kind()

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        rng = self._rng
        if rng.random() < self.switch_probability:
            self._draw_kind()
        # Updated also while another controller is active, so that it does not restart from 0.
        self._random_torque = 0.9 * self._random_torque + 0.7 * rng.standard_normal()
        if self._kind == _RANDOM:
            torque = self._random_torque
        elif self._kind == _WEAK:
            torque = self._weakness * expert_torque(observation) + rng.standard_normal()
        else:
            torque = expert_torque(observation) + 0.3 * rng.standard_normal()
        return np.array([_clip(torque)], np.float32)

    def _draw_kind(self) -> None:
        self._kind = int(self._rng.choice(3, p=_KIND_PROBABILITIES))
        self._weakness = self._rng.uniform(0.2, 0.6)


class PendulumMixed(PendulumStitch):
    """One controller per episode. With the defaults: 500 episodes with a mean return of about -800;
    the best 10% exceed about -125."""

    about = "Pendulum-v1; each episode has a random, a weak or an expert controller"
    switch_probability = 0.0


def _clip(torque: float) -> float:
    return max(-_MAX_TORQUE, min(_MAX_TORQUE, torque))
