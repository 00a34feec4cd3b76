"""Augmented random search: a linear policy for MuJoCo locomotion in minutes on one CPU core.

ARS-V2 (Mania, Guy and Recht, NeurIPS 2018): at each iteration the weights are perturbed in
`directions` random directions, both ways; the update is the sum of the `top` best directions,
weighted by the differences of the returns and divided by their standard deviation. Observations
are normalised with their running mean and standard deviation.
"""

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from stepwell._files import whole_file

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a training depends on; the names of the paper's symbols are in parentheses."""

    env_id: str
    iterations: int
    directions: int  # N
    top: int  # b
    step_size: float  # alpha
    noise: float  # nu
    alive_bonus: bool = True
    """Whether the environment has a reward for not falling; the training leaves it out, as in the
    paper, because standing still is a local optimum with it."""
    horizon: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The linear policies of all iterations; the first is the untrained one (zero).

    Action = clip(weights[k] @ (observation - means[k]) / scales[k], -1, 1).
    """

    weights: Array  # [K, actions, observations]
    means: Array  # [K, observations]
    scales: Array  # [K, observations]
    returns: Array  # [K] mean return of a few episodes with noise on the actions

    def policy(self, k: int, perturbation: Array | float = 0.0) -> tuple[Array, Array]:
        """(matrix, offset) of snapshot k: action = clip(matrix @ observation + offset, -1, 1)."""
        matrix = (self.weights[k] + perturbation) / self.scales[k]
        return matrix, -matrix @ self.means[k]

    @property
    def expert(self) -> int:
        """The snapshot with the highest return."""
        return int(self.returns.argmax())

    @property
    def medium(self) -> int:
        """The first snapshot with half of the highest return."""
        return int((self.returns >= self.returns.max() / 2).argmax())


ACTION_NOISE = 0.05
"""Standard deviation of the noise on the actions in evaluations and in the datasets. Some of the
best policies without noise fail with it, so they are judged with it."""
_EVALUATION_EPISODES = 4


def evaluate(env: Any, snapshots: Snapshots, k: int, horizon: int) -> float:
    """Mean return of snapshot k with noise on its actions."""
    rng = np.random.default_rng(0)
    matrix, offset = snapshots.policy(k)
    noise = ACTION_NOISE * rng.standard_normal((_EVALUATION_EPISODES, horizon, len(offset)))
    returns = [_rollout(env, matrix, offset + one, i) for i, one in enumerate(noise)]
    return float(np.mean([total for total, _ in returns]))


def train(settings: Settings) -> Snapshots:
    """Train a linear policy; a pure function of `settings` on one machine."""
    bonus: dict[str, Any] = {"healthy_reward": 0.0} if settings.alive_bonus else {}
    train_env = gymnasium.make(settings.env_id, **bonus).unwrapped
    test_env = gymnasium.make(settings.env_id).unwrapped
    rng = np.random.default_rng(settings.seed)
    assert train_env.observation_space.shape and train_env.action_space.shape
    (width,), (actions,) = train_env.observation_space.shape, train_env.action_space.shape
    count, total, squares = 0, np.zeros(width), np.zeros(width)
    weights, mean, scale = np.zeros((actions, width)), np.zeros(width), np.ones(width)
    kept: list[tuple[Array, Array, Array, float]] = []
    episode_seed = 0

    def keep() -> None:
        snapshot = Snapshots(weights[None], mean[None], scale[None], np.zeros(1))
        returned = evaluate(test_env, snapshot, 0, settings.horizon)
        kept.append((weights, mean, scale, returned))

    keep()
    for _ in range(settings.iterations):
        deltas = rng.standard_normal((settings.directions, actions, width))
        returns = np.zeros((settings.directions, 2))
        for i, delta in enumerate(deltas):
            episode_seed += 1
            for j, sign in enumerate((1.0, -1.0)):
                matrix = (weights + sign * settings.noise * delta) / scale
                offsets = np.tile(-matrix @ mean, (settings.horizon, 1))
                returns[i, j], seen = _rollout(train_env, matrix, offsets, episode_seed)
                count += len(seen)
                total += seen.sum(0)
                squares += np.square(seen).sum(0)
        best = np.argsort(-returns.max(1), kind="stable")[: settings.top]
        differences = returns[best, 0] - returns[best, 1]
        update = np.tensordot(differences, deltas[best], 1) / settings.top
        weights = weights + settings.step_size / (returns[best].std() + 1e-6) * update
        mean = total / count
        variance = squares / count - np.square(mean)
        # A constant dimension is left as it is, not divided by almost 0.
        scale = np.sqrt(np.where(variance < 1e-7, 1.0, variance))
        keep()
    columns = [np.array(column) for column in zip(*kept, strict=True)]
    return Snapshots(*columns)


def _rollout(env: Any, matrix: Array, offsets: Array, seed: int) -> tuple[float, Array]:
    """Returns (undiscounted return, observations [T, observations]) of one episode of at most as
    many steps as there are offsets [steps, actions]."""
    obs, _ = env.reset(seed=seed)
    seen, total = np.empty((len(offsets), len(obs))), 0.0
    for t, offset in enumerate(offsets):
        seen[t] = obs
        action = np.minimum(np.maximum(matrix @ obs + offset, -1.0), 1.0)
        obs, reward, terminated, _, _ = env.step(action)
        total += float(reward)
        if terminated:
            break
    return total, seen[: t + 1]


def load_or_train(settings: Settings, folder: Path | None) -> Snapshots:
    """The snapshots of `settings` from `folder`; trained and written there if they are missing.

    Without a folder they are always trained.
    """
    path = None if folder is None else folder / f"ars-{settings.env_id.lower()}.npz"
    described = json.dumps(asdict(settings))
    names = ("weights", "means", "scales", "returns")
    if path is not None and path.exists():
        with np.load(path) as file:
            if str(file["settings"]) == described:
                return Snapshots(*(file[name] for name in names))
    snapshots = train(settings)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: getattr(snapshots, name) for name in names}
        content = io.BytesIO()
        np.savez(content, settings=np.array(described), **arrays)
        with whole_file(path) as target:
            target.write(content.getbuffer())
    return snapshots
