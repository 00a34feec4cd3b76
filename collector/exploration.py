"""Exploration in addition to the policy's own sampling: epsilon-greedy, with random actions of one
step or of several, sticky actions, your own.

    epsilon = u · ( b - (b - e) · min(1, t / horizon) )      u ~ U[0, 1), drawn anew per episode;
                                                             0 for the share `quiet_episodes`
    b = begin level, annealed start → end over `steps`       e = the level at an episode's end

Discrete actions: with probability epsilon a uniform random one. Continuous: Gaussian noise whose
standard deviation is epsilon, on the scale where the action range is -1 … 1, then clipped. What is
executed is what is recorded. Facts: AMAGO v3.3.0, `ExplorationWrapper` (Grigsby et al., 2024).

A plug-in registers its own:

    @register_exploration("flip")
    class Flip(Exploration):
        def apply(self, actions, inputs):
            flipped = self.rng.random(self.n) < 0.1
            return {key: np.where(flipped, 1 - a, a) for key, a in actions.items()}

    stepwell collect … --plugin my_module --epsilon.kind custom --epsilon.name flip
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from amago_model.config.base import Settings
from stepwell._plugins import describe_error
from stepwell.errors import InvalidSpace, StepwellError
from stepwell.spaces import Array, Box, Discrete, EnvSpec, MultiBinary, Space

if TYPE_CHECKING:  # importing them would load torch, which a command's help does without
    from collector.env_spaces import Arrays
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
    quiet_episodes: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of episodes without exploration, where all actions are choices: what the policy itself
    does is learned from, too."""
    clock: Literal["own", "policy"] = "own"
    """Step count of the annealing: own: steps of this collector, including earlier sessions;
    policy: the step of the published policy."""

    def annealed(self, clock: int, start: float, end: float) -> float:
        """Between start and end, at global step `clock`."""
        return start + (end - start) * min(1.0, max(0, clock) / self.steps)

    def level(self, clock: int, t: NDArray[np.int64], u: NDArray[np.float64]) -> Array:  # noqa: ARG002
        """[N] epsilon at global step `clock` and episode steps `t` [N], for draws `u` [N]."""
        return u * self.annealed(clock, self.start, self.end)


class GreedyConfig(_AnnealedConfig):
    """Epsilon-greedy with a constant epsilon within an episode."""

    kind: Literal["greedy"] = "greedy"
    """greedy: a constant epsilon within an episode."""


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


