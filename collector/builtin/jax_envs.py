"""Environments written in JAX: those of gymnax, and XLand-MiniGrid.

    stepwell collect --env stepwell/Gymnax-v0 --env-args name=Catch-bsuite …
    stepwell collect --env stepwell/XLandMiniGrid-v0 --env-args name=MiniGrid-MemoryS8 …

They are stepped one by one, compiled on the first step; gymnax's also all at once on jax's device:

    stepwell collect --env stepwell/Gymnax-v0 --env-args name=Catch-bsuite --vectorization native …
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from collector.builtin.checks import require, require_step

LATEST = 2**31 - 1


def _installed(name: str) -> tuple[ModuleType, ModuleType]:
    """The package `name` and jax."""
    try:
        return import_module(name), import_module("jax")
    except ModuleNotFoundError as error:
        raise DependencyNotInstalled(f"{error}; pip install 'stepwell[jax]'") from None


class Gymnax(gymnasium.Env[Any, Any]):
    """An environment of gymnax, with its observations, actions and rewards.

    gymnax ends an episode for its time limit as for anything else; here the limit is `truncated`.

    Args:
        name: "CartPole-v1", "Catch-bsuite", "Breakout-MinAtar", …
        params: the environment's parameters, such as max_steps_in_episode.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, name: str, render_mode: None = None, **params: Any) -> None:
        gymnax, self._jax = _installed("gymnax")
        from gymnax.environments.spaces import gymnax_space_to_gym_space

        self._env, defaults = gymnax.make(name)
        self._params = defaults.replace(**params)
        self._unlimited = self._params.replace(max_steps_in_episode=LATEST)
        self.transition = self._jax.jit(self._transition)
        self.observation_space, self.action_space = (
            gymnax_space_to_gym_space(space(self._params))
            for space in (self._env.observation_space, self._env.action_space)
        )
        self.render_mode, self._state, self._over = render_mode, None, True

    def _transition(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Observation, state, reward, terminated, truncated."""
        # `step` would reset at the end, and lose the last observation.
        obs, after, reward, done, _ = self._env.step_env(key, state, action, self._params)
        late = after.time >= self._params.max_steps_in_episode
        # Before gymnax 1.0 done includes the limit.
        terminated = done & (self._env.is_terminal(after, self._unlimited) | ~late)
        return obs, after, reward, terminated, late & ~terminated

    def _key(self) -> Any:
        return self._jax.random.key(int(self.np_random.integers(LATEST)))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        obs, self._state = self._env.reset_env(self._key(), self._params)
        self._over = False
        return np.asarray(obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._over)
        obs, self._state, reward, terminated, truncated = self.transition(
            self._key(), self._state, action
        )
        self._over = bool(terminated | truncated)
        return np.asarray(obs), float(reward), bool(terminated), bool(truncated), {}


class GymnaxVector(VectorEnv[Any, Any, Any]):
    """Many of one environment of gymnax: one call of jax steps, another resets those that ended.

    Arguments are those of `Gymnax`.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.DISABLED}

    def __init__(
        self, num_envs: int = 1, *, name: str, render_mode: None = None, **params: Any
    ) -> None:
        one = Gymnax(name, **params)
        self._jax, self.num_envs, self.render_mode = one._jax, num_envs, render_mode
        self.single_observation_space = one.observation_space
        self.single_action_space = one.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

        def first(key: Any) -> Any:
            return one._env.reset_env(key, one._params)

        vmap, jit = self._jax.vmap, self._jax.jit
        self._first, self._transition = jit(vmap(first)), jit(vmap(one.transition))
        self._obs: Any = None
        self._state: Any = None

    def _keys(self) -> Any:
        numbers = self.np_random.integers(LATEST, size=self.num_envs)
        return self._jax.vmap(self._jax.random.key)(numbers)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)  # type: ignore[arg-type]
        obs, state = self._first(self._keys())
        if self._state is not None and options and "reset_mask" in options:
            chosen = np.asarray(options["reset_mask"], np.bool_)

            def merge(new: Any, old: Any) -> Any:
                rows = chosen.reshape(-1, *[1] * (new.ndim - 1))
                return self._jax.numpy.where(rows, new, old)

            obs, state = self._jax.tree.map(merge, (obs, state), (self._obs, self._state))
        self._obs, self._state = obs, state
        return np.asarray(obs), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._obs, self._state, *rest = self._transition(self._keys(), self._state, actions)
        reward, terminated, truncated = map(np.asarray, rest)
        return np.asarray(self._obs), reward, terminated, truncated, {}


class XLandMiniGrid(gymnasium.Env[Any, Any]):
    """One trial of XLand-MiniGrid, or one of its MiniGrid tasks, per episode.

    Observation: `view` uint8 (view_size, view_size, 2), tile and colour of each cell in front of
    the agent, and `goal`, the five numbers of the goal's encoding.

    Args:
        name: "XLand-MiniGrid-R1-9x9", "MiniGrid-DoorKey-5x5", …
        benchmark: a file of rulesets, of which each episode draws one. It is a pickle: load only
            files that you trust. Without it XLand's own names have an empty goal.
        params: other parameters, such as view_size and max_steps.
    """

    metadata: dict[str, Any] = {"render_modes": [], "partially_observable": True}

    def __init__(
        self, name: str, benchmark: str = "", render_mode: None = None, **params: Any
    ) -> None:
        xminigrid, self._jax = _installed("xminigrid")
        self._env, self._params = xminigrid.make(name, **params)
        self._rules = None
        if benchmark:
            require(name.startswith("XLand"), "benchmark", "none for MiniGrid's tasks", benchmark)
            from xminigrid.benchmarks import load_benchmark_from_path

            self._rules = load_benchmark_from_path(benchmark)
        self._reset, self._step = self._jax.jit(self._env.reset), self._jax.jit(self._env.step)
        self.observation_space = spaces.Dict(
            {
                "view": spaces.Box(0, 12, self._env.observation_shape(self._params), np.uint8),
                "goal": spaces.MultiDiscrete([32] * 5),
            }
        )
        self.action_space = spaces.Discrete(self._env.num_actions(self._params))
        self.render_mode, self._timestep, self._over = render_mode, None, True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        rules, start = self._jax.random.split(
            self._jax.random.key(int(self.np_random.integers(LATEST)))
        )
        if self._rules is not None:
            self._params = self._params.replace(ruleset=self._rules.sample_ruleset(rules))
        self._timestep, self._over = self._reset(self._params, start), False
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._over)
        self._timestep = now = self._step(self._params, self._timestep, action)
        self._over = bool(now.last())
        terminated = self._over and float(now.discount) == 0
        return self._observe(), float(now.reward), terminated, self._over and not terminated, {}

    def _observe(self) -> dict[str, Any]:
        now: Any = self._timestep
        goal = np.asarray(now.state.goal_encoding, np.int64)
        return {"view": np.asarray(now.observation), "goal": goal}
