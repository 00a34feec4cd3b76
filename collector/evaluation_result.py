"""The scores of an evaluation, with confidence intervals, and of two policies on the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from collector.episode_recorder import EpisodeSummary
from collector.stats import mean_metrics
from stepwell.trajectory import Trajectory
from workbench.analysis.confidence_intervals import bootstrap_mean, iqm
from workbench.analysis.reference_scores import normalised_score


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The score of a policy; lists are in the order of `seeds`."""

    env: str
    policy: str
    seeds: list[int]
    returns: list[float]
    """Undiscounted sums of rewards."""
    lengths: list[int]
    successes: list[bool | None]
    mean: float
    iqm: float
    """Mean of the middle half of the returns (Agarwal et al., 2021)."""
    bottom_quintile: float
    """20th percentile of the returns: how the worse episodes end."""
    ci_low: float
    """Bootstrap interval of the mean: percentiles of 10,000 seeded resamples."""
    ci_high: float
    confidence: float
    normalised: float | None
    """Score on D4RL's scale (0 … 100), if D4RL has reference scores for the environment."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean of each number that the environment reported, over the episodes that have it."""
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    """By info["env_name"], if it differs: mean, ci_low, ci_high and number of episodes."""
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    """All episodes, in the order of `seeds` (long ones in several pieces)."""

    def to_json(self) -> dict[str, Any]:
        """All fields except the trajectories."""
        return {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "trajectories"}

    def table(self) -> Table:
        table = Table(title=f"{self.policy} in {self.env}")
        table.add_column("")
        table.add_column("value", justify="right")
        rows = {
            "episodes": f"{len(self.returns)} (seeds {self.seeds[0]} … {self.seeds[-1]})",
            "mean return": f"{self.mean:.2f}",
            f"{100 * self.confidence:.0f}% interval": f"{self.ci_low:.2f} … {self.ci_high:.2f}",
            "interquartile mean": f"{self.iqm:.2f}",
            "20th percentile": f"{self.bottom_quintile:.2f}",
            "lowest … highest": f"{min(self.returns):.2f} … {max(self.returns):.2f}",
            "mean length": f"{np.mean(self.lengths):.1f}",
        }
        if self.normalised is not None:
            rows["normalised (0 … 100)"] = f"{self.normalised:.1f}"
        if known := [s for s in self.successes if s is not None]:
            rows["success"] = f"{100 * np.mean(known):.1f}%"
        rows |= {f"log/{name}": f"{value:.4g}" for name, value in self.metrics.items()}
        for name, task in self.tasks.items():
            interval = f"{task['ci_low']:.2f} … {task['ci_high']:.2f}"
            rows[f"task {name}"] = (
                f"{task['mean']:.2f} ({interval}), {task['episodes']:.0f} episodes"
            )
        for name, value in rows.items():
            table.add_row(Text(name), Text(value))
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """The difference of two policies on the same seeds. Its interval is narrower than the two
    intervals of the means suggest, because both meet the same episodes."""

    policy: str
    against: str
    difference: float
    """Mean of (return of `policy` - return of `against`)."""
    ci_low: float
    """Bootstrap interval of the difference."""
    ci_high: float
    better: int
    """Number of seeds on which `policy` has the higher return."""
    worse: int
    seeds: int

    def line(self) -> str:
        return (
            f"{self.policy} minus {self.against}: {self.difference:+.4g} "
            f"({self.ci_low:+.4g} … {self.ci_high:+.4g}) on the same {self.seeds} seeds; "
            f"better on {self.better}, worse on {self.worse}"
        )


def compare_paired(a: EvaluationResult, b: EvaluationResult) -> PairedComparison:
    """Compare two results of the same seeds."""
    assert a.seeds == b.seeds, "a seed is an episode of both"
    differences = np.asarray(a.returns) - np.asarray(b.returns)
    interval = bootstrap_mean(differences)
    return PairedComparison(
        policy=a.policy,
        against=b.policy,
        difference=interval.value,
        ci_low=interval.low,
        ci_high=interval.high,
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        seeds=len(differences),
    )


def summarise(
    env: str,
    policy_id: str,
    episodes: Sequence[EpisodeSummary],
    trajectories: Sequence[Trajectory] = (),
) -> EvaluationResult:
    """The result of whole episodes, one for each seed."""
    returns = [e.total_reward for e in episodes]
    interval = bootstrap_mean(returns)
    return EvaluationResult(
        env=env,
        policy=policy_id,
        seeds=[e.seed or 0 for e in episodes],
        returns=returns,
        lengths=[e.length for e in episodes],
        successes=[e.success for e in episodes],
        mean=interval.value,
        iqm=iqm(returns),
        bottom_quintile=float(np.quantile(returns, 0.2)),
        ci_low=interval.low,
        ci_high=interval.high,
        confidence=interval.confidence,
        normalised=normalised_score(env, interval.value),
        metrics=mean_metrics(episodes),
        tasks=_tasks(episodes),
        trajectories=list(trajectories),
    )


def _tasks(episodes: Sequence[EpisodeSummary]) -> dict[str, dict[str, float]]:
    returns: dict[str, list[float]] = {}
    for episode in episodes:
        returns.setdefault(episode.task, []).append(episode.total_reward)
    if len(returns) < 2:
        return {}
    found = {}
    for task in sorted(returns):
        interval = bootstrap_mean(returns[task])
        scores = {"mean": interval.value, "ci_low": interval.low, "ci_high": interval.high}
        found[task] = {**scores, "episodes": float(len(returns[task]))}
    return found
