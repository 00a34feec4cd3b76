"""Checks of pieces of an episode that are out of order: backwards, or exchanged with each other."""

from __future__ import annotations

from workbench.analysis.doctor.check import Check, Subject
from workbench.analysis.doctor.step_changes import ROUGH

LEAST = 5
"""Steps of a piece."""
LARGE = 2.0
"""The change at a seam (the mean square of what changes), in units of a great one."""
HEALED = 0.25
"""Share of the change at the seams up to which the right order counts as without a change."""
RARE = 0.1
"""Share of the trajectories up to which this is a defect, not how these data move."""


def _reordered_piece(s: Subject) -> str | None:
    """Steps with a large change between steps with small ones are seams, of all numbers together,
    so a smaller one is seen than by `teleport`. It takes two or three of them between which the
    changes are small if the piece is turned round, or if two neighbours are exchanged: impacts and
    resets are large, too, but do not fit each other."""
    numbers = s.numbers()
    if len(numbers) < 2:
        return None
    each = range(1, len(numbers) + 1)
    at = 1 - min(0.01, max(0.001, 20 / max(s.row_count, 1)))
    columns = ", ".join(
        f"{x} as x{i}, {x} - lag({x}) over {s.over} as e{i}" for i, (_, x) in enumerate(numbers, 1)
    )
    # Numbers that mostly stand still have no usual change, and a speed may turn in an impact.
    great = ", ".join(
        f"if(approx_quantile(abs(e{i}), 0.5) > 1e-3 * approx_quantile(abs(e{i}), {at}), "
        f"approx_quantile(abs(e{i}), {at}), null) as q{i}, stddev_pop(x{i}) as r{i}"
        for i in each
    )
    rough = ", ".join(f"q{i} / nullif(r{i}, 0)" for i in each)
    weights = ", ".join(
        f"coalesce(if(q{i} / r{i} <= {ROUGH} * smooth, 1 / q{i}, 0), 0) as w{i}" for i in each
    )
    used = " + ".join(f"(w{i} > 0)::int" for i in each)
    size = " + ".join(f"(w{i} * e{i}) ** 2" for i in each)
    large = " + ".join(f"(w{i} * abs(e{i}) > 1)::int" for i in each)
    now = ", ".join(f"w{i} * x{i}" for i in each)
    before = ", ".join(f"w{i} * (x{i} - e{i})" for i in each)
    return f"""with c as not materialized (
  select * from (select trajectory_id as id, t, {columns} from {s.numbered}) where t > 0),
w as (
  select {weights} from (select *, list_min([{rough}]) as smooth from (select {great} from c))),
m as (select *, {used} as used from w),
u as (select approx_quantile(({size}) / used, {at}) as usual from c, m where used > 1),
k as materialized (
  select id, t, used, ({size}) / used as size, ({large}) as large, [{now}] as now,
    [{before}] as before
  from c, m, u where used > 1 and ({size}) / used > usual),
seam as materialized (
  select k.* from k, u where size > {LARGE} * usual and large > 1 and not exists (
    select 1 from k o where o.id = k.id and o.size > {HEALED} * k.size
      and o.t in (k.t - 1, k.t + 1))),
p as (
  select a.id, 'steps ' || a.t || ' to ' || (b.t - 1) || ' backwards' as what
  from seam a join seam b on b.id = a.id and b.t >= a.t + {LEAST}
  where {_near("a.before", "b.before", "a", "b")} and {_near("a.now", "b.now", "a", "b")}
  union all
  select a.id,
    'steps ' || a.t || ' to ' || (b.t - 1) || ' belong after ' || b.t || ' to ' || (c.t - 1)
  from seam a join seam b on b.id = a.id and b.t >= a.t + {LEAST}
    join seam c on c.id = a.id and c.t >= b.t + {LEAST}
  where {_near("a.before", "b.now", "a", "b")} and {_near("c.before", "a.now", "a", "c")}
    and {_near("b.before", "c.now", "b", "c")})
select id, first(what) as what from p
where (select count(distinct id) from p)
  <= greatest(1, {RARE} * (select count(distinct trajectory_id) from {s.steps})) group by id"""


def _near(one: str, other: str, a: str, b: str) -> str:
    """Whether the change from one to the other is small compared to the seams a and b."""
    distance = f"list_distance({one}, {other}) ** 2 / {a}.used"
    return f"{distance} < {HEALED} * least({a}.size, {b}.size)"


CHECKS = (
    Check("reordered_piece", "warning", "{n} with a piece of the episode that is backwards or in "
          "another place ({what})", _reordered_piece, in_groups=True),
)  # fmt: skip
