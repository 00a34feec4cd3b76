"""Means with bootstrap intervals, and the interquartile mean.

Small, seeded and the same everywhere, so that two tables of the same numbers agree to the digit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000


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
