"""The curves on one screen, each read completely once; then only its new points are read."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from dashboard import api
from stepwell.messages import Run, Series

WHOLE_SECONDS = 60.0
"""Seconds until a growing curve is read completely again: a resumed run rewrites its points."""
KEYS_AT_ONCE = 50
POINTS, LEAST = 500, 100
"""Most points of a curve, and those that it has beside however many others. For longer ones, the
service sends the minimum and the maximum of each interval."""
PER_CHART = 900
"""Points of all curves of a chart, or LEAST of each. With 500 of each of three runs, four charts
took 0.2 s more."""


class Curve:
    """One metric of one run: `steps`, `times` and `values` as arrays, NaN where none was finite."""

    def __init__(self, series: Series, heartbeat: float, points: int):
        self.steps = np.asarray(series.steps, np.int64)
        self.times = np.asarray(series.times, float)
        self.values = np.asarray(series.values, float)
        self.points = points
        """Most points that were asked for."""
        self.heartbeat = heartbeat
        """Heartbeat of the run when the complete curve was read."""
        self.read_at = time.monotonic()

    def extend(self, more: Series) -> None:
        self.steps = np.append(self.steps, np.asarray(more.steps, np.int64))
        self.times = np.append(self.times, np.asarray(more.times, float))
        self.values = np.append(self.values, np.asarray(more.values, float))

    def is_old(self, run: Run, last: int, points: int) -> bool:
        """Whether to read the complete curve again, not only its new points. `points`: as many it
        should have."""
        waited = time.monotonic() - self.read_at > WHOLE_SECONDS or not run.alive
        newer = run.heartbeat_at != self.heartbeat
        if not points <= self.points <= 2 * points:
            return True
        return (newer and waited) or len(self.steps) > 2 * points or last < self.steps[-1]


class Curves:
    """The curves on one screen. Each is read completely once, then only its new points."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, float], dict[str, Curve]] = {}
        self._points = POINTS

    def keep(self, chosen: Sequence[Run]) -> None:
        """Delete the curves of runs that are no longer shown: these are."""
        self._points = max(LEAST, min(POINTS, PER_CHART // max(1, len(chosen))))
        for place in set(self._known) - {_place(run) for run in chosen}:
            del self._known[place]

    def get(self, run: Run, keys: Sequence[str]) -> dict[str, Curve]:
        """Return the curves of those `keys` that this run has."""
        known = self._known.setdefault(_place(run), {})
        mine = [key for key in keys if key in run.latest_steps]
        whole, newer = [], {}
        for key in mine:
            last = run.latest_steps[key]
            # The query separates keys with commas, so for a key that contains one, all keys are
            # read completely.
            if key not in known or known[key].is_old(run, last, self._points):
                whole.append(key)
            elif last > known[key].steps[-1]:
                if "," in key:
                    whole.append(key)
                else:
                    newer[key] = int(known[key].steps[-1])
        if any("," in key for key in whole):
            read = api.client().metrics(run.name, points=self._points)
            found = {key: read[key] for key in whole if key in read}
        else:
            found = _series(run.name, whole, self._points)
        for key, series in found.items():
            known[key] = Curve(series, run.heartbeat_at, self._points)
        after = list(newer.values())
        for key, series in _series(run.name, list(newer), self._points, after).items():
            known[key].extend(series)
        return {key: known[key] for key in mine if key in known}


def _place(run: Run) -> tuple[str, str, float]:
    """The key of a run. A run deleted and created again with the same name gets another key."""
    return api.address(), run.name, run.created_at


def _series(
    name: str, keys: list[str], points: int, after: list[int] | None = None
) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for start in range(0, len(keys), KEYS_AT_ONCE):
        part = slice(start, start + KEYS_AT_ONCE)
        steps = None if after is None else after[part]
        found |= api.client().metrics(name, keys[part], points, after=steps)
    return found
