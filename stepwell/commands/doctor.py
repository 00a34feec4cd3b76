"""`stepwell doctor`: what is wrong with a dataset, the SQL that shows it, and what to do."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.progress import Progress

from stepwell.commands import common
from stepwell.doctor import CHECKS, SEVERITIES, Finding, Report, diagnose

ABOUT = """\
Look for what is wrong with a dataset: ends, jumps within episodes, copies, numbers and rewards far
from all others, last observations of other episodes, leaks into the evaluation.

Each finding has the SQL that shows it, and what to do. Nothing is changed."""
EXAMPLES = """\
  stepwell doctor hopper
  stepwell doctor hopper --severity error
  stepwell doctor hopper --sql"""


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("doctor", ABOUT, EXAMPLES)
    parser.add_argument("dataset")
    parser.add_argument(
        "--severity", choices=SEVERITIES, default="note", help="the least to show (default note)"
    )
    parser.add_argument("--sql", action="store_true", help="print the SQL of each finding")
    common.add_connection(parser)
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    with (
        common.connect(args) as client,
        Progress(console=console, disable=not console.is_terminal, transient=True) as bar,
    ):
        task = bar.add_task("checking", total=len(CHECKS))

        def show(done: int, _: int, what: str) -> None:
            bar.update(task, completed=done, description=what)

        report = diagnose(client, args.dataset, progress=show)
    most = SEVERITIES.index(args.severity)
    shown = [f for f in report.findings if SEVERITIES.index(f.severity) <= most]
    if args.json:
        common.print_json(dataclasses.asdict(report) | {"findings": shown})
    else:
        _print(report, shown, sql=args.sql)
    return 1 if any(f.severity != "note" for f in shown) else 0


def _print(report: Report, shown: list[Finding], *, sql: bool) -> None:
    part = f", of which one in {report.one_in} was read" if report.one_in > 1 else ""
    print(f"{report.dataset}: {report.trajectories:,} trajectories, {report.steps:,} steps{part}")
    for f in shown:
        print(f"\n{f.severity}: {f.kind}: {common.printable(f.message)}")
        if f.examples:
            more = " …" if f.trajectories > len(f.examples) else ""
            print(f"  {' '.join(f.examples)}{more}")
        if sql:
            print("  SQL:\n" + "\n".join(f"    {line}" for line in f.sql.splitlines()))
        print("  to do: " + f.repair.replace("\n", "\n    "))
    if not shown:
        print("nothing found")
    for kind, why in report.failed.items():
        print(f"\n{kind}: not checked: {common.printable(why)}")
