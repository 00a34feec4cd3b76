"""Policies of one environment ranked by their evaluations: training seeds folded, with intervals.

Runs whose configs differ in nothing but the seed and names are one row. Beside them stand
references: random actions, the mean of the data, and D4RL's random and expert scores.
"""

from __future__ import annotations

import json
import os.path
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from stepwell.confidence_intervals import (
    Interval,
    bootstrap_grouped_iqm,
    bootstrap_grouped_mean,
)
from stepwell.messages import Evaluation
from stepwell.reference_scores import REFERENCE_SCORES, normalised_score, reference_family

NAMES = (
    "seed", "run", "output", "tags", "notes", "parent", "claim", "origins", "versions", "hardware",
)  # fmt: skip
"""Parts of a run's config in which two training seeds of one experiment may differ."""
Pick = Literal["newest", "best"]


@dataclass(frozen=True, slots=True)
class Standing:
    """A row: a policy, the seeds of one experiment, or a reference."""

    name: str
    mean: Interval
    """Of the mean over training seeds; a reference that nobody played has no width."""
    iqm: Interval | None
    """Of the interquartile mean over all episodes; None: only the mean is known."""
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
        kept = {k: v for k, v in configs.get(run, {}).items() if k not in NAMES}
        key = json.dumps(kept, sort_keys=True, default=str) if kept else run
        groups[key].append(chosen)
    rows = [_standing(found) for found in groups.values()]
    names = Counter(row.name for row in rows)
    # Experiments of one sweep begin alike: each is then called after its first run.
    rows = [
        replace(row, name=row.runs[0]) if names[row.name] > 1 and row.runs else row for row in rows
    ]
    return sorted(rows, key=lambda row: row.mean.value, reverse=True)


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
    runs = [run_of(e.policy) for e in found]
    name = found[0].policy
    if len(runs) > 1:
        name = os.path.commonprefix(runs).rstrip("-_/ ") or runs[0]
    return Standing(
        name=name,
        mean=mean,
        iqm=iqm,
        evaluations=found,
        reference="/" not in found[0].policy,
    )


@lru_cache(maxsize=4096)
def _intervals(returns: tuple[tuple[float, ...], ...]) -> tuple[Interval, Interval]:
    """Of mean and IQM; kept, because a page is drawn again and again from the same returns."""
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
