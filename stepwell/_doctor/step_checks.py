"""Checks of observations, actions and rewards, step by step."""

from __future__ import annotations

from stepwell._doctor.check import Check, Subject, is_blob
from stepwell._sql import quoted
from stepwell.spaces import Box, Discrete

EPISODE = 20
"""Steps below which an episode that stands still says little."""


# --- whole episodes -------------------------------------------------------------------------------


def _distinct(s: Subject) -> str:
    """A condition: observations hardly ever repeat, as in a world of few states they do."""
    return f"""(select count(distinct hash(obs)) / count(*) from {s.steps}) > 0.5"""


def _contents(s: Subject) -> str:
    # DuckDB's hash of several values mixes them too weakly to be summed over steps.
    return f"""select trajectory_id as id,
    md5(string_agg(hash(obs, action, reward)::varchar, ',' order by t)) as content
  from {s.steps} group by all"""


def _duplicate(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""with c as ({_contents(s)})
select id, 'as ' || min(id) over (partition by content) as what from c
where {_distinct(s)}
qualify row_number() over (partition by content order by id) > 1"""


def _content_leak(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""with c as ({_contents(s)}),
p as (select c.id, content, purpose from c join {s.trajectories} t on t.id = c.id)
select id, '' as what from p where purpose = 'train' and {_distinct(s)}
  and content in (select content from p where purpose = 'eval')"""


def _near_duplicate(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""with c as ({_contents(s)}),
p as (
  select trajectory_id as id,
    md5(string_agg(hash(obs, action)::varchar, ',' order by t)) as start
  from {s.steps} where t < 10 group by all having count(*) = 10)
select p.id, 'as ' || min(p.id) over (partition by start) as what from p join c on c.id = p.id
where start in (
  select start from p join c on c.id = p.id group by start having count(distinct content) > 1)
  and {_distinct(s)}
qualify row_number() over (partition by start order by p.id) > 1"""


def _constant_episode(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""with e as (
  select trajectory_id as id, count(distinct hash(obs)) as distinct_obs, count(*) as rows
  from {s.steps} group by all)
select id, rows || ' observations' as what from e
where distinct_obs = 1 and rows > {EPISODE // 2}
  and (select avg((distinct_obs = 1)::int) from e) < 0.2"""


def _stuck_number(s: Subject) -> str | None:
    numbers = s.numbers()
    if not numbers or not s.has_floats():
        return None
    stuck = ", ".join(f"min({sql}) = max({sql})" for _, sql in numbers)
    names = ", ".join(_text(name) for name, _ in numbers)
    return f"""with e as (
  select trajectory_id as id, [{stuck}] as stuck, count(distinct hash(obs)) as distinct_obs
  from {s.steps} group by all having count(*) > {EPISODE}),
d as (select id, distinct_obs, unnest(stuck) as is_stuck, unnest([{names}]) as name from e)
select id, name as what from d
where is_stuck and distinct_obs > 1
qualify count(*) over (partition by name)
  < 0.05 * (select count(*) from e) + 1 and (select count(*) from e) >= 10"""


# --- between two steps ----------------------------------------------------------------------------


def _jumps(s: Subject, numbers: list[tuple[str, str]]) -> str:
    """Common tables: for each step the length of the change in units of usual changes."""
    changes = ", ".join(f"{sql} - lag({sql}) over w" for _, sql in numbers)
    scales = ", ".join(
        f"sqrt(avg(change[{i}] ** 2) filter (change[{i}] <> 0))" for i in range(1, len(numbers) + 1)
    )
    terms = " + ".join(
        f"coalesce((change[{i}] / nullif(scale[{i}], 0)) ** 2, 0)"
        for i in range(1, len(numbers) + 1)
    )
    return f"""with d as (
  select trajectory_id as id, t, is_last, [{changes}] as change from {s.steps}
  window w as (partition by trajectory_id order by t)),
u as (select [{scales}] as scale from d where t > 0),
j as (select id, t, is_last, sqrt({terms}) as jump from d, u where t > 0),
q as (
  select quantile_cont(jump, 0.995) as usual, avg((jump > 0)::int) as moving, count(*) as n from j),
r as (
  select count(distinct id) filter (jump > 1.8 * usual) / count(distinct id) as jumping from j, q)
"""


def _teleport(s: Subject) -> str | None:
    numbers = s.numbers()
    if not numbers or not s.has_floats():
        return None
    return f"""{_jumps(s, numbers)}
select id, 'step ' || arg_max(t, jump) || ': ' || round(max(jump / usual), 1)
  || ' times a great change' as what
from j, q, r where not is_last and jump > 3.5 * usual
  and moving > 0.5 and n >= 200 and jumping < 0.06 group by id"""


def _final_jump(s: Subject) -> str | None:
    numbers = s.numbers()
    if not numbers or not s.has_floats():
        return None
    return f"""{_jumps(s, numbers)}
select j.id, round(jump / usual, 1) || ' times a great change' as what
from j, q, r where is_last and jump > 3.5 * usual
  and moving > 0.5 and n >= 200 and jumping < 0.06"""


def _last_is_next_first(s: Subject) -> str | None:
    if not s.has_floats():
        return None
    return f"""with e as (
  select seq, id, arg_min(hash(obs), t) as first, arg_max(hash(obs), t) as last
  from {s.steps} x join {s.trajectories} t on t.id = x.trajectory_id group by all),
n as (select *, lead(first) over (order by seq) as following from e)
select id, '' as what from n where last = following
  and (select count(distinct first) from e) > 0.5 * (select count(*) from e)"""


def _pairs(s: Subject) -> str:
    return f"""with p as (
  select trajectory_id as id, t, is_last, hash(obs) = lag(hash(obs)) over w as same
  from {s.steps} window w as (partition by trajectory_id order by t))"""


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
group by id having count(*) < (select max(t) from p)"""


def _last_is_zero(s: Subject) -> str | None:
    numbers = s.numbers()
    if len(numbers) < 2 or not s.has_floats():
        return None
    zero = " and ".join(f"{sql} = 0" for _, sql in numbers)
    return f"""with z as (select trajectory_id as id, is_last, {zero} as zero from {s.steps})
select z.id, '' as what from z join {s.trajectories} t on t.id = z.id
where is_last and zero and final_obs_valid
  and (select avg(zero::int) from z where not is_last) < 0.001"""


# --- values ---------------------------------------------------------------------------------------


def _sentinel(s: Subject) -> str | None:
    numbers = s.numbers()
    if not numbers:
        return None
    values = [sql for _, sql in numbers]
    low, middle, high = (
        ", ".join(f"approx_quantile({sql}, {at})" for sql in values) for at in (0.02, 0.5, 0.98)
    )
    cases = "\n  ".join(
        f"when high[{i}] > low[{i}] and abs({sql} - middle[{i}]) > 50 * (high[{i}] - low[{i}])"
        f" then {_text(name)} || ' = ' || {sql}"
        for i, (name, sql) in enumerate(numbers, 1)
    )
    return f"""with q as (
  select [{low}] as low, [{middle}] as middle, [{high}] as high from {s.steps}),
v as (select trajectory_id as id, t, case
  {cases}
  end as what from {s.steps}, q)
select id, arg_min(what, t) as what from v where what is not null group by id"""


def _constant_number(s: Subject) -> str | None:
    numbers = s.numbers()
    if not numbers:
        return None
    constant = ", ".join(f"min({sql}) = max({sql})" for _, sql in numbers)
    names = ", ".join(_text(name) for name, _ in numbers)
    return f"""with c as (select [{constant}] as c, count(*) as n from {s.steps})
select null as id, string_agg(name, ', ') as what
from (select unnest(c) as is_constant, unnest([{names}]) as name, n from c)
where is_constant and n > 50 having count(*) > 0"""


def _units(s: Subject) -> str | None:
    numbers = s.numbers()
    if len(numbers) < 2:
        return None
    spreads = ", ".join(f"stddev_pop({sql})" for _, sql in numbers)
    return f"""with u as (select unnest([{spreads}]) as spread from {s.steps})
select null as id, 'from ' || min(spread) || ' to ' || max(spread) as what from u
where spread > 0 having max(spread) > 1e6 * min(spread)"""


def _dark_image(s: Subject) -> str | None:
    images = [key for key, space in s.spec.observations.items() if is_blob(space)]
    if not images:
        return None
    bright = " or ".join(
        f"not regexp_full_match(hex(obs.{quoted(key)}), '(0[01])+')" for key in images
    )
    return f"""select null as id, 'bytes of 0 and 1' as what from {s.steps}
where t = 0 having count(*) > 0 and not bool_or({bright})"""


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
        if not isinstance(space, Box) or is_blob(space) or not isinstance(space.low, float | int):
            continue
        if not isinstance(space.high, float | int):
            continue
        low, high = float(space.low), float(space.high)
        margin = 1e-4 * (high - low) if high - low < 1e30 else 0.0
        for value in _action_numbers(sql, space):
            if low > -1e30:
                parts.append(f"{value} < {low - margin!r}")
            if high < 1e30:
                parts.append(f"{value} > {high + margin!r}")
    if not parts:
        return None
    return f"""select trajectory_id as id, 'step ' || min(t) as what from {s.steps}
where not is_last and ({" or ".join(parts)}) group by all"""


def _action_numbers(sql: str, space: Box) -> list[str]:
    if space.shape == ():
        return [f"cast({sql} as double)"]
    size = 1
    for n in space.shape:
        size *= n
    return [f"cast({sql}[{i + 1}] as double)" for i in range(min(size, 32))]


def _constant_action(s: Subject) -> str | None:
    boxes = [(sql, a) for _, sql, a in s.actions() if isinstance(a, Box) and not is_blob(a)]
    if len(boxes) != len(s.actions()):
        return None
    bounds = " or ".join(
        f"{value} in ({float(space.low)!r}, {float(space.high)!r})"
        for sql, space in boxes
        if isinstance(space.low, float | int) and isinstance(space.high, float | int)
        and abs(space.low) < 1e30 and abs(space.high) < 1e30
        for value in _action_numbers(sql, space)
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
                f"""select {_text(name)} as name, a as action from range({space.n}) r(a)
where a + {space.start} not in (select distinct {sql} from {s.steps} where not is_last)"""
            )
    if not parts:
        return None
    return f"""with u as ({" union all ".join(parts)})
select null as id, string_agg(name || ' = ' || action, ', ') as what from u having count(*) > 0"""


def _saturated(s: Subject) -> str | None:
    parts = [
        f"abs({value} - {float(bound)!r}) < 1e-6"
        for _, sql, space in s.actions()
        if isinstance(space, Box) and not is_blob(space)
        for bound in (space.low, space.high)
        if isinstance(bound, float | int) and abs(bound) < 1e30
        for value in _action_numbers(sql, space)
    ]
    if not parts:
        return None
    return f"""select null as id, round(100 * avg(({" or ".join(parts)})::int)) || '%' as what
from {s.steps} where not is_last having avg(({" or ".join(parts)})::int) > 0.9"""


# --- rewards --------------------------------------------------------------------------------------


def _zero_rewards(s: Subject) -> str:
    return f"""select null as id, '' as what from {s.steps}
where not is_last having count(*) > 0 and max(abs(reward)) = 0"""


def _reward_outlier(s: Subject) -> str:
    return f"""with q as (
  select quantile_cont(reward, 0.002) as low, quantile_cont(reward, 0.998) as high,
    median(reward) as middle, count(*) as n from {s.steps} where not is_last),
o as (
  select trajectory_id as id, t, reward from {s.steps}, q
  where not is_last and high > low and n >= 500 and abs(reward - middle) > 10 * (high - low))
select id, 'step ' || min(t) || ': ' || first(reward) as what from o
where (select count(distinct id) from o)
  <= greatest(1, 0.05 * (select count(distinct trajectory_id) from {s.steps})) group by id"""


def _reward_scale(s: Subject) -> str:
    return f"""with e as (
  select trajectory_id as id, quantile_cont(abs(reward), 0.9) as size from {s.steps}
  where not is_last and reward <> 0 group by all),
m as (select median(size) as usual from e)
select id, size || ', usually ' || usual as what from e, m
where usual > 0 and size > 30 * usual
  and (select avg((size > 30 * usual)::int) from e, m) < 0.4"""


def _reward_sign(s: Subject) -> str:
    return f"""with e as (
  select trajectory_id as id, min(reward) as low, max(reward) as high from {s.steps}
  where not is_last group by all having min(reward) <> max(reward)),
n as (select avg((high <= 0)::int) as negative, avg((low >= 0)::int) as positive from e)
select id, 'from ' || low || ' to ' || high as what from e, n
where (negative between 0.6 and 0.999 and low >= 0)
  or (positive between 0.6 and 0.999 and high <= 0)"""


def _last_reward_missing(s: Subject) -> str:
    # The row of the last reward is the one with the end; the row after it has no reward.
    return f"""with f as (
  select avg((reward <> 0)::int) filter (not truncated and not terminated) as dense
  from {s.steps} where not is_last)
select trajectory_id as id, '' as what from {s.steps}, f
where truncated and reward = 0 and dense > 0.98"""


def _first_reward_missing(s: Subject) -> str:
    return f"""with f as (
  select avg((reward <> 0)::int) filter (t > 0) as dense,
    avg((reward = 0)::int) filter (t = 0) as missing from {s.steps} where not is_last)
select null as id, round(100 * missing) || '% of the first rewards are 0' as what from f
where dense > 0.98 and missing > 0.95"""


def _text(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


SHIFTED = "shift the rewards by one step where the data is made, and import it again"
CHECKS = (
    Check("duplicate", "warning", "{n} have the content of another one ({what})", _duplicate),
    Check("content_leak", "error", "{n} for training are also evaluation episodes", _content_leak),
    Check(
        "near_duplicate", "warning",
        "{n} have the same first ten steps as another one, and then differ ({what})",
        _near_duplicate,
    ),
    Check("constant_episode", "warning", "{n} never change their observation ({what})",
          _constant_episode),
    Check("stuck_number", "warning", "{n} have a number that never changes, elsewhere it does "
          "({what})", _stuck_number),
    Check("teleport", "warning", "{n} have a change within an episode that is far beyond all "
          "others ({what}): two episodes in one?", _teleport),
    Check("final_jump", "warning", "{n} have a last observation far from the one before ({what}): "
          "that of another episode?", _final_jump),
    Check("last_is_next_first", "error", "{n} end with the first observation of the next "
          "trajectory", _last_is_next_first),
    Check("last_is_copy", "warning", "{n} end with a copy of the observation before",
          _last_is_copy),
    Check("last_is_zero", "error", "{n} end with an observation of zeros", _last_is_zero),
    Check("repeated_observation", "warning", "{n} have a step whose observation is that of the "
          "step before ({what}), which is rare here", _repeated_observation),
    Check("sentinel", "warning", "{n} have numbers far beyond all others ({what})", _sentinel),
    Check("constant_number", "note", "these numbers never change: {what}", _constant_number,
          "nothing; an agent learns nothing from them"),
    Check("units", "note", "spreads of the numbers differ by more than a million: {what}", _units,
          "nothing, if inputs are normalised; very small ones are only centred"),
    Check("dark_image", "warning", "images have {what}: were they scaled to 0 … 1 before?",
          _dark_image, "multiply by 255 where the data is made, and import it again"),
    Check("nan_info", "note", "{n} have infos that are not finite ({what})", _nan_info, "nothing"),
    Check("action_outside", "error", "{n} have actions outside of their space ({what})", _outside),
    Check("constant_action", "warning", "{n} repeat one action from begin to end ({what})",
          _constant_action),
    Check("unused_action", "note", "actions that were never taken: {what}", _unused_action,
          "nothing; their values are guesses"),
    Check("saturated", "note", "{what} of the steps have an action at its bound", _saturated,
          "nothing, if the task is solved so; a Gaussian actor cannot imitate it"),
    Check("zero_rewards", "warning", "all rewards are 0", _zero_rewards,
          "relabel the rewards before training on it"),
    Check("reward_outlier", "warning", "{n} have rewards far beyond all others ({what})",
          _reward_outlier),
    Check("reward_scale", "warning", "{n} have rewards on another scale ({what})", _reward_scale),
    Check("reward_sign", "warning", "{n} have rewards of the other sign ({what})", _reward_sign),
    Check("last_reward_missing", "warning", "{n} were cut off with a last reward of 0, where "
          "nearly all others are not 0: are rewards shifted by a step?", _last_reward_missing,
          SHIFTED),
    Check("first_reward_missing", "warning", "{what}, and nearly no others: are rewards shifted "
          "by a step?", _first_reward_missing, SHIFTED),
)  # fmt: skip
