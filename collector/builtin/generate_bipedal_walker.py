"""bipedal-walker-noisy: gymnasium's walking heuristic with Gaussian noise. Needs Box2D."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.builtin.noisy import GaussianNoise, Uniform


class BipedalWalkerNoisy(GaussianNoise):
    """The standard deviation of the noise is uniform in 0 … 0.5.

    observations float32 (N, 24), actions float32 (N, 4) in [-1, 1]. An episode ends with a terminal
    (it fell, or reached the end) or, at 1600 steps, a timeout. With the default number of steps the
    mean return is about -93, the best 10% of episodes exceed about -62, and the best one has 316;
    without noise the mean is about 50. The heuristic has a state that the observations do not
    contain: which leg moves, and what it does.
    """

    env_id = "BipedalWalker-v3"
    algorithm = "heuristic+gaussian"
    package = "gymnasium[box2d]"
    noise = Uniform(0.0, 0.5)
    about = "BipedalWalker-v3; a heuristic with noise (needs Box2D)"

    def __init__(self, env: Any) -> None:
        from gymnasium.envs.box2d.bipedal_walker import BipedalWalkerHeuristics

        super().__init__(env)
        self._new_heuristic: Any = BipedalWalkerHeuristics

    def begin(self, rng: np.random.Generator) -> None:
        super().begin(rng)
        self._heuristic = self._new_heuristic()

    def mean_action(self, observation: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.asarray(self._heuristic.step_heuristic(observation), np.float64)
