"""A plug-in with an environment whose step takes an hour."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Hanging(gymnasium.Env[Any, Any]):
    observation_space, action_space = Box(-1, 1, (1,)), Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(3600)  # a moment: nothing waits for it


gymnasium.register("tests/Hanging-v0", Hanging)
