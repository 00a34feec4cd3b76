"""Modified: another environment with scaled rewards, hidden observations or an idle action."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from collector.builtin.checks import require


class Modified(gymnasium.Env[Any, Any]):
    """`gymnasium.make(env, **env_args)` with modifications:

    reward_scale      every reward is multiplied with it
    constant_action   the action has one dimension more, in -1 … 1, which is ignored
    hide              indices of the numbers that observations lack: velocities, for example

    The last dimension is 0 in all of the generated data. `inner` is the environment itself, and
    `full_observation` its last observation.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        env: str,
        reward_scale: float = 1.0,
        constant_action: bool = False,
        hide: Sequence[int] = (),
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
        self._shown: list[int] | None = None
        if hide:
            seen = self.inner.observation_space
            flat = isinstance(seen, spaces.Box) and len(seen.shape) == 1
            require(flat, "hide", "an environment with a flat Box of observations", seen)
            assert isinstance(seen, spaces.Box)
            shown = sorted(set(range(seen.shape[0])) - set(hide))
            known = set(hide) <= set(range(seen.shape[0])) and bool(shown)
            require(known, "hide", f"some of 0 … {seen.shape[0] - 1}, not all", list(hide))
            self._shown = shown
            self.observation_space = spaces.Box(
                seen.low[shown], seen.high[shown], dtype=seen.dtype.type
            )
            self.metadata["partially_observable"] = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.full_observation, info = self.inner.reset(seed=seed, options=options)
        return self._observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        kept = action[:-1] if self.constant_action else action
        self.full_observation, reward, terminated, truncated, info = self.inner.step(kept)
        return self._observe(), float(reward) * self.reward_scale, terminated, truncated, info

    def _observe(self) -> Any:
        obs = self.full_observation
        return obs if self._shown is None else obs[self._shown]

    def close(self) -> None:
        self.inner.close()
