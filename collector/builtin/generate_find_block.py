"""find-block-noisy: images; the right square is touched, or a random one."""

from typing import Any

from collector.builtin import FIND_BLOCK_IMAGE_ID
from collector.builtin.noisy import EpsilonGreedy


class FindBlockNoisy(EpsilonGreedy):
    """Each episode draws the probability of a random touch from 0.2, 0.6 and 1.

    observations uint8 (N, 6, 18, 3), actions int32 (N,) in 0..1. An episode has 5 steps and ends
    with a terminal. The mean return is about 3.5, the best possible one 5.
    """

    env_id = FIND_BLOCK_IMAGE_ID
    algorithm = "oracle+eps"
    noise = (0.2, 0.6, 1.0)
    steps = 20_000
    about = "FindBlock as one image; an oracle with random actions"

    def greedy(self, observation: Any) -> int:  # noqa: ARG002
        return int(self.env.inner.answer)
