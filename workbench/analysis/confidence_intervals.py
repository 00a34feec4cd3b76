"""Means with bootstrap intervals, and the interquartile mean.

Small, seeded and the same everywhere, so that two tables of the same numbers agree to the digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
BLOCK = 1 << 20
"""Numbers that are drawn at once."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic of n numbers and its two-sided bootstrap interval."""

    value: float
    low: float
    high: float
    n: int
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


def bootstrap_mean(
    values: ArrayLike, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Mean of `values` [n] with its percentile-bootstrap interval (Efron 1979).

    Deterministic for a seed. One value gives an interval of no width. Raises ValueError when empty.
    """
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0:
        raise ValueError("a mean needs at least one value; got none")
    means = _resampled_means(array, resamples, seed)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(float(array.mean()), float(low), float(high), int(array.size), confidence)


def bootstrap_grouped_mean(
    groups: Sequence[ArrayLike],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean over groups of each group's mean, with a percentile interval of a two-stage bootstrap.

    A group holds the returns of one training seed. Each resample draws as many groups as there are,
    with replacement, and from each drawn group as many returns as it has, with replacement
    (Davison & Hinkley 1997, section 3.8). With one group, only its returns vary. `n` counts all
    returns. Deterministic for a seed. Raises ValueError for no group or an empty one.
    """
    arrays = [np.asarray(group, dtype=np.float64).reshape(-1) for group in groups]
    if not arrays or any(array.size == 0 for array in arrays):
        raise ValueError("a mean of groups needs at least one group, and values in each")
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(arrays), (resamples, len(arrays)))
    means = np.empty(drawn.shape, np.float64)
    for index, array in enumerate(arrays):
        here = drawn == index
        means[here] = _resampled_means(array, int(here.sum()), seed + 1 + index)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means.mean(axis=1), [tail, 1.0 - tail])
    value = float(np.mean([array.mean() for array in arrays]))
    n = sum(array.size for array in arrays)
    return Interval(value, float(low), float(high), n, confidence)


def bootstrap_grouped_iqm(
    groups: Sequence[ArrayLike],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interquartile mean of all groups' values together, with the interval of the same two-stage
    bootstrap as `bootstrap_grouped_mean`. Raises ValueError for no group or an empty one."""
    arrays = [np.asarray(group, dtype=np.float64).reshape(-1) for group in groups]
    if not arrays or any(array.size == 0 for array in arrays):
        raise ValueError("an IQM of groups needs at least one group, and values in each")
    rng = np.random.default_rng(seed)
    sizes = np.array([array.size for array in arrays])
    longest = int(sizes.max())
    padded = np.stack([np.resize(array, longest) for array in arrays])
    found = np.empty(resamples, np.float64)
    at_once = max(1, BLOCK // (len(arrays) * longest))
    for start in range(0, resamples, at_once):
        here = found[start : start + at_once]
        groups_of = rng.integers(0, len(arrays), (len(here), len(arrays)))[..., None]
        lengths = sizes[groups_of]
        picked = rng.integers(0, lengths, (len(here), len(arrays), longest))
        # Unused places come last, and weigh nothing.
        drawn = np.where(np.arange(longest) < lengths, padded[groups_of, picked], np.inf)
        drawn = np.sort(drawn.reshape(len(here), -1), axis=1)
        count = lengths.sum(axis=(1, 2))[:, None]
        place = np.arange(drawn.shape[1])
        weight = np.minimum(place + 1, 0.75 * count) - np.maximum(place, 0.25 * count)
        inside = weight > 0
        total = np.where(inside, weight * np.where(inside, drawn, 0.0), 0.0).sum(axis=1)
        here[:] = total / (0.5 * count[:, 0])
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(found, [tail, 1.0 - tail])
    every = np.concatenate(arrays)
    return Interval(iqm(every), float(low), float(high), int(every.size), confidence)


def bootstrap_mean_curve(
    curves: ArrayLike, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean of `curves` [n, points] at each point, with the bounds of its percentile bootstrap.

    A resample draws whole curves, such as training seeds, because points of one are not
    independent. NaN: the curve has no value there. Where one curve has a value, the interval has
    no width; where none has, all three are NaN. Deterministic for a seed.
    """
    array = np.atleast_2d(np.asarray(curves, dtype=np.float64))
    n = len(array)
    present = np.isfinite(array)
    values = np.where(present, array, 0.0)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(n, np.full(n, 1.0 / n), resamples).astype(np.float64)
    counts = drawn @ present
    with np.errstate(invalid="ignore"):
        means = np.where(counts > 0, drawn @ values, np.nan) / np.where(counts > 0, counts, np.nan)
        mean = values.sum(0) / np.where(present.any(0), present.sum(0), np.nan)
    tail = (1.0 - confidence) / 2.0
    low, high = np.full(mean.shape, np.nan), np.full(mean.shape, np.nan)
    whole = (counts > 0).all(0)
    low[whole], high[whole] = np.quantile(means[:, whole], [tail, 1.0 - tail], axis=0)
    some = present.any(0) & ~whole
    if some.any():
        low[some], high[some] = np.nanquantile(means[:, some], [tail, 1.0 - tail], axis=0)
    return mean, low, high


def iqm(values: ArrayLike) -> float:
    """Interquartile mean: the mean of the middle half, edges weighted by their fraction.

    As rliable (Agarwal et al. 2021) reports; equals scipy's trim_mean(0.25) when n is a multiple of
    four, and interpolates between when it is not. Raises ValueError when empty.
    """
    array = np.sort(np.asarray(values, dtype=np.float64).reshape(-1))
    n = array.size
    if n == 0:
        raise ValueError("an interquartile mean needs at least one value; got none")
    # Element i covers the quantile range [i/n, (i+1)/n]; its weight is the overlap with [.25, .75].
    edges = np.arange(n + 1) / n
    weights = np.clip(edges[1:], 0.25, 0.75) - np.clip(edges[:-1], 0.25, 0.75)
    return float((array * weights).sum() / weights.sum())


def _resampled_means(array: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    means = np.empty(resamples, np.float64)
    # In slices: 10,000 resamples of 100,000 returns at once would take gigabytes.
    step = max(1, 4_000_000 // array.size)
    for start in range(0, resamples, step):
        stop = min(resamples, start + step)
        picks = rng.integers(0, array.size, (stop - start, array.size))
        means[start:stop] = array[picks].mean(axis=1)
    return means
