"""HalfCheetah-Velocity: run at a velocity that only the rewards tell.

    observation, actions, limit of 1,000 steps   as HalfCheetah-v5
    reward   - |velocity - target| - 0.05 * sum of squared actions

The target is drawn for each episode. The meta-RL task of Finn et al. (ICML 2017); targets and
weights as in AMAGO. Needs `pip install 'stepwell[envs]'`.
"""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from collector.builtin.checks import require


class HalfCheetahVelocity(gymnasium.Wrapper[NDArray[np.float64], Any, NDArray[np.float64], Any]):
    """`target` is the velocity of this episode, between `low` and `high`.

    At the last step `info` has `log/velocity_error`, the mean of |velocity - target| over the last
    50 steps.
    """

    def __init__(
        self,
        low: float = 0.0,
        high: float = 3.0,
        control_cost: float = 0.05,
        render_mode: str | None = None,
    ) -> None:
        require(low <= high, "low", f"at most high={high}", low)
        super().__init__(gymnasium.make("HalfCheetah-v5", render_mode=render_mode))
        self.metadata = {**self.env.metadata, "partially_observable": True}
        self.low, self.high, self.control_cost = low, high, control_cost
        self.target = low

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float64], dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self.target = float(self.np_random.uniform(self.low, self.high))
        self._errors: list[float] = []
        return obs, info

    def step(self, action: Any) -> tuple[NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = self.env.step(action)
        error = abs(float(info["x_velocity"]) - self.target)
        self._errors.append(error)
        if terminated or truncated:
            info = {**info, "log/velocity_error": float(np.mean(self._errors[-50:]))}
        cost = self.control_cost * float(np.square(action).sum())
        return obs, -error - cost, terminated, truncated, info
