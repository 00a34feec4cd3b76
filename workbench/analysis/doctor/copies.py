"""Checks of copies: trajectories that are there twice, or in part, or in both purposes."""

from __future__ import annotations

from workbench.analysis.doctor.check import Check, Subject, hashed

START = 10
"""Steps after which two trajectories do not agree by chance, except in small worlds."""
MOST_HASHES = 150_000
LONG = 50
"""Steps after which they do not agree by chance where observations are few."""

RARE = 0.1
"""Share of the trajectories up to which a repeated piece is a defect, not part of the task."""


def _least(s: Subject) -> int:
    return START if s.has_floats() else LONG


def _contents(s: Subject, steps: str = "") -> str:
    """Common tables: c, a number for the content of each trajectory and one for its start; and
    small, whether trajectories share their start by chance, as in a corridor or on a grid."""
    # md5, because DuckDB's own hash mixes several values too weakly to be summed over steps.
    return f"""{hashed(s, steps)},
h as (
  select trajectory_id as id, t, is_last,
    md5_number_lower(concat(t, '/', o, '/', a, '/', r)) as whole,
    md5_number_lower(concat(t, '/', o, '/', a)) as start
  from hashed),
c as materialized (
  select id, count(*) as rows, sum(whole) as content, sum(start) filter (t < {START}) as start
  from h group by id),
g as (
  select start, count(*) as n, count(distinct content) as contents from c where rows > {START}
  group by start),
small as (
  select coalesce(sum(n) filter (contents > 1), 0)
    > greatest(4, 0.1 * (select count(*) from c)) as is_small from g)"""


def _duplicate(s: Subject) -> str:
    # Of copies the first one stays; evaluation episodes come first, as the others leak from them.
    return f"""with {_contents(s)},
p as (select c.id, content, purpose from c join {s.trajectories} t on t.id = c.id, small
  where rows > {_least(s)} and not is_small)
select id, 'as ' || first(id) over w as what from p
window w as (partition by content order by purpose, id)
qualify row_number() over w > 1"""


def _content_leak(s: Subject) -> str:
    return f"""with {_contents(s, s.steps_and_eval)},
p as (select c.id, content, purpose from c join {s.all_trajectories} t on t.id = c.id, small
  where rows > {_least(s)} and not is_small)
select id, '' as what from p where purpose = 'train'
  and content in (select content from p where purpose = 'eval')"""


def _near_duplicate(s: Subject) -> str:
    # Of large data, a part of the steps is compared: chosen by content, so equal ones are chosen
    # in both trajectories.
    part = max(1, s.row_count // MOST_HASHES)
    # Where paths meet, as at a wall, they go on alike by chance; of large data not all are seen.
    return f"""with {_contents(s)},
part_of as materialized (
  select id, t, o, a, before, md5_number_lower(concat(o, '/', a)) as h from (
    select trajectory_id as id, t, is_last, o, a, lag(o) over {s.over} as before from hashed)
  where not is_last and o % {part} = 0),
meetings as (
  select o from part_of where t > 0 and before <> o group by o
  having count(*) >= 3 and min(before) <> max(before) and min(a) <> max(a)),
until as (
  select id, min(t) as first from part_of where o in (select o from meetings) group by id),
shared as (
  select h, min(id) as a from part_of group by h having min(id) <> max(id)),
pairs as (
  select shared.a, p.id as b, count(*) * {part} as n from shared join part_of p using (h)
    left join until u on u.id = p.id
  where p.id <> shared.a and p.t < coalesce(first, p.t + 1)
  group by all having count(*) >= 3 and count(*) * {part} >= {START}),
ordered as (
  select if(a.purpose = 'train' and b.purpose = 'eval', a.id, b.id) as copy,
    if(a.purpose = 'train' and b.purpose = 'eval', b.id, a.id) as original, n
  from pairs p join {s.trajectories} a on a.id = p.a join {s.trajectories} b on b.id = p.b)
select copy as id, 'about ' || max(n) || ' steps of ' || arg_max(original, n) as what
from ordered join c x on x.id = original join c y on y.id = copy, small
where x.content <> y.content and not is_small
  and (select count(*) from shared) < 0.3 * (select count(distinct h) from part_of)
group by copy"""


def _repeated_piece(s: Subject) -> str | None:
    # What is there four times or more is a place or a cycle, or stands still.
    if not s.has_floats():
        return None
    return f"""with {hashed(s)},
g as (
  select trajectory_id as id, o, min(t) as first, max(t) as again from hashed
  group by all having count(*) between 2 and 3),
p as (
  select id, again - first as later, min(first) as first, count(*) as n from g
  group by all having count(*) >= {START} and max(first) - min(first) < 2 * count(*))
select id, 'about ' || max(n) || ' steps from step ' || arg_max(first, n) || ' again at step '
  || arg_max(first + later, n) as what from p
where (select count(distinct id) from p)
    <= greatest(1, {RARE} * (select count(distinct trajectory_id) from hashed))
  and (select approx_count_distinct(o) > 0.7 * count(*) from hashed) group by id"""


CHECKS = (
    Check("duplicate", "warning", "{n} with the content of another one ({what})", _duplicate),
    Check("content_leak", "error", "{n} for training with the content of an evaluation episode",
          _content_leak),
    Check("near_duplicate", "warning", "{n} sharing many steps with another one ({what})",
          _near_duplicate),
    Check("repeated_piece", "warning", "{n} in which a piece of the episode is there twice "
          "({what})", _repeated_piece),
)  # fmt: skip
