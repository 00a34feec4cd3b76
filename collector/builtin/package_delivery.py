"""Package delivery: a road with hidden forks; a wrong turn leads back, a right one is remembered.

    0 ─ 1 ─ 2 ─<fork>─ 4 ─ … ─<fork>─ … ─ length      obs   [place/length, packages left / packages,
    depot                                address             at a fork]

    actions   0 stay, 1 forward, 2 back, 3 deliver, 4 … 7 take road 0 … 3 of a fork

At a fork, "forward" does nothing; the road that leads on is one of four, and is the same for the
whole episode; each other one leads back to the depot. Delivering at the address is rewarded by 1,
and leads back to the depot for the next package; delivering elsewhere loses the package. The
episode ends with the last package, or after `limit` steps. An idea of AMAGO's appendix (Grigsby et
al., ICLR 2024), whose exact rules are not published.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.drawing import RENDERS, DrawsMap, put

STAY, FORWARD, BACK, DELIVER, FIRST_ROAD = range(5)
ROADS = 4


class PackageDelivery(DrawsMap, gymnasium.Env[NDArray[np.float32], np.int64]):
    """`packages` are to be carried along `length` cells with `forks` forks at random places.

    `info["log/delivered"]` is the number of delivered packages, at the last step.
    """

    metadata: dict[str, Any] = {**RENDERS, "partially_observable": True}

    def __init__(
        self,
        length: int = 20,
        forks: int = 3,
        packages: int = 4,
        limit: int = 180,
        render_mode: str | None = None,
    ) -> None:
        require(length >= 2, "length", "at least 2", length)
        require(1 <= forks < length, "forks", f"1 to {length - 1}", forks)
        require(packages >= 1, "packages", "at least 1", packages)
        require(limit >= 1, "limit", "at least 1", limit)
        self.length, self.n_forks, self.packages, self.limit = length, forks, packages, limit
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(FIRST_ROAD + ROADS)
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        places = self.np_random.choice(np.arange(1, self.length), self.n_forks, replace=False)
        self.forks = {int(place): int(self.np_random.integers(ROADS)) for place in sorted(places)}
        """Place → the road that leads on."""
        self._place = self._time = self._delivered = 0
        self._left = self.packages
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._left == 0 or self._time >= self.limit)
        self._time += 1
        reward = 0.0
        at_fork = self._place in self.forks
        if action == DELIVER:
            reward = float(self._place == self.length)
            self._left -= 1
            self._delivered += int(reward)
            self._place = 0 if reward else self._place
        elif action == BACK:
            self._place = max(0, self._place - 1)
        elif action == FORWARD and not at_fork:
            self._place = min(self.length, self._place + 1)
        elif action >= FIRST_ROAD and at_fork:
            right = int(action) - FIRST_ROAD == self.forks[self._place]
            self._place = self._place + 1 if right else 0
        over = self._left == 0 or self._time >= self.limit
        info = {"log/delivered": float(self._delivered)} if over else {}
        return self._observe(), reward, over, False, info

    def draw(self) -> list[str]:
        """`DrawsMap.draw`: the road with its forks as doors, and below a key for each package that
        is left."""
        road = put(["." * (self.length + 1)], (0, self.length), "G")
        for fork in self.forks:
            road = put(road, (0, fork), "D")
        width = max(self.length + 1, self.packages)
        left = "K" * self._left
        return [row.ljust(width, "#") for row in (*put(road, (0, self._place), "A"), left)]

    def _observe(self) -> NDArray[np.float32]:
        left = self._left / self.packages
        return np.array([self._place / self.length, left, self._place in self.forks], np.float32)
