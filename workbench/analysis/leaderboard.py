"""Policies ranked by their evaluations, in one environment or in all: training seeds folded, with
intervals.

Runs whose configs differ in nothing but the seed and names are one row. Beside them stand
references: random actions, scripted policies, the mean of the data, and D4RL's random and expert
scores.
"""

from __future__ import annotations

import json
import os.path
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np

from stepwell._settings import flatten
from stepwell.messages import Evaluation
from workbench.analysis.confidence_intervals import (
    Interval,
    bootstrap_grouped_iqm,
    bootstrap_grouped_mean,
)
from workbench.analysis.reference_scores import REFERENCE_SCORES, normalised_score, reference_family

NAMES = (
    "seed", "run", "output", "tags", "notes", "parent", "claim", "origins", "versions", "hardware",
)  # fmt: skip
"""Parts of a run's config in which two training seeds of one experiment may differ."""
DATA = ("dataset",)
"""Parts of a config in which runs of one experiment in several environments differ, too."""
FOLLOWS = ("default", "recipe ", "derived")
"""Origins of settings that nobody chose one by one."""
Pick = Literal["newest", "best"]


@dataclass(frozen=True, slots=True)
class Standing:
    """A row: a policy, the seeds of one experiment, or a reference."""

    name: str
    mean: Interval
    """Interval of the mean over training seeds; an unplayed reference has no width."""
    iqm: Interval | None
    """Interval of the interquartile mean over all episodes; None if only the mean is known."""
    evaluations: list[Evaluation]
    """One per training seed; empty: a reference that nobody played, which has no intervals."""
    reference: bool = False

    @property
    def policies(self) -> list[str]:
        return [e.policy for e in self.evaluations]

    @property
    def runs(self) -> list[str]:
        """The runs of its policies, in their order; none of random actions."""
        return [run_of(e.policy) for e in self.evaluations if "/" in e.policy]

    @property
    def returns(self) -> list[list[float]]:
        """The returns of each training seed."""
        return [e.returns for e in self.evaluations]

    def normalised(self, env: str) -> float | None:
        """The mean on D4RL's scale (0: random, 100: expert); None where there is none."""
        return normalised_score(env, self.mean.value)


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A policy, the seeds of one experiment, or a reference, in several environments."""

    name: str
    cells: dict[str, Standing]
    """By environment; not all have one."""
    reference: bool = False

    @property
    def runs(self) -> list[str]:
        """The runs of its policies, without repetition."""
        return list(dict.fromkeys(run for cell in self.cells.values() for run in cell.runs))


T = TypeVar("T", Standing, ScoreRow)


def normalised(env: str, found: Interval) -> Interval | None:
    """A statistic and its interval on D4RL's scale; None where there is none."""
    value, low, high = (normalised_score(env, x) for x in (found.value, found.low, found.high))
    if value is None or low is None or high is None:
        return None
    return replace(found, value=value, low=low, high=high)


def leaderboard(
    evaluations: Sequence[Evaluation],
    configs: Mapping[str, Mapping[str, Any]],
    *,
    pick: Pick = "newest",
) -> list[Standing]:
    """Rows by descending mean.

    Args:
        evaluations: those of one environment, in any order.
        configs: run -> its config; a run without one stands alone.
        pick: the version of each run that counts: the one evaluated last, or the one with the
            highest mean, which flatters, as the best of many noisy scores.
    """
    groups: dict[str, list[Evaluation]] = defaultdict(list)
    for run, chosen in _one_per_run(evaluations, pick).items():
        groups[_experiment(run, configs)].append(chosen)
    rows = _named_apart([_standing(found) for found in groups.values()])
    return sorted(rows, key=lambda row: row.mean.value, reverse=True)


def score_table(
    evaluations: Sequence[Evaluation],
    configs: Mapping[str, Mapping[str, Any]],
    *,
    pick: Pick = "newest",
) -> list[ScoreRow]:
    """Policies by environments, by their mean rank; then references, D4RL's among them.

    An experiment that is repeated on the data of other environments is one row, too, called after
    its recipe: the same recipe and settings beside it, whatever else was derived from the data.
    Where these are two experiments in one environment, as on two of its datasets, each has a row of
    its own. For the arguments see `leaderboard`.
    """
    by_env: dict[str, list[Evaluation]] = defaultdict(list)
    for e in evaluations:
        by_env[e.env].append(e)
    chosen = [(run, e) for found in by_env.values() for run, e in _one_per_run(found, pick).items()]
    asked = {run: _as_asked(configs.get(run, {})) for run, _ in chosen}
    wide = {run: _experiment(run, asked, NAMES + DATA) for run, _ in chosen}
    narrow = {run: _experiment(run, configs) for run, _ in chosen}
    experiments: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run, e in chosen:
        experiments[wide[run], e.env].add(narrow[run])
    mixed = {key for (key, _), found in experiments.items() if len(found) > 1}
    groups: dict[str, dict[str, list[Evaluation]]] = defaultdict(lambda: defaultdict(list))
    for run, e in chosen:
        key = narrow[run] if wide[run] in mixed else wide[run]
        groups[key][e.env].append(e)
    rows = _named_apart([_score_row(cells, configs) for cells in groups.values()])
    for env in by_env:
        rows += [ScoreRow(one.name, {env: one}, reference=True) for one in reference_rows(env)]
    return _by_rank(_merged(rows))


