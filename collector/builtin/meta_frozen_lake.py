"""Meta-Frozen-Lake: a new map per episode, several attempts at it; the holes must be remembered.

    attempt 0       attempt 1       …       obs   [x/size, y/size, attempt begins, attempt/attempts]
    S . . O         S . . O
    . O . .         . O . .                 actions  0 stay, 1 x+1, 2 x-1, 3 y+1, 4 y-1
    . . . .         . . . .                 reward   1 at the goal G, which begins the next attempt
    O . . G         O . . G

The map is not observed. A hole, the goal, or the time limit of an attempt leads back to the start S
in the same step; the episode ends after the last attempt. The best return is `attempts`, less what
exploration costs. Dynamics after AMAGO (Grigsby et al., ICLR 2024).
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.drawing import RENDERS, DrawsMap, put

STAY = 0
MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
"""Effect of each action on (x, y) = (row, column)."""
FROZEN = 0.8
"""Probability that a cell of a map is frozen."""
SWAP, CRACK, BLUR = 0.5, 0.33, 0.25
"""Probabilities of `hard`: that actions 1 and 3 are exchanged for the episode, that a cell becomes
a hole when it is left, and, for each coordinate, that it is observed one off."""


class MetaFrozenLake(DrawsMap, gymnasium.Env[NDArray[np.float32], np.int64]):
    """Several attempts to cross a hidden map.

    Args:
        size: cells per side of the map.
        attempts: number of attempts per episode.
        limit: steps per attempt; default size², twice that if hard, more if slippery.
        slip: probability that a move becomes "stay".
        hard: see SWAP, CRACK and BLUR.
        recover: a hole costs 0.1 and does not end the attempt.
        show_attempt: observe the share of attempts that are over; else 0.

    `info["log/success_K"]` is 1 or 0 at the end of attempt K.
    """

    metadata: dict[str, Any] = {**RENDERS, "partially_observable": True}

    def __init__(
        self,
        size: int = 5,
        attempts: int = 10,
        limit: int | None = None,
        slip: float = 0.0,
        hard: bool = False,
        recover: bool = False,
        show_attempt: bool = True,
        render_mode: str | None = None,
    ) -> None:
        require(size >= 2, "size", "at least 2", size)
        require(attempts >= 1, "attempts", "at least 1", attempts)
        require(0 <= slip < 1, "slip", "a probability below 1", slip)
        require(limit is None or limit >= 1, "limit", "at least 1", limit)
        self.size, self.attempts, self.slip = size, attempts, slip
        self.limit = limit or int((2 if hard else 1) * size**2 / (1 - slip))
        self.hard, self.recover, self.show_attempt = hard, recover, show_attempt
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(len(MOVES))
        self._attempt = attempts
        self._x = self._y = self._time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        rows = generate_random_map(self.size, FROZEN, seed=int(self.np_random.integers(2**31)))
        self.map = np.array([list(row) for row in rows])
        """[size, size] of "S", "F", "H" and "G"."""
        self._moves = list(MOVES)
        if self.hard and self.np_random.random() < SWAP:
            self._moves[1], self._moves[3] = self._moves[3], self._moves[1]
        self._attempt = 0
        self._begin_attempt()
        return self._observe(begins=True), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._attempt == self.attempts)
        self._time += 1
        if action != STAY and self.np_random.random() < self.slip:
            action = np.int64(STAY)
        dx, dy = self._moves[int(action)]
        last = self.size - 1
        target = min(max(self._x + dx, 0), last), min(max(self._y + dy, 0), last)
        cracks = self.hard and self.np_random.random() < CRACK
        cell = self._active[target]
        reward, over = float(cell == "G"), cell == "G"
        if cell == "H":
            reward, over = (-0.1, False) if self.recover else (0.0, True)
        if target != (self._x, self._y) and not (cell == "H" and self.recover):
            if cracks:
                self._active[self._x, self._y] = "H"
            self._x, self._y = target
        if not (over or self._time >= self.limit):
            return self._observe(), reward, False, False, {}
        info = {f"log/success_{self._attempt}": float(cell == "G")}
        self._attempt += 1
        self._begin_attempt()
        return self._observe(begins=True), reward, self._attempt == self.attempts, False, info

    def _begin_attempt(self) -> None:
        self._active = self.map.copy()
        self._x = self._y = self._time = 0

    def draw(self) -> list[str]:
        """`DrawsMap.draw`: rows are x, as in the map; below, a cell for each attempt, G for those
        that are over."""
        rows = ["".join(row).replace("F", ".").replace("H", "O") for row in self._active]
        rows = put(rows, (self._x, self._y), "A")
        over = "g" * self._attempt + "." * (self.attempts - self._attempt)
        width = max(self.size, self.attempts)
        return [row.ljust(width, "#") for row in (*rows, "#" * width, over)]

    def _observe(self, begins: bool = False) -> NDArray[np.float32]:
        place = [self._x, self._y]
        if self.hard:
            for i in range(2):
                if self.np_random.random() < BLUR:
                    seen = place[i] + int(self.np_random.integers(-1, 2))
                    place[i] = min(max(seen, 0), self.size - 1)
        attempt = self._attempt / self.attempts if self.show_attempt else 0.0
        x, y = place[0] / self.size, place[1] / self.size
        return np.array([x, y, float(begins), attempt], np.float32)
