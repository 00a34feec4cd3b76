"""maze2d-medium, maze2d-large and maze2d-sparse: navigation to random goals, with D4RL's quirks.

The data are one continuous trajectory: the point is never reset, and its velocity carries over.

    goals        random cells, drawn again when reached or after the time limit of an episode
    timeouts     the rows after which a new goal was drawn; no row is terminal
    rewards      for the fixed goal of the evaluation, of observations[i], not of the next one
    infos/goal   the goal at that row, which the rewards do not depend on
    last row     unmarked, unless a goal was reached there; there are no next_observations

A policy that cloned the data would walk to random places. In maze2d-sparse few goals lead to the
rewarded cell.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.builtin import MAZE2D_LARGE_ID, MAZE2D_MEDIUM_ID
from collector.builtin.checks import require
from collector.builtin.generate import Behaviour, Columns, Request, first_episode_seed
from collector.builtin.maze2d import RADIUS, Cell, Maze2d, next_cells, steer

_FORCE_NOISE = 0.5  # standard deviation


class Maze2dMedium(Behaviour):
    """A PD controller along shortest paths, plus Gaussian noise of 0.5.

    observations float32 (N, 4), actions float32 (N, 2) in [-1, 1], infos/goal float32 (N, 2). The
    rows of a goal count as an episode here; its mean return is about 4. The controller without
    noise, with the rewarded cell as its goal, earns about 475 in the 600 steps of an evaluation.
    """

    env_id = MAZE2D_MEDIUM_ID
    algorithm = "waypoints+noise"
    package = "gymnasium-robotics"
    about = "PointMaze Medium; walks to random goals (needs gymnasium-robotics)"
    limit = 600
    """Steps after which another goal is drawn."""

    def __init__(self, env: Any, successes: float = 1.0) -> None:
        """`successes`: probability of keeping a goal whose path passes the rewarded cell."""
        super().__init__(env)
        require(0 <= successes <= 1, "successes", "0 … 1", successes)
        self._maze: Maze2d = env
        self._successes = successes

    def aim(self, here: Cell) -> None:
        """Draw a new goal: a random cell, and a place in it."""
        cells, rng = self._maze.free_cells, self._rng
        while True:
            goal = cells[int(rng.integers(len(cells)))]
            self._following = next_cells(cells, goal)
            if goal == here:
                continue
            if rng.random() < self._successes or not self._passes(here, goal):
                break
        self.goal = self._maze.centres[goal] + rng.uniform(-0.25, 0.25, 2)

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        force = steer(self._maze, observation, self.goal, self._following)
        noise = _FORCE_NOISE * self._rng.standard_normal(2)
        return np.clip(force + noise, -1.0, 1.0).astype(np.float32)

    def _passes(self, here: Cell, goal: Cell) -> bool:
        while here != goal:
            if here == self._maze.goal_cell:
                return True
            here = self._following[here]
        return goal == self._maze.goal_cell

    def play(self, request: Request) -> tuple[Columns, list[float]]:
        """One reset; exactly `steps` rows, or the rows until the last of `episodes` goals."""
        env = request.env
        self.begin(np.random.default_rng((request.seed, 0)))
        obs, _ = env.reset(seed=first_episode_seed(request.seed))
        self.aim(self._maze.cell(obs))
        rows: list[tuple[Any, ...]] = []
        returns: list[float] = []
        earned, since = 0.0, 0
        scale = getattr(env.unwrapped, "reward_scale", 1.0)
        while not request.fulfilled(len(rows), len(returns)):
            action = request.action(self, obs)
            reward = self._maze.reward(obs) * scale
            next_obs = env.step(action)[0]  # the time limit of an evaluation is ignored
            earned, since = earned + reward, since + 1
            reached = float(np.linalg.norm(next_obs[:2] - self.goal)) <= RADIUS
            over = reached or since == self.limit
            rows.append((obs, action, reward, False, over, self.goal))
            obs = next_obs
            if over:
                returns.append(earned)
                earned, since = 0.0, 0
                self.aim(self._maze.cell(obs))
        if since:
            returns.append(earned)
        names = ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal")
        dtypes = (np.float32, np.float32, np.float32, np.bool_, np.bool_, np.float32)
        columns = zip(names, dtypes, zip(*rows, strict=True), strict=True)
        return {name: np.array(column, dtype) for name, dtype, column in columns}, returns


class Maze2dLarge(Maze2dMedium):
    """The same in the large maze, whose goals have 800 steps."""

    env_id = MAZE2D_LARGE_ID
    about = "PointMaze Large; walks to random goals (needs gymnasium-robotics)"
    limit = 800


class Maze2dSparse(Maze2dMedium):
    """The medium maze; by default one in ten of the goals beyond the rewarded cell is kept."""

    about = "PointMaze Medium with few successes (needs gymnasium-robotics)"

    def __init__(self, env: Any, successes: float = 0.1) -> None:
        super().__init__(env, successes)
