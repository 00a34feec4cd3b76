"""The table and the learning curves of a comparison of recipes, from its runs and evaluations.

Every run of comparison NAME has the tag comparison:NAME. A policy is trained by NAME-RECIPE-SEED;
its version V is evaluated by the run NAME-RECIPE-SEED-eval-V, random actions by NAME-random. All
evaluations have the same seeds. `stepwell compare` makes these runs; it and the dashboard show them
with the functions of this module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepwell.client import Client
from stepwell.messages import Evaluation, Run
from stepwell.spaces import env_name
from workbench.analysis.confidence_intervals import (
    Interval,
    bootstrap_grouped_iqm,
    bootstrap_grouped_mean,
)
from workbench.analysis.reference_scores import normalised_score, reference_family

TAG = "comparison:"
RATE = "progress/updates_per_second"
"""The metric of training speed, without start-up and pauses."""
DATA_SQL = """\
SELECT count(*) AS episodes, avg(r) AS mean, sum(r * w) / sum(w) AS iqm
FROM (
  SELECT r, least(greatest(i / n, 0.25), 0.75)
    - least(greatest((i - 1) / n, 0.25), 0.75) AS w
  FROM (
    SELECT "return" AS r, row_number() OVER (ORDER BY "return") AS i, count(*) OVER () AS n
    FROM trajectories WHERE dataset = ? AND purpose = 'train'
  )
)"""
"""Number, mean and interquartile mean of the returns of a dataset's training trajectories."""
NAMES_SQL = f"""\
SELECT tag[{len(TAG) + 1}:] AS comparison
FROM (SELECT unnest(tags) AS tag, created_at FROM runs)
WHERE starts_with(tag, '{TAG}') GROUP BY tag ORDER BY max(created_at) DESC"""
"""The names of all comparisons, newest first."""
TABLE_SQL = f"""\
WITH mine AS (
  SELECT name, seed, config->>'recipe' AS recipe FROM runs
  WHERE list_contains(tags, '{TAG}NAME')
), last AS (
  SELECT m.recipe, m.seed, e.*, split_part(e.policy, '/', 2)::BIGINT AS updates
  FROM evaluations e JOIN mine m ON m.name = split_part(e.policy, '/', 1)
  WHERE e.run IN (SELECT name FROM mine)
  QUALIFY row_number() OVER (PARTITION BY m.name ORDER BY updates DESC, e.created_at DESC) = 1
), speed AS (
  SELECT run, arg_max(value, step) AS rate FROM metrics WHERE key = '{RATE}' GROUP BY run
)
SELECT recipe, count(*) AS seeds, avg(mean) AS mean, min(mean) AS lowest, max(mean) AS highest,
  avg(normalised) AS normalised, sum(episodes) AS episodes, max(updates) AS updates,
  avg(updates / rate) AS seconds
FROM last LEFT JOIN speed ON speed.run = split_part(policy, '/', 1)
GROUP BY recipe ORDER BY mean DESC"""
"""The recipes of comparison NAME: last policies, mean over training seeds, without intervals."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the service has of a comparison."""

    name: str
    dataset: str
    runs: list[Run]
    """Training runs, oldest first."""
    evaluations: dict[str, Evaluation]
    """Policy (RUN/VERSION or random) -> its newest evaluation."""

    @property
    def env(self) -> str:
        return next((e.env for e in self.evaluations.values()), "")

    @property
    def reference(self) -> str | None:
        """The dataset or environment whose D4RL reference scores normalise; None without one."""
        return next((name for name in (self.dataset, self.env) if reference_family(name)), None)

    def versions(self, run: str) -> dict[int, Evaluation]:
        """The evaluated versions of a run's policy, in order."""
        found = {}
        for policy, evaluation in self.evaluations.items():
            name, _, version = policy.rpartition("/")
            if name == run:
                found[int(version)] = evaluation
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a recipe, `data` (the dataset's trajectories) or `random` (actions)."""

    recipe: str
    seeds: int = 0
    """Training seeds whose last policy was evaluated."""
    mean: float | None = None
    """Mean return; for a recipe the mean over its training seeds."""
    iqm: float | None = None
    """Interquartile mean over all episodes (of all training seeds)."""
    iqm_interval: Interval | None = None
    """Like `interval`, of the IQM."""
    interval: Interval | None = None
    """95 % bootstrap interval of the mean: over training seeds, and over episodes within each.
    None for `data`, which is no sample."""
    normalised: float | None = None
    """The mean on D4RL's scale (0 … 100)."""
    episodes: int = 0
    updates: int | None = None
    """Updates of the last policy (the most over training seeds)."""
    seconds: float | None = None
    """Mean training time of a run, without its start-up and pauses."""
    by_seed: dict[int, float] = field(default_factory=dict)
    """Training seed -> mean return."""
    alarms: list[str] = field(default_factory=list)
    """Alarms that stood at the end of a run in the numbers: "seed 0: q_above_data, td_error"."""
    problems: list[str] = field(default_factory=list)
    """What keeps a training seed out of the numbers."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A point of a recipe's learning curve."""

    recipe: str
    updates: int
    seeds: int
    interval: Interval
    """Interval of the mean return, as in `Row`."""


def read_comparison(
    client: Client, name: str, seeds: Sequence[int] | None = None, env: str | None = None
) -> Comparison:
    """Read the runs and evaluations of a comparison; with `seeds`, only evaluations with these
    seeds, and with `env` only those in this environment."""
    runs = client.items(Run, "/v1/runs", tag=TAG + name, limit=1000)[::-1]
    mine = {run.name for run in runs if run.kind == "eval"}
    envs = {str(run.config.get("env", "")) for run in runs if run.kind == "eval"}
    newest: dict[str, Evaluation] = {}
    for one in sorted(envs if env is None else envs & {env}):
        for e in client.items(
            Evaluation, "/v1/evaluations", env=env_name(one), limit=1000
        ):  # newest first
            if e.run in mine and (seeds is None or e.seeds == list(seeds)):
                newest.setdefault(e.policy, e)
    # An evaluation has the dataset of its policy's training; so has the one of random actions.
    dataset = next((str(run.config.get("dataset", "")) for run in runs), "")
    return Comparison(name, dataset, [run for run in runs if run.kind == "train"], newest)


def read_data_row(client: Client, comparison: Comparison) -> Row:
    """The row `data`, counted and averaged by the service."""
    found = client.sql(DATA_SQL, [comparison.dataset], timeout=60).rows
    episodes, mean, middle = found[0]
    normalised = _normalised(comparison, mean)
    return Row("data", mean=mean, iqm=middle, normalised=normalised, episodes=int(episodes))


def recipe_rows(comparison: Comparison, problems: Mapping[str, str] | None = None) -> list[Row]:
    """A row per recipe, in order of their first run, then `random`.

    `problems`: run -> why it has no result, for runs of which the caller knows more than their
    state at the service.
    """
    problems = dict(problems or {})
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in comparison.runs:
        groups[recipe_of(run)].append(run)
    rows = [_recipe_row(comparison, recipe, runs, problems) for recipe, runs in groups.items()]
    if (e := comparison.evaluations.get("random")) is not None:
        interval = Interval(e.mean, e.ci_low, e.ci_high, len(e.returns), e.confidence)
        normalised = _normalised(comparison, e.mean)
        middle = bootstrap_grouped_iqm([e.returns])
        rows.append(Row("random", 0, e.mean, e.iqm, middle, interval, normalised, len(e.returns)))
    return rows


def _recipe_row(
    comparison: Comparison, recipe: str, runs: list[Run], problems: dict[str, str]
) -> Row:
    returns: dict[int, list[float]] = {}
    seconds, updates, alarms, troubles = [], 0, [], []
    for run in runs:
        seed = run.seed or 0
        versions = comparison.versions(run.name)
        problem = problems.get(run.name) or _problem(run, versions)
        if problem:
            troubles.append(f"seed {seed}: {problem}")
            continue
        version, last = list(versions.items())[-1]
        returns[seed] = last.returns
        updates = max(updates, version)
        if run.alarms:
            alarms.append(f"seed {seed}: {', '.join(alarm.key for alarm in run.alarms)}")
        if run.latest.get(RATE, 0.0) > 0.0:
            seconds.append(version / run.latest[RATE])
    if not returns:
        return Row(recipe, problems=troubles)
    interval = bootstrap_grouped_mean(list(returns.values()))
    middle = bootstrap_grouped_iqm(list(returns.values()))
    return Row(
        recipe,
        seeds=len(returns),
        mean=interval.value,
        iqm=middle.value,
        iqm_interval=middle,
        interval=interval,
        normalised=_normalised(comparison, interval.value),
        episodes=interval.n,
        updates=updates,
        seconds=float(np.mean(seconds)) if seconds else None,
        by_seed={seed: float(np.mean(values)) for seed, values in returns.items()},
        alarms=alarms,
        problems=troubles,
    )


def _problem(run: Run, versions: Mapping[int, Any]) -> str:
    """Why a training run has no result yet; empty where it has one."""
    if run.status != "finished":
        return f"{run.status}: {run.error}" if run.error else run.status
    return "" if versions else "not evaluated"


def curves(comparison: Comparison) -> list[CurvePoint]:
    """The mean return of every evaluated version, by recipe and number of updates."""
    groups: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    for run in comparison.runs:
        for version, evaluation in comparison.versions(run.name).items():
            groups[recipe_of(run), version].append(evaluation.returns)
    return [
        CurvePoint(recipe, version, len(returns), bootstrap_grouped_mean(returns))
        for (recipe, version), returns in groups.items()
    ]


def recipe_of(run: Run) -> str:
    return str(run.config.get("recipe", "?"))


def _normalised(comparison: Comparison, mean: float | None) -> float | None:
    if comparison.reference is None or mean is None:
        return None
    return normalised_score(comparison.reference, mean)
