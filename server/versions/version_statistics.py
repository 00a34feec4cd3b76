"""Statistics of a version's trajectories, from the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stepwell.messages import Spread, VersionStatistics

COLUMNS = 't.length, t."return", t.bytes, t.terminated, t.truncated, t.success, t.env, t.policy'
"""The columns of `trajectories AS t` that `statistics_of` needs, in this order."""
POLICIES = 20


def statistics_of(rows: Sequence[Sequence[Any]]) -> VersionStatistics:
    """Compute statistics from rows of COLUMNS."""
    if not rows:
        return VersionStatistics()
    lengths, returns, sizes, terminated, truncated, success, envs, policies = zip(
        *rows, strict=True
    )
    known = [value for value in success if value is not None]
    return VersionStatistics(
        trajectories=len(rows),
        steps=sum(lengths),
        bytes=sum(sizes),
        returns=_spread(returns),
        lengths=_spread(lengths),
        terminated=sum(map(bool, terminated)),
        truncated=sum(map(bool, truncated)),
        success=sum(map(bool, known)) if known else None,
        envs=dict(Counter(envs).most_common()),
        policies=dict(Counter(name for name in policies if name).most_common(POLICIES)),
    )


def _spread(values: Iterable[float]) -> Spread:
    array = np.asarray(list(values), np.float64)
    low, q25, median, q75, high = np.quantile(array, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return Spread(
        mean=float(array.mean()),
        std=float(array.std()),
        min=low,
        q25=q25,
        median=median,
        q75=q75,
        max=high,
    )
