"""gridworld-random, recall-random and the bandits: random actions, in tasks where rewards tell all.

Cloning these behaviours gives a random policy. Few of the grid's episodes reach the goal, Recall
needs memory, and the bandits' episodes have one step.
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin import BANDIT_ID, GRIDWORLD_ID, RECALL_ID
from collector.builtin.bandit import ARMS, DIMENSIONS
from collector.builtin.generate import Behaviour

_ARM_PROBABILITIES = (0.6, 0.2, 0.1, 0.08, 0.02)


class _UniformActions(Behaviour):
    """Uniformly random discrete actions."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        assert isinstance(env.action_space, spaces.Discrete)
        self._actions = int(env.action_space.n)

    def act(self, observation: NDArray[np.float32]) -> int:  # noqa: ARG002
        return int(self._rng.integers(self._actions))


class GridworldRandom(_UniformActions):
    """observations float32 (N, 2), actions int32 (N,) in 0..3. With the default arguments 17% of
    the episodes reach the goal, and an episode has about 27 steps."""

    env_id = GRIDWORLD_ID
    algorithm = "random"
    about = "a 7 x 7 grid with one rewarded cell; random actions"


class RecallRandom(_UniformActions):
    """observations float32 (N, 6), actions int32 (N,) in 0..3. A quarter of the episodes, of 10
    steps, have the return 1, the others 0."""

    env_id = RECALL_ID
    algorithm = "random"
    steps = 20_000
    about = "Recall, a minimal task for memory; random actions"


class BanditDiscrete(Behaviour):
    """observations float32 (N, 4), actions int32 (N,) in 0..4, drawn without looking at the context
    and with unequal probabilities: the rarest arm has 2%. Mean return about 0.32, the best policy's
    0.8. Every row is a terminal."""

    env_id = BANDIT_ID
    algorithm = "random-unequal"
    steps = 20_000
    about = "one-step episodes, 5 arms, rare arms; random actions"

    def act(self, observation: NDArray[np.float32]) -> int:  # noqa: ARG002
        return int(self._rng.choice(ARMS, p=_ARM_PROBABILITIES))


class BanditContinuous(Behaviour):
    """observations float32 (N, 4), actions float32 (N, 2), uniform in [-1, 1]. Mean return about
    0.2, the best policy's 1. Every row is a terminal."""

    env_id = BANDIT_ID
    env_args = {"continuous": True}
    algorithm = "random"
    steps = 20_000
    about = "one-step episodes, 2 continuous action dimensions; random actions"

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:  # noqa: ARG002
        return self._rng.uniform(-1.0, 1.0, DIMENSIONS).astype(np.float32)
