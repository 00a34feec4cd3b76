"""pendulum-stitch: offline data in which no episode is good but good pieces are everywhere.

Behaviour changes hands about every 12 steps inside an episode: half the time smooth random torque,
a quarter a weak and noisy expert, a quarter a nearly clean one. Copying the data, or its best
tenth, fails; stitching the good pieces together does not. The demo's data.
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
    """Swing up by pumping energy, catch with a PD controller; in [-2, 2].

    In units of Pendulum-v1 (m = l = 1, g = 10, rod of inertia 1/3): energy w^2/6 + 5 cos(angle),
    which is 5 when it stands upright and still.
    """
    cosine, sine, velocity = (float(value) for value in observation)
    angle = math.atan2(sine, cosine)
    if abs(angle) < 1.0:
        return _clip(-12.0 * angle - 3.0 * velocity)
    if velocity == 0.0:
        return _MAX_TORQUE
    return _clip((5.0 - velocity**2 / 6.0 - 5.0 * cosine) * velocity)


class PendulumStitch(Behaviour):
    """The mixture: the active controller is redrawn with probability 1/12 at every step.

    observations float32 (N, 3), actions float32 (N, 1) in [-2, 2]; every 200th row is a timeout,
    no row is terminal. With the defaults: 500 episodes, mean return about -850, best decile above
    about -590, where the scripted expert alone earns about -150.
    """

    env_id = "Pendulum-v1"
    algorithm = "scripted-mixture"
    about = "Pendulum-v1; random, weak and expert torque change hands inside episodes"

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._random_torque = 0.0
        self._draw_kind()

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        rng = self._rng
        if rng.random() < _SWITCH_PROBABILITY:
            self._draw_kind()
        # The random torque walks on while others act, so it does not start from 0 at each switch.
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


def _clip(torque: float) -> float:
    return max(-_MAX_TORQUE, min(_MAX_TORQUE, torque))
