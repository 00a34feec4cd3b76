"""Leaderboards: policies and references of one environment, or of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dashboard import api
from stepwell.messages import Evaluation
from workbench.analysis import leaderboard as board
from workbench.analysis.confidence_intervals import Interval
from workbench.analysis.leaderboard import Pick as Pick
from workbench.analysis.leaderboard import ScoreRow, Standing, run_of
from workbench.analysis.leaderboard import normalised as normalised
from workbench.analysis.reference_scores import reference_family as reference_family

DATA_SQL = """
SELECT {by}, avg(r) AS mean, sum(r * w) / sum(w) AS iqm, count(*) AS episodes
FROM (
  SELECT {by}, r, least(greatest(i / n, 0.25), 0.75)
    - least(greatest((i - 1) / n, 0.25), 0.75) AS w
  FROM (
    SELECT {by}, "return" AS r, count(*) OVER (PARTITION BY {by}) AS n,
      row_number() OVER (PARTITION BY {by} ORDER BY "return") AS i
    FROM trajectories WHERE list_contains($envs, env) AND purpose = 'train'
  )
)
GROUP BY {by} ORDER BY episodes DESC, {by} LIMIT {most}
"""
"""Mean and interquartile mean of the returns of datasets or environments, most trajectories first,
as `stepwell compare` counts them. No interval: these are all that there are."""
DATASETS, ENVS = 5, 1000
"""Most datasets of an environment, and most environments."""
DATA = "data"


def _configs(found: Sequence[Evaluation]) -> dict[str, Any]:
    """Run → config, of the runs of these evaluations."""
    names = sorted({run_of(e.policy) for e in found})
    query = "SELECT name, config FROM runs WHERE list_contains($names, name)"
    rows = api.run_query(query, {"names": names}, limit=api.MOST_ROWS).rows
    return {name: json.loads(config) for name, config in rows}


@api.read(3)
def leaderboard(env: str, pick: Pick) -> list[Standing]:
    """Policies of one environment, and references, by descending mean."""
    found = [e for e in api.evaluations() if e.env == env]
    standings = board.leaderboard(found, _configs(found), pick=pick)
    standings += board.reference_rows(env)
    data = api.run_query(DATA_SQL.format(by="dataset", most=DATASETS), {"envs": [env]}).rows
    standings += [board.constant(f"data of {name}", *numbers) for name, *numbers in data]
    return sorted(standings, key=lambda row: row.mean.value, reverse=True)


@api.read(3)
def score_table(pick: Pick) -> list[ScoreRow]:
    """Policies by environments; then references, the last one the mean of each one's data."""
    found = api.evaluations()
    rows = board.score_table(found, _configs(found), pick=pick)
    envs = sorted({e.env for e in found})
    data = api.run_query(DATA_SQL.format(by="env", most=ENVS), {"envs": envs}).rows
    if data:
        cells = {env: board.constant(DATA, *numbers) for env, *numbers in data}
        rows.append(ScoreRow(DATA, cells, reference=True))
    return rows


def average(row: ScoreRow, statistic: str, envs: Sequence[str]) -> float | None:
    """Mean of the normalised scores; None unless the row has one in each of `envs`."""
    found = [interval_of(row.cells.get(env), statistic) for env in envs]
    known = [one and normalised(env, one) for env, one in zip(envs, found, strict=True)]
    values = [one.value for one in known if one]
    return float(np.mean(values)) if values and len(values) == len(envs) else None


def interval_of(row: Standing | None, statistic: str) -> Interval | None:
    """Return the interval of the drawn statistic, "mean" or "IQM"; None if it is unknown."""
    if row is None:
        return None
    return row.iqm if statistic == "IQM" else row.mean


@api.read(60)
def improvements(row: Standing, others: list[Standing]) -> dict[str, str]:
    """Name of another row -> probability of improvement over it, as text."""
    found = {}
    for other in others:
        if other.name == row.name:
            found[other.name] = ""
        else:
            p = board.improvement(row, other)
            found[other.name] = f"{p.value:.0%} ({p.low:.0%} … {p.high:.0%})"
    return found
