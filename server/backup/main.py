"""`stepwell backup` and `stepwell restore`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from server.backup.backup import back_up
from server.backup.restore import restore
from server.backup.target import Manifest, Target
from server.backup.target import Progress as Counted
from server.index.db import IndexUnusable
from server.index.dialect import DAMAGE, reason
from server.storage.hold import HeldByAnother
from server.storage.store import DirectoryInUse
from stepwell import terminal
from stepwell._exit_message import fail
from stepwell._wording import pluralize
from stepwell.errors import InvalidData

BACKUP = """\
Back up the whole directory of a service, whether the service is running or not.

Everything that was acknowledged before the command started is in the backup: trajectories,
versions, annotations, policies, videos, runs with their metrics, evaluations, tokens. Every file is
verified. The next backup to the same TARGET copies new files only; an interrupted one is simply
started again. While it runs, the service deletes nothing.

Exit status: 0, or 1 if files were damaged or missing (each is named; all others are in the backup).
Run it on the machine of the service. TARGET may be any folder, also a mounted one."""
BACKUP_EXAMPLES = """\
  stepwell backup /backups/stepwell --data ./data
  stepwell backup /backups/stepwell --data ./data --keep 14
  stepwell backup /backups/stepwell --list"""
RESTORE = """\
Put a backup back, into a new or empty directory. Nothing is overwritten.

Every file is verified. An interrupted restore goes on where it stopped when it is started again.
Then: stepwell serve --data DIR."""
RESTORE_EXAMPLES = """\
  stepwell restore /backups/stepwell --data ./data
  stepwell restore /backups/stepwell --data ./data --at 20261127T031500.000Z"""


def main(argv: list[str] | None = None) -> int:
    """`stepwell backup`."""
    parser = terminal.parser("backup", BACKUP, BACKUP_EXAMPLES)
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder of the backups")
    _add_data(parser)
    parser.add_argument(
        "--verify", action="store_true", help="read the files again that TARGET has from before"
    )
    parser.add_argument(
        "--keep", type=int, metavar="N", help="then delete all but the newest N backups"
    )
    parser.add_argument("--list", action="store_true", help="list the backups, make none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.keep is not None and args.keep < 1:
        return fail("stepwell", f"--keep: expected at least 1, got {args.keep}", status=2)
    if not args.list and args.data is None:
        return fail("stepwell", "missing data directory: --data DIR or STEPWELL_DATA", status=2)
    with _reported(), closing(Target(args.target, create=not args.list)) as target:
        if args.list:
            return _list(target.backups(), as_json=args.json)
        data = Path(args.data)
        if args.target.resolve().is_relative_to(data.resolve()):
            raise InvalidData(
                "a backup inside the directory that it is of is lost with it",
                expected=f"a TARGET outside {data}",
                got=str(args.target),
            )
        with _bar("backing up") as (start, advance):
            made = back_up(data, target, verify=args.verify, start=start, progress=advance)
        deleted = target.keep(args.keep) if args.keep is not None else 0
    if args.json:
        terminal.print_json({**_summary(made), "problems": made.problems, "deleted": deleted})
    else:
        _print_problems(made.problems)
        files = pluralize(len(made.files) + len(made.segments), "file")
        print(f"backup {made.id}: {files}, {terminal.size(made.bytes)}, in {args.target}")
    return 1 if made.problems else 0


def restore_main(argv: list[str] | None = None) -> int:
    """`stepwell restore`."""
    parser = terminal.parser("restore", RESTORE, RESTORE_EXAMPLES)
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder of the backups")
    _add_data(parser)
    parser.add_argument("--at", metavar="ID", help="which backup (default: the newest; --list)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.data is None:
        return fail("stepwell", "missing data directory: --data DIR or STEPWELL_DATA", status=2)
    with _reported(), closing(Target(args.target, create=False)) as target:
        manifest = _chosen(target.backups(), args.at, args.target)
        with _bar("restoring") as (start, advance):
            start(manifest.bytes)
            problems = restore(target, manifest, Path(args.data), progress=advance)
    if args.json:
        terminal.print_json({**_summary(manifest), "problems": problems})
    else:
        _print_problems(problems)
        print(f"restored backup {manifest.id}; now: stepwell serve --data {args.data}")
    return 1 if problems else 0


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("STEPWELL_DATA"),
        help="the service's directory (STEPWELL_DATA)",
    )


@contextmanager
def _reported() -> Iterator[None]:
    """Errors of the directory and its index as one line."""
    try:
        yield
    except (IndexUnusable, DirectoryInUse, HeldByAnother, OSError) as error:
        sys.exit(fail("stepwell", str(error)))
    except DAMAGE as error:
        sys.exit(
            fail("stepwell", f"the index cannot be used ({reason(error)}); see: stepwell fsck")
        )


@contextmanager
def _bar(what: str) -> Iterator[tuple[Counted, Counted]]:
    """A progress bar on stderr: functions that set the total, and that add to what is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield (
            lambda total: bar.update(task, total=total),
            lambda count: bar.advance(task, count),
        )


def _chosen(found: list[Manifest], at: str | None, root: Path) -> Manifest:
    if not found:
        raise InvalidData(f"{root} holds no complete backup", expected="stepwell backup first")
    if at is None:
        return found[-1]
    for manifest in found:
        if manifest.id == at:
            return manifest
    raise InvalidData(
        f"there is no complete backup {at} in {root}",
        expected="one of stepwell backup --list",
        got=at,
    )


def _summary(manifest: Manifest) -> dict[str, object]:
    document = asdict(manifest)
    files = len(document.pop("files")) + len(document.pop("segments"))
    document.pop("index_sha256")
    return {**document, "files": files, "bytes": manifest.bytes}


def _list(found: list[Manifest], *, as_json: bool) -> int:
    if as_json:
        terminal.print_json([_summary(manifest) for manifest in found])
        return 0
    terminal.print_table(
        ("id", "made", "files", "size", "problems"),
        [
            (
                one.id,
                terminal.moment(one.created_at),
                len(one.files) + len(one.segments),
                terminal.size(one.bytes),
                len(one.problems),
            )
            for one in found
        ],
        empty="no backups",
    )
    return 0


def _print_problems(problems: list[str]) -> None:
    for problem in problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
