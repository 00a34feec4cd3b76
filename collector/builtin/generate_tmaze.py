"""tmaze-passive: offline data of the T-Maze in which the walk is right and the turn is a coin toss.

Copying it earns 0.5 of the goal with any memory; only an agent that both remembers the cue and
learns from reward earns 1.0. The smallest offline test of memory.
"""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from collector.builtin import TMAZE_PASSIVE_ID
from collector.builtin.generate import Progress, Summary, generate
from collector.builtin.tmaze import DOWN, RIGHT, UP


def tmaze_passive(
    path: str | Path,
    steps: int = 42_000,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    corridor_length: int = 20,
) -> Summary:
    """Write at least `steps` steps (whole episodes of corridor_length + 1) to `path`.

    observations float32 (N, 2), actions int32 (N,) in 0..3; each episode ends in a terminal.
    With the defaults: 2000 episodes, mean return about 0.33.
    """
    kwargs: dict[str, Any] = {"corridor_length": corridor_length}
    return generate(
        path,
        gymnasium.make(TMAZE_PASSIVE_ID, **kwargs),
        _CoinTosser(corridor_length),
        algorithm="walk-right-toss-coin",
        steps=steps,
        seed=seed,
        progress=progress,
        metadata={"environment_kwargs": json.dumps(kwargs)},
    )


class _CoinTosser:
    """Walks right but for one random action in two episodes; tosses a coin at the junction."""

    def __init__(self, corridor_length: int) -> None:
        self._noise_probability = 0.5 / corridor_length

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, observation: NDArray[np.float32]) -> int:
        if observation[0] == 1.0:
            return UP if self._rng.random() < 0.5 else DOWN
        if self._rng.random() < self._noise_probability:
            return int(self._rng.integers(4))
        return RIGHT
