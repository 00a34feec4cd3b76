"""Scripted policies with random actions, or with Gaussian noise on their actions.

Each episode draws how much: the better episodes are those with less of it.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collector.builtin.generate import Behaviour


class Uniform(NamedTuple):
    """A noise level between two numbers."""

    low: float
    high: float


class Noisy(Behaviour):
    """Each episode draws its level of noise."""

    noise: ClassVar[Uniform | tuple[float, ...]]
    """The levels: all between two, or one of several."""

    def begin(self, rng: np.random.Generator) -> None:
        super().begin(rng)
        of = self.noise
        drawn = rng.uniform(of.low, of.high) if isinstance(of, Uniform) else rng.choice(of)
        self._level = float(drawn)


class EpsilonGreedy(Noisy):
    """The level is a probability; with it, an action is uniformly random instead of greedy.

    The actions are int32 (N,).
    """

    algorithm = "scripted+eps"

    def act(self, observation: NDArray[np.float32]) -> int:
        if self._rng.random() < self._level:
            return int(self._rng.integers(self.env.action_space.n))
        return self.greedy(observation)

    @abstractmethod
    def greedy(self, observation: Any) -> int:
        """The action without noise."""


class GaussianNoise(Noisy):
    """The level is a standard deviation; the noisy action is clipped to the action space.

    The actions are float32 (N, A).
    """

    algorithm = "scripted+gaussian"

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        limits = self.env.action_space
        noise = self._level * self._rng.standard_normal(limits.shape)
        action = self.mean_action(observation) + noise
        return np.asarray(np.clip(action, limits.low, limits.high), np.float32)

    @abstractmethod
    def mean_action(self, observation: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
        """The action without noise; may lie outside the action space."""
