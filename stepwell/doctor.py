"""What is wrong with a dataset: findings, each with the SQL that shows it and what to do.

    for finding in diagnose(client, "hopper").findings:
        print(finding)

Nothing is downloaded: every check is a query, run by the service.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from stepwell._doctor import step_checks, trajectory_checks
from stepwell._doctor.check import Check, Severity, Subject
from stepwell._plural import pluralize
from stepwell.client import Client
from stepwell.errors import BadRequest, ServiceError, ServiceUnreachable
from stepwell.spaces import EnvSpec

CHECKS = (*trajectory_checks.CHECKS, *step_checks.CHECKS)
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
MOST_STEPS = 5_000_000
"""Beyond, steps of a part of the trajectories are read."""
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
    one_in = max(1, -(-steps // most_steps))
    subject = Subject(dataset, EnvSpec.from_json(about.spec), one_in)
    count = sum(bucket.trajectories for bucket in buckets)
    report = Report(dataset, count, steps, one_in)
    for done, check in enumerate(checks):
        if progress is not None:
            progress(done, len(checks), check.kind)
        query = check.query(subject)
        if query is None:
            continue
        try:
            found = client.sql(query, dataset=dataset, limit=1_000_000, timeout=SECONDS).rows
        except ServiceUnreachable:
            raise
        except (BadRequest, ServiceError) as error:
            report.failed[check.kind] = str(error).splitlines()[0]
            continue
        if found:
            report.findings.append(_finding(check, dataset, query, found))
    report.findings.sort(key=lambda f: SEVERITIES.index(f.severity))
    return report


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
