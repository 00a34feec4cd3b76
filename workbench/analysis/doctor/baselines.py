"""A check of the baseline of rewards: the same constant added to those of some trajectories."""

from __future__ import annotations

from dataclasses import replace

from workbench.analysis.doctor.check import NUMBERS_AT_ONCE, Check, Subject

KEYS = 3
"""Numbers of an observation by which steps are compared: those that tell most of the reward."""
BINS = 8
"""Bins of each number."""
SHARED = 3
"""Trajectories with a step in a cell, from which on it is compared."""
STEPS = 10
"""Compared ones that a trajectory has to have."""
LEAST = 8
"""Trajectories, below which none is an exception."""
FAR = 3.0
"""The gap between two groups of trajectories, in units of the spread of each of them."""


def _reward_baseline(s: Subject) -> str:
    """Trajectories whose rewards differ from those in like states of others by a constant: the
    medians of the differences have a gap that is far greater than they vary on its two sides, and
    than the differences vary within a trajectory. They are differences from the larger half, as
    those from a mean of both depend on which of them are in a cell. Where few rewards are possible,
    an equal least or greatest one in both groups is a reward of the task."""
    part = replace(s, only=(0, NUMBERS_AT_ONCE))  # more would take longer, and tell little more
    numbers = part.numbers()
    each = range(1, len(numbers) + 1)
    columns = "".join(f", {x} as x{i}" for i, (_, x) in enumerate(numbers, 1))
    steps = f"""(select seq, env, reward{columns}
    from {part.numbered} n join {s.trajectories} a on a.id = n.trajectory_id
    where not is_last)"""
    told = ", ".join(
        f"greatest(abs(coalesce(nullif(corr(reward, x{i}), 'nan'), 0)), "
        f"abs(coalesce(nullif(corr(reward, x{i} * x{i}), 'nan'), 0)))"
        for i in each
    )
    lows = ", ".join(f"approx_quantile(x{i}, 0.02)" for i in each)
    widths = ", ".join(f"approx_quantile(x{i}, 0.98) - approx_quantile(x{i}, 0.02)" for i in each)
    values = f"[{', '.join(f'x{i}' for i in each)}]"
    cell = " + ".join(
        [f"hash(env) % 1009 * {BINS**KEYS}"]
        + [
            f"{BINS**j} * least({BINS - 1}, greatest(0, coalesce(floor({BINS} * "
            f"({values}[k[{j + 1}]] - low[k[{j + 1}]]) / nullif(width[k[{j + 1}]], 0)), 0)))"
            for j in range(min(KEYS, len(numbers)))
        ]
    )
    best = f"list_grade_up([{told}], 'DESC')" if numbers else "null"
    # Few bytes of each step are kept: to read the steps again for each table takes more memory.
    return f"""with q as materialized (
  select {best} as k, [{lows}] as low, [{widths}] as width, count(*) as rows from {steps}),
d as materialized (
  select seq::int as seq, reward::float as reward, ({cell})::int as cell from {steps}, q),
{_differences("first", "true")},
middle as (select (min(middle) + max(middle)) / 2 as cut from first),
most as materialized (
  select seq from first, middle
  where (middle > cut) = (select 2 * count(*) filter (middle > cut) > count(*) from first, middle)),
{_differences("e", "seq in (select seq from most)")},
l as (select list(middle order by middle) as m, median(spread) as noise from e),
gaps as (select *, list_transform(range(1, len(m)), lambda i: m[i + 1] - m[i]) as gaps from l),
g as (
  select m, noise, list_max(gaps) as gap, list_position(gaps, list_max(gaps)) as i from gaps
  where len(m) >= {LEAST}),
same as (
  select count(*) as n from (
    select value from (select middle > m[i] as up, unnest([low, high]) as value from e, g)
    group by value having min(up) <> max(up)))
select id, if(2 * i >= len(m), 'higher', 'lower') || ' by about ' || round(gap, 3) as what
from e join {s.trajectories} using (seq), g, same
where (middle > m[i]) = (2 * i >= len(m)) and gap > 1e-6
  and gap > {FAR - 1} * noise and gap > {FAR} * greatest(m[i] - m[1], m[-1] - m[i + 1])
  and n = 0"""


def _differences(name: str, where: str) -> str:
    """A common table: the median and spread of a trajectory's rewards, as differences from the
    mean reward in the same cell of the trajectories that are chosen."""
    return f"""{name}_cells as materialized (
  select cell, avg(reward) as usual from d where {where} group by cell
  having approx_count_distinct(seq) >= {SHARED}),
{name} as materialized (
  select seq, low, high, q[2] as middle, q[3] - q[1] as spread from (
    select seq, min(reward) as low, max(reward) as high,
      approx_quantile(reward - usual, [0.1, 0.5, 0.9]) as q
    from d join {name}_cells using (cell) group by seq having count(*) >= {STEPS}))"""


CHECKS = (
    Check("reward_baseline", "warning", "{n} with rewards that differ by a constant from those of "
          "the others in like states ({what})", _reward_baseline),
)  # fmt: skip
