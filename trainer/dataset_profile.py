"""What a person would look at in a dataset before choosing settings: lengths, rewards, spaces.

All numbers come from SQL queries to the service; rewards are those of a sample of trajectories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from amago_model.config import Spaces
from stepwell import EnvSpec
from stepwell.client import Client
from stepwell.messages import PARTIALLY_OBSERVABLE
from trainer.config import TrainConfig
from trainer.data.returns import NEGLIGIBLE, Floats, returns_to_go
from trainer.data.snapshot import sql_condition
from trainer.errors import SettingError

SAMPLED_STEPS = 200_000
"""Approximate number of steps whose rewards are read."""
MAX_TRAJECTORIES = 1_000_000
TIMEOUT = 60.0
BLOCK = 10
"""Steps whose mean reward is one observation in `consistency`."""


@dataclass(frozen=True, slots=True)
class ReturnRange:
    """Discounted returns over all sampled steps, in the environment's units."""

    low: float
    high: float
    p5: float
    p95: float
    mean: float
    variance: float

    @property
    def spread(self) -> float:
        """The distance from p5 to p95, at least a fifth of the range (sparse rewards)."""
        return max(self.p95 - self.p5, 0.2 * (self.high - self.low))


@dataclass(frozen=True, slots=True)
class DatasetProfile:
    """Statistics of the selected trajectories of a dataset."""

    dataset: str
    env: str
    spaces: Spaces
    partially_observable: bool
    """The dataset has the tag `partially-observable`."""
    trajectories: int
    steps: int
    length: tuple[float, float, float]
    """Median, 95th percentile and maximum of the trajectories' lengths."""
    terminated: float
    """Share of trajectories that end in a termination."""
    returns: tuple[float, float, float]
    """5th percentile, mean and 95th percentile of the trajectories' undiscounted returns."""
    best_return: float
    """The highest undiscounted return of a trajectory."""
    informative: float
    """Share of steps whose reward is not the most frequent one: small if rewards are sparse."""
    reward: Floats
    """[M] rewards of the sampled trajectories, one trajectory after the other."""
    sampled_length: Floats
    """[n] lengths of the sampled trajectories."""
    sampled_terminated: Floats
    """[n] whether they end in a termination."""

    @property
    def observation_width(self) -> int:
        """Number of features of all observations together."""
        return sum(space.features for space in self.spaces.observations.values())

    @property
    def consistency(self) -> float:
        """Share of the variance of rewards that lies between trajectories, 0 to 1: high if each
        trajectory is good or bad as a whole, low if the quality changes within them.

        Rewards are means of 10 steps, in trajectories of at least 20; 0 without such trajectories.
        (Variances are unbiased, as in a one-way analysis of variance: else, with two means per
        trajectory, noise alone would give 0.5.)
        """
        means = [mean for mean in self._block_means() if len(mean) >= 2]
        if not means:
            return 0.0
        every = np.concatenate(means)
        variance = float(every.var(ddof=1))
        residual = np.concatenate([mean - mean.mean() for mean in means])
        within = float(np.square(residual).sum()) / (len(every) - len(means))
        size = float(np.square(self.reward).mean())
        return max(0.0, 1.0 - within / variance) if variance > NEGLIGIBLE * size else 0.0

    @property
    def difference(self) -> float:
        """Standard deviation between trajectories of the rewards of the same 10 steps, as a share
        of their mean size: low if all trajectories are alike, as those of one policy are.

        0 without rewards; infinite if all trajectories are shorter than 10 steps, so that nothing
        can be compared.
        """
        means = [mean for mean in self._block_means() if len(mean)]
        if not means:
            return math.inf if self.reward.any() else 0.0
        every = np.concatenate(means)
        place = np.concatenate([np.arange(len(mean)) for mean in means])
        count = np.bincount(place)
        residual = every - (np.bincount(place, every) / count)[place]
        deviation = np.sqrt(np.bincount(place, np.square(residual)) / count)
        size = float(np.abs(every).mean())
        return float((deviation * count).sum() / len(every)) / size if size > 0.0 else 0.0

    def _block_means(self) -> list[Floats]:
        """The mean rewards of each 10 steps of each trajectory."""
        length = self.sampled_length.astype(np.int64)
        starts = np.cumsum(length) - length
        return [
            self.reward[start : start + n * BLOCK].reshape(n, BLOCK).mean(axis=1)
            for start, n in zip(starts, length // BLOCK, strict=True)
        ]

    def discounted(self, gamma: float) -> ReturnRange:
        """Discounted returns to the end of each trajectory. Where a trajectory is truncated, its
        mean reward is assumed to continue for ever."""
        length = self.sampled_length.astype(np.int64)
        mean = np.add.reduceat(self.reward, np.cumsum(length) - length) / length
        after = np.where(self.sampled_terminated > 0, 0.0, mean / (1.0 - gamma))
        found = returns_to_go(self.reward, length, gamma, after)
        p5, p95 = np.quantile(found, (0.05, 0.95))
        return ReturnRange(
            low=float(found.min()),
            high=float(found.max()),
            p5=float(p5),
            p95=float(p95),
            mean=float(found.mean()),
            variance=float(found.var()),
        )


def read_profile(client: Client, config: TrainConfig) -> DatasetProfile:
    """Read the profile of the trajectories that a config selects from its dataset.

    Raises:
        NotFound: no such dataset.
        SettingError: no trajectory is selected.
        StepwellError: the condition is wrong, or the service did not answer.
    """
    dataset = config.dataset
    found = client.dataset(dataset)
    client.flush(dataset)  # `steps` has sealed trajectories only
    spec = EnvSpec.from_json(found.spec)
    condition = sql_condition(config)
    table = client.sql(
        f'select length, "return", terminated from trajectories where {condition}',
        limit=MAX_TRAJECTORIES,
        timeout=TIMEOUT,
    ).to_numpy()
    length = table["length"].astype(np.float64)
    if not len(length):
        raise SettingError(
            f"dataset {dataset!r} has no trajectory to learn from"
            + (f" with where={config.where!r}" if config.where else "")
        )
    limit = max(1, int(SAMPLED_STEPS / length.mean()))
    chosen = f"select id, length, terminated from trajectories where {condition} and state = "
    chosen += f"'sealed' order by hash(id), id limit {limit}"
    sample = client.sql(
        f"select any_value(c.length) as length, any_value(c.terminated) as terminated, "
        f"list(s.reward order by s.t) as reward from steps s join ({chosen}) c "
        "on s.trajectory_id = c.id where not s.is_last group by c.id order by c.id",
        dataset=dataset,
        limit=MAX_TRAJECTORIES,
        timeout=TIMEOUT,
    )
    if not len(sample):
        raise SettingError(f"dataset {dataset!r}: no trajectory is sealed; run stepwell flush")
    columns = sample.to_arrow()
    reward = columns["reward"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    counts = np.unique(reward, return_counts=True)[1]
    return DatasetProfile(
        dataset=dataset,
        env=spec.env,
        spaces=Spaces.of_spec(spec.to_json()),
        partially_observable=PARTIALLY_OBSERVABLE in found.tags,
        trajectories=len(length),
        steps=int(length.sum()),
        length=(
            float(np.median(length)),
            float(np.quantile(length, 0.95)),
            float(length.max()),
        ),
        terminated=float(table["terminated"].astype(np.float64).mean()),
        returns=(
            float(np.quantile(table["return"], 0.05)),
            float(np.mean(table["return"])),
            float(np.quantile(table["return"], 0.95)),
        ),
        best_return=float(np.max(table["return"])),
        informative=1.0 - float(counts.max()) / len(reward),
        reward=reward.astype(np.float64),
        sampled_length=columns["length"].to_numpy().astype(np.float64),
        sampled_terminated=columns["terminated"].to_numpy().astype(np.float64),
    )
