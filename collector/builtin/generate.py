"""Generate offline data with a scripted behaviour policy, as a file in the D4RL layout.

    row i          observations[i] actions[i] rewards[i] next_observations[i]
    terminals[i]   the episode terminated at this row; row i + 1 begins another episode
    timeouts[i]    the episode was truncated at this row; row i + 1 begins another episode
    metadata/...   how the file was made

The columns concatenate all episodes, with gzip level 4 and without HDF5 attributes (Fu et al.,
2020). The service imports such files. Generating 100,000 steps takes seconds.
"""

import io
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import h5py
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from collector.builtin import MODIFIED_ID
from collector.builtin.modified import Modified
from stepwell._files import whole_file
from stepwell.errors import InvalidData, StepwellError

# Distance between the reset seeds of two dataset seeds, so that the datasets share no reset seed.
_SEED_STRIDE = 1_000_000

Progress = Callable[[int, int], None]
"""Called once per episode with (steps done, steps requested), or the same of episodes."""
Columns = Mapping[str, NDArray[np.generic]]
Metadata = Mapping[str, str | int | float | NDArray[np.generic]]


class MissingPackage(StepwellError, ImportError):
    """An environment's package is not installed; the message says how to install it."""


class Behaviour(ABC):
    """An environment and its scripted behaviour policy. The policy's only source of randomness is
    the `rng` that `begin` receives, a new one for each episode."""

    env_id: ClassVar[str]
    env_args: ClassVar[Mapping[str, Any]] = {}
    """Default arguments of the environment."""
    algorithm: ClassVar[str]
    """Name of the policy in the file's metadata."""
    steps: ClassVar[int] = 100_000
    """Default number of steps in a file."""
    package: ClassVar[str] = "gymnasium"
    """What `pip install` needs for the environment."""
    about: ClassVar[str]
    """One line for --help."""

    def __init__(self, env: Any) -> None:
        self.env = env
        """The environment without wrappers."""

    def begin(self, rng: np.random.Generator) -> None:
        """Start an episode, which has its random numbers from `rng`."""
        self._rng = rng

    @abstractmethod
    def act(self, observation: NDArray[np.float32]) -> Any:
        """The action for this observation, inside the environment's action space."""

    def play(self, request: "Request") -> tuple[Columns, list[float]]:
        """Act until the request is fulfilled. Returns (columns of N rows, return per episode)."""
        return _play_episodes(self, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How much to play, where, and with which random numbers."""

    env: gymnasium.Env[Any, Any]
    """The environment with its wrappers."""
    steps: int | None
    """Minimum number of rows, or None."""
    episodes: int | None
    """Number of episodes, if `steps` is None."""
    seed: int
    constant_action: bool
    progress: Progress | None

    def __post_init__(self) -> None:
        for name, wanted in (("steps", self.steps), ("episodes", self.episodes)):
            if wanted is not None and wanted < 1:
                raise InvalidData(name, expected="at least 1", got=str(wanted))
        if not 0 <= self.seed < 2**31:
            raise InvalidData("seed", expected="0 .. 2**31 - 1", got=str(self.seed))

    @property
    def action_dtype(self) -> type[np.int32] | type[np.float32]:
        """Discrete actions are int32."""
        return np.int32 if isinstance(self.env.action_space, spaces.Discrete) else np.float32

    def action(self, behaviour: Behaviour, observation: NDArray[np.float32]) -> Any:
        """The behaviour's action in the recorded dtype, as it is executed. The behaviour sees what
        `Modified` hides."""
        base = self.env.unwrapped
        seen = base.full_observation if isinstance(base, Modified) else observation
        # A discrete action becomes a numpy scalar: toy text's tables have no key that is an array.
        action = np.asarray(behaviour.act(seen), self.action_dtype)[()]
        return np.append(action, self.action_dtype(0)) if self.constant_action else action

    def fulfilled(self, rows: int, episodes: int) -> bool:
        """Whether this is enough; also reports the progress."""
        done, wanted = (rows, self.steps) if self.steps is not None else (episodes, self.episodes)
        assert wanted is not None
        if self.progress is not None and done:
            self.progress(min(done, wanted), wanted)
        return done >= wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics of a generated file."""

    steps: int
    """Rows in the file. May exceed the requested number, because the last episode is completed."""
    episodes: int
    """Number of episodes in the file."""
    mean_return: float
    """Mean over episodes of the undiscounted sum of rewards."""
    p90_return: float
    """90th percentile of the episodes' returns."""
    best_return: float
    """Highest return of an episode."""


def first_episode_seed(seed: int) -> int:
    """Reset seed of a file's first episode: episode i is reset with this seed + i."""
    return seed * _SEED_STRIDE


def generate(
    kind: type[Behaviour],
    path: str | Path,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    episodes: int | None = None,
    reward_scale: float = 1.0,
    constant_action: bool = False,
    hide: Sequence[int] = (),
    observation_scale: float = 1.0,
    observation_shift: float = 0.0,
    policy_args: Mapping[str, Any] | None = None,
    env_args: Mapping[str, Any] | None = None,
) -> Summary:
    """Run whole episodes until at least `steps` steps are recorded, and write them to `path`.

    With `episodes`, exactly that many episodes are recorded instead. The file is a pure function of
    the arguments. Episode i depends only on (kind, env_args, seed, i), so a longer file begins with
    the rows of a shorter one. The metadata contain all that is needed to replay the episodes.

    `reward_scale`, `constant_action`, `hide`, `observation_scale` and `observation_shift` change
    the data as `Modified` does; the metadata then name that environment. `policy_args` are passed
    to `kind` after the environment.

    Raises:
        InvalidData: an argument is out of range, or both `steps` and `episodes` are given, or
            `constant_action` for discrete actions.
        MissingPackage: a package that the environment needs is not installed.
    """
    if steps is not None and episodes is not None:
        raise InvalidData("steps", expected="none if episodes is given", got=str(steps))
    env_id, env_args = kind.env_id, {**kind.env_args, **(env_args or {})}
    units = {"observation_scale": observation_scale, "observation_shift": observation_shift}
    in_units = observation_scale != 1.0 or observation_shift != 0.0
    if modified := reward_scale != 1.0 or constant_action or bool(hide) or in_units:
        changes: dict[str, Any] = {"reward_scale": reward_scale, "constant_action": constant_action}
        if hide:
            changes["hide"] = list(hide)
        if in_units:
            changes |= units
        env_id, env_args = MODIFIED_ID, {"env": kind.env_id, **changes, **env_args}
    try:
        with warnings.catch_warnings():
            # Box2D's SWIG types emit a DeprecationWarning when they are created. If warnings are
            # errors (`-W error`, the tests) it causes a segmentation fault, so it is suppressed.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, **env_args)
            except TypeError as error:
                accepted = f"arguments that {env_id} accepts"
                raise InvalidData("env_args", expected=accepted, got=str(error)) from error
            base: Any = env.unwrapped
            behaviour = kind(base.inner.unwrapped if modified else base, **(policy_args or {}))
    except (ImportError, DependencyNotInstalled) as error:
        raise MissingPackage(
            f"{kind.env_id} needs a package that is not installed: {error}\n"
            f'    pip install "{kind.package}"'
        ) from error
    try:
        if steps is None and episodes is None:
            steps = kind.steps
        request = Request(
            env=env,
            steps=steps,
            episodes=episodes,
            seed=seed,
            constant_action=constant_action,
            progress=progress,
        )
        columns, returns = behaviour.play(request)
    finally:
        env.close()
    metadata: dict[str, str | int] = {
        "algorithm": kind.algorithm,
        "environment": env_id,
        "gymnasium": gymnasium.__version__,
        "seed": seed,
        "first_episode_seed": first_episode_seed(seed),
    }
    if env.metadata.get("partially_observable"):
        metadata["partially_observable"] = 1
    if isinstance(env.observation_space, spaces.Discrete):
        metadata["discrete_observations"] = int(env.observation_space.n)
    if env_args:
        metadata["environment_kwargs"] = json.dumps(env_args)
    write_d4rl(path, columns, metadata)
    return Summary(
        steps=len(columns["rewards"]),
        episodes=len(returns),
        mean_return=float(np.mean(returns)),
        p90_return=float(np.percentile(returns, 90)),
        best_return=float(np.max(returns)),
    )


def _play_episodes(behaviour: Behaviour, request: Request) -> tuple[Columns, list[float]]:
    env = request.env
    rows: list[tuple[Any, ...]] = []
    returns: list[float] = []
    while not request.fulfilled(len(rows), len(returns)):
        episode = len(returns)
        behaviour.begin(np.random.default_rng((request.seed, episode)))
        obs, _ = env.reset(seed=first_episode_seed(request.seed) + episode)
        earned, over = 0.0, False
        while not over:
            action = request.action(behaviour, obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            cut = truncated and not terminated
            rows.append((obs, action, float(reward), next_obs, terminated, cut))
            obs, earned, over = next_obs, earned + float(reward), terminated or truncated
        returns.append(earned)
    obs_dtype: type[np.uint8 | np.int32 | np.float32] = np.float32
    if env.observation_space.dtype == np.uint8:
        obs_dtype = np.uint8
    elif isinstance(env.observation_space, spaces.Discrete):
        obs_dtype = np.int32
    names = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")
    dtypes = (obs_dtype, request.action_dtype, np.float32, obs_dtype, np.bool_, np.bool_)
    columns = zip(names, dtypes, zip(*rows, strict=True), strict=True)
    return {name: np.array(column, dtype) for name, dtype, column in columns}, returns


def write_d4rl(path: str | Path, columns: Columns, metadata: Metadata) -> None:
    """Write `columns` (name -> array, all with the same N rows) and `metadata` to `path`.

    Names may contain slashes (`infos/qpos`). Strings in `metadata` become bytes, as in D4RL. The
    file is written atomically and replaces an existing one. The same input gives the same bytes.
    """
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        for name, column in columns.items():
            h5.create_dataset(name, data=column, compression="gzip", compression_opts=4)
        for name, value in metadata.items():
            leaf = np.bytes_(value) if isinstance(value, str) else value
            h5.create_dataset(f"metadata/{name}", data=leaf)
    with whole_file(Path(path)) as target:
        target.write(file.getbuffer())
