"""Scripted behaviours played in real environments and recorded as D4RL columns.

The part that all generators share; a generator adds an environment and a behaviour. No policies,
no network, no vectorisation: a hundred thousand steps take seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.d4rl_file import Columns
from stepwell.errors import InvalidData

# Room between two seeds, so that their episodes never start from the same reset seed.
_SEED_STRIDE = 1_000_000

Progress = Callable[[int, int], None]
"""Called with (steps done, steps asked for), once an episode."""


class Behaviour(Protocol):
    """Whoever chooses the actions. `rng` is new in each episode and the only source of chance."""

    def begin(self, rng: np.random.Generator) -> None:
        """An episode begins: forget the last one, keep `rng` for this one."""

    def act(self, observation: NDArray[np.float32]) -> Any:
        """The action for this observation, inside the environment's action space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a generator wrote, in numbers."""

    steps: int
    """Rows in the file; may exceed what was asked for, because episodes are kept whole."""
    episodes: int
    """Whole episodes in the file."""
    mean_return: float
    """Mean over episodes of the undiscounted sum of rewards."""
    p90_return: float
    """The return that one episode in ten exceeds."""
    best_return: float
    """The best episode's return."""


def first_episode_seed(seed: int) -> int:
    """Episode i of a file made with `seed` was reset with `first_episode_seed(seed) + i`."""
    return seed * _SEED_STRIDE


def record(
    env: gymnasium.Env[Any, Any],
    behaviour: Behaviour,
    *,
    steps: int,
    seed: int,
    progress: Progress | None = None,
) -> tuple[dict[str, NDArray[np.generic]], Summary]:
    """Play whole episodes until at least `steps` steps (N in all) are recorded.

    Returns the columns of a D4RL file: observations, next_observations float32 (N, O); actions
    float32 (N, A) or, for Discrete, int32 (N,); rewards float32 (N,); terminals, timeouts bool
    (N,). Pure in (env, behaviour, steps, seed), and a longer record begins with the shorter one:
    episode i depends on (seed, i) alone.

    Raises InvalidData when `steps` or `seed` is out of range.
    """
    if steps < 1:
        raise InvalidData("steps", expected="at least 1", got=str(steps))
    if not 0 <= seed < 2**31:
        raise InvalidData("seed", expected="0 .. 2**31 - 1", got=str(seed))
    action_dtype = np.int32 if isinstance(env.action_space, spaces.Discrete) else np.float32
    obs: list[Any] = []
    next_obs: list[Any] = []
    actions: list[NDArray[np.generic]] = []
    rewards: list[float] = []
    terminals: list[bool] = []
    timeouts: list[bool] = []
    returns: list[float] = []
    while len(rewards) < steps:
        episode = len(returns)
        behaviour.begin(np.random.default_rng((seed, episode)))
        obs_t, _ = env.reset(seed=first_episode_seed(seed) + episode)
        earned, over = 0.0, False
        while not over:
            # Rounded before it is played: what the file says is what the environment was given.
            action = np.asarray(behaviour.act(obs_t), action_dtype)
            obs_tp1, reward, terminated, truncated, _ = env.step(action)
            obs.append(obs_t)
            actions.append(action)
            rewards.append(float(reward))
            next_obs.append(obs_tp1)
            terminals.append(bool(terminated))
            timeouts.append(bool(truncated and not terminated))
            obs_t, earned, over = obs_tp1, earned + float(reward), terminated or truncated
        returns.append(earned)
        if progress is not None:
            progress(min(len(rewards), steps), steps)
    columns: dict[str, NDArray[np.generic]] = {
        "observations": np.array(obs, np.float32),
        "actions": np.array(actions, action_dtype),
        "rewards": np.array(rewards, np.float32),
        "next_observations": np.array(next_obs, np.float32),
        "terminals": np.array(terminals, np.bool_),
        "timeouts": np.array(timeouts, np.bool_),
    }
    return columns, _summarise(columns, returns)


def provenance(algorithm: str, env_id: str, seed: int) -> dict[str, str | int]:
    """The `metadata/` leaves that let anyone replay the file's episodes."""
    return {
        "algorithm": algorithm,
        "environment": env_id,
        "gymnasium": gymnasium.__version__,
        "seed": seed,
        "first_episode_seed": first_episode_seed(seed),
    }


def _summarise(columns: Columns, returns: list[float]) -> Summary:
    return Summary(
        steps=len(columns["rewards"]),
        episodes=len(returns),
        mean_return=float(np.mean(returns)),
        p90_return=float(np.percentile(returns, 90)),
        best_return=float(np.max(returns)),
    )
