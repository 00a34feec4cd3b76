"""`stepwell doctor`: what is wrong with a dataset, the SQL that shows it, and its repair."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.progress import Progress

from stepwell import terminal
from workbench.analysis.doctor import (
    CHECKS,
    SEVERITIES,
    Finding,
    Repair,
    Report,
    diagnose,
    make_version,
    plan_repair,
)

ABOUT = """\
Look for what is wrong with a dataset: ends, jumps within episodes, copies, numbers and rewards far
from all others, last observations of other episodes, leaks into the evaluation.

Each finding has the SQL that shows it, and what to do. Nothing is changed; --repair NAME makes a
version of the dataset without the trajectories in which the findings are."""
EXAMPLES = """\
  stepwell doctor hopper
  stepwell doctor hopper --severity error
  stepwell doctor hopper@v3 --sql
  stepwell doctor hopper --repair clean
  stepwell doctor hopper --repair no-copies --findings duplicate,near_duplicate"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("doctor", ABOUT, EXAMPLES)
    terminal.add_dataset(parser, metavar="DATASET[@VERSION]")
    parser.add_argument(
        "--severity", choices=SEVERITIES,
        help="the least to show (default note), or to repair (default warning)",
    )  # fmt: skip
    parser.add_argument("--findings", metavar="A,B", help="of these kinds only")
    parser.add_argument(
        "--repair", metavar="NAME", help="make the version NAME without these trajectories"
    )
    parser.add_argument("--sql", action="store_true", help="print the SQL of each finding")
    terminal.add_connection(parser)
    args = parser.parse_args(argv)
    kinds = [kind for kind in (args.findings or "").split(",") if kind]
    unknown = sorted(set(kinds) - {check.kind for check in CHECKS})
    if unknown:
        parser.error(f"no such finding: {', '.join(unknown)} (docs/reference/doctor.md lists them)")
    console = Console(stderr=True)
    with (
        terminal.connect(args) as client,
        Progress(console=console, disable=not console.is_terminal, transient=True) as bar,
    ):
        task = bar.add_task("checking", total=len(CHECKS))

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        checks = tuple(check for check in CHECKS if not kinds or check.kind in kinds)
        report = diagnose(client, args.dataset, checks=checks, progress=show)
        if args.repair:
            repair = plan_repair(
                client, report, kinds=kinds, severity=args.severity or "warning", progress=show
            )
            version = make_version(client, repair, args.repair)
    if args.repair:
        if args.json:
            terminal.print_json(dataclasses.asdict(repair) | {"version": version.version})
        else:
            _print_repair(repair, version.version)
        return 1 if report.failed.keys() & repair.not_repaired.keys() else 0
    most = SEVERITIES.index(args.severity or "note")
    shown = [f for f in report.findings if SEVERITIES.index(f.severity) <= most]
    if args.json:
        terminal.print_json(dataclasses.asdict(report) | {"findings": shown})
    else:
        _print(report, shown, sql=args.sql)
    return 1 if report.failed or any(f.severity != "note" for f in shown) else 0


def _print_repair(repair: Repair, version: str) -> None:
    print(f"{version}: {repair.trajectories:,} trajectories, {repair.steps:,} steps")
    print(f"left out: {repair.count:,} trajectories")
    for kind, count in repair.left_out.items():
        print(f"  {kind}: {count:,}")
    for kind, why in repair.not_repaired.items():
        print(f"not repaired: {kind}: {terminal.printable(why)}")


def _print(report: Report, shown: list[Finding], *, sql: bool) -> None:
    part = f", of which one in {report.one_in} was read" if report.one_in > 1 else ""
    print(f"{report.dataset}: {report.trajectories:,} trajectories, {report.steps:,} steps{part}")
    if report.numbers > report.numbers_read:
        print(f"of {report.numbers:,} numbers of an observation, the first "
              f"{report.numbers_read:,} were checked one by one")  # fmt: skip
    for f in shown:
        print(f"\n{f.severity}: {f.kind}: {terminal.printable(f.message)}")
        if f.examples:
            more = " …" if f.trajectories > len(f.examples) else ""
            print(f"  {' '.join(f.examples)}{more}")
        if sql:
            print("  SQL:\n" + "\n".join(f"    {line}" for line in f.sql.splitlines()))
        print("  to do: " + f.repair.replace("\n", "\n    "))
    for kind, why in report.failed.items():
        print(f"\n{kind}: not checked: {terminal.printable(why)}")
    if not shown:
        print("nothing found by the other checks" if report.failed else "nothing found")
