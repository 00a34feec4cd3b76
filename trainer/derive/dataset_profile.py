"""What a person would look at in a dataset before choosing settings: lengths, rewards, spaces.

All numbers come from SQL queries to the service; rewards are those of a sample of trajectories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amago_model.config import Spaces, TimestepEncoderConfig
from amago_model.encoders.modalities import modalities_of
from stepwell import EnvSpec
from stepwell._sql import quoted
from stepwell.client import Client
from stepwell.messages import PARTIALLY_OBSERVABLE, split_version
from trainer.config import DataConfig, TrainConfig
from trainer.data.returns import NEGLIGIBLE, Floats, returns_to_go
from trainer.data.sampler import Ints
from trainer.data.snapshot import best_condition, sql_condition
from trainer.errors import SettingError

SAMPLED_STEPS = 200_000
"""Approximate number of steps whose rewards are read."""
MAX_TRAJECTORIES = 1_000_000
TIMEOUT = 60.0
BLOCK = 10
"""Steps whose mean reward is one observation in `difference`, and at least in `consistency`."""
PARTS = 8
"""Parts of a long trajectory; the mean reward of one is an observation in `consistency`."""
SPARSE = 0.1
"""Rewards are sparse if a smaller share of the steps is informative."""
MOST = 0.9
"""This share of all differences to the median reward is most of them."""
COMPARED = 5
"""Fewer trajectories do not show whether they are equally good."""
REPEATED = 0.5
"""Outcomes are compared if a larger share of the steps has a state and action that occur again."""
LARGEST_STATE = 100
"""Outcomes are compared for observations of at most this many numbers: images are too much to read,
and hardly occur again. The same limit holds for the deviations of observed numbers."""
OBSERVED_STEPS = 20_000
"""Approximate number of steps whose observations are read."""
DEVIATION_SQL = """\
with observed as (
  select unnest({numbers})::double as x, generate_subscripts({numbers}, 1) as i
  from steps where trajectory_id in (select id from ({chosen})) and t % {every} = 0
)
select stddev_pop(x) as std, abs(avg(x)) as distance,
  quantile_cont(x, 0.75) - quantile_cont(x, 0.25) as middle,
  quantile_cont(x, 0.95) - quantile_cont(x, 0.05) as most
