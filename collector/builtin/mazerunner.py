"""MazeRunner: reach a sequence of goals in a maze, in a given order.

    # # # # # # # # #      Every episode has a new maze. The start S is in a corridor at the
    # 2         #   #      bottom; the goals 1, 2, … are in any other free cells. Only reaching
    #   # # #   #   #      the active goal is rewarded.
    #           # 1 #      observation   row, column, free cells W N E S, time      all in 0 … 1
    #                      goals         [K, 2] row, column; -1 if reached (and in empty slots)
    #     # S #     #      achieved      [2] current row, column: only for hindsight relabeling
    # # # # # # # # #

The rewards are sparse: a random policy hardly ever reaches all goals, but hindsight relabeling can
use the cells that it visits (docs/reference/relabeling.md). After MazeRunner of AMAGO (Grigsby et
al., ICLR 2024), but square, with the goals as a separate observation, and never truncated.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.drawing import RENDERS, DrawsMap, put

WEST, NORTH, EAST, SOUTH, STAY = range(5)
_MOVES = ((0, -1), (-1, 0), (0, 1), (1, 0), (0, 0))
DONE = -1
DENSITY, COMPLEXITY = 0.75, 0.75

Cell = tuple[int, int]
Observation = dict[str, NDArray[Any]]


class MazeRunner(DrawsMap, gymnasium.Env[Observation, np.int64]):
    """A `size` x `size` maze with `min_goals` … `max_goals` goals and a time limit.

    Observation: a Dict of `observation` float32 (7,), `goals` int16 (max_goals, 2) and `achieved`
    int16 (2,), as in the module's docstring. `achieved` has the role `relabel`. The episode's goals
    occupy the last rows of `goals`; a goal that was reached becomes -1, -1.

    Actions: 0 west, 1 north, 2 east, 3 south, 4 stay. A move into a wall does not change the
    position. With `shuffle_actions` every episode has another random order of the actions.

    The reward is 1 for a step that ends on the active goal; then the next goal becomes active. The
    episode ends with `terminated` at the last goal, and also after `time_limit` steps: the time is
    observed, so the time limit is part of the task. In the last step `info["log/success"]` is 1 if
    all goals were reached, else 0, and `info["log/goals"]` is the fraction of goals reached.

    `maze_seed` uses the same maze in all episodes; goals and order of actions still vary.
    `hide_plan` shows only the active goal, in the last row (as hide_plan of the relabelers).
    """

    metadata: dict[str, Any] = {**RENDERS, "roles": {"achieved": "relabel"}}

    def __init__(
        self,
        size: int = 11,
        min_goals: int = 3,
        max_goals: int = 3,
        time_limit: int = 250,
        shuffle_actions: bool = False,
        maze_seed: int | None = None,
        hide_plan: bool = False,
        render_mode: str | None = None,
    ) -> None:
        require(size >= 7 and size % 2 == 1, "size", "an odd number from 7 up", size)
        fine, got = 1 <= min_goals <= max_goals, f"{min_goals}, {max_goals}"
        require(fine, "min_goals, max_goals", "1 <= min_goals <= max_goals", got)
        require(max_goals <= size, "max_goals", f"at most {size}, the maze's size", max_goals)
        require(time_limit >= 1, "time_limit", "at least 1 step", time_limit)
        self.size, self.time_limit = size, time_limit
        self.min_goals, self.max_goals = min_goals, max_goals
        self.shuffle_actions, self.maze_seed, self.hide_plan = shuffle_actions, maze_seed, hide_plan
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {
                "observation": spaces.Box(0.0, 1.0, (7,), np.float32),
                "goals": spaces.Box(DONE, size - 1, (max_goals, 2), np.int16),
                "achieved": spaces.Box(0, size - 1, (2,), np.int16),
            }
        )
        self.action_space = spaces.Discrete(5)
        self.walls: NDArray[np.bool_] = np.ones((size, size), np.bool_)
        """[size, size]: True for a wall."""
        self.goals: list[Cell] = []
        """This episode's goals, in order."""
        self.position: Cell = (size - 2, size // 2)
        self.moves: tuple[Cell, ...] = _MOVES
        """(row, column) change of each action in this episode."""
        self._reached = 0
        self._t = time_limit

    @property
    def active(self) -> Cell | None:
        """The goal to reach next; None when all goals are reached."""
        return self.goals[self._reached] if self._reached < len(self.goals) else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        rng = self.np_random
        of_maze = rng if self.maze_seed is None else np.random.default_rng(self.maze_seed)
        self.walls = random_maze(self.size, of_maze)
        self.position = (self.size - 2, self.size // 2)
        free = [(int(i), int(j)) for i, j in np.argwhere(~self.walls)]
        free.remove(self.position)
        count = int(rng.integers(self.min_goals, self.max_goals + 1))
        self.goals = [free[i] for i in rng.choice(len(free), count, replace=False)]
        order = rng.permutation(5) if self.shuffle_actions else range(5)
        self.moves = tuple(_MOVES[i] for i in order)
        self._reached = self._t = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._t >= self.time_limit or self.active is None)
        self._t += 1
        di, dj = self.moves[int(action)]
        i, j = self.position
        if not self.walls[i + di, j + dj]:
            self.position = (i + di, j + dj)
        reward = float(self.position == self.active)
        self._reached += int(reward)
        success = self.active is None
        terminated = success or self._t >= self.time_limit
        info: dict[str, Any] = {}
        if terminated:
            share = self._reached / len(self.goals)
            info = {"log/success": float(success), "log/goals": share}
        return self._observe(), reward, terminated, False, info

    def draw(self) -> list[str]:
        """`DrawsMap.draw`: the active goal, and paler the others."""
        rows = ["".join("#" if wall else "." for wall in row) for row in self.walls]
        for goal in self.goals:
            rows = put(rows, goal, "G" if goal == self.active else "g")
        return put(rows, self.position, "A")

    def _observe(self) -> Observation:
        i, j = self.position
        n = self.size
        sight = [
            _free_cells(ray)
            for ray in (
                self.walls[i, :j][::-1],
                self.walls[:i, j][::-1],
                self.walls[i, j + 1 :],
                self.walls[i + 1 :, j],
            )
        ]
        clock = self._t / self.time_limit
        goals = np.full((self.max_goals, 2), DONE, np.int16)
        if not self.hide_plan:
            left = self.goals[self._reached :]
            goals[self.max_goals - len(left) :] = np.reshape(left, (-1, 2))
        elif self.active is not None:
            goals[-1] = self.active
        return {
            "observation": np.array([i / n, j / n, *(s / n for s in sight), clock], np.float32),
            "goals": goals,
            "achieved": np.array(self.position, np.int16),
        }


def random_maze(size: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Walls [size, size] of a random maze whose free cells are all connected; `size` is odd.

    Walls grow from random cells with even coordinates, by two cells at a time, to neighbours that
    are still free. Then the four rows above the bottom wall are cleared, and two short walls in the
    lower three of them form the corridor of the start.
    """
    walls = np.zeros((size, size), np.bool_)
    walls[[0, -1], :] = walls[:, [0, -1]] = True
    last = (size - 1) // 2
    for _ in range(int(DENSITY * (size // 2) ** 2)):
        i, j = (2 * int(k) for k in rng.integers(0, last + 1, 2))
        walls[i, j] = True
        for _ in range(int(COMPLEXITY * 5 * 2 * size)):
            near = [
                (i + 2 * di, j + 2 * dj)
                for di, dj in _MOVES[:4]
                if 0 <= i + 2 * di < size and 0 <= j + 2 * dj < size
            ]
            ni, nj = near[int(rng.integers(len(near)))]
            if walls[ni, nj]:
                continue
            walls[ni, nj] = walls[(i + ni) // 2, (j + nj) // 2] = True
            i, j = ni, nj
    middle = size // 2
    walls[size - 5 : size - 1, 1 : size - 1] = False
    walls[size - 4 : size - 1, [middle - 1, middle + 1]] = True
    return walls


def _free_cells(ray: NDArray[np.bool_]) -> int:
    """Number of free cells before the first wall."""
    return int(ray.argmax())
