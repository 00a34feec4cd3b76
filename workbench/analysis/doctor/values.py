"""Checks of the numbers in observations, infos and actions."""

from __future__ import annotations

import math

from stepwell._sql import literal, quoted
from stepwell.spaces import Box, Discrete
from workbench.analysis.doctor.check import (
    Check,
    Subject,
    action_numbers,
    each_number,
    is_blob,
    named,
)

EPISODE = 20
"""Steps below which a constant action says little."""


def _sentinel(s: Subject) -> str | None:
    numbers = s.numbers()
    if not numbers:
        return None
    quantiles = ", ".join(
        f"approx_quantile({sql}, [0.02, 0.5, 0.98]) as q{i}" for i, (_, sql) in enumerate(numbers)
    )
    conditions = [
        (
            literal(f"{name} = ") + f" || {sql}",
            f"q{i}[3] > q{i}[1] and abs({sql} - q{i}[2]) > 50 * (q{i}[3] - q{i}[1])",
        )
        for i, (name, sql) in enumerate(numbers)
    ]
    return f"""with q as (select {quantiles} from {s.numbered}),
w as (select trajectory_id as id, t, {named(conditions)} as what from {s.numbered}, q)
select id, 'step ' || min(t) || ': ' || arg_min(what, t) as what from w
where what is not null group by id"""


def _constant_number(s: Subject) -> str | None:
    if not s.numbers():
        return None
    return f"""with c as (
  select key, i from {each_number(s)} group by all
  having min(value) = max(value) and count(*) > 50)
select null as id,
  string_agg(key || coalesce('[' || i || ']', ''), ', ' order by key, i) as what
from c having count(*) > 0"""


def _units(s: Subject) -> str | None:
    if len(s.numbers()) < 2:
        return None
    return f"""with u as (
  select key, i, stddev_pop(value) as spread from {each_number(s)} group by all)
select null as id, 'from ' || min(spread) || ' to ' || max(spread) as what from u
where spread > 0 having max(spread) > 1e6 * min(spread)"""


def _nan_info(s: Subject) -> str | None:
    floats = [
        (key, space)
        for key, space in s.spec.infos.items()
        if isinstance(space, Box) and space.dtype.startswith("float")
    ]
    if not floats:
        return None
    parts = []
    for key, space in floats:
        column = f"info.{quoted(key)}"
        if space.shape == ():
            parts.append(f"isnan({column}) or isinf({column})")
        else:
            parts.append(f"len(list_filter({column}::double[], lambda x: not isfinite(x))) > 0")
    return f"""select trajectory_id as id, 'step ' || min(t) as what from {s.steps}
where {" or ".join(parts)} group by all"""


def _outside(s: Subject) -> str | None:
    parts = []
    for _, sql, space in s.actions():
        if not isinstance(space, Box) or is_blob(space):
            continue
        for value, low, high in _bounded(sql, space):
            parts += _beyond(value, low, high)
    if not parts:
        return None
    return f"""select trajectory_id as id, 'step ' || min(t) as what from {s.steps}
where not is_last and ({" or ".join(parts)}) group by all"""


def _bounded(sql: str, space: Box) -> list[tuple[str, float, float]]:
    """(SQL, low, high) of each number of an action."""
    low, high = (bound.reshape(-1).tolist() for bound in space.bounds())
    values = [value for _, value in action_numbers("", sql, space)]
    return list(zip(values, low, high, strict=False))


def _beyond(value: str, low: float, high: float) -> list[str]:
    """Conditions of a number beyond its bounds, with room for rounding."""
    margin = 1e-4 * (high - low) if high - low < 1e30 else 0.0
    parts = [f"{value} < {low - margin!r}"] * (low > -1e30)
    return parts + [f"{value} > {high + margin!r}"] * (high < 1e30)


