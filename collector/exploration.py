"""Noise on top of the policy's own sampling: AMAGO's epsilon-greedy and its bilevel form.

    epsilon = u · ( b - (b - e) · min(1, t / horizon) )      u ~ U[0, 1), drawn anew per episode
    b = begin level, annealed start → end over `steps`       e = the level at an episode's end

Discrete actions: with probability epsilon a uniform random one. Continuous: Gaussian noise whose
standard deviation is epsilon, on the scale where the action range is -1 … 1, then clipped. What is
executed is what is recorded. Facts: AMAGO v3.3.0, `ExplorationWrapper` (Grigsby et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from amago_model.config.base import Settings
from stepwell.errors import InvalidSpace
from stepwell.spaces import Array, Box, Discrete, EnvSpec, MultiBinary, Space

if TYPE_CHECKING:  # importing them would load torch, which a command's help does without
    from collector.envs import Arrays
    from collector.policy_actor import ActorInputs


Level = Annotated[float, Field(ge=0.0, le=1.0)]


class NoExplorationConfig(Settings):
    """No exploration besides sampling from the policy."""

    kind: Literal["none"] = "none"
    """none: no exploration besides sampling from the policy."""


class _AnnealedConfig(Settings):
    """An epsilon that is annealed over the steps of the collector."""

    start: Level = 1.0
    """Epsilon before annealing."""
    end: Level = 0.05
    """Epsilon after `steps` environment steps."""
    steps: int = Field(1_000_000, ge=1)
    """Environment steps over which start falls linearly to end."""
    randomize: bool = True
    """Multiply epsilon by a random number in [0, 1) for each episode."""
    clock: Literal["own", "policy"] = "own"
    """Step count of the annealing: own: steps of this collector, including earlier sessions;
    policy: the step of the published policy."""

    def annealed(self, clock: int, start: float, end: float) -> float:
        """Between start and end, at global step `clock`."""
        return start + (end - start) * min(1.0, max(0, clock) / self.steps)


class GreedyConfig(_AnnealedConfig):
    """Epsilon-greedy with a constant epsilon within an episode."""

    kind: Literal["greedy"] = "greedy"
    """greedy: a constant epsilon within an episode."""

    def level(self, clock: int, t: NDArray[np.int64], u: NDArray[np.float64]) -> Array:
        """[N] epsilon at global step `clock` and episode steps `t` [N], for draws `u` [N]."""
        del t
        return u * self.annealed(clock, self.start, self.end)


class BilevelConfig(_AnnealedConfig):
    """Epsilon-greedy with an epsilon that also falls within each episode."""

    kind: Literal["bilevel"] = "bilevel"
    """bilevel: epsilon also falls within each episode."""
    late_start: Level = 0.8
    """Epsilon at the end of an episode, before annealing."""
    late_end: Level = 0.01
    """Epsilon at the end of an episode, after annealing."""
    horizon: int = Field(ge=1)
    """Episode step at which the late epsilon is reached, typically the length of an episode.
    Required."""

    def level(self, clock: int, t: NDArray[np.int64], u: NDArray[np.float64]) -> Array:
        """[N] epsilon at global step `clock` and episode steps `t` [N], for draws `u` [N]."""
        begin = self.annealed(clock, self.start, self.end)
        late = self.annealed(clock, self.late_start, self.late_end)
        return u * (begin - (begin - late) * np.minimum(1.0, t / self.horizon))


EpsilonConfig = Annotated[
    NoExplorationConfig | GreedyConfig | BilevelConfig, Field(discriminator="kind")
]
"""Exploration in addition to sampling from the policy, by `kind`."""


class Exploration:
    """Epsilon-greedy over N environments. `clock()` gives the step that the schedule runs on."""

    def __init__(
        self,
        config: GreedyConfig | BilevelConfig,
        spec: EnvSpec,
        n: int,
        *,
        seed: int,
        clock: Callable[[], int],
    ):
        self._config, self._spaces, self._clock = config, spec.actions, clock
        self._rng = np.random.default_rng(seed)
        self._u = np.ones(n)
        for key, space in spec.actions.items():
            if isinstance(space, Box):
                _require_range(key, space)

    def reset(self, env_index: int) -> None:
        """An episode begins: it draws its own share of the level."""
        if self._config.randomize:
            self._u[env_index] = self._rng.random()

    def level(self, inputs: ActorInputs) -> Array:
        """[N] epsilon of every environment now."""
        return self._config.level(self._clock(), inputs.time_idx, self._u)

    def apply(self, actions: Arrays, inputs: ActorInputs) -> Arrays:
        """The actions [N, *shape] to execute."""
        epsilon = self.level(inputs)
        return {key: self._noisy(self._spaces[key], a, epsilon) for key, a in actions.items()}

    def _noisy(self, space: Space, action: Array, epsilon: Array) -> Array:
        n = len(action)
        if isinstance(space, Box):
            low, high = space.bounds()
            scale = epsilon.reshape(n, *(1,) * len(space.shape)) * (high - low) / 2.0
            noisy = action + scale * self._rng.standard_normal(action.shape)
            return np.clip(noisy, low, high).astype(action.dtype)
        # One uniform number per environment; a normal one would be below epsilon half of the time.
        random = self._rng.random(n) < epsilon
        drawn = self._uniform(space, n)
        return np.where(random.reshape(n, *(1,) * (action.ndim - 1)), drawn, action)

    def _uniform(self, space: Space, n: int) -> Array:
        if isinstance(space, Discrete):
            return self._rng.integers(space.start, space.start + space.n, n)
        if isinstance(space, MultiBinary):
            return self._rng.integers(0, 2, (n, space.n), np.int8)
        assert not isinstance(space, Box), "a Box gets Gaussian noise"
        return self._rng.integers(0, np.asarray(space.nvec), (n, len(space.nvec)))


def _require_range(key: str, space: Box) -> None:
    low, high = space.bounds()
    if np.dtype(space.dtype).kind != "f" or not np.isfinite(low).all() & np.isfinite(high).all():
        raise InvalidSpace(
            f"epsilon needs a range to be a part of: action {key!r}; "
            "rescale the actions (gymnasium.wrappers.RescaleAction) or use --epsilon.kind none",
            expected="a Box of floats with finite bounds",
            got=str(space),
        )
