"""frozen-lake-noisy, taxi-noisy and cliff-walking-noisy: the best policy with random actions.

The best action of each state comes from value iteration on the environment's own table of
transitions. Each episode draws the probability of a random action.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.builtin.noisy import EpsilonGreedy, Uniform

_GAMMA = 0.99


def best_actions(transitions: dict[int, dict[int, list[Any]]]) -> NDArray[np.int64]:
    """The best action of each state, for lists of (probability, next state, reward, terminated)
    by state and action, as in gymnasium's `env.P`."""
    states, actions = len(transitions), len(transitions[0])
    following = np.zeros((states, actions, states))  # probabilities of those that go on
    rewards = np.zeros((states, actions))
    for state, choices in transitions.items():
        for action, outcomes in choices.items():
            for probability, next_state, reward, terminated in outcomes:
                rewards[state, action] += probability * reward
                following[state, action, next_state] += probability * (not terminated)
    values, change = np.zeros(states), np.inf
    while change > 1e-12:
        q_values = rewards + _GAMMA * following @ values
        change = np.abs(q_values.max(1) - values).max()
        values = q_values.max(1)
    # Rounded, so that the first of equally good actions is taken whatever the rounding errors.
    best: NDArray[np.int64] = q_values.round(8).argmax(1)
    return best


class _ValueIteration(EpsilonGreedy):
    algorithm = "value-iteration+eps"

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._best_actions = best_actions(env.P)

    def greedy(self, observation: Any) -> int:
        return int(self._best_actions[observation])


class FrozenLakeNoisy(_ValueIteration):
    """The probability of a random action is uniform in 0.3 … 1. The map has 8 x 8 cells.

    observations int32 (N,) in 0..63, actions int32 (N,) in 0..3. The return is 1 at the goal, else
    0. An episode ends with a terminal (the goal or a hole) or, at 100 steps, a timeout. With the
    default number of steps the mean return is about 0.04, without noise about 0.63.
    """

    env_id = "FrozenLake-v1"
    env_args = {"map_name": "8x8"}
    noise = Uniform(0.3, 1.0)
    steps = 40_000
    about = "FrozenLake-v1 with 8 x 8 cells; the best policy with random actions"


class TaxiNoisy(_ValueIteration):
    """The probability of a random action is uniform in 0.1 … 0.9.

    observations int32 (N,) in 0..499, actions int32 (N,) in 0..5. An episode ends with a terminal
    (the passenger has arrived) or, at 200 steps, a timeout. With the default number of steps the
    mean return is about -99 and the best 10% of episodes exceed about 4; without noise the mean is
    about 7.9. Needs gymnasium 1.3.
    """

    env_id = "Taxi-v4"
    noise = Uniform(0.1, 0.9)
    steps = 50_000
    about = "Taxi-v4; the best policy with random actions"


class CliffWalkingNoisy(_ValueIteration):
    """The probability of a random action is uniform in 0.2 … 1.

    observations int32 (N,) in 0..47, actions int32 (N,) in 0..3. An episode ends with a terminal
    (the goal) or, at 100 steps, a timeout. Falling off the cliff costs 100 and leads to the start.
    With the default number of steps the mean return is about -430 and the best 10% of episodes
    exceed about -20; without noise it is -13.
    """

    env_id = "CliffWalking-v1"
    env_args = {"max_episode_steps": 100}  # by default it has no time limit
    noise = Uniform(0.2, 1.0)
    steps = 30_000
    about = "CliffWalking-v1 with 100 steps; the best policy with random actions"
