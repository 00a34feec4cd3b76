"""Checks of rewards."""

from __future__ import annotations

from workbench.analysis.doctor.check import Check, Subject

FEW = 10
"""Different rewards, up to which they are choices of the task and none is an outlier."""

EPISODE = 10
"""Steps below which an episode without rewards may have ended too early for one."""
DENSE = 0.9
"""Share of steps, and of trajectories, that must have a reward for one to be missing."""


def _zero_rewards(s: Subject) -> str:
    return f"""select null as id, '' as what from {s.steps}
where not is_last having count(*) > 0 and max(abs(reward)) = 0"""


def _missing_rewards(s: Subject) -> str:
    return f"""with e as (
  select trajectory_id as id, count(*) as n, avg((reward <> 0)::int) as share from {s.steps}
  where not is_last group by all)
select id, n || ' steps' as what from e where share = 0 and n >= {EPISODE}
  and (select count(*) filter (share > {DENSE}) > {DENSE} * (count(*) - 1) and count(*) >= 5
    from e)"""


def _reward_outlier(s: Subject) -> str:
    # Where most rewards are 0, those of a success are compared with each other.
    return f"""with z as (
  select avg((reward = 0)::int) > 0.5 as sparse, approx_count_distinct(reward) as different
  from {s.steps} where not is_last),
q as (
  select approx_quantile(reward, 0.002) as low, approx_quantile(reward, 0.998) as high,
    approx_quantile(reward, 0.5) as middle, count(*) as n
  from {s.steps}, z where not is_last and different > {FEW} and not (sparse and reward = 0)),
o as (
  select trajectory_id as id, t, reward from {s.steps}, q
  where not is_last and high > low and n >= 500 and abs(reward - middle) > 10 * (high - low)
    and (reward <> 0 or not (select sparse from z)))
select id, 'step ' || min(t) || ': ' || first(reward) as what from o
where (select count(distinct id) from o)
  <= greatest(1, 0.05 * (select count(*) from {s.trajectories})) group by id"""


def _reward_scale(s: Subject) -> str:
    return f"""with e as (
  select trajectory_id as id, approx_quantile(abs(reward), 0.9) as size,
    approx_quantile(abs(reward), 0.5) as middle from {s.steps}
  where not is_last and reward <> 0 group by all),
m as (
  select median(size) as usual, (select approx_count_distinct(reward) from {s.steps}) as different
  from e)
select id, size || ', usually ' || usual as what from e, m
where usual > 0 and size > 30 * usual and (different > {FEW} or middle > 30 * usual)
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


SHIFTED = "shift the rewards by one step where the data is made, and import it again"
CHECKS = (
    Check("missing_rewards", "warning", "{n} with rewards that are all 0 ({what}), elsewhere "
          "hardly any is", _missing_rewards),
    Check("zero_rewards", "warning", "all rewards are 0", _zero_rewards,
          "relabel the rewards before training on it"),
    Check("reward_outlier", "warning", "{n} with rewards far beyond all others ({what})",
          _reward_outlier),
    Check("reward_scale", "warning", "{n} with rewards on another scale ({what})", _reward_scale),
    Check("reward_sign", "warning", "{n} with rewards of the other sign ({what})", _reward_sign),
    Check("last_reward_missing", "warning", "{n} cut off with a last reward of 0, where "
          "nearly all others are not 0: are rewards shifted by a step?", _last_reward_missing,
          SHIFTED),
    Check("first_reward_missing", "warning", "{what}, and nearly no others: are rewards shifted "
          "by a step?", _first_reward_missing, SHIFTED),
)  # fmt: skip
