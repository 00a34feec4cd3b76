"""Dark Key-to-Door: find a hidden key, then a hidden door, again and again in the same room.

    . . . .       obs     [x/size, y/size, has the key, time of the attempt / limit]
    . k . .               with dark=False also [door x, y, key x, y] / size
    S . . .       actions 0 (0,-1), 1 (-1,0), 2 (0,+1), 3 (+1,0), 4 stay; shuffled per episode
    . . . d               with shuffle=True
                  reward  1 at the key, 1 at the door with the key

After the door, or after `limit` steps, the next action is ignored and leads back to the start, with
key and door where they were. The episode ends after `horizon` steps. Dynamics after AMAGO (Grigsby
et al., ICLR 2024), the task after Laskin et al. (ICLR 2023).
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.drawing import RENDERS, DrawsMap, put

MOVES = ((0, -1), (-1, 0), (0, 1), (1, 0), (0, 0))


class DarkKeyDoor(DrawsMap, gymnasium.Env[NDArray[np.float32], np.int64]):
    """A room of size x size cells. `start`, `key` and `door` fix cells; default: random per
    episode. `info["log/doors"]` is the number of doors reached, at the last step."""

    metadata: dict[str, Any] = {**RENDERS, "partially_observable": True}

    def __init__(
        self,
        size: int = 9,
        limit: int = 50,
        horizon: int = 500,
        dark: bool = True,
        shuffle: bool = False,
        start: tuple[int, int] | None = None,
        key: tuple[int, int] | None = None,
        door: tuple[int, int] | None = None,
        render_mode: str | None = None,
    ) -> None:
        for name, number in (("size", size), ("limit", limit), ("horizon", horizon)):
            require(number >= 1, name, "at least 1", number)
        for name, cell in (("start", start), ("key", key), ("door", door)):
            inside = cell is None or (len(cell) == 2 and all(0 <= c < size for c in cell))
            require(inside, name, f"two numbers below {size}", cell)
        self.size, self.limit, self.horizon = size, limit, horizon
        self.dark, self.shuffle, self.render_mode = dark, shuffle, render_mode
        self._fixed = (start, key, door)
        self.observation_space = spaces.Box(0.0, 1.0, (4 if dark else 8,), np.float32)
        self.action_space = spaces.Discrete(len(MOVES))
        self._total, self._time, self._doors = horizon, 0, 0
        self._place = (0, 0)
        self._has_key = self._over = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)

        def cell(fixed: tuple[int, int] | None) -> tuple[int, int]:
            x, y = self.np_random.integers(self.size, size=2)
            return (int(x), int(y)) if fixed is None else (fixed[0], fixed[1])

        self.start, self.key, self.door = (cell(fixed) for fixed in self._fixed)
        order = self.np_random.permutation(len(MOVES)) if self.shuffle else range(len(MOVES))
        self.moves = [MOVES[i] for i in order]
        """Effect of each action in this episode."""
        self._total, self._doors = 0, 0
        self._begin_attempt()
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._total >= self.horizon)
        self._total += 1
        reward = 0.0
        if self._over:
            self._begin_attempt()
        else:
            reward = self._move(*self.moves[int(action)])
        ends = self._total >= self.horizon
        info = {"log/doors": float(self._doors)} if ends else {}
        return self._observe(), reward, ends, False, info

    def _move(self, dx: int, dy: int) -> float:
        self._time += 1
        last = self.size - 1
        self._place = (
            min(max(self._place[0] + dx, 0), last),
            min(max(self._place[1] + dy, 0), last),
        )
        self._over = self._time >= self.limit
        if self._has_key and self._place == self.door:
            self._over, self._doors = True, self._doors + 1
            return 1.0
        if not self._has_key and self._place == self.key:
            self._has_key = True
            return 1.0
        return 0.0

    def _begin_attempt(self) -> None:
        self._place, self._has_key, self._time, self._over = self.start, False, 0, False

    def draw(self) -> list[str]:
        """`DrawsMap.draw`: x to the right, y down; the key disappears when it is taken."""
        rows = put(["." * self.size] * self.size, self.start[::-1], "S")
        rows = put(rows, self.door[::-1], "D")
        rows = rows if self._has_key else put(rows, self.key[::-1], "K")
        return put(rows, self._place[::-1], "A")

    def _observe(self) -> NDArray[np.float32]:
        cells = [self._place] if self.dark else [self._place, self.door, self.key]
        x_y = [c / self.size for cell in cells for c in cell]
        state = [float(self._has_key), self._time / self.limit]
        return np.array([*x_y[:2], *state, *x_y[2:]], np.float32)