class WindowConfig(_AnnealedConfig):
    """Epsilon-greedy with an epsilon of its own between two steps of each episode."""

    kind: Literal["window"] = "window"
    """window: another epsilon between two steps of each episode, such as those in a corridor."""
    first: int = Field(ge=0)
    """The first episode step of the window, from 0. Required."""
    last: int = Field(ge=0)
    """The last episode step of the window. Required."""
    inside: Level = 0.0
    """Epsilon within the window: not annealed, but with the random share of the episode, too."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"last: expected at least first, {self.first}, got {self.last}")
        return self

    def level(self, clock: int, t: NDArray[np.int64], u: NDArray[np.float64]) -> Array:
        """[N] epsilon at global step `clock` and episode steps `t` [N], for draws `u` [N]."""
        within = (self.first <= t) & (t <= self.last)
        return u * np.where(within, self.inside, self.annealed(clock, self.start, self.end))


class RepeatConfig(_AnnealedConfig):
    """Random actions that last for a random number of steps (ez-greedy; Dabney et al. 2021).

    They reach states that single random actions hardly ever reach, as in Acrobot and MountainCar.
    """

    kind: Literal["repeat"] = "repeat"
    """repeat: random actions, each repeated for a random number of steps."""
    exponent: float = Field(1.5, gt=1.0)
    """A random action lasts k steps with a probability proportional to k ** -exponent."""
    longest: int = Field(30, ge=1)
    """Longer ones last this many steps."""


class StickyConfig(_AnnealedConfig):
    """The last action again, with probability epsilon."""

    kind: Literal["sticky"] = "sticky"
    """sticky: the last action again, with probability epsilon."""


class CustomConfig(Settings):
    """A class that a plug-in registers."""

    kind: Literal["custom"] = "custom"
    """custom: a class that a plug-in registers with `register_exploration`."""
    name: str
    """The name under which it is registered. Required."""
    settings: tuple[str, ...] = ()
    """Its keyword arguments, as KEY=VALUE with values in JSON."""
    clock: Literal["own", "policy"] = "own"
    """Step count of its `clock()`: steps of this collector, or of the published policy."""


EpsilonConfig = Annotated[
    NoExplorationConfig
    | GreedyConfig
    | BilevelConfig
    | WindowConfig
    | RepeatConfig
    | StickyConfig
    | CustomConfig,
    Field(discriminator="kind"),
]
"""Exploration in addition to sampling from the policy, by `kind`."""


class ExplorationError(StepwellError):
    """No exploration of that name, or it does not accept its settings."""

    exit_status = 2


class Exploration(ABC):
    """Changes the actions of N environments before they are executed and recorded.

    A subclass has `spaces`, the action spaces by key, `n`, the number of environments, `rng`, a
    generator of its own, and `clock()`, the step that a schedule runs on: that of the collector or,
    with epsilon.clock policy, of the published policy.
    """

    def __init__(self, spec: EnvSpec, n: int, *, seed: int, clock: Callable[[], int]) -> None:
        self.spaces, self.n, self.clock = spec.actions, n, clock
        self.rng = np.random.default_rng(seed)

    def reset(self, env_index: int) -> None:  # noqa: B027, ARG002 - most keep nothing per episode
        """An episode begins in one environment."""

    @abstractmethod
    def apply(self, actions: Arrays, inputs: ActorInputs) -> Arrays:
        """The actions to execute, by key [N, *shape], for those of the policy."""


class EpsilonGreedy(Exploration):
    """Random actions, or Gaussian noise: the kinds greedy, bilevel and window."""

    def __init__(
        self,
        config: GreedyConfig | BilevelConfig | WindowConfig | RepeatConfig | StickyConfig,
        spec: EnvSpec,
        n: int,
        *,
        seed: int,
        clock: Callable[[], int],
    ) -> None:
        super().__init__(spec, n, seed=seed, clock=clock)
        self._config = config
        self._u = np.ones(n)
        continuous = any(isinstance(space, Box) for space in self.spaces.values())
        self._quiet = 0.0 if continuous else config.quiet_episodes

    def reset(self, env_index: int) -> None:
        """An episode begins: it draws its own share of the level."""
        quiet = self._quiet
        if self._config.randomize or quiet:
            drawn = (self.rng.random() - quiet) / (1.0 - quiet)
            self._u[env_index] = max(0.0, drawn if self._config.randomize else float(drawn > 0))

    def level(self, inputs: ActorInputs) -> Array:
        """[N] epsilon of every environment now."""
        return self._config.level(self.clock(), inputs.time_idx, self._u)

    def apply(self, actions: Arrays, inputs: ActorInputs) -> Arrays:
        """The actions [N, *shape] to execute."""
        epsilon = self.level(inputs)
        return {key: self._noisy(self.spaces[key], a, epsilon) for key, a in actions.items()}

    def _noisy(self, space: Space, action: Array, epsilon: Array) -> Array:
        n = len(action)
        if isinstance(space, Box):
            low, high = space.bounds()
            scale = epsilon.reshape(n, *(1,) * len(space.shape)) * (high - low) / 2.0
            noisy = action + scale * self.rng.standard_normal(action.shape)
            return np.clip(noisy, low, high).astype(action.dtype)
        # One uniform number per environment; a normal one would be below epsilon half of the time.
        random = self.rng.random(n) < epsilon
        drawn = self._uniform(space, n)
        return np.where(random.reshape(n, *(1,) * (action.ndim - 1)), drawn, action)

    def _uniform(self, space: Space, n: int) -> Array:
        if isinstance(space, Box):
            low, high = space.bounds()
            return self.rng.uniform(low, high, (n, *space.shape)).astype(space.dtype)
        if isinstance(space, Discrete):
            return self.rng.integers(space.start, space.start + space.n, n)
        if isinstance(space, MultiBinary):
            return self.rng.integers(0, 2, (n, space.n), np.int8)
        return np.asarray(space.start) + self.rng.integers(
            0, np.asarray(space.nvec), (n, len(space.nvec))
        )


class RepeatedActions(EpsilonGreedy):
    """Random actions for epsilon of the steps, each repeated for a random number of steps. Other
    steps of a Box get Gaussian noise, as in EpsilonGreedy."""

    _config: RepeatConfig

    def __init__(self, config: RepeatConfig, spec: EnvSpec, n: int, **options: Any) -> None:
        super().__init__(config, spec, n, **options)
        lengths = np.arange(1, 10_001)  # longer ones are rare
        chance = lengths**-config.exponent
        self._mean_length = np.average(np.minimum(lengths, config.longest), weights=chance)
        self._left = np.zeros(n, np.int64)
        self._held = {key: self._uniform(space, n) for key, space in self.spaces.items()}

    def reset(self, env_index: int) -> None:
        """An episode begins: no action is repeated."""
        super().reset(env_index)
        self._left[env_index] = 0

    def apply(self, actions: Arrays, inputs: ActorInputs) -> Arrays:
        """The actions [N, *shape] to execute."""
        epsilon = self.level(inputs)
        # Chance that repetitions begin, such that they are epsilon of all steps.
        chance = epsilon / (epsilon + self._mean_length * (1.0 - epsilon))
        begins = (self._left == 0) & (self.rng.random(self.n) < chance)
        lengths = np.minimum(self.rng.zipf(self._config.exponent, self.n), self._config.longest)
        self._left = np.where(begins, lengths, self._left)
        random, found = self._left > 0, {}
        for key, action in actions.items():
            space, shape = self.spaces[key], (self.n, *(1,) * (action.ndim - 1))
            drawn = self._uniform(space, self.n)
            self._held[key] = np.where(begins.reshape(shape), drawn, self._held[key])
            own = self._noisy(space, action, epsilon) if isinstance(space, Box) else action
            found[key] = np.where(random.reshape(shape), self._held[key], own).astype(action.dtype)
        self._left -= random
        return found


class StickyActions(EpsilonGreedy):
    """The last executed action again, with probability epsilon; not in the first step."""

    def apply(self, actions: Arrays, inputs: ActorInputs) -> Arrays:
        """The actions [N, *shape] to execute."""
        again = (self.rng.random(self.n) < self.level(inputs)) & (inputs.time_idx > 0)
        return {
            key: np.where(again.reshape(self.n, *(1,) * (a.ndim - 1)), inputs.prev_action[key], a)
            for key, a in actions.items()
        }


_registered: dict[str, type[Exploration]] = {}
E = TypeVar("E", bound=type[Exploration])


def register_exploration(name: str) -> Callable[[E], E]:
    """Decorator that registers a subclass of `Exploration` under a name; the last one counts."""

    def decorate(kind: E) -> E:
        if not (isinstance(kind, type) and issubclass(kind, Exploration)):
            raise ExplorationError(f"register_exploration: {kind!r} is no subclass of Exploration")
        _registered[name] = kind
        return kind

    return decorate


def make_exploration(
    config: EpsilonConfig, spec: EnvSpec, n: int, *, seed: int, clock: Callable[[], int]
) -> Exploration | None:
    """The exploration of a config; None for the kind none.

    Raises:
        InvalidSpace: noise needs an action range.
        ExplorationError: a custom one is not registered, or does not accept its settings.
    """
    if isinstance(config, NoExplorationConfig):
        return None
    if isinstance(config, CustomConfig):
        return _custom(config, spec, n, seed=seed, clock=clock)
    if isinstance(config, StickyConfig):
        return StickyActions(config, spec, n, seed=seed, clock=clock)
    for key, space in spec.actions.items():
        if isinstance(space, Box):
            _require_range(key, space)
    if isinstance(config, RepeatConfig):
        return RepeatedActions(config, spec, n, seed=seed, clock=clock)
    return EpsilonGreedy(config, spec, n, seed=seed, clock=clock)


def _custom(
    config: CustomConfig, spec: EnvSpec, n: int, *, seed: int, clock: Callable[[], int]
) -> Exploration:
    from collector.envs import parse_pairs  # it imports gymnasium, which --help does without

    if config.name not in _registered:
        raise ExplorationError(
            f"--epsilon.name {config.name}: expected one of {sorted(_registered)}; import the "
            "module that registers it with --plugin MODULE"
        )
    settings = parse_pairs(config.settings, "--epsilon.settings")
    try:
        return _registered[config.name](spec, n, seed=seed, clock=clock, **settings)
    except Exception as error:  # user code may raise anything
        raise ExplorationError(f"--epsilon.settings {settings}: {describe_error(error)}") from error


def explore(exploration: Exploration, actions: Arrays, inputs: ActorInputs) -> Arrays:
    """`exploration.apply`, checked. Raises `ExplorationError` for what cannot be executed."""
    name = type(exploration).__name__
    try:
        changed = exploration.apply(actions, inputs)
        for key, action in actions.items():
            got = np.asarray(changed[key])
            whole = got.dtype.kind in "biu" or action.dtype.kind == "f"
            if got.shape != action.shape or not whole:
                raise ValueError(
                    f"{key!r}: expected {action.dtype} {action.shape}, got {got.dtype} {got.shape}"
                )
    except Exception as error:  # user code may raise anything
        raise ExplorationError(f"exploration {name}: {describe_error(error)}") from error
    return changed


def _require_range(key: str, space: Box) -> None:
    low, high = space.bounds()
    if np.dtype(space.dtype).kind != "f" or not np.isfinite(low).all() & np.isfinite(high).all():
        raise InvalidSpace(
            f"epsilon needs a range to be a part of: action {key!r}; "
            "rescale the actions (gymnasium.wrappers.RescaleAction) or use --epsilon.kind none",
            expected="a Box of floats with finite bounds",
            got=str(space),
        )