def _score_row(
    found: Mapping[str, list[Evaluation]], configs: Mapping[str, Mapping[str, Any]]
) -> ScoreRow:
    cells = {env: _standing(mine) for env, mine in sorted(found.items())}
    policies = {e.policy for mine in found.values() for e in mine}
    runs = sorted(set(map(run_of, policies)))
    known = [configs.get(run, {}) for run in runs]
    recipe = known[0].get("recipe")
    if recipe and len({str(config.get("dataset")) for config in known}) > 1:
        name = str(recipe)
    else:  # versions of one run are called after the run
        name = _name(sorted(policies) if len(policies) == 1 else runs)
    return ScoreRow(name, cells, all(cell.reference for cell in cells.values()))


def _merged(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """References of one name are one row."""
    found: dict[str, ScoreRow] = {}
    for row in rows:
        before = found.get(row.name) if row.reference else None
        found[row.name] = replace(row, cells=before.cells | row.cells) if before else row
    return list(found.values())


def _by_rank(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """References last. The rank in an environment is a share of its rows, as few may have some."""
    shares: dict[str, list[float]] = defaultdict(list)
    for env in {env for row in rows for env in row.cells}:
        here = [row for row in rows if env in row.cells]
        here.sort(key=lambda row: row.cells[env].mean.value, reverse=True)
        for place, row in enumerate(here):
            shares[row.name].append(place / len(here))
    return sorted(rows, key=lambda row: (row.reference, np.mean(shares[row.name]), row.name))


def _experiment(
    run: str, configs: Mapping[str, Mapping[str, Any]], apart: Sequence[str] = NAMES
) -> str:
    """What all runs of one experiment have in common: their config but for the parts `apart`."""
    kept = {k: v for k, v in configs.get(run, {}).items() if k not in apart}
    return json.dumps(kept, sort_keys=True, default=str) if kept else run


def _as_asked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe and what was set beside it: the rest follows from them and the data."""
    origins = config.get("origins")
    if not isinstance(origins, dict):
        return config
    asked = {k for k, origin in origins.items() if not str(origin).startswith(FOLLOWS)}
    return {k: v for k, v in flatten(config).items() if k in asked or k == "recipe"}


def _named_apart(rows: list[T]) -> list[T]:
    """Experiments of one sweep begin alike: each is then called after its first run."""
    names = Counter(row.name for row in rows)
    return [
        replace(row, name=row.runs[0]) if names[row.name] > 1 and row.runs else row for row in rows
    ]


def reference_rows(env: str) -> list[Standing]:
    """D4RL's scores of random actions and of the expert in this environment, if it has them."""
    family = reference_family(env)
    if family is None:
        return []
    return [
        constant(f"D4RL's {what}", score)
        for what, score in zip(("random", "expert"), REFERENCE_SCORES[family], strict=True)
    ]


def constant(name: str, mean: float, iqm: float | None = None, episodes: int = 0) -> Standing:
    """A reference that nobody played, of which only these numbers are known."""
    middle = None if iqm is None else Interval(iqm, iqm, iqm, episodes)
    return Standing(name, Interval(mean, mean, mean, episodes), middle, [], reference=True)


def _one_per_run(evaluations: Sequence[Evaluation], pick: Pick) -> dict[str, Evaluation]:
    chosen: dict[str, Evaluation] = {}
    for e in sorted(evaluations, key=lambda e: e.created_at, reverse=True):
        run = run_of(e.policy)
        if run not in chosen or (pick == "best" and e.mean > chosen[run].mean):
            chosen[run] = e
    return chosen


def run_of(policy: str) -> str:
    """RUN/VERSION -> RUN; "random" and other players without versions as they are."""
    return policy.rpartition("/")[0] or policy


def _standing(found: list[Evaluation]) -> Standing:
    found = sorted(found, key=lambda e: e.policy)
    mean, iqm = _intervals(tuple(tuple(e.returns) for e in found))
    names = [run_of(e.policy) for e in found] if len(found) > 1 else [found[0].policy]
    return Standing(
        name=_name(names),
        mean=mean,
        iqm=iqm,
        evaluations=found,
        reference="/" not in found[0].policy,
    )


def _name(names: list[str]) -> str:
    """What they begin with."""
    if len(names) == 1:
        return names[0]
    return os.path.commonprefix(names).rstrip("-_/ ") or names[0]


@lru_cache(maxsize=4096)
def _intervals(returns: tuple[tuple[float, ...], ...]) -> tuple[Interval, Interval]:
    """Compute the intervals of mean and IQM; cached, because pages are drawn repeatedly."""
    return bootstrap_grouped_mean(returns), bootstrap_grouped_iqm(returns)


def improvement(ours: Standing, others: Standing, resamples: int = 1000) -> Interval:
    """Probability that an episode of ours has a higher return than one of theirs (Agarwal et al.
    2021), ties counted half, with the interval of a bootstrap over training seeds and episodes.

    Raises ValueError for a row without episodes.
    """
    a, b = ([np.asarray(one, np.float64) for one in row.returns] for row in (ours, others))
    if not a or not b:
        raise ValueError("a probability of improvement needs episodes of both rows")
    rng = np.random.default_rng(0)

    def drawn(groups: list[Any]) -> Any:
        picked = [groups[i] for i in rng.integers(0, len(groups), len(groups))]
        return np.concatenate([g[rng.integers(0, g.size, g.size)] for g in picked])

    found = [_share(drawn(a), drawn(b)) for _ in range(resamples)]
    low, high = np.quantile(found, [0.025, 0.975])
    every_a, every_b = np.concatenate(a), np.concatenate(b)
    value = _share(every_a, every_b)
    return Interval(value, float(low), float(high), int(every_a.size + every_b.size))


def _share(a: Any, b: Any) -> float:
    """Share of pairs in which the first is higher; ties count half."""
    b = np.sort(b)
    below = np.searchsorted(b, a, "left")
    up_to = np.searchsorted(b, a, "right")
    return float((below + up_to).mean() / (2 * b.size))