def _observation_outside(s: Subject) -> str | None:
    limits: dict[str, tuple[float, float]] = {}
    for key, space, count in s.vectors():
        if isinstance(space, Box):
            least, most = (bound.reshape(-1).tolist()[:count] for bound in space.bounds())
            names = [f"{key}[{i}]" for i in range(count)] if space.shape else [key]
            limits |= dict(zip(names, zip(least, most, strict=True), strict=True))
    conditions = []
    for name, sql in s.numbers():
        low, high = limits.get(name, (-math.inf, math.inf))
        if parts := _beyond(sql, low, high):
            declared = literal(f", its space says {low:g} to {high:g}")
            what = f"{literal(f'{name} = ')} || {sql} || {declared}"
            conditions.append((what, " or ".join(parts)))
    if not conditions:
        return None
    return f"""with w as (
  select trajectory_id as id, t, {named(conditions)} as what from {s.numbered})
select id, 'step ' || min(t) || ': ' || arg_min(what, t) as what from w
where what is not null group by id"""


def _constant_action(s: Subject) -> str | None:
    boxes = [(sql, a) for _, sql, a in s.actions() if isinstance(a, Box) and not is_blob(a)]
    if len(boxes) != len(s.actions()):
        return None
    bounds = " or ".join(
        f"{value} in ({low!r}, {high!r})"
        for sql, space in boxes
        for value, low, high in _bounded(sql, space)
        if abs(low) < 1e30 and abs(high) < 1e30
    )  # fmt: skip
    at_bound = f"bool_and({bounds})" if bounds else "false"
    return f"""with a as (
  select trajectory_id as id, count(distinct hash(action)) as actions, count(*) as n,
    {at_bound} as at_bound
  from {s.steps} where not is_last group by all)
select id, n || ' steps' as what from a
where actions = 1 and not at_bound and n >= {EPISODE}
  and (select avg((actions = 1)::int) from a) < 0.1"""


def _unused_action(s: Subject) -> str | None:
    parts = []
    for name, sql, space in s.actions():
        if isinstance(space, Discrete) and space.n <= 256:
            parts.append(
                f"""select {literal(name)} as name, a as action
from range({space.start}, {space.start + space.n}) r(a)
where a not in (select distinct {sql} from {s.steps} where not is_last)"""
            )
    if not parts:
        return None
    return f"""with u as ({" union all ".join(parts)})
select null as id, string_agg(name || ' = ' || action, ', ') as what from u having count(*) > 0"""


def _saturated(s: Subject) -> str | None:
    parts = [
        f"abs({value} - {bound!r}) < 1e-6"
        for _, sql, space in s.actions()
        if isinstance(space, Box) and not is_blob(space)
        for value, low, high in _bounded(sql, space)
        for bound in (low, high)
        if abs(bound) < 1e30
    ]
    if not parts:
        return None
    return f"""select null as id, round(100 * avg(({" or ".join(parts)})::int)) || '%' as what
from {s.steps} where not is_last having avg(({" or ".join(parts)})::int) > 0.9"""


CHECKS = (
    Check("sentinel", "warning", "{n} with numbers far beyond all others ({what})", _sentinel,
          in_groups=True),
    Check("constant_number", "note", "these numbers never change: {what}", _constant_number,
          "nothing; an agent learns nothing from them"),
    Check("units", "note", "spreads of the numbers differ by more than a million: {what}", _units,
          "nothing, if inputs are normalised; very small ones are only centred"),
    Check("nan_info", "note", "{n} with infos that are not finite ({what})", _nan_info, "nothing"),
    Check("action_outside", "error", "{n} with actions outside of their space ({what})", _outside),
    Check("observation_outside", "warning", "{n} with observations outside of their space ({what})",
          _observation_outside, "nothing, if the environment's bounds are only too narrow",
          in_groups=True),
    Check("constant_action", "warning", "{n} repeating one action from begin to end ({what})",
          _constant_action),
    Check("unused_action", "note", "actions that were never taken: {what}", _unused_action,
          "nothing; their values are guesses"),
    Check("saturated", "note", "{what} of the steps have an action at its bound", _saturated,
          "nothing, if the task is solved so; a Gaussian actor cannot imitate it"),
)  # fmt: skip
