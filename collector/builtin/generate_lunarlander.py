"""lunarlander-noisy and lunarlander-discrete-noisy: gymnasium's landing heuristic with noise.

Each episode draws a noise level. The higher it is, the more often a random action replaces the
heuristic for a few steps. Imitating all episodes crashes; the better episodes land. Only this
generator needs Box2D.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.builtin.generate import Behaviour

_NOISE_LEVELS = (0.1, 0.3, 0.6, 1.0)
_LEVEL_PROBABILITIES = (0.1, 0.25, 0.35, 0.3)
_SLIP_STEPS = (2, 6)  # minimum and maximum number of steps with the same random action


class LunarLanderNoisy(Behaviour):
    """At each step, with probability 0.35 x level, a uniform random action starts for 2 to 6 steps.

    observations float32 (N, 8), actions float32 (N, 2) in [-1, 1]. An episode ends with a terminal
    (landed, crashed) or, at 1000 steps, a timeout. With the default number of steps the mean return
    is about +30 and the best 10% of episodes exceed about 277, the return of the heuristic without
    noise.
    """

    env_id = "LunarLanderContinuous-v3"
    algorithm = "heuristic+eps"
    package = "gymnasium[box2d]"
    about = "LunarLanderContinuous-v3; a heuristic with noise (needs Box2D)"

    def __init__(self, env: Any) -> None:
        from gymnasium.envs.box2d.lunar_lander import heuristic  # needs Box2D

        super().__init__(env)
        self._heuristic: Any = heuristic

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        level = float(rng.choice(_NOISE_LEVELS, p=_LEVEL_PROBABILITIES))
        self._slip_probability = 0.35 * level
        self._held_steps = 0
        self._held_action: Any = None

    def act(self, observation: NDArray[np.float32]) -> Any:
        if self._held_steps == 0 and self._rng.random() < self._slip_probability:
            self._held_steps = int(self._rng.integers(*_SLIP_STEPS, endpoint=True))
            self._held_action = self._random_action()
        if self._held_steps > 0:
            self._held_steps -= 1
            return self._held_action
        return self._heuristic_action(observation)

    def _random_action(self) -> Any:
        return self._rng.uniform(-1.0, 1.0, 2).astype(np.float32)

    def _heuristic_action(self, observation: NDArray[np.float32]) -> Any:
        action = np.clip(self._heuristic(self.env, observation), -1.0, 1.0)
        return np.asarray(action, np.float32)


class LunarLanderDiscreteNoisy(LunarLanderNoisy):
    """The same with actions int32 (N,) in 0..3. With the default number of steps the mean return is
    about -40, and the best 10% of episodes exceed about 40; the heuristic without noise has about
    240, and the most frequent action of each state is much better than the data."""

    env_id = "LunarLander-v3"
    about = "LunarLander-v3 with 4 actions; a heuristic with noise (needs Box2D)"

    def _random_action(self) -> Any:
        return int(self._rng.integers(4))

    def _heuristic_action(self, observation: NDArray[np.float32]) -> Any:
        return int(self._heuristic(self.env, observation))