from observed where isfinite(x) group by i"""
"""For each number of an observation: standard deviation, distance of its mean from 0, and the
ranges of its middle half and of its middle 90%."""
RANDOM_SQL = """\
with transition as (
  select hash(obs) as state, action, is_last,
    hash(reward, terminated, if(terminated, null, lead(obs) over w)) as outcome,
    lead(is_last) over w and not terminated as cut
  from steps where trajectory_id in (select id from ({chosen}))
  window w as (partition by trajectory_id order by t)
), counted as (
  select state, action, outcome, count(*) as n from transition where not is_last and not cut
  group by all
), pair as (
  select sum(n) as n, sum(n) - max(n) as unusual from counted group by state, action
)
select sum(n)::bigint, sum(n) filter (n > 1)::bigint, sum(unusual)::bigint from pair"""
"""Steps, steps whose state and action occur again, and those of them whose outcome is not the most
frequent one. After a truncation the outcome may be unknown."""
OFTEN = 0.1
"""A number changes in most steps if its middle half spans more than this many deviations."""
FAR = 10.0
"""Returns are far from the others if they are farther away than this many times the distance from
the 5th to the 95th percentile."""


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
    usual_length: float
    """The median length with each trajectory as often as it has steps: half of the steps are in
    trajectories as long, however many short ones there are."""
    terminated: float
    """Share of trajectories that end in a termination."""
    returns: tuple[float, float, float]
    """5th percentile, mean and 95th percentile of the trajectories' undiscounted returns."""
    best_return: float
    """The highest undiscounted return of a trajectory."""
    low_return: float
    """The 5th percentile of the returns, with each trajectory as often as it has steps, or that of
    the trajectories if it is lower."""
    best_tenth: int
    """Number of trajectories that data.best_share prefers."""
    informative: float
    """Share of the steps whose reward is not the most frequent one, or which hold most of the
    differences to the median, see `informative_share`: small if rewards are sparse, also beside a
    small cost of each step."""
    reward: Floats
    """[M] rewards of the sampled trajectories, one trajectory after the other."""
    sampled_length: Floats
    """[n] lengths of the sampled trajectories."""
    sampled_terminated: Floats
    """[n] whether they end in a termination."""
    smallest_std: float = math.inf
    """The smallest standard deviation of an observed number that changes in most steps; infinite if
    there is none, or if observations are larger than LARGEST_STATE."""
    farthest: float = 0.0
    """The largest distance from 0 of the mean of such a number, in its standard deviations."""
    heaviest_tail: float = 0.0
    """The largest standard deviation of an observed number, in ranges of the middle 90% of its
    values: 0.3 if it is Gaussian, large if rare extreme values hide the usual ones."""
    history_gain: float | None = None
    """How much better rewards or next observations are predicted with what was before
    (history.py); None if it was not measured."""
    random_outcomes: float = 0.0
    """Share of steps, of those that share observation and action, whose outcome is not the
    most frequent one. 0 if most observations occur once, and not counted (0) if rewards are not
    sparse, actions not discrete, or observations larger than LARGEST_STATE."""

    @property
    def long_length(self) -> float:
        """The length of long trajectories, which long ones among many short ones determine, too."""
        return max(self.length[1], self.usual_length)

    @property
    def sparse(self) -> bool:
        """Whether few steps are informative. A constant reward is not sparse."""
        return 0.0 < self.informative < SPARSE

    @property
    def observation_width(self) -> int:
        """Number of features of what the policy sees; of an embedding for what is embedded."""
        encoder = TimestepEncoderConfig()
        kinds = modalities_of(encoder, self.spaces)
        return sum(
            encoder.tokens.d_output if kind == "tokens" else self.spaces.observations[key].features
            for key, kind in kinds.items()
        )

    @property
    def consistency(self) -> float:
        """Share of the variance of rewards that lies between trajectories, 0 to 1: high if each
        trajectory is good or bad as a whole, low if the quality changes within them.

        Rewards are means of an eighth of a long trajectory (at least 10 steps), relative to those
        of the same steps of the other trajectories: else beginnings, which are alike, and the
        steps of a gait would hide how good the trajectories are. 0 if fewer than five have two such
        parts.
        (Variances are unbiased, as in a one-way analysis of variance: else, with two means per
        trajectory, noise alone would give 0.5.)
        """
        block = max(BLOCK, int(self.long_length) // PARTS)
        means = [mean for mean in self._block_means(block) if len(mean) >= 2]
        if len(means) < COMPARED:
            return 0.0
        residual, _, of = _residuals(means)
        inner = residual - (np.bincount(of, residual) / np.bincount(of))[of]
        within = float(np.square(inner).sum()) / (len(of) - len(means))
        variance = float(residual.var(ddof=1))
        size = float(np.square(self.reward).mean())
        return max(0.0, 1.0 - within / variance) if variance > NEGLIGIBLE * size else 0.0

    @property
    def difference(self) -> float:
        """Standard deviation between trajectories of the rewards of the same 10 steps, as a share
        of their mean size: low if all trajectories are alike, as those of one policy are.

        0 without rewards; infinite if fewer than half of the trajectories have 10 steps that at
        least five of them have, so that nothing can be compared.
        """
        means = [mean for mean in self._block_means(BLOCK) if len(mean)]
        if not self.reward.any():
            return 0.0
        if len(means) < max(COMPARED, len(self.sampled_length) / 2):
            return math.inf
        residual, place, _ = _residuals(means)
        count = np.bincount(place)
        deviation = np.sqrt(np.bincount(place, np.square(residual)) / (count - 1))
        size = float(np.abs(np.concatenate([mean[: len(count)] for mean in means])).mean())
        return float((deviation * count).sum() / len(place)) / size if size > 0.0 else 0.0

    def _block_means(self, block: int) -> list[Floats]:
        """The mean rewards of each `block` steps of each trajectory."""
        return [
            self.reward[start : start + n * block].reshape(n, block).mean(axis=1)
            for start, n in zip(self._starts, self._length // block, strict=True)
        ]

    def discounted(self, gamma: float) -> ReturnRange:
        """Discounted returns to the end of each trajectory. Where a trajectory is truncated, its
        mean reward is assumed to continue for ever."""
        found = self._returns_to_go(gamma)
        p5, p95 = np.quantile(found, (0.05, 0.95))
        return ReturnRange(
            low=float(found.min()),
            high=float(found.max()),
            p5=float(p5),
            p95=float(p95),
            mean=float(found.mean()),
            variance=float(found.var()),
        )

    @property
    def _length(self) -> NDArray[np.int64]:
        return self.sampled_length.astype(np.int64)

    @property
    def _starts(self) -> NDArray[np.int64]:
        """[n] where in `reward` the sampled trajectories begin."""
        return np.cumsum(self._length) - self._length

    @property
    def sampled_returns(self) -> Floats:
        """[n] the undiscounted returns of the sampled trajectories."""
        return np.add.reduceat(self.reward, self._starts)

    @property
    def length_correlation(self) -> float:
        """Correlation of the sampled trajectories' lengths and returns, -1 to 1: near -1 if goals
        end trajectories, so short ones are best; near 1 if mistakes do. 0 if all are as long, or
        have the same return."""
        length, returns = self.sampled_length, self.sampled_returns
        if np.ptp(length) == 0 or np.ptp(returns) <= NEGLIGIBLE * np.abs(returns).max():
            return 0.0
        return float(np.corrcoef(length, returns)[0, 1])

    def _returns_to_go(self, gamma: float) -> Floats:
        return returns_to_go(self.reward, self._length, gamma, self.sampled_terminated > 0)

    def outliers(self, gamma: float) -> NDArray[np.bool_]:
        """[n] which sampled trajectories have discounted returns that are far from the others.

        Not those with higher returns that a few steps earn: these may be the successes to learn.
        """
        found = self._returns_to_go(gamma)
        p5, p95 = np.quantile(found, (0.05, 0.95))
        far = FAR * (p95 - p5)
        below: NDArray[np.bool_] = np.minimum.reduceat(found, self._starts) < p5 - far
        above: NDArray[np.bool_] = np.maximum.reduceat(found, self._starts) > p95 + far
        others = self.reward[np.repeat(~(below | above), self._length)]
        for i in np.flatnonzero(above) if len(others) else ():
            usual = np.median(self.reward[self._starts[i] :][: self._length[i]])
            above[i] = not others.min() <= usual <= others.max()
        return below | above

    def without(self, outliers: NDArray[np.bool_]) -> DatasetProfile:
        """The profile with a sample that lacks these [n] trajectories."""
        return replace(
            self,
            reward=self.reward[np.repeat(~outliers, self._length)],
            sampled_length=self.sampled_length[~outliers],
            sampled_terminated=self.sampled_terminated[~outliers],
        )


def read_profile(client: Client, config: TrainConfig) -> DatasetProfile:
    """Read the profile of the trajectories that a config selects from its dataset.

    Raises:
        NotFound: no such dataset.
        SettingError: no trajectory is selected.
        StepwellError: the condition is wrong, or the service did not answer.
    """
    dataset, _ = split_version(config.dataset)
    found = client.dataset(dataset)
    client.flush(dataset)  # `steps` has sealed trajectories only
    spec = EnvSpec.from_json(found.spec)
    condition = sql_condition(config)
    table = client.sql(
        f'select length, "return", terminated from trajectories where {condition}',
        limit=MAX_TRAJECTORIES,
        timeout=TIMEOUT,
    ).to_numpy()
    length, returns = table["length"].astype(np.float64), table["return"]
    if not len(length):
        raise SettingError(
            f"dataset {dataset!r} has no trajectory to learn from"
            + (f" with where={config.where!r}" if config.where else "")
        )

    def sample_of(steps: int) -> str:
        limit = max(1, int(steps / length.mean()))
        return (
            f"select id, length, terminated from trajectories where {condition} and "
            f"state = 'sealed' order by hash(id), id limit {limit}"
        )

    best = best_condition(condition, DataConfig().best_fraction)
    best_tenth = client.sql(
        f"select count(*) from trajectories where {condition} and {best}", timeout=TIMEOUT
    ).rows[0][0]
    chosen = sample_of(SAMPLED_STEPS)
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
    profile = summarise(
        dataset,
        spec,
        partially_observable=PARTIALLY_OBSERVABLE in found.tags,
        length=length,
        returns=returns,
        terminated=table["terminated"].astype(np.float64),
        best_tenth=best_tenth,
        reward=columns["reward"].combine_chunks().flatten().to_numpy(zero_copy_only=False),
        sampled_length=columns["length"].to_numpy(),
        sampled_terminated=columns["terminated"].to_numpy(),
    )
    size = sum(math.prod(space.shape) for space in profile.spaces.observations.values())
    if size <= LARGEST_STATE:
        every = max(1, int(length.max() / OBSERVED_STEPS))
        numbers = _observed_numbers(client, profile, sample_of(OBSERVED_STEPS), every)
        # A number that is nearly always the same, and seldom another, is not in small units.
        changing = [n for n in numbers if n.middle > OFTEN * n.std]
        profile = replace(
            profile,
            smallest_std=min((n.std for n in changing), default=math.inf),
            farthest=max((n.distance / n.std for n in changing), default=0.0),
            heaviest_tail=max((n.std / n.most for n in numbers if n.most > 0.0), default=0.0),
        )
    if profile.spaces.action.kind != "discrete" or not profile.sparse or size > LARGEST_STATE:
        return profile
    counts = client.sql(RANDOM_SQL.format(chosen=chosen), dataset=dataset, timeout=TIMEOUT)
    return replace(profile, random_outcomes=random_share(*counts.rows[0]))


class ObservedNumber(NamedTuple):
    """One number of the observations, whose values differ."""

    std: float
    distance: float
    """The distance of the mean from 0."""
    middle: float
    """The range of the middle half of its values."""
    most: float
    """The range of the middle 90% of its values."""


def _observed_numbers(
    client: Client, profile: DatasetProfile, chosen: str, every: int
) -> list[ObservedNumber]:
    """The numbers that differ in the chosen trajectories. Of long ones, every so many steps are
    read."""
    found = []
    kinds = modalities_of(TimestepEncoderConfig(), profile.spaces)
    for key, kind in kinds.items():
        space = profile.spaces.observations[key]
        if kind != "vector" or space.n is not None or space.dtype == "uint8":
            continue
        column = f"obs.{quoted(key)}"
        numbers = column if space.shape else f"[{column}]"
        query = DEVIATION_SQL.format(numbers=numbers, chosen=chosen, every=every)
        rows = client.sql(query, dataset=profile.dataset, timeout=TIMEOUT).rows
        found += [number for row in rows if (number := ObservedNumber(*row)).std > 0.0]
    return found


def random_share(steps: int | None, repeated: int | None, unusual: int | None) -> float:
    """The share of random outcomes, from the counts of RANDOM_SQL."""
    if not steps or not repeated or repeated < REPEATED * steps:
        return 0.0
    return (unusual or 0) / repeated


def summarise(
    dataset: str,
    spec: EnvSpec,
    *,
    partially_observable: bool,
    length: Floats,
    returns: Floats,
    terminated: Floats,
    best_tenth: int,
    reward: NDArray[Any],
    sampled_length: NDArray[Any],
    sampled_terminated: NDArray[Any],
) -> DatasetProfile:
    """The profile of n trajectories with these lengths, returns and endings [n]; of a sample of
    them, in the same units, the rewards [M], lengths and endings. See DatasetProfile."""
    low, high = np.quantile(returns, (0.05, 0.95))
    median, long = np.quantile(length, (0.5, 0.95))
    return DatasetProfile(
        dataset=dataset,
        env=spec.env,
        spaces=Spaces.of_spec(spec.to_json()),
        partially_observable=partially_observable,
        trajectories=len(length),
        steps=int(length.sum()),
        length=(float(median), float(long), float(length.max())),
        usual_length=weighted_quantile(length, length, 0.5),
        terminated=float(terminated.mean()),
        returns=(float(low), float(returns.mean()), float(high)),
        best_return=float(returns.max()),
        low_return=min(float(low), weighted_quantile(returns, length, 0.05)),
        best_tenth=best_tenth,
        informative=informative_share(reward, sampled_length),
        reward=reward.astype(np.float64),
        sampled_length=sampled_length.astype(np.float64),
        sampled_terminated=sampled_terminated.astype(np.float64),
    )


def _residuals(means: list[Floats]) -> tuple[Floats, Ints, Ints]:
    """Means relative to the average of the same place, where at least five trajectories have one:
    these [k], their places [k], and the numbers of their trajectories [k]."""
    every = np.concatenate(means)
    place = np.concatenate([np.arange(len(mean)) for mean in means])
    of = np.repeat(np.arange(len(means)), [len(mean) for mean in means])
    known = np.bincount(place)[place] >= COMPARED
    every, place, of = every[known], place[known], of[known]
    average = np.bincount(place, every) / np.bincount(place)
    return every - average[place], place, of


def informative_share(reward: NDArray[Any], length: NDArray[Any]) -> float:
    """The share of the steps whose rewards tell something, of trajectories [n] with rewards [M].

    These are the steps with another reward than the most frequent one; or, if fewer, those that
    hold 90% of all differences to the median, as a reward for success does beside a small cost of
    each step. The latter only if they are successes: mostly above the median, and few in their
    trajectories, too, unlike those of a trajectory in another unit.
    """
    unusual = 1.0 - float(np.unique(reward, return_counts=True)[1].max()) / len(reward)
    above = reward.astype(np.float64) - np.median(reward)
    difference = np.abs(above)
    falling = np.sort(difference)[::-1]
    held = falling.cumsum()
    if held[-1] == 0.0:
        return unusual
    large = difference >= falling[np.searchsorted(held, MOST * held[-1])]
    each = length.astype(np.int64)
    within = np.add.reduceat(large, np.cumsum(each) - each, dtype=np.int64)
    if above[large].sum() < 0.0 or large.sum() >= SPARSE * each[within > 0].sum():
        return unusual
    return min(unusual, float(large.mean()))


def weighted_quantile(values: Floats, weights: Floats, q: float) -> float:
    """The smallest of `values` [n] up to which at least a share q of the `weights` [n] lies."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order][min(np.searchsorted(below, q * below[-1]), len(values) - 1)])
