"""find-block-noisy: images; the right square is touched, or a random one."""

import numpy as np
from numpy.typing import NDArray

from collector.builtin import FIND_BLOCK_IMAGE_ID
from collector.builtin.generate import Behaviour

_NOISE_LEVELS = (0.2, 0.6, 1.0)


class FindBlockNoisy(Behaviour):
    """Each episode draws the probability of a random touch from 0.2, 0.6 and 1.

    observations uint8 (N, 6, 18, 3), actions int32 (N,) in 0..1. An episode has 5 steps and ends
    with a terminal. The mean return is about 3.5, the best possible one 5.
    """

    env_id = FIND_BLOCK_IMAGE_ID
    algorithm = "oracle+eps"
    steps = 20_000
    about = "FindBlock as one image; an oracle with random actions"

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._noise = float(rng.choice(_NOISE_LEVELS))

    def act(self, observation: NDArray[np.float32]) -> int:  # noqa: ARG002
        if self._rng.random() < self._noise:
            return int(self._rng.integers(self.env.inner.colours))
        return int(self.env.inner.answer)
