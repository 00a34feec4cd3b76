"""Checks of a piece of an episode in which something stands still: a sensor, an action, a reward.

A piece is found by blocks of ten steps, which takes no sorting: any 30 steps without a change hold
two blocks in a row, and shorter pieces hold them by chance from 20 steps on.
"""

from __future__ import annotations

from stepwell._sql import literal, quoted
from stepwell.spaces import Box
from workbench.analysis.doctor.check import Check, Subject, action_numbers, images

BLOCK = 10
USUALLY = 0.9
"""Share of the steps in which a number must change for a piece without change to be a defect."""
FEW = 0.1
"""Share of the trajectories up to which standing still is a defect, not a habit of the data."""
ABRUPT = 0.01
"""The last change before a number stands still, in units of a usual one; what comes to rest has
less."""
TRANSITIONS = "t > 0 and not is_last"
"""A condition on steps that have looked back: see `Subject.over`."""
MOST_ACTIONS = 32
"""Numbers of an action that are looked at."""

Numbers = list[tuple[str, str]]
"""(name, SQL of a DOUBLE)."""


def _frozen(s: Subject, numbers: Numbers, steps: str, meanwhile: str, where: str = "t > 0") -> str:
    """Numbers that stand still for 30 steps, although they change nearly always, while `meanwhile`
    (SQL over `moved`, `acted`) is true. A least or greatest value that several trajectories reach
    is a bound, at which standing still is natural; so is, except at 0, a value at which several of
    them stand still, such as that of a wall. What comes to rest changes ever less before."""
    each = range(1, len(numbers) + 1)
    ends = ", ".join(f"min({x}) as l{i}, max({x}) as h{i}" for i, (_, x) in enumerate(numbers, 1))
    bounds = ", ".join(
        f"if(count(*) filter (l{i} = low{i}) > 1, any_value(low{i}), null) as low{i}, "
        f"if(count(*) filter (h{i} = high{i}) > 1, any_value(high{i}), null) as high{i}"
        for i in each
    )
    least = ", ".join(f"min(l{i}) over () as low{i}, max(h{i}) over () as high{i}" for i in each)
    columns = ", ".join(
        f"{x} as x{i}, abs({x} - lag({x}) over {s.over}) as d{i}"
        for i, (_, x) in enumerate(numbers, 1)
    )
    block = ", ".join(
        f"count(*) filter (d{i} > 0 or coalesce(x{i} in (low{i}, high{i}), false))::utinyint "
        f"as c{i}, any_value(x{i}) as x{i}, (arg_max(d{i}, t) filter (d{i} > 0))::float as d{i}"
        for i in each
    )
    changed, shares = _list("c", each), ", ".join(f"sum(c{i}) / sum(rows)" for i in each)
    whole = ", ".join(f"sum(c{i})" for i in each)
    sizes = ", ".join(f"approx_quantile(d{i}, 0.5)" for i in each)
    names = ", ".join(literal(name) for name, _ in numbers)
    return f"""with q as (
  select {bounds} from (
    select *, {least} from (select trajectory_id, {ends} from {steps} group by trajectory_id))),
b as materialized (
  select id, t // {BLOCK} as block, count(*) as rows, bool_or({meanwhile}) as lives, {block}
  from (select trajectory_id as id, t, o <> lag(o) over {s.over} as moved,
      a <> lag(a) over {s.over} as acted, is_last, {columns} from {steps}), q
  where {where} group by all),
e as (select id, sum(rows) as total, [{whole}] as changed from b group by id),
u as (select [{shares}] as usual, [{sizes}] as size from b),
f as (
  select id, block, i, value from (
    select id, block, unnest(range(1, {len(numbers) + 1})) as i, unnest({changed}) as c,
      unnest({_list("x", each)}) as value
    from b where rows = {BLOCK} and lives and least({", ".join(f"c{i}" for i in each)}, 1) = 0)
  where c = 0),
p as (
  select id, i, value, min(block) filter (follows) as block, count(*) as blocks from (
    select *, lag(block) over (partition by id, i order by block) = block - 1 as follows from f)
  group by all having bool_or(follows)),
w as (
  select p.id, [{names}][i] as name, p.block from p join e using (id)
    join b on b.id = p.id and b.block = p.block - 2, u
  where usual[i] > {USUALLY} and changed[i] > 0
    and {_list("d", each)}[i] > {ABRUPT} * size[i]
    and changed[i] >= {USUALLY} * (total - {BLOCK} * (blocks + 2))
    and (value = 0 or (select count(*) from p o where o.i = p.i and o.value = p.value) = 1))
select id, arg_min(name, block) || ' near step ' || {BLOCK} * (min(block) - 1) as what from w
where (select count(distinct id) from w)
  <= greatest(1, {FEW} * (select count(*) from e)) group by id"""


def _list(letter: str, each: range) -> str:
    return "[" + ", ".join(f"{letter}{i}" for i in each) + "]"


def _frozen_number(s: Subject) -> str | None:
    # A robot at rest, whose policy repeats its action, is no defect.
    return _frozen(s, s.numbers(), s.numbered, "moved or acted") if s.numbers() else None


def _frozen_image(s: Subject) -> str | None:
    keys = [key for key, _ in images(s)]
    if not keys:
        return None
    columns = ", ".join(f"hash(obs.{quoted(key)})::double as {quoted(key)}" for key in keys)
    numbers = [(key, quoted(key)) for key in keys]
    query = _frozen(s, numbers, "hashed", "moved or acted")
    hashed = _hashed(s, columns)  # images are read once
    return f"with hashed as materialized {hashed},\n{query.removeprefix('with ')}"


def _frozen_action(s: Subject) -> str | None:
    numbers = [
        number
        for name, sql, space in s.actions()
        if isinstance(space, Box) and space.dtype.startswith("float")
        for number in action_numbers(name, sql, space)
    ]
    if not numbers:
        return None
    return _frozen(s, numbers[:MOST_ACTIONS], _hashed(s, "action"), "moved", TRANSITIONS)


def _frozen_reward(s: Subject) -> str:
    steps = _hashed(s, "cast(reward as double) as reward")
    return _frozen(s, [("reward", "reward")], steps, "moved", TRANSITIONS)


def _hashed(s: Subject, columns: str) -> str:
    """A FROM item: the steps with o and a, the hashes of observation and action."""
    return f"""(select trajectory_id, t, is_last, hash(obs) as o, hash(action) as a, {columns}
    from {s.steps})"""


CHECKS = (
    Check("frozen_number", "warning", "{n} with a number that stands still for 30 steps, elsewhere "
          "it changes nearly always ({what})", _frozen_number, in_groups=True),
    Check("frozen_image", "warning", "{n} with an image that stands still for 30 steps, elsewhere "
          "it changes nearly always ({what})", _frozen_image),
    Check("frozen_action", "warning", "{n} repeating a number of the action for 30 steps, "
          "elsewhere it changes nearly always ({what})", _frozen_action),
    Check("frozen_reward", "warning", "{n} repeating a reward for 30 steps, elsewhere it changes "
          "nearly always ({what})", _frozen_reward),
)  # fmt: skip
