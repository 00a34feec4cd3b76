"""Runs the queries of checks, on less data where the service has too little memory."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from stepwell.client import Client
from stepwell.errors import BadRequest
from stepwell.messages import split_version
from stepwell.spaces import EnvSpec
from workbench.analysis.doctor.check import Query, Subject, images

MOST_STEPS = 2_000_000
MOST_TRAJECTORIES = 20_000
MOST_VALUES = 25_000_000
"""Beyond these, steps of a part of the trajectories are read: with the default memory of the
service (docs/reference/sql.md) a query cannot join the steps of 100,000 trajectories."""
FEWEST_STEPS = 20_000
"""Below, a check is not tried on fewer trajectories."""
MOST_ROWS = 1_000_000
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query found."""

    query: str
    subject: Subject
    """What the query read."""
    rows: list[tuple[Any, ...]]


def subject_of(client: Client, dataset: str, most_steps: int) -> tuple[Subject, int, int]:
    """What is examined of a dataset or a version of it, such as "hopper@v3"; how many trajectories
    and steps it has. Raises `NotFound`."""
    name, version = split_version(dataset)
    if version:
        found = client.version(dataset)
        select = found.select.split(" WHERE ", 1)[1]
        subject = Subject(name, EnvSpec.from_json(found.spec), select)
        count, steps = found.statistics.trajectories, found.statistics.steps
    else:
        client.flush(name)  # what is not sealed has no rows in `steps`
        about = client.dataset(name)
        buckets = (about.fifo, about.protected, about.eval)
        subject = Subject(name, EnvSpec.from_json(about.spec))
        count, steps = (sum(getattr(b, k) for b in buckets) for k in ("trajectories", "steps"))
    return sized(client, subject, count, steps, most_steps), count, steps


def sized(client: Client, subject: Subject, count: int, steps: int, most_steps: int) -> Subject:
    """A subject that reads as much of its steps as a query can."""
    values = steps * len(subject.numbers())
    sizes = ((steps, most_steps), (count, MOST_TRAJECTORIES), (values, MOST_VALUES))
    one_in = max(1, *(-(-size // most) for size, most in sizes))
    subject = dataclasses.replace(subject, one_in=one_in, row_count=steps // one_in)
    return dataclasses.replace(subject, ordered=_is_ordered(client, subject))


def ask(
    client: Client, query_of: Query, subject: Subject, *, in_groups: bool = False
) -> list[Answer]:
    """Run a query, `in_groups`: for a few numbers of the observation at a time. If the service has
    too little memory for it, for fewer of them, then on ever fewer trajectories: what it takes
    depends on the data, and on what the worker ran before."""
    waiting = subject.groups() if in_groups else [subject]
    answers = []
    while waiting:
        part = waiting.pop(0)
        found = _try(client, query_of, part)
        if isinstance(found, BadRequest):
            halves = part.halves() if in_groups else []
            waiting[:0] = halves or _quarters(part, found)[:1]
        elif found is not None:
            answers.append(found)
    return answers


def ask_all(
    client: Client, query_of: Query, subject: Subject, *, in_groups: bool = False
) -> set[int]:
    """The numbers that a query returns, in all parts of the steps, one part at a time."""
    numbers: set[int] = set()
    for group in subject.groups() if in_groups else [subject]:
        parts = [dataclasses.replace(group, part=part) for part in range(group.one_in)]
        while parts:
            part = parts.pop()
            found = _try(client, query_of, part)
            if found is None:
                break
            if isinstance(found, BadRequest):
                parts += (part.halves() if in_groups else []) or _quarters(part, found)
                continue
            numbers |= {int(row[0]) for row in found.rows}
            if part.steps_table not in found.query:  # trajectories only: all of them, at once
                break
    return numbers


def _try(client: Client, query_of: Query, subject: Subject) -> Answer | BadRequest | None:
    """The answer; the error, if it is too little memory for the steps that it reads."""
    query = query_of(subject)
    if query is None:
        return None
    reads_steps = subject.steps_table in query
    query = subject.scoped(query)
    # A worker that has read images keeps some of their memory, until it runs out of it: the same
    # query may succeed a second time.
    for retry in (True, False):
        try:
            result = client.sql(query, dataset=subject.name, limit=MOST_ROWS, timeout=SECONDS)
        except BadRequest as error:
            if not reads_steps or not re.search("(?i)memory", str(error)):
                raise
            if not (retry and images(subject)):
                return error
        else:
            return Answer(query, subject, result.rows)
    raise AssertionError("the second time returns")


def _quarters(s: Subject, error: BadRequest) -> list[Subject]:
    """A fourth of the trajectories each; raises the error, if there are few."""
    if s.row_count < FEWEST_STEPS:
        raise error
    return [
        dataclasses.replace(
            s, one_in=4 * s.one_in, part=s.part + i * s.one_in, row_count=s.row_count // 4
        )
        for i in range(4)
    ]


def _is_ordered(client: Client, subject: Subject) -> bool:
    """Whether a row of `steps` follows on the one before it in its trajectory; False also if the
    service cannot tell."""
    try:
        asked = ask(client, _order, subject)
    except BadRequest:
        return False
    return all(bool(answer.rows[0][0]) for answer in asked)


def _order(s: Subject) -> str:
    return f"""select coalesce(bool_and(t = 0 or (id = trajectory_id and before = t - 1)), true)
from (select trajectory_id, t, lag(trajectory_id) over () as id, lag(t) over () as before
  from {s.steps})"""
