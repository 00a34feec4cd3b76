"""The scale of rewards and the bounds of targets, derived from the returns in a dataset."""

from __future__ import annotations

import math
import shlex

import numpy as np
from numpy.typing import NDArray

from stepwell._wording import pluralize
from trainer.data.returns import NEGLIGIBLE, Floats, margin_of_returns
from trainer.derive.dataset_profile import DatasetProfile, ReturnRange
from trainer.derive.derived import Derived

SCALE = 10.0
"""Spread of the discounted returns, in units of the multiplied reward. Critics start with outputs
of about 1: returns much smaller than that would drown in them."""
VISIBLE = 1.0
"""Least distance from the 5th to the 95th percentile of the returns, in the same units: smaller
differences drown in the critics' first outputs. It is 2% of the range of returns."""
FEW = 0.1
"""Outliers are at most this share of the trajectories."""


def reward_settings(p: DatasetProfile, gamma: float) -> list[Derived]:
    """The multiplier of rewards, and the bounds of targets if returns differ."""
    returns = p.discounted(gamma)
    extent = f"discounted returns are {returns.low:.4g} to {returns.high:.4g}"
    if returns.spread <= NEGLIGIBLE * max(abs(returns.low), abs(returns.high)):
        return [Derived("agent.losses.reward_multiplier", 1.0, f"{extent}: all are equal")]
    multiplier = one_digit(SCALE / returns.spread)
    most = f"most of them within {returns.p95 - returns.p5:.4g}"
    if returns.spread > returns.p95 - returns.p5:
        most += f", and a fifth of their range is {returns.spread:.4g}"
    certain = p.terminated > 0.5 or p.sparse
    margin = margin_of_returns(returns.low, returns.high, certain=certain)
    low, high = _round(returns.low - margin, returns), _round(returns.high + margin, returns)
    bounds = f"{extent}; a margin of {margin / (returns.high - returns.low):.0%}"
    return [
        Derived(
            "agent.losses.reward_multiplier",
            multiplier,
            f"{extent}, {most}: scaled to about {SCALE:g}",
        ),
        Derived("agent.losses.target_low", low, bounds),
        Derived("agent.losses.target_high", high, bounds),
    ]


def outlier_warning(p: DatasetProfile, gamma: float, scale: Derived, where: str) -> str:
    """A warning if a few trajectories have returns so extreme that the scale of rewards, a fifth of
    the range, hides how the others differ; else "". Sparse rewards are meant to be scaled so."""
    returns = p.discounted(gamma)
    most = returns.p95 - returns.p5
    if p.sparse or most * SCALE >= VISIBLE * returns.spread:
        return ""
    if most <= 1e-6 * max(abs(returns.p5), abs(returns.p95)):  # rounding
        return ""
    outliers = p.outliers(gamma)
    if not 0 < outliers.sum() <= FEW * len(outliers):
        return ""
    others = p.without(outliers).discounted(gamma)
    if others.spread > returns.spread / 2:
        return ""
    better = f"set --{scale.key}={one_digit(SCALE / others.spread):g}"
    if condition := _condition_of_others(p.sampled_returns, outliers):
        condition = f"({where}) and {condition}" if where else condition
        better = f"select the others with --where {shlex.quote(condition)}, or {better}"
    count = pluralize(int(outliers.sum()), "trajectory", "trajectories")
    sampled = "" if len(outliers) == p.trajectories else " sampled ones"
    return (
        f"warning: 90% of the discounted returns are within {most:.4g}, but their range is "
        f"{returns.high - returns.low:.4g} because of {count} of {len(outliers):,}{sampled}: it "
        f"sets {scale.key}={scale.value:g}, so critics hardly see how the other returns "
        f"differ; {better}"
    )


def _condition_of_others(returns: Floats, outliers: NDArray[np.bool_]) -> str:
    """The SQL condition that the outliers alone do not meet; "" if no return separates them."""
    others, extreme = returns[~outliers], returns[outliers]
    below, above = extreme[extreme < others.min()], extreme[extreme > others.max()]
    if len(below) + len(above) < len(extreme):
        return ""
    limits = []
    if len(below):
        limits.append(f'"return" > {_between(below.max(), others.min())}')
    if len(above):
        limits.append(f'"return" < {_between(others.max(), above.min())}')
    return " and ".join(limits)


def _between(low: float, high: float) -> str:
    """A short number near the middle of two."""
    digits = 1 - math.floor(math.log10(high - low))
    return f"{round((low + high) / 2, digits):.15g}"


def one_digit(x: float) -> float:
    """x rounded to one significant digit."""
    return float(f"{x:.0e}")


def _round(x: float, returns: ReturnRange) -> float:
    """x rounded to a hundredth of the returns' range."""
    digits = 2 - math.floor(math.log10(returns.high - returns.low))
    return round(x, digits)
