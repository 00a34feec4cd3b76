"""How rare each achieved goal is in a snapshot, and weights that prefer the rare ones.

After the goal importance sampling of AMAGO (Grigsby et al., ICLR 2024, appendix B), but counted
once over the whole snapshot: every process and every resumed run has the same numbers, where
counters that follow each worker's own draws would drift apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e5
KEPT = 5
CHANCES = (0.2, 0.1, 0.1, 0.6)
"""Of the four ways of `reweighted`, as in AMAGO's code."""


class Rarity:
    """Weights of goals: (-log10 share)^power, where share is a goal's part of all achievements.

    Two shares per goal: of all (row, goal) pairs, and of all (episode, goal) pairs.
    """

    def __init__(
        self,
        episodes: Iterable[tuple[Floats, NDArray[np.bool_]]],
        *,
        power: float,
        tolerance: float,
    ):
        """Args: episodes: achieved goals [T, m, d] and which of them there are [T, m]."""
        self._tolerance = tolerance
        by_row: Counter[bytes] = Counter()
        by_episode: Counter[bytes] = Counter()
        for achieved, there in episodes:
            keys = self._keys(achieved[there])
            by_row.update(keys)
            by_episode.update(set(keys))
        self._tables = tuple(_weights(counts, power) for counts in (by_row, by_episode))

    def weights(self, goals: Floats, table: Literal[0, 1]) -> Floats:
        """[n] for goals [n, d]; table 0 counts rows, 1 counts episodes."""
        known = self._tables[table]
        return np.array([known.get(key, MIN_WEIGHT) for key in self._keys(goals)])

    def _keys(self, goals: Floats) -> list[bytes]:
        # Goals that count as equal should share a count: rounded to a grid of twice the tolerance.
        if self._tolerance:
            goals = np.rint(goals / (2 * self._tolerance))
        return [goal.tobytes() for goal in goals + 0.0]  # + 0.0: -0 is 0


def _weights(counts: Counter[bytes], power: float) -> dict[bytes, float]:
    total = sum(counts.values())
    return {
        key: float(np.clip((-np.log10(count / total)) ** power, MIN_WEIGHT, MAX_WEIGHT))
        for key, count in counts.items()
    }


def reweighted(weights: Floats, rng: np.random.Generator) -> Floats:
    """Weights [n] after one of four ways, drawn by `CHANCES`: made equal; the least subtracted; the
    median subtracted; only the five largest kept."""
    way = int(np.searchsorted(np.cumsum(CHANCES), rng.random(), side="right"))
    if way == 0:
        sharp = np.ones_like(weights)
    elif way == 1:
        sharp = weights - weights.min()
    elif way == 2:
        sharp = np.maximum(weights - np.median(weights), 0.0)
    else:
        sharp = np.where(weights >= np.sort(weights)[-KEPT:][0], weights, 0.0)
    # Whatever comes out stays possible, should everything preferred be used up.
    return np.asarray(np.maximum(sharp, 1e-9 * max(float(sharp.max()), 1.0)))
