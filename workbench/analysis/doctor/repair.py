"""A repair: a version of the dataset without the trajectories that findings name."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import BadRequest, InvalidData
from stepwell.messages import Version, split_version
from workbench.analysis.doctor.asking import MOST_STEPS, SECONDS, ask_all, subject_of
from workbench.analysis.doctor.check import Check, Query, Severity, Subject
from workbench.analysis.doctor.report import CHECKS, SEVERITIES, Progress, Report

ROUNDS = 5
"""A bound is relative to the dataset: without the worst, the next ones may be beyond it."""
MOST_TEXT = 100_000
"""Characters of a condition that the service accepts (messages.CreateVersion)."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What a version would leave out, and what would be left."""

    dataset: str
    """Or the version that is repaired."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Kind of finding -> trajectories that it names; a trajectory may have several."""
    count: int = 0
    """Trajectories that are left out."""
    trajectories: int = 0
    steps: int = 0
    """Steps that remain."""
    where: str = ""
    """The condition of the version over `trajectories`; empty: nothing is left out."""
    include_eval: bool = False
    not_repaired: dict[str, str] = field(default_factory=dict)
    """Kind -> why deletion cannot fix it, or what to do instead."""

    @property
    def description(self) -> str:
        """Describe the version, for its card."""
        some = ", ".join(f"{kind} {n:,}" for kind, n in self.left_out.items())
        lines = [
            f"{self.dataset} without what the doctor found: "
            f"{pluralize(self.count, 'trajectory', 'trajectories')} left out ({some})."
        ]
        lines += [f"Not repaired: {kind}: {why}" for kind, why in self.not_repaired.items()]
        return "\n".join(lines)[:4096]


def plan_repair(
    client: Client,
    report: Report,
    *,
    kinds: Collection[str] = (),
    severity: Severity = "warning",
    progress: Progress | None = None,
) -> Repair:
    """What a version without the trajectories of these findings is: of these `kinds`, or else of
    this severity and above. Nothing is changed.

    All parts of large data are read. Checks that found something are repeated on what remains
    until they find no more, at most `ROUNDS` times. A version of a whole dataset has no evaluation
    episodes. Raises `InvalidData` for an unknown kind.
    """
    chosen = _chosen(kinds, severity)
    found = {f.kind: f for f in report.findings}
    not_repaired = {c.kind: report.failed[c.kind] for c in chosen if c.kind in report.failed}
    not_repaired |= {
        c.kind: found[c.kind].repair
        for c in chosen
        if c.kind in found and not found[c.kind].leave_out
    }
    checks = [c for c in chosen if c.kind in found and c.kind not in not_repaired]
    name, version = split_version(report.dataset)
    base, _, _ = subject_of(client, report.dataset, MOST_STEPS)
    include_eval = bool(version) and client.version(report.dataset).include_eval
    kept = "true" if include_eval else "purpose = 'train'"
    kept = f"({base.chosen}) and {kept}" if base.chosen else kept
    named: dict[str, set[int]] = {}
    subject, rest = base, checks
    for _ in range(ROUNDS):
        again = []
        before = set().union(*named.values())
        for done, check in enumerate(rest):
            if progress is not None:
                progress(done, len(rest), check.kind)
            try:
                seqs = ask_all(client, _seqs(check.query), subject, in_groups=check.in_groups)
            except BadRequest as error:
                not_repaired[check.kind] = str(error).splitlines()[0]
                continue
            if seqs - before:
                again.append(check)
                named[check.kind] = named.get(check.kind, set()) | seqs
        rest = again
        if not rest:
            break
        out = _not_in(set().union(*named.values()))
        subject = dataclasses.replace(base, chosen=f"({base.chosen or 'true'}) and {out}")
    else:
        not_repaired |= {c.kind: f"found again after {ROUNDS} rounds" for c in rest}
    all_out = set().union(*named.values())
    where = _not_in(all_out) if all_out else ""
    condition = f"dataset = ? and {kept}"
    counted = "select count(*), coalesce(sum(length), 0) from trajectories where "
    ((total, _),) = client.sql(counted + condition, [name], timeout=SECONDS).rows
    kept_rows = f"{counted}{condition} and {where or 'true'}"
    ((left, steps),) = client.sql(kept_rows, [name], timeout=SECONDS).rows
    if version and where:
        where = f"{base.chosen}\nand {where}"
    return Repair(
        report.dataset, {kind: len(seqs) for kind, seqs in named.items()}, int(total) - int(left),
        int(left), int(steps), where, include_eval, not_repaired,
    )  # fmt: skip


def make_version(client: Client, repair: Repair, name: str) -> Version:
    """Make the version `name` of the dataset as planned; its description says what was left out.

    Raises `InvalidData` if nothing would be left out, or nothing would be left; `Conflict` if the
    name is or was taken.
    """
    dataset, parent = split_version(repair.dataset)
    if not repair.where:
        why = "".join(f"\n{kind}: {text}" for kind, text in repair.not_repaired.items())
        raise InvalidData(f"no chosen finding of {repair.dataset} can be left out{why}")
    if not repair.trajectories:
        raise InvalidData(
            f"nothing of {repair.dataset} would be left: all {repair.count:,} trajectories have "
            f"these findings ({', '.join(repair.left_out)}); choose fewer with --findings or "
            "--severity"
        )
    if len(repair.where) > MOST_TEXT:
        raise InvalidData(
            f"too many trajectories to name in a version: {repair.count:,}; label them (stepwell "
            "trajectories label --where … --flag …), then: stepwell versions create "
            f"{dataset}@{name} --where \"not list_contains(flags, '…')\""
        )
    return client.create_version(
        dataset, name, where=repair.where, description=repair.description, parent=parent or None,
        include_eval=repair.include_eval,
    )  # fmt: skip


def _chosen(kinds: Collection[str], severity: Severity) -> list[Check]:
    known = {check.kind for check in CHECKS}
    if unknown := sorted(set(kinds) - known):
        raise InvalidData(
            f"no such finding: {', '.join(unknown)}", expected=", ".join(sorted(known))
        )
    if kinds:
        return [check for check in CHECKS if check.kind in kinds]
    most = SEVERITIES.index(severity)
    return [check for check in CHECKS if SEVERITIES.index(check.severity) <= most]


def _seqs(query_of: Query) -> Query:
    """The numbers of the trajectories that a check names: shorter than their ids."""

    def query(s: Subject) -> str | None:
        inner = query_of(s)
        if inner is None:
            return None
        return f"select seq from {s.trajectories} where id in (select id from (\n{inner}\n))"

    return query


def _not_in(seqs: Iterable[int]) -> str:
    """Return a condition in which neighbours are ranges."""
    ranges: list[list[int]] = []
    for seq in sorted(seqs):
        if ranges and ranges[-1][1] == seq - 1:
            ranges[-1][1] = seq
        else:
            ranges.append([seq, seq])
    single = ", ".join(str(a) for a, b in ranges if a == b)
    parts = [f"seq in ({single})"] if single else []
    parts += [f"seq between {a} and {b}" for a, b in ranges if a < b]
    return f"not ({' or '.join(parts)})"
