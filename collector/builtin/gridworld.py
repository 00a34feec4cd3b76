"""Gridworld: an empty square grid whose only reward is at the goal, in a corner.

. . . . . . .        observation   [row, column], each scaled to -1 … 1
. . A . . . .        actions       0 right, 1 down, 2 left, 3 up; a move into the wall stays
. . . . . . .        reward        1 at the goal, else 0
. . . . . . .        end           at the goal (terminated) or after `limit` steps (truncated)
. . . . . . .
. . . . . . .        7 x 7 cells, 30 steps: uniformly random actions reach the goal
. . . . . . G        in 17% of the episodes, the shortest path in all
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.drawing import RENDERS, DrawsMap, put

RIGHT, DOWN, LEFT, UP = range(4)
_MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])


class Gridworld(DrawsMap, gymnasium.Env[NDArray[np.float32], np.int64]):
    """Walk from a random cell to the bottom right corner within `limit` steps.

    Observation: float32 (2,). Actions: Discrete(4). `info["log/success"]` is 1 or 0 at the last
    step. Every cell is within `limit` steps of the goal.
    """

    metadata: dict[str, Any] = RENDERS

    def __init__(self, size: int = 7, limit: int = 30, render_mode: str | None = None) -> None:
        require(size >= 2, "size", "at least 2", size)
        require(limit >= 2 * (size - 1), "limit", f"at least {2 * (size - 1)}", limit)
        self.size, self.limit = size, limit
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(4)
        self._cell = np.zeros(2, np.int64)
        self._t, self._over = 0, True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        # Any cell but the last, which is the goal.
        self._cell = np.array(divmod(int(self.np_random.integers(self.size**2 - 1)), self.size))
        self._t, self._over = 0, False
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._over)
        self._t += 1
        self._cell = np.clip(self._cell + _MOVES[int(action)], 0, self.size - 1)
        success = bool((self._cell == self.size - 1).all())
        truncated = self._t == self.limit and not success
        self._over = success or truncated
        info = {"log/success": float(success)} if self._over else {}
        return self._observe(), float(success), success, truncated, info

    def draw(self) -> list[str]:
        """`DrawsMap.draw`."""
        last = self.size - 1
        rows = put(["." * self.size] * self.size, (last, last), "G")
        return put(rows, (int(self._cell[0]), int(self._cell[1])), "A")

    def _observe(self) -> NDArray[np.float32]:
        return (2.0 * self._cell / (self.size - 1) - 1.0).astype(np.float32)
