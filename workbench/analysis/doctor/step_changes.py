"""Checks between two steps: jumps, standing still, and the last observation."""

from __future__ import annotations

from stepwell._sql import literal, quoted
from workbench.analysis.doctor.check import Check, Subject, changes, hashed, named

EPISODE = 20
"""Steps below which an episode that stands still says little."""
FAR = 4.0
"""A jump, in units of a great change: the 99th percentile, in large data the 99.9th."""

ROUGH = 3.0
"""A number that changes so many times as much for its spread as the smoothest may be a speed."""


def _constant_episode(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""with e as (
  select trajectory_id as id, min(hash(obs)) = max(hash(obs)) as still, count(*) as rows
  from {s.steps} group by all)
select id, rows || ' observations' as what from e
where still and rows > {EPISODE // 2}
  and (select avg(still::int) from e) < 0.2"""


def _stuck_number(s: Subject) -> str | None:
    numbers = s.numbers()
    if not numbers or (len(numbers) < 2 and s.only is None):
        return None
    each = range(1, len(numbers) + 1)
    moves = ", ".join(f"avg((d{i} > 0)::int) as m{i}" for i in each)
    usual = ", ".join(f"avg(m{i}) as u{i}, avg((m{i} = 0)::int) as s{i}" for i in each)
    conditions = [
        (literal(name), f"m{i} = 0 and u{i} > 0.8 and s{i} < 0.05 + 1 / u.n")
        for i, (name, _) in enumerate(numbers, 1)
    ]
    return f"""with e as (
  select id, {moves}, bool_or(changed) as changed from {changes(s)}
  group by id having count(*) > {EPISODE}),
u as (select count(*) as n, {usual} from e),
w as (select id, {named(conditions)} as what from e, u where n >= 10 and changed)
select id, what from w where what is not null"""


# --- jumps ----------------------------------------------------------------------------------------


def _jumps(s: Subject, where: str) -> str | None:
    """Steps in which two numbers or more change far more than they nearly ever do, in few
    trajectories. An angle that wraps changes alone; what collides often is no jump, as each
    number is measured by its own changes. One that mostly stands still, such as a force of
    contact, has no usual change. A collision turns speeds, but places do not jump: one of the
    numbers that change least for their spread has to be far."""
    numbers = s.numbers()
    if not numbers:
        return None
    each = range(1, len(numbers) + 1)
    at = 1 - min(0.01, max(0.001, 20 / max(s.row_count, 1)))
    great = ", ".join(
        f"if(approx_quantile(d{i}, 0.5) > 1e-3 * approx_quantile(d{i}, {at}), "
        f"approx_quantile(d{i}, {at}), null) as q{i}, stddev_pop(x{i}) as r{i}"
        for i in each
    )
    moving = " + ".join(f"(q{i} is not null)::int" for i in each)
    # Of some numbers of many, one that moves alone may be an angle.
    least = f"least(2, {moving})" if s.only is None else "2"
    wild = " + ".join(f"coalesce((d{i} > {FAR / 2} * q{i})::int, 0)" for i in each)
    rough = ", ".join(f"q{i} / nullif(r{i}, 0)" for i in each)
    far = ", ".join(
        f"coalesce(if(q{i} / r{i} <= {ROUGH} * smooth, d{i} / q{i}, 0), 0)" for i in each
    )
    return f"""with q as (select count(*) as n, {great} from {changes(s)}),
j as (
  select id, t, is_last, list_max([{far}]) as jump
  from {changes(s)}, (select *, list_min([{rough}]) as smooth from q)
  where n >= 200 and {moving} > 0 and ({wild}) >= {least})
select id, 'step ' || arg_max(t, jump) || ': ' || round(max(jump), 1)
  || ' times a great change' as what
from j where {where} and jump > {FAR}
  and {s.one_in} * (select count(distinct id) from j where jump > {FAR / 2})
    < 0.06 * (select count(*) from {s.trajectories})
group by id"""


def _teleport(s: Subject) -> str | None:
    return _jumps(s, "not is_last")


def _final_jump(s: Subject) -> str | None:
    return _jumps(s, "is_last")


# --- the last observation -------------------------------------------------------------------------


def _last_is_next_first(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""with e as (
  select seq, id, final_obs_valid, any_value(hash(obs)) filter (t = 0) as first,
    any_value(hash(obs)) filter (is_last) as last
  from {s.steps} x join {s.trajectories} t on t.id = x.trajectory_id group by all),
n as (select *, lead(first) over (order by seq) as following from e)
select id, '' as what from n where last = following and final_obs_valid
  and (select count(distinct first) from e) > 0.5 * (select count(*) from e)"""


def _pairs(s: Subject) -> str:
    return f"""with {hashed(s)},
p as not materialized (
  select trajectory_id as id, t, is_last, o = lag(o) over {s.over} as same from hashed)"""


def _last_is_copy(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""{_pairs(s)}
select p.id, '' as what from p join {s.trajectories} t on t.id = p.id
where is_last and same and final_obs_valid and length > 2
  and (select avg(same::int) from p where not is_last and t > 0) < 0.01"""


def _repeated_observation(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""{_pairs(s)}
select id, 'step ' || min(t) as what from p
where same and not is_last and (select avg(same::int) from p where t > 0 and not is_last) < 0.005
  and (select approx_count_distinct(o) > 0.7 * count(*) from hashed)
  and t > 0 group by id"""


def _last_is_zero(s: Subject) -> str | None:
    if len(s.numbers()) < 2 or not s.has_floats():
        return None
    zero = " and ".join(
        f"cast(obs.{quoted(key)} as double) = 0" if space.shape == ()
        else f"len(list_filter(obs.{quoted(key)}::double[], lambda x: x <> 0)) = 0"
        for key, space, _ in s.vectors()
    )  # fmt: skip
    return f"""with z as not materialized (
  select trajectory_id as id, is_last, {zero} as zero from {s.steps})
select z.id, '' as what from z join {s.trajectories} t on t.id = z.id
where is_last and zero and final_obs_valid
  and (select avg(zero::int) from z where not is_last) < 0.001"""


CHECKS = (
    Check("constant_episode", "warning", "{n} with one observation from begin to end ({what})",
          _constant_episode),
    Check("stuck_number", "warning", "{n} with a number that never changes, elsewhere it does "
          "({what})", _stuck_number, in_groups=True),
    Check("teleport", "warning", "{n} with a change within an episode that is far beyond all "
          "others ({what}): two episodes in one?", _teleport, in_groups=True),
    Check("final_jump", "warning", "{n} with a last observation far from the one before ({what}): "
          "that of another episode?", _final_jump, in_groups=True),
    Check("last_is_next_first", "error", "{n} ending with the first observation of the next "
          "trajectory", _last_is_next_first),
    Check("last_is_copy", "warning", "{n} ending with a copy of the observation before",
          _last_is_copy),
    Check("last_is_zero", "error", "{n} ending with an observation of zeros", _last_is_zero),
    Check("repeated_observation", "warning", "{n} with a step whose observation is that of the "
          "step before ({what}), which is rare here", _repeated_observation),
)  # fmt: skip
