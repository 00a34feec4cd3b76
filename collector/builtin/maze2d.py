"""Maze2d: D4RL's task of a point mass in a maze, on gymnasium-robotics' PointMaze.

    observation   float32 [x, y, velocity x, velocity y]; the goal is not observed
    action        float32 [force x, force y] in -1 … 1
    reward        1 within 0.5 of the goal, else 0; the goal is always in the bottom right cell
    end           never; truncated after 600 (medium) or 800 (large) steps

An episode begins in a random cell, at rest. It needs `pip install gymnasium-robotics`.
"""

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from collector.builtin.checks import require
from collector.builtin.drawing import RENDERS, DrawsMap, put

Cell = tuple[int, int]
GOALS: dict[str, Cell] = {"UMaze": (3, 1), "Medium": (6, 6), "Large": (7, 10)}
RADIUS = 0.5


class Maze2d(DrawsMap, gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """One of PointMaze's mazes with a fixed goal. The episode's limit is registered with it."""

    metadata: dict[str, Any] = RENDERS

    def __init__(self, maze: str = "Medium", render_mode: str | None = None) -> None:
        require(maze in GOALS, "maze", ", ".join(GOALS), maze)
        try:
            import gymnasium_robotics
        except ImportError as error:
            raise DependencyNotInstalled(
                f"{error}; for Maze2d: pip install 'stepwell[envs]'"
            ) from error
        gymnasium.register_envs(gymnasium_robotics)
        made: Any = gymnasium.make(
            f"PointMaze_{maze}-v3",
            continuing_task=True,
            reset_target=False,
            disable_env_checker=True,
        )
        self._point = made.unwrapped
        self.render_mode = render_mode
        self.goal_cell = GOALS[maze]
        self.observation_space = spaces.Box(-8.0, 8.0, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.free_cells: list[Cell] = [
            (i, j)
            for i, row in enumerate(made.unwrapped.maze.maze_map)
            for j, cell in enumerate(row)
            if cell != 1
        ]
        maze_to_xy = made.unwrapped.maze.cell_rowcol_to_xy
        self.centres = {c: np.asarray(maze_to_xy(np.array(c))) for c in self.free_cells}
        """The position (x, y) of each free cell's centre."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        options = {"goal_cell": np.array(self.goal_cell)}
        obs, _ = self._point.reset(seed=seed, options=options)
        self._observation = obs["observation"].astype(np.float32)
        return self._observation.copy(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs = self._point.step(action)[0]["observation"].astype(np.float32)
        self._observation = obs.copy()
        return obs, self.reward(obs), False, False, {}

    def reward(self, observation: NDArray[np.float32]) -> float:
        """1.0 if the observed position is within 0.5 of the goal, else 0.0."""
        distance = np.linalg.norm(observation[:2] - self.centres[self.goal_cell])
        return float(distance <= RADIUS)

    def cell(self, observation: NDArray[np.float32]) -> Cell:
        """The cell of the observed position."""
        i, j = self._point.maze.cell_xy_to_rowcol(observation[:2])
        return int(i), int(j)

    def draw(self) -> list[str]:
        """`DrawsMap.draw`: the cell of the point; the goal is the middle of its cell."""
        rows = [
            "".join("#" if cell == 1 else "." for cell in row) for row in self._point.maze.maze_map
        ]
        return put(put(rows, self.goal_cell, "G"), self.cell(self._observation), "A")

    def close(self) -> None:
        self._point.close()


def next_cells(free_cells: list[Cell], goal: Cell) -> dict[Cell, Cell]:
    """For each free cell, its neighbour on a shortest path to `goal` (breadth-first search)."""
    following = {goal: goal}
    queue = deque([goal])
    while queue:
        i, j = queue.popleft()
        for near in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            if near in free_cells and near not in following:
                following[near] = (i, j)
                queue.append(near)
    return following


def steer(
    maze: Maze2d,
    observation: NDArray[np.float32],
    target: NDArray[np.float64],
    following: dict[Cell, Cell],
) -> NDArray[np.float64]:
    """The force towards `target`, through the cells of `following`: a PD controller (10, -1) to the
    centre of the next cell, or to the target in its own cell."""
    here = maze.cell(observation)
    there = following[here]
    waypoint = target if there == here else maze.centres[there]
    return np.clip(10.0 * (waypoint - observation[:2]) - observation[2:], -1.0, 1.0)
