"""Recall: a minimal task that needs only memory.

    t         0             1 .. delay    delay + 1
    obs       cue, 1, 0     0, 0, 0       0, 0, 1          (cue one-hot, "is cue", "is query")
    action    ignored       ignored       the answer
    reward    0             0             1 if the answer is the cue's index, else 0

An agent without memory has a mean return of 1/symbols. Exploration is easy: only the last action
counts.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step


class Recall(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Show one of `symbols` symbols, then, after `delay` blank steps, ask for its index.

    Observation: float32 (symbols + 2,): one-hot cue, then the flags "is cue" and "is query".
    Actions: Discrete(symbols). An episode has delay + 2 steps and ends with `terminated` after the
    answer; `info["log/success"]` is then 1 or 0.
    """

    metadata: dict[str, Any] = {"render_modes": [], "partially_observable": True}

    def __init__(self, symbols: int = 4, delay: int = 8, render_mode: None = None) -> None:
        require(symbols >= 2, "symbols", "at least 2", symbols)
        require(delay >= 0, "delay", "0 or more blank steps", delay)
        self.symbols = symbols
        self.delay = delay
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0.0, 1.0, (symbols + 2,), np.float32)
        self.action_space = spaces.Discrete(symbols)
        self._cue = self._t = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._t = 0
        self._cue = int(self.np_random.integers(self.symbols))
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._t > self.delay + 1)
        answered = self._t == self.delay + 1
        self._t += 1
        if not answered:
            return self._observe(), 0.0, False, False, {}
        reward = 1.0 if int(action) == self._cue else 0.0
        return self._observe(), reward, True, False, {"log/success": reward}

    def _observe(self) -> NDArray[np.float32]:
        obs = np.zeros(self.symbols + 2, np.float32)
        if self._t == 0:
            obs[self._cue] = obs[-2] = 1.0
        elif self._t == self.delay + 1:
            obs[-1] = 1.0
        return obs
