"""FakeEnv: an environment whose every number tells its place. For tests.

    obs     [episode, t, length]      episode counts resets of this environment, from 0
    reward  1000 · episode + t        what the action taken at t earned (t counts from 0)
    end     at t = length: terminated in even episodes, truncated in odd ones
    info    {"log/episode": episode, "log/t": t of the observation beside it},
            at an even episode's end also is_success

So a single row that slipped, an observation from the next episode, or a swapped flag is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class FakeEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Plays `lengths` in turn, again and again; see the table above.

    It hands out one buffer for all observations, as fast environments do, so a missing copy
    shows; with `copies` every observation is an array of its own. `broken_at` = (episode, t) raises
    in that step; `nan_at` answers NaN there.
    """

    metadata = {"render_modes": []}

    def __init__(
        self,
        lengths: Sequence[int] = (3, 1, 4),
        *,
        actions: int = 5,
        copies: bool = False,
        broken_at: tuple[int, int] | None = None,
        nan_at: tuple[int, int] | None = None,
        broken_resets: Sequence[int] = (),
    ):
        self.lengths, self.copies = tuple(lengths), copies
        self.broken_at, self.nan_at = broken_at, nan_at
        self.broken_resets = frozenset(broken_resets)
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self.render_mode = None
        self.episode, self.t = -1, 0
        self.seeds: list[int | None] = []
        self.actions: list[int] = []
        self.closed = False
        self._buffer = np.zeros(3, np.float32)

    @property
    def length(self) -> int:
        return self.lengths[self.episode % len(self.lengths)]

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002 - gymnasium's signature
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        self.seeds.append(seed)
        if self.episode in self.broken_resets:
            raise RuntimeError("reset was asked to fail")
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        if self.t >= self.length:
            raise RuntimeError("step after the end of an episode")
        if (self.episode, self.t) == self.broken_at:
            raise RuntimeError("step was asked to fail")
        self.actions.append(int(action))
        reward = 1000.0 * self.episode + self.t
        spoilt = (self.episode, self.t) == self.nan_at
        self.t += 1
        over, odd = self.t == self.length, bool(self.episode % 2)
        info: dict[str, Any] = {"log/episode": self.episode, "log/t": self.t}
        if over and not odd:
            info["is_success"] = True
        obs = self._observe()
        if spoilt:
            obs[1] = np.nan
        return obs, reward, over and not odd, over and odd, info

    def close(self) -> None:
        self.closed = True

    def _observe(self) -> NDArray[np.float32]:
        self._buffer[:] = self.episode, self.t, self.length
        return self._buffer.copy() if self.copies else self._buffer
