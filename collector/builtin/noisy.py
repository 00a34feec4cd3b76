"""Scripted policies with random actions, or with Gaussian noise on their actions.

Each episode draws how much: the better episodes are those with less of it.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collector.builtin.generate import Behaviour


class EpsilonGreedy(Behaviour):
    """Each episode draws a probability; with it, an action is uniformly random instead of greedy.

    The actions are int32 (N,).
    """

    algorithm = "scripted+eps"
    epsilon_range: ClassVar[tuple[float, float]]
    """The probability is uniform between these."""

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._epsilon = rng.uniform(*self.epsilon_range)

    def act(self, observation: NDArray[np.float32]) -> int:
        if self._rng.random() < self._epsilon:
            return int(self._rng.integers(self.env.action_space.n))
        return self.greedy(observation)

    @abstractmethod
    def greedy(self, observation: Any) -> int:
        """The action without noise."""


class GaussianNoise(Behaviour):
    """Each episode draws a standard deviation; the sum of action and noise is clipped to the action
    space.

    The actions are float32 (N, A).
    """

    algorithm = "scripted+gaussian"

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._deviation = self.draw_deviation(rng)

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        limits = self.env.action_space
        noise = self._deviation * self._rng.standard_normal(limits.shape)
        action = self.mean_action(observation) + noise
        return np.asarray(np.clip(action, limits.low, limits.high), np.float32)

    @abstractmethod
    def draw_deviation(self, rng: np.random.Generator) -> float:
        """The standard deviation of the noise, for one episode."""

    @abstractmethod
    def mean_action(self, observation: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
        """The action without noise; may lie outside the action space."""
