"""Mixed: in each episode one of several environments, drawn with the episode's seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium

from collector.builtin.checks import require

Given = str | Sequence[Any]
"""An id, or (id, arguments)."""


class Mixed(gymnasium.Env[Any, Any]):
    """Episodes of `envs`, which have equal spaces; `info["env_name"]` of a reset names that of the
    episode, so it is the trajectory's `env`, and an evaluation shows a score of each.

    Args:
        envs: ids, or pairs of an id and its arguments: ["A-v0", ["B-v0", {"size": 3}]].
        weights: how often each is drawn, relative to the others; default: equally.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        envs: Sequence[Given],
        weights: Sequence[float] | None = None,
        render_mode: str | None = None,
    ) -> None:
        known = isinstance(envs, Sequence) and not isinstance(envs, str) and len(envs) > 0
        require(known, "envs", "a list of ids", envs)
        self._names, self._envs = [], []
        for given in envs:
            name, args = (given, {}) if isinstance(given, str) else tuple(given)
            self._names.append(str(name))
            self._envs.append(
                gymnasium.make(name, disable_env_checker=True, render_mode=render_mode, **args)
            )
        weights = [1.0] * len(envs) if weights is None else list(weights)
        fits = len(weights) == len(envs) and min(weights) >= 0 and sum(weights) > 0
        require(fits, "weights", f"{len(envs)} numbers, at least 0, not all 0", weights)
        self._shares = [weight / sum(weights) for weight in weights]
        first = self._envs[0]
        self.observation_space, self.action_space = first.observation_space, first.action_space
        for name, env in zip(self._names, self._envs, strict=True):
            for what in ("observation_space", "action_space"):
                own, wanted = getattr(env, what), getattr(first, what)
                expected = f"equal spaces; {self._names[0]} has the {what} {wanted}"
                require(own == wanted, "envs", expected, f"{name} with {own}")
        hidden = any(env.metadata.get("partially_observable") for env in self._envs)
        self.metadata = {**first.metadata, "partially_observable": hidden}
        self.render_mode, self._current = render_mode, first

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        number = int(self.np_random.choice(len(self._envs), p=self._shares))
        self._current = self._envs[number]
        obs, info = self._current.reset(seed=int(self.np_random.integers(2**31)), options=options)
        return obs, {"env_name": self._names[number], **info}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self._current.step(action)
        return obs, reward, terminated, truncated, info

    def render(self) -> Any:
        return self._current.render()

    def close(self) -> None:
        for env in self._envs:
            env.close()
