"""Checks of copies: trajectories that are there twice, or in part, or in both purposes."""

from __future__ import annotations

from stepwell._doctor.check import Check, Subject

START = 10
"""Steps after which two trajectories do not agree by chance, except in small worlds."""
MOST_HASHES = 150_000


def _contents(s: Subject) -> str:
    """Common tables: c, a number for the content of each trajectory and one for its start; and
    small, whether trajectories share their start by chance, as in a corridor or on a grid."""
    # md5, because DuckDB's own hash mixes several values too weakly to be summed over steps.
    return f"""h as (
  select trajectory_id as id, t, is_last,
    md5_number_lower(concat(t, '/', hash(obs), '/', hash(action), '/', hash(reward))) as whole,
    md5_number_lower(concat(t, '/', hash(obs), '/', hash(action))) as start
  from {s.steps}),
c as (
  select id, count(*) as rows, sum(whole) as content, sum(start) filter (t < {START}) as start
  from h group by id),
g as (
  select start, count(*) as n, count(distinct content) as contents from c where rows > {START}
  group by start),
small as (
  select coalesce(sum(n) filter (contents > 1), 0)
    > greatest(4, 0.1 * (select count(*) from c)) as is_small from g)"""


def _duplicate(s: Subject) -> str:
    return f"""with {_contents(s)}
select id, 'as ' || min(id) over (partition by content) as what from c, small
where rows > {START} and not is_small
qualify row_number() over (partition by content order by id) > 1"""


def _content_leak(s: Subject) -> str:
    return f"""with {_contents(s)},
p as (select c.id, content, purpose from c join {s.trajectories} t on t.id = c.id, small
  where rows > {START} and not is_small)
select id, '' as what from p where purpose = 'train'
  and content in (select content from p where purpose = 'eval')"""


def _near_duplicate(s: Subject) -> str:
    # Of large data, a part of the steps is compared: chosen by content, so equal ones are chosen
    # in both trajectories.
    part = max(1, s.row_count // MOST_HASHES)
    return f"""with {_contents(s)},
part_of as (
  select trajectory_id as id, md5_number_lower(concat(hash(obs), '/', hash(action))) as h
  from {s.steps} where not is_last and hash(obs) % {part} = 0),
shared as (
  select min(id) as a, max(id) as b from part_of group by h having min(id) <> max(id)),
pairs as (
  select a, b, count(*) * {part} as n from shared group by a, b
  having count(*) >= 3 and count(*) * {part} >= {START})
select b as id, 'about ' || max(n) || ' steps of ' || arg_max(a, n) as what
from pairs join c x on x.id = a join c y on y.id = b, small
where x.content <> y.content and not is_small
  and (select count(*) from shared) < 0.3 * (select count(distinct h) from part_of)
group by b"""


CHECKS = (
    Check("duplicate", "warning", "{n} have the content of another one ({what})", _duplicate),
    Check("content_leak", "error", "{n} for training are also evaluation episodes", _content_leak),
    Check("near_duplicate", "warning", "{n} share many steps with another one ({what})",
          _near_duplicate),
)  # fmt: skip
