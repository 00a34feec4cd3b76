"""tmaze-passive: offline data of the T-Maze in which the walk is right and the turn is a coin toss.

Copying it earns 0.5 of the goal with any memory; only an agent that both remembers the cue and
learns from reward earns 1.0. The smallest offline test of memory.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.builtin import TMAZE_PASSIVE_ID
from collector.builtin.generate import Behaviour
from collector.builtin.tmaze import DOWN, RIGHT, UP


class TMazePassiveCoin(Behaviour):
    """Walks right but for one random action in two episodes; tosses a coin at the junction.

    observations float32 (N, 2), actions int32 (N,) in 0..3; episodes of corridor_length + 1 steps
    end in a terminal. With the defaults: 2000 episodes, mean return about 0.33.
    """

    env_id = TMAZE_PASSIVE_ID
    algorithm = "walk-right-toss-coin"
    steps = 42_000
    about = "the passive T-Maze; walks right, then turns at random"

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._noise_probability = 0.5 / env.corridor_length

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, observation: NDArray[np.float32]) -> int:
        if observation[0] == 1.0:
            return UP if self._rng.random() < 0.5 else DOWN
        if self._rng.random() < self._noise_probability:
            return int(self._rng.integers(4))
        return RIGHT
