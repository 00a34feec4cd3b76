"""tmaze-passive: offline data of the passive T-Maze with a random turn at the junction.

Behaviour cloning reaches the goal in about half of the episodes, with or without memory. A success
rate of 1.0 needs both memory of the cue and learning from rewards. This is a minimal test of memory
in offline RL.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.builtin import TMAZE_PASSIVE_ID
from collector.builtin.generate import Behaviour
from collector.builtin.tmaze import DOWN, RIGHT, UP


class TMazePassiveCoin(Behaviour):
    """Moves right, with on average one random action in two episodes; turns up or down at random.

    observations float32 (N, 2), actions int32 (N,) in 0..3. Episodes have corridor_length + 1 steps
    and end with a terminal. With the defaults: 2000 episodes, mean return about 0.33.
    """

    env_id = TMAZE_PASSIVE_ID
    algorithm = "walk-right-toss-coin"
    steps = 42_000
    about = "the passive T-Maze; moves right, then turns at random"

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._noise_probability = 0.5 / env.corridor_length

    def act(self, observation: NDArray[np.float32]) -> int:
        if observation[0] == 1.0:
            return UP if self._rng.random() < 0.5 else DOWN
        if self._rng.random() < self._noise_probability:
            return int(self._rng.integers(4))
        return RIGHT
