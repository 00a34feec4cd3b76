"""The rarity of each achieved goal in a snapshot, and weights that prefer rare goals.

Based on the goal importance sampling of AMAGO (Grigsby et al., ICLR 2024, appendix B), but counted
once over the whole snapshot, so every process and every resumed run has the same counts. Counters
updated from each worker's samples would differ between workers.
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
"""Probabilities of the four methods in `reweighted`, as in AMAGO's code."""


class Rarity:
    """Weights of goals: (-log10 share)^power, where share is a goal's fraction of all achievements.

    There are two shares per goal: of all (row, goal) pairs, and of all (episode, goal) pairs.
    """

    def __init__(
        self,
        episodes: Iterable[tuple[Floats, NDArray[np.bool_]]],
        *,
        power: float,
        tolerance: float,
    ):
        """Args: episodes: achieved goals [T, m, d] and a mask of the valid ones [T, m]."""
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
        # Rounded to a grid of twice the tolerance, so that equal goals share a count.
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
    """Weights [n] modified by one of four methods, drawn with `CHANCES`: all equal; minimum
    subtracted; median subtracted; only the five largest kept."""
    way = int(np.searchsorted(np.cumsum(CHANCES), rng.random(), side="right"))
    if way == 0:
        sharp = np.ones_like(weights)
    elif way == 1:
        sharp = weights - weights.min()
    elif way == 2:
        sharp = np.maximum(weights - np.median(weights), 0.0)
    else:
        sharp = np.where(weights >= np.sort(weights)[-KEPT:][0], weights, 0.0)
    # All weights stay above 0, so that other goals can be drawn after the preferred ones.
    return np.asarray(np.maximum(sharp, 1e-9 * max(float(sharp.max()), 1.0)))
