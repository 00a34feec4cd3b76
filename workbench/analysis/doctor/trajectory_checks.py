"""Checks that need no steps: ends, lengths, seeds."""

from __future__ import annotations

from workbench.analysis.doctor.check import Check, Subject

SHORT = 10
"""Steps: where there are shorter episodes, one of a single step is no wonder."""


def _open_end(s: Subject) -> str:
    return f"""select id, 'step ' || (first_step + length) as what from {s.trajectories} a
where not terminated and not truncated and not exists (
  select 1 from {s.trajectories} b
  where b.episode_id = a.episode_id and b.first_step = a.first_step + a.length)"""


def _one_step(s: Subject) -> str:
    return f"""select id, '' as what from {s.trajectories}
where length = 1 and (select count(*) from {s.trajectories} where length > 1) > 0
  and not exists (select 1 from {s.trajectories} where length between 2 and {SHORT - 1})"""


def _unmarked_timeout(s: Subject) -> str:
    return f"""with l as (
  select max(length) as longest, count(distinct length) as lengths, count(*) as n
  from {s.trajectories}),
longest_ones as (
  select count(*) as n, avg(terminated::int) as ended from {s.trajectories}, l
  where length = longest)
select id, longest || ' steps' as what from {s.trajectories} t, l, longest_ones o
where t.terminated and length = longest and longest >= 20 and lengths >= 4
  and o.n >= greatest(4, 0.1 * l.n) and o.ended > 0.5"""


def _early_truncation(s: Subject) -> str:
    return f"""with limits as (
  select env, mode(length) as usual, max(length) as longest, count(*) as n
  from {s.trajectories} where truncated and first_step = 0 group by env)
select id, length || ' of ' || usual || ' steps' as what from {s.trajectories} t
join limits l on l.env = t.env
where t.truncated and t.first_step = 0 and usual = longest and length < usual and l.n >= 8
  and (select count(*) from {s.trajectories} o
       where o.env = t.env and truncated and first_step = 0 and o.length < usual) <= 0.3 * l.n
  and not exists (select 1 from {s.trajectories} b
                  where b.episode_id = t.episode_id and b.first_step = t.length)"""


def _overlap(s: Subject) -> str:
    return f"""select a.id, 'step ' || b.first_step as what from {s.trajectories} a
join {s.trajectories} b on a.episode_id = b.episode_id and a.id <> b.id
where a.episode_id <> '' and b.first_step >= a.first_step
  and b.first_step < a.first_step + a.length and (b.first_step, b.id) > (a.first_step, a.id)"""


def _seed_leak(s: Subject) -> str:
    return f"""select id, 'seed ' || seed as what from {s.trajectories} t
where purpose = 'train' and seed is not null and exists (
  select 1 from trajectories e
  where e.purpose = 'eval' and e.env = t.env and e.seed = t.seed)"""


def _unknown_last(s: Subject) -> str:
    return f"select id, '' as what from {s.trajectories} where not final_obs_valid"


def _return_outlier(s: Subject) -> str:
    return f"""with q as (
  select quantile_cont("return", 0.25) as low, quantile_cont("return", 0.75) as high,
    median("return") as middle from {s.trajectories})
select id, 'return ' || round("return", 2) as what from {s.trajectories}, q
where high > low and abs("return" - middle) > 20 * (high - low)"""


def _broken(s: Subject) -> str:
    return f"""select id, 'step ' || (first_step + length) as what from {s.trajectories}
where list_contains(tags, 'broken')"""


CHECKS = (
    Check(
        "broken", "warning",
        "{n} broken off by an error of the environment ({what}); the run that collected them says "
        "which",
        _broken,
    ),
    Check(
        "open_end", "warning",
        "{n} neither terminated nor truncated, and not going on in another trajectory",
        _open_end,
    ),
    Check("one_step", "warning", "{n} of a single step, where all others have ten or more",
          _one_step),
    Check(
        "unmarked_timeout", "warning",
        "{n} terminated at exactly the greatest length ({what}): time limits, not ends?",
        _unmarked_timeout,
        "record or import them again with the limit as truncation: values would learn that "
        "the world ends there",
    ),
    Check(
        "early_truncation", "warning",
        "{n} cut off earlier than the usual limit ({what}): a reset that is marked wrongly?",
        _early_truncation,
    ),
    Check("overlap", "error", "{n} sharing steps with another piece of their episode", _overlap),
    Check(
        "seed_leak", "warning",
        "{n} for training with an environment seed of an evaluation episode ({what})", _seed_leak,
    ),
    Check(
        "unknown_last_observation", "note",
        "{n} without a known last observation, whose value is not learned", _unknown_last,
        "nothing",
    ),
    Check("return_outlier", "note", "{n} with a return far from all others ({what})",
          _return_outlier),
)  # fmt: skip
