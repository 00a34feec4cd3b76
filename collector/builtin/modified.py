"""Modified: another environment in other units, with hidden observations or an idle action."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from collector.builtin.checks import require


class Modified(gymnasium.Env[Any, Any]):
    """`gymnasium.make(env, **env_args)` with modifications:

    reward_scale        every reward is multiplied with it
    observation_scale   every observed number is multiplied with it
    observation_shift   then this is added to every observed number
    constant_action     the action has one dimension more, in -1 … 1, which is ignored
    hide                indices of the numbers that observations lack: velocities, for example

    The last dimension is 0 in all of the generated data. `inner` is the environment itself, and
    `full_observation` its last observation.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        env: str,
        reward_scale: float = 1.0,
        constant_action: bool = False,
        hide: Sequence[int] = (),
        observation_scale: float = 1.0,
        observation_shift: float = 0.0,
        render_mode: str | None = None,
        **env_args: Any,
    ) -> None:
        require(reward_scale > 0, "reward_scale", "above 0", reward_scale)
        require(observation_scale > 0, "observation_scale", "above 0", observation_scale)
        self.inner: gymnasium.Env[Any, Any] = gymnasium.make(
            env, disable_env_checker=True, render_mode=render_mode, **env_args
        )
        self.metadata = dict(self.inner.metadata)
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
        self._scale, self._shift = observation_scale, observation_shift
        self._in_units = observation_scale != 1.0 or observation_shift != 0.0
        if hide:
            seen = self._flat_box("hide")
            shown = sorted(set(range(seen.shape[0])) - set(hide))
            known = set(hide) <= set(range(seen.shape[0])) and bool(shown)
            require(known, "hide", f"some of 0 … {seen.shape[0] - 1}, not all", list(hide))
            self._shown = shown
            self.observation_space = spaces.Box(
                seen.low[shown], seen.high[shown], dtype=seen.dtype.type
            )
            self.metadata["partially_observable"] = True
        if self._in_units:
            changed = "observation_scale" if observation_scale != 1.0 else "observation_shift"
            seen = self._flat_box(changed)
            self.observation_space = spaces.Box(
                self._other_units(seen.low), self._other_units(seen.high), dtype=seen.dtype.type
            )

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

    def _flat_box(self, option: str) -> spaces.Box:
        """The space of observations, which the option needs to be a flat Box of floats."""
        seen = self.observation_space
        flat = isinstance(seen, spaces.Box) and len(seen.shape) == 1 and seen.dtype.kind == "f"
        require(flat, option, "an environment with a flat Box of observations", seen)
        assert isinstance(seen, spaces.Box)
        return seen

    def _observe(self) -> Any:
        obs = self.full_observation
        obs = obs if self._shown is None else obs[self._shown]
        return self._other_units(obs) if self._in_units else obs

    def _other_units(self, x: Any) -> Any:
        return (x * self._scale + self._shift).astype(x.dtype)

    def render(self) -> Any:
        return self.inner.render()

    def close(self) -> None:
        self.inner.close()
