"""The T-Maze: a cue tells where to turn at the end of a long corridor.

Passive: the cue is the first observation.

                          (H, +1)
    (0,0) (1,0)  ...  (H, 0)          t        0            1 .. H-1   H              H+1
                          (H, -1)     obs      [0, cue]     [0, 0]     [1, y]         [1, y]

Active: the cue is one step to the left of the start, and is seen at the first visit only.

    (0,0) (1,0) (2,0)  ...  (H+1, 0)      (H+1, ±1)      1 step left, H + 1 right, 1 up or down
     cue  start

Only one observation contains the cue. The highest success rate is 0.5 without memory and
1.0 with memory, for any corridor length H. Dynamics after AMAGO (Grigsby et al., ICLR 2024), the
task after Bakker (NeurIPS 2001) and Ni et al. (NeurIPS 2023).
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.drawing import RENDERS, DrawsMap, put

RIGHT, UP, LEFT, DOWN = range(4)
_MOVES = {RIGHT: (1, 0), UP: (0, 1), LEFT: (-1, 0), DOWN: (0, -1)}


class TMazePassive(DrawsMap, gymnasium.Env[NDArray[np.float32], np.int64]):
    """A corridor of `corridor_length` moves to the right, then one move up or down.

    Observation: float32 (2,): [1 if at the junction or in an arm else 0, y]. The first observation
    is [0, cue] instead; the cue is +1 (up) or -1 (down). Actions: 0 right, 1 up, 2 left, 3 down. A
    move into a wall does not change the position.

    Reward: at the last step `goal_reward` if the agent is in the arm of the cue, else 0; at any
    other step `penalty` unless the action is "right". `penalty=None` means -1/corridor_length.
    `penalty=0` makes the reward sparse and exploration hard.

    An episode always has corridor_length + 1 steps and ends with `terminated` (never `truncated`).
    Reaching the goal takes all of them, so one wrong step in the corridor makes it unreachable.
    `info["log/success"]` is 1 or 0 at the last step.
    """

    metadata: dict[str, Any] = {**RENDERS, "partially_observable": True}
    cue_distance: ClassVar[int] = 0
    """Steps from the start to the cue."""

    def __init__(
        self,
        corridor_length: int = 20,
        penalty: float | None = None,
        goal_reward: float = 1.0,
        render_mode: str | None = None,
    ) -> None:
        require(corridor_length >= 1, "corridor_length", "at least 1", corridor_length)
        self.corridor_length = corridor_length
        self.penalty = -1.0 / corridor_length if penalty is None else penalty
        self.goal_reward = goal_reward
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(4)
        self._junction = self.cue_distance + corridor_length
        self._steps = corridor_length + 1 + 2 * self.cue_distance
        self._x = self._y = self._goal_y = 0
        self._t = self._steps
        self._cue_seen = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._x, self._y, self._t, self._cue_seen = self.cue_distance, 0, 0, False
        self._goal_y = 1 if self.np_random.integers(2) else -1
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._t >= self._steps)
        self._t += 1
        self._move(int(action))
        if self._t < self._steps:
            fine = action == RIGHT or self._t <= self.cue_distance
            return self._observe(), 0.0 if fine else self.penalty, False, False, {}
        success = self._y == self._goal_y
        info = {"log/success": float(success)}
        return self._observe(), self.goal_reward if success else 0.0, True, False, info

    def _move(self, action: int) -> None:
        dx, dy = _MOVES[action]
        x, y = self._x + dx, self._y + dy
        in_corridor = y == 0 and 0 <= x <= self._junction
        in_arm = x == self._junction and abs(y) == 1
        if in_corridor or in_arm:
            self._x, self._y = x, y

    def draw(self) -> list[str]:
        """`DrawsMap.draw`: the arms above and below the junction, and the cue in a corner above or
        below its place, where the agent does not see it."""
        length = self._junction + 1
        wall = "#" * (length - 1)
        rows = [wall + ("G" if self._goal_y == y else ".") for y in (1, -1)]
        rows = ["#" * length, rows[0], "." * length, rows[1], "#" * length]
        rows = put(rows, (2 - self._goal_y, 0), "?")
        return put(rows, (2 - self._y, self._x), "A")

    def _observe(self) -> NDArray[np.float32]:
        if self._x == 0 and not self._cue_seen:
            self._cue_seen = True
            return np.array([0, self._goal_y], np.float32)
        if self._x == self._junction:
            return np.array([1, self._y], np.float32)
        return np.zeros(2, np.float32)


class TMazeActive(TMazePassive):
    """A TMazePassive whose cue must be fetched: it is one step to the left of the start.

    An episode has corridor_length + 3 steps: to the cue, back, through the corridor, and a turn.
    No action is punished in the first step.
    """

    cue_distance = 1
