"""What is wrong with a dataset: findings, each with the SQL that shows it and what to do.

    for finding in diagnose(client, "hopper").findings:
        print(finding)

Nothing is downloaded: every check is a query, run by the service.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepwell._doctor import copies, rewards, step_changes, trajectory_checks, values
from stepwell._doctor.check import Check, Query, Severity, Subject
from stepwell._plural import pluralize
from stepwell.client import Client
from stepwell.errors import BadRequest, ServiceError, ServiceUnreachable
from stepwell.spaces import EnvSpec

CHECKS = (
    *trajectory_checks.CHECKS,
    *copies.CHECKS,
    *step_changes.CHECKS,
    *values.CHECKS,
    *rewards.CHECKS,
)
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
MOST_STEPS = 2_000_000
MOST_TRAJECTORIES = 20_000
MOST_VALUES = 25_000_000
"""Beyond these, steps of a part of the trajectories are read: with the default memory of the
service (docs/sql.md) a query cannot join the steps of 100,000 trajectories."""
FEWEST_STEPS = 20_000
"""Below, a check is not tried on fewer trajectories."""
EXAMPLES = 5
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of defect in a dataset."""

    kind: str
    severity: Severity
    message: str
    trajectories: int
    """How many are concerned; 0: it is about the dataset as a whole."""
    examples: list[str]
    """Ids of the first ones."""
    sql: str
    """Shows them: columns id and what."""
    repair: str
    """What to do, as commands or in words."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of all checks."""

    dataset: str
    trajectories: int
    steps: int
    one_in: int
    """Steps of one in so many trajectories were read."""
    findings: list[Finding] = field(default_factory=list)
    """Errors first."""
    failed: dict[str, str] = field(default_factory=dict)
    """Check -> why it could not be made."""


def diagnose(
    client: Client,
    dataset: str,
    *,
    checks: tuple[Check, ...] = CHECKS,
    most_steps: int = MOST_STEPS,
    progress: Callable[[int, int, str], object] | None = None,
) -> Report:
    """Run all checks on a dataset. A check that the service refuses, for instance because it takes
    longer than a minute, is named in `failed`, and the others are run.

    Raises `NotFound` for an unknown dataset.
    """
    client.flush(dataset)  # what is not sealed has no rows in `steps`
    about = client.dataset(dataset)
    buckets = (about.fifo, about.protected, about.eval)
    steps = sum(bucket.steps for bucket in buckets)
    count = sum(bucket.trajectories for bucket in buckets)
    subject = Subject(dataset, EnvSpec.from_json(about.spec))
    values = steps * len(subject.numbers())
    sizes = ((steps, most_steps), (count, MOST_TRAJECTORIES), (values, MOST_VALUES))
    one_in = max(1, *(-(-size // most) for size, most in sizes))
    subject = dataclasses.replace(subject, one_in=one_in, row_count=steps // one_in)
    subject = dataclasses.replace(subject, ordered=_is_ordered(client, subject))
    report = Report(dataset, count, steps, one_in)
    for done, check in enumerate(checks):
        if progress is not None:
            progress(done, len(checks), check.kind)
        try:
            finding = _examine(client, check, subject)
        except ServiceUnreachable:
            raise
        except (BadRequest, ServiceError) as error:
            report.failed[check.kind] = str(error).splitlines()[0]
            continue
        if finding is not None:
            report.findings.append(finding)
    report.findings.sort(key=lambda f: SEVERITIES.index(f.severity))
    return report


def _examine(client: Client, check: Check, subject: Subject) -> Finding | None:
    """The finding of one check, or None."""
    asked = _ask(client, check.query, subject)
    if asked is None or not asked.rows:
        return None
    finding = _finding(check, subject.name, asked.query, asked.rows)
    if asked.part.one_in > subject.one_in:
        said = f"{finding.message} (of one in {asked.part.one_in} trajectories)"
        finding = dataclasses.replace(finding, message=said)
    return finding


@dataclass(frozen=True, slots=True)
class _Asked:
    query: str
    part: Subject
    """What the query read."""
    rows: list[tuple[Any, ...]]


def _ask(client: Client, query_of: Query, subject: Subject) -> _Asked | None:
    """Run a query. If the service has too little memory for it, on ever fewer trajectories: what
    it takes depends on the data, and on what the worker ran before."""
    while True:
        query = query_of(subject)
        if query is None:
            return None
        try:
            result = client.sql(query, dataset=subject.name, limit=1_000_000, timeout=SECONDS)
            return _Asked(query, subject, result.rows)
        except BadRequest as error:
            few = subject.row_count < FEWEST_STEPS or subject.steps not in query
            if few or not re.search("(?i)memory", str(error)):
                raise
            subject = dataclasses.replace(
                subject, one_in=4 * subject.one_in, row_count=subject.row_count // 4
            )


def _is_ordered(client: Client, subject: Subject) -> bool:
    """Whether a row of `steps` follows on the one before it in its trajectory; False also if the
    service cannot tell."""
    try:
        asked = _ask(client, _order, subject)
    except BadRequest:
        return False
    return asked is not None and bool(asked.rows[0][0])


def _order(s: Subject) -> str:
    return f"""select coalesce(bool_and(t = 0 or (id = trajectory_id and before = t - 1)), true)
from (select trajectory_id, t, lag(trajectory_id) over () as id, lag(t) over () as before
  from {s.steps})"""


def _finding(check: Check, dataset: str, query: str, rows: list[tuple[str | None, str]]) -> Finding:
    ids = list(dict.fromkeys(str(row[0]) for row in rows if row[0] is not None))
    n = pluralize(len(ids), "trajectory", "trajectories")
    message = check.says.format(n=n, what=rows[0][1])
    repair = check.repair
    if repair == "leave out":
        condition = f"id in (select id from (\n{query}\n))"
        repair = (
            f"stepwell trajectories label --where {shlex.quote(condition)} --flag {check.kind}\n"
            f"stepwell train offline --dataset {shlex.quote(dataset)} "
            f"--where \"not list_contains(flags, '{check.kind}')\""
        )
    return Finding(check.kind, check.severity, message, len(ids), ids[:EXAMPLES], query, repair)
