"""All checks on a dataset: what they find, with the SQL that shows it and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import BadRequest, ServiceError, ServiceUnreachable
from stepwell.messages import split_version
from workbench.analysis.doctor import (
    baselines,
    copies,
    freezes,
    images,
    pieces,
    rewards,
    step_changes,
    trajectory_checks,
    values,
)
from workbench.analysis.doctor.asking import MOST_STEPS, Answer, ask, subject_of
from workbench.analysis.doctor.check import LEAVE_OUT, Check, Severity, Subject, size_of

CHECKS = (
    *trajectory_checks.CHECKS,
    *copies.CHECKS,
    *step_changes.CHECKS,
    *pieces.CHECKS,
    *freezes.CHECKS,
    *values.CHECKS,
    *images.CHECKS,
    *rewards.CHECKS,
    *baselines.CHECKS,
)
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
EXAMPLES = 5
NEARLY_ALL = 0.9
"""Share of the trajectories from which a defect is one of the dataset."""
FEWEST = 8
"""Minimum number of trajectories for a defect of the dataset."""
REMAKE = (
    "deletion cannot fix this, as hardly any trajectory would be left: correct how the data are "
    "made or imported, then import them again"
)

Progress = Callable[[int, int, str], object]
"""Is told how many are done, of how many, and what is next."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of defect in a dataset."""

    kind: str
    severity: Severity
    message: str
    trajectories: int
    """How many are concerned; 0: none in particular."""
    examples: list[str]
    """Ids of the first ones."""
    sql: str
    """Shows them: columns id and what."""
    repair: str
    """What to do, as commands or in words."""
    leave_out: bool
    """Whether a version without these trajectories repairs it."""
    wholesale: bool
    """It is a defect of the dataset: of nearly all trajectories, or of none in particular."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of all checks."""

    dataset: str
    """Or a version of one, such as "hopper@v3"."""
    trajectories: int
    steps: int
    one_in: int
    """Steps of one in so many trajectories were read."""
    numbers: int = 0
    """Number of values in an observation; images have none."""
    numbers_read: int = 0
    """Number of leading values that were checked one by one."""
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
    progress: Progress | None = None,
) -> Report:
    """Run all checks on a dataset, or on a version of it. A check that the service refuses, for
    instance because it takes longer than a minute, is named in `failed`, and the others are run.

    Raises `NotFound` for an unknown dataset or version.
    """
    subject, count, steps = subject_of(client, dataset, most_steps)
    numbers = sum(size_of(space) for _, space, _ in subject.vectors())
    report = Report(dataset, count, steps, subject.one_in, numbers, len(subject.numbers()))
    for done, check in enumerate(checks):
        if progress is not None:
            progress(done, len(checks), check.kind)
        try:
            finding = _examine(client, check, subject, dataset, count)
        except ServiceUnreachable:
            raise
        except (BadRequest, ServiceError) as error:
            report.failed[check.kind] = str(error).splitlines()[0]
            continue
        if finding is not None:
            report.findings.append(finding)
    report.findings.sort(key=lambda f: SEVERITIES.index(f.severity))
    return report


def _examine(
    client: Client, check: Check, subject: Subject, dataset: str, count: int
) -> Finding | None:
    """The finding of one check, or None; the dataset has `count` trajectories."""
    answers = _telling(ask(client, check.query, subject, in_groups=check.in_groups))
    if not answers:
        return None
    rows = [row for answer in answers for row in answer.rows]
    ids = list(dict.fromkeys(str(row[0]) for row in rows if row[0] is not None))
    reads_steps = subject.steps_table in answers[0].query
    one_in = max(answer.subject.one_in for answer in answers) if reads_steps else 1
    wholesale = not ids or len(ids) >= max(FEWEST, NEARLY_ALL * count / one_in)
    n = pluralize(len(ids), "trajectory", "trajectories")
    if ids and wholesale:
        n = f"(nearly) all trajectories ({len(ids):,})"
    message = check.says.format(n=n, what=rows[0][1])
    if one_in > subject.one_in:
        message += f" (of one in {one_in} trajectories)"
    leave_out = check.repair == LEAVE_OUT and not wholesale
    repair = check.repair
    if repair == LEAVE_OUT:
        repair = _commands(check.kind, dataset) if leave_out else REMAKE
    return Finding(
        check.kind, check.severity, message, len(ids), ids[:EXAMPLES], _joined(answers), repair,
        leave_out, wholesale,
    )  # fmt: skip


def _telling(answers: list[Answer]) -> list[Answer]:
    """Keep answers about the dataset, or a trajectory that no earlier answer names."""
    told: set[str] = set()
    telling = []
    for answer in answers:
        if {str(row[0]) for row in answer.rows} - told:
            telling.append(answer)
            told |= {str(row[0]) for row in answer.rows}
    return telling


def _joined(answers: list[Answer]) -> str:
    """One query for what several found, each trajectory once."""
    if len(answers) == 1:
        return answers[0].query
    parts = " union all\n".join(f"(\n{answer.query}\n)" for answer in answers)
    return f"select id, first(what) as what from (\n{parts}\n) group by id"


def _commands(kind: str, dataset: str) -> str:
    """Make a version without the trajectories of a finding, and train on it."""
    name = f"without-{kind.replace('_', '-')}"
    version = f"{split_version(dataset)[0]}@{name}"
    return (
        f"stepwell doctor {shlex.quote(dataset)} --repair {name} --findings {kind}\n"
        f"stepwell train offline --dataset {shlex.quote(version)}"
    )
