"""Several attempts at one task in one episode, as in-context (k-shot) reinforcement learning needs.

    call of step   1 … 19   20           21             22 …
                   steps    attempt 0    begins         steps of attempt 1
                            ends         attempt 1
    observation    …        the last     the first      …
    attempt        0 0 0    0 1 0        1 0 1/K        0 0 1/K       begins, ends, share
    reward         …        the last     0, and the     …
                                         action is
                                         ignored

Only the end of the last attempt ends the episode, so memory lasts over all attempts.

    stepwell run stepwell/Attempts-v0 --env-args env=CartPole-v1 attempts=3
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from collector.builtin.checks import require
from stepwell.flags import as_bool
from stepwell.spaces import DEFAULT_OBSERVATION

KEY = "attempt"
"""The key of the observation that this wrapper adds."""


class Attempts(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An episode of `env` is `attempts` of its episodes, all reset with the same seed: at the same
    task and start. What is random afterwards differs, if `env` draws it from its `np_random`.

    Observations become a Dict; its key "attempt" [3] is 1 or 0: an attempt begins; an attempt is
    over, the next action is ignored; and the share of attempts that are over. `env` is reset with
    options={"attempt": number}, in case it draws its task otherwise than from the seed.

    At the end of attempt K, `info` has "log/return_K", and "log/success_K" if `env` reports
    success. They are metrics of the recorded trajectory.

    Raises:
        InvalidData: fewer than two attempts, or `env` has an observation of the same name.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], attempts: int) -> None:
        super().__init__(env)
        whole = isinstance(attempts, int) and attempts >= 2
        require(whole, "attempts", "an integer, at least 2", attempts)
        inner = env.observation_space
        self._nested = isinstance(inner, spaces.Dict)
        named = (
            dict(inner.spaces) if isinstance(inner, spaces.Dict) else {DEFAULT_OBSERVATION: inner}
        )
        require(KEY not in named, "env", f"one without an observation {KEY!r}", sorted(named))
        self.observation_space = spaces.Dict({**named, KEY: spaces.Box(0.0, 1.0, (3,), np.float32)})
        self.attempts = attempts
        self._metadata = {**(env.metadata or {}), "partially_observable": True}
        self._attempt, self._over = attempts, False
        self._seed, self._return = 0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin attempt 0 of a new task."""
        self._seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self._options, self._attempt = options, 0
        return self._begin()

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step, or the reset between two attempts."""
        if self._attempt == self.attempts:
            raise ResetNeeded("the last attempt is over: call reset")
        if self._over:
            obs, info = self._begin()
            return obs, 0.0, False, False, info
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        ends = {"terminated": terminated, "truncated": truncated}
        if not any([as_bool(name, flag, end=True) for name, flag in ends.items()]):
            return self._observe(obs), reward, False, False, info
        info = {**info, f"log/return_{self._attempt}": self._return}
        for name in ("is_success", "success"):
            if info.get(name) is not None:
                info[f"log/success_{self._attempt}"] = float(info[name])
        self._attempt += 1
        self._over = True
        # After the last attempt nothing can be gained, so that its end is no time limit.
        return self._observe(obs, over=True), reward, self._attempt == self.attempts, False, info

    def _begin(self) -> tuple[Any, dict[str, Any]]:
        self._over, self._return = False, 0.0
        options = {**(self._options or {}), KEY: self._attempt}
        obs, info = self.env.reset(seed=self._seed, options=options)
        if self._attempt:
            # Else slips and the like would repeat, and luck could be replayed.
            self.env.unwrapped.np_random = np.random.default_rng([self._seed, self._attempt])
        return self._observe(obs, begins=True), info

    def _observe(self, obs: Any, *, begins: bool = False, over: bool = False) -> dict[str, Any]:
        named = obs if self._nested else {DEFAULT_OBSERVATION: obs}
        share = (self._attempt - over) / self.attempts
        return {**named, KEY: np.array([begins, over, share], np.float32)}


def make_attempts(env: str, attempts: int = 2, **env_args: Any) -> Attempts:
    """`Attempts` of `gymnasium.make(env, **env_args)`."""
    return Attempts(gymnasium.make(env, disable_env_checker=True, **env_args), attempts)
