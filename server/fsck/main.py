"""`stepwell fsck`: checks that the index and the files agree.

    stepwell fsck --data DIR [--deep] [--json]     exit status 0 clean, 1 problems, each with a cure
    stepwell fsck --data DIR --rebuild             rebuild a lost or broken index from the files
    stepwell fsck --sandbox                        which sandbox layers are active

Reads only (except --rebuild), and not while a service runs on the same directory. What the next
start repairs by itself (a torn tail, a consumed segment, an unknown file) is a note.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from server.fsck import checks
from server.fsck.checks import FsckProblem, Report
from server.index.db import REBUILD, Database, IndexUnusable
from server.index.dialect import DAMAGE, mend, reason
from server.index.index_file import refuse_wrong_index
from server.storage.store import DirectoryInUse, DirectoryLock, Store
from stepwell import terminal
from stepwell.errors import InvalidData

ABOUT = """\
Check that the index and the files agree.

Reads only, except with --rebuild. Every problem is printed with its cure; a note is something that
the next start repairs by itself. Exit status: 0 clean, 1 problems, 2 the check could not run."""
EXAMPLES = """\
  stepwell fsck --data ./data
  stepwell fsck --data ./data --deep --json
  stepwell fsck --data ./data --rebuild
  stepwell fsck --sandbox"""


def check(data: Path, *, deep: bool = False) -> Report:
    """Run all checks. Raises `DirectoryInUse`, `IndexUnusable`."""
    if not (data / "index.sqlite").exists():
        raise IndexUnusable(
            f"there is no index in {data}; if shards exist: stepwell fsck --rebuild --data {data}"
        )
    with closing(DirectoryLock(data)):
        refuse_wrong_index(data, data / "index.sqlite")
        store = Store(data)
        if trouble := mend(data / "index.sqlite").trouble:
            raise IndexUnusable(f"{trouble}; rebuild the index with: {REBUILD}")
        with closing(Database(data / "index.sqlite")) as db:
            return _check(db, store, deep)


def _check(db: Database, store: Store, deep: bool) -> Report:
    report = Report()
    with db.read() as connection:
        for found in (
            checks.check_rows(connection, report),
            checks.check_index(connection),
            checks.check_segments(connection, store, report, deep),
            checks.check_shards(connection, store, report, deep),
            checks.check_snapshots(connection, store, report),
            checks.check_versions(connection, report),
            checks.check_files(connection, store, report),
            checks.check_unknown(db, store, report),
        ):
            report.problems.extend(_readable(found, report))
    return report


def _readable(found: Iterator[FsckProblem], report: Report) -> Iterator[FsckProblem]:
    """The problems that a check finds, up to what it cannot read of a damaged index: the other
    checks go on."""
    try:
        yield from found
    except DAMAGE as error:
        what = f"cannot be read ({reason(error)})"
        yield FsckProblem("index.sqlite", what, checks.REBUILD)
    except (ValueError, TypeError, LookupError, AttributeError, InvalidData) as error:
        if not report.index_damaged:
            raise
        what = f"a row cannot be understood ({str(error)[:100]})"
        yield FsckProblem("index.sqlite", what, checks.REBUILD)


# --- the command ----------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 clean, 1 problems, 2 the check could not run."""
    parser = terminal.parser("fsck", ABOUT, EXAMPLES)
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("STEPWELL_DATA"),
        help="the service's directory (STEPWELL_DATA); no service may be using it",
    )
    parser.add_argument("--deep", action="store_true", help="also recompute every digest")
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="rebuild the index from the files",
    )
    parser.add_argument("--sandbox", action="store_true", help="print the active sandbox layers")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    if options.sandbox:
        return _print_sandbox(as_json=options.json)
    if options.data is None:
        print("stepwell: missing data directory: --data DIR or STEPWELL_DATA", file=sys.stderr)
        return 2
    try:
        if options.rebuild:
            return _rebuild(Path(options.data), as_json=options.json)
        report = check(Path(options.data), deep=options.deep)
    except (DirectoryInUse, IndexUnusable, *DAMAGE) as error:
        print(f"stepwell: {reason(error)}", file=sys.stderr)
        return 2
    if options.json:
        document = {
            "clean": report.clean,
            "checked": report.checked,
            "problems": [asdict(problem) for problem in report.problems],
        }
        print(json.dumps(document, indent=2))
    else:
        for problem in report.problems:
            mark = "note   " if problem.note else "PROBLEM"
            print(f"{mark} {problem.where}: {problem.what}\n        cure: {problem.cure}")
        looked = ", ".join(f"{count} {what}" for what, count in report.checked.items())
        print(f"{'clean' if report.clean else 'NOT CLEAN'}: {looked}")
    return 0 if report.clean else 1


def _rebuild(data: Path, *, as_json: bool) -> int:
    from server.maintenance.rebuild import rebuild

    with closing(DirectoryLock(data)):
        result = asdict(rebuild(data))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        lists = ("unreadable", "lost")
        print("rebuilt:", ", ".join(f"{v} {k}" for k, v in result.items() if k not in lists))
        for name in result["unreadable"]:
            print(f"PROBLEM {name}: cannot be read")
        print("not restored:")
        for what in result["lost"]:
            print(f"  - {what}")
    return 1 if result["unreadable"] else 0


def _print_sandbox(*, as_json: bool) -> int:
    from server.sandbox import active

    found = active()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for name, is_active in found.items():
            print(f"{'active  ' if is_active else 'inactive'} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
