"""Modified: another environment with scaled rewards, or with an action dimension of no effect."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from collector.builtin.checks import require


class Modified(gymnasium.Env[Any, Any]):
    """`gymnasium.make(env, **env_args)` with modifications:

    reward_scale      every reward is multiplied with it
    constant_action   the action has one dimension more, in -1 … 1, which is ignored

    The last dimension is 0 in all of the generated data. `inner` is the environment itself.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        env: str,
        reward_scale: float = 1.0,
        constant_action: bool = False,
        render_mode: None = None,
        **env_args: Any,
    ) -> None:
        require(reward_scale > 0, "reward_scale", "above 0", reward_scale)
        self.inner: gymnasium.Env[Any, Any] = gymnasium.make(
            env, disable_env_checker=True, **env_args
        )
        self.metadata = {**self.inner.metadata, **self.metadata}
        self.reward_scale, self.constant_action = reward_scale, constant_action
        self.render_mode = render_mode
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space
        if constant_action:
            box = self.inner.action_space
            flat = isinstance(box, spaces.Box) and len(box.shape) == 1
            require(flat, "constant_action", "an environment with a flat Box of actions", box)
            assert isinstance(box, spaces.Box)
            self.action_space = spaces.Box(
                np.append(box.low, box.dtype.type(-1)), np.append(box.high, box.dtype.type(1))
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self.inner.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        kept = action[:-1] if self.constant_action else action
        obs, reward, terminated, truncated, info = self.inner.step(kept)
        return obs, float(reward) * self.reward_scale, terminated, truncated, info

    def close(self) -> None:
        self.inner.close()
