"""`stepwell fsck`: does the index say what the files hold, and do the files hold what it says?

    stepwell fsck --data DIR [--deep] [--json]     exit status 0 clean, 1 problems, each with a cure
    stepwell fsck --data DIR --rebuild             a lost or broken index, made anew from the files
    stepwell fsck --sandbox                        which confinements of child processes are active

Reads only (but for --rebuild), and not while a service runs on the same directory. What the next
start cures by itself (a torn tail, a consumed segment, an orphan of a crash) is a note.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import Database, IndexUnusable
from server.index.tables import (
    TRIGGERS,
    datasets,
    leases,
    partition_stats,
    policies,
    segments,
    shards,
    snapshots,
    tombstones,
    trajectories,
)
from server.ingest.rows import bucket_of, chunks
from server.ingest.spool import MAGIC, SegmentDamaged, SegmentFile
from server.snapshots import read_table
from server.storage.shards import ShardDamaged, read_batches, read_footer
from server.storage.store import DirectoryInUse, DirectoryLock, Store
from server.upkeep.sweep import orphans
from stepwell.codec import HEADER_KEY, from_batch
from stepwell.commands import common
from stepwell.errors import InvalidData
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec

ABOUT = """\
Does the index say what the files hold, and do the files hold what it says?

Only looks, but for --rebuild. Every problem comes with its cure; a note is something that the next
start cures by itself. Exit status: 0 clean, 1 problems, 2 could not look."""
EXAMPLES = """\
  stepwell fsck --data ./data
  stepwell fsck --data ./data --deep --json
  stepwell fsck --data ./data --rebuild
  stepwell fsck --sandbox"""

REBUILD = "stepwell fsck --rebuild --data DIR"
RESTORE = "restore the file from a backup, or give up the trajectories in it"

RESTORE_SHARD = "restore the file from a backup: the next start takes it back when it is whole"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be. `note`: the next start or sweep cures it."""

    where: str
    what: str
    cure: str
    note: bool = False


@dataclass(slots=True)
class Report:
    """What was looked at, and what was found."""

    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return all(finding.note for finding in self.findings)


def check(data: Path, *, deep: bool = False) -> Report:
    """Everything. Raises `DirectoryInUse`, `IndexUnusable`."""
    if not (data / "index.sqlite").exists():
        raise IndexUnusable(
            f"there is no index in {data}; if shards are there: stepwell fsck --rebuild --data DIR"
        )
    lock = DirectoryLock(data)
    try:
        store = Store(data)
        db = Database(data / "index.sqlite")
        try:
            return _check(db, store, deep)
        finally:
            db.close()
    finally:
        lock.release()


def _check(db: Database, store: Store, deep: bool) -> Report:
    report = Report()
    parts: tuple[tuple[str, Callable[[Connection], Iterator[Finding]]], ...] = (
        ("index", lambda c: _index(c)),
        ("segments", lambda c: _segments(c, store, report, deep)),
        ("shards", lambda c: _shards(c, store, report, deep)),
        ("snapshots", lambda c: _snapshots(c, store, report)),
        ("policies", lambda c: _policies(c, store, report)),
    )
    with db.read() as connection:
        for _, part in parts:
            report.findings.extend(part(connection))
    report.findings.extend(_orphans(db, store))
    return report


def _index(c: Connection) -> Iterator[Finding]:
    cure = REBUILD
    for (line,) in c.exec_driver_sql("PRAGMA integrity_check"):
        if line != "ok":
            yield Finding("index.sqlite", str(line), cure)
    for row in c.exec_driver_sql("PRAGMA foreign_key_check"):
        yield Finding("index.sqlite", f"a row of {row[0]} refers to nothing in {row[2]}", cure)
    there = {row[0] for row in c.exec_driver_sql("SELECT name FROM sqlite_master")}
    for name in sorted(set(TRIGGERS) - there):
        yield Finding("index.sqlite", f"the guard {name} is missing", cure)
    t, d = trajectories.c, datasets.c
    behind = c.execute(
        sa.select(d.name).where(
            d.next_seq
            <= sa.select(sa.func.max(t.seq)).where(t.dataset_pk == d.pk).scalar_subquery()
        )
    ).scalars()
    for name in behind:
        yield Finding(
            "index.sqlite", f"dataset {name} would give out a sequence number twice", cure
        )
    twice = c.execute(sa.select(t.id).join(tombstones, tombstones.c.id == t.id)).scalars()
    for trajectory_id in twice:
        yield Finding("index.sqlite", f"{trajectory_id} is both here and a tombstone", cure)
    yield from _totals(c)


def _totals(c: Connection) -> Iterator[Finding]:
    """The running totals, counted again."""
    t, s = trajectories.c, partition_stats.c
    counted: dict[tuple[int, str], list[int]] = {}
    rows = c.execute(
        sa.select(
            t.dataset_pk,
            t.partition,
            t.purpose,
            sa.func.count(),
            sa.func.sum(t.length),
            sa.func.sum(t.bytes),
        )
        .where(t.state != "evicted")
        .group_by(t.dataset_pk, t.partition, t.purpose)
    )
    for pk, partition, purpose, *numbers in rows:
        sums = counted.setdefault((pk, bucket_of(partition, purpose)), [0, 0, 0])
        for i, number in enumerate(numbers):
            sums[i] += number
    stored = {
        (row[0], row[1]): [row[2], row[3], row[4]]
        for row in c.execute(sa.select(s.dataset_pk, s.bucket, s.trajectories, s.steps, s.bytes))
    }
    for key in sorted(counted.keys() | stored.keys()):
        is_, was = counted.get(key, [0, 0, 0]), stored.get(key, [0, 0, 0])
        if is_ != was:
            yield Finding(
                "index.sqlite",
                f"totals of dataset {key[0]} {key[1]}: {was} instead of {is_}",
                REBUILD,
            )


def _segments(c: Connection, store: Store, report: Report, deep: bool) -> Iterator[Finding]:
    t = trajectories.c
    names = set(store.names("segments"))
    rows = c.execute(sa.select(segments.c.pk, segments.c.name, segments.c.state)).all()
    report.checked["segments"] = len(rows)
    for row in rows:
        where = f"segments/{row.name}"
        if row.state == "consumed":
            if row.name in names:
                yield Finding(where, "sealed, not yet removed", "the next start", note=True)
            continue
        spooled = c.execute(
            sa.select(t.id, t.digest, t.segment_offset, datasets.c.spec)
            .join(datasets, datasets.c.pk == t.dataset_pk)
            .where(t.segment_pk == row.pk, t.state == "spooled")
            .order_by(t.segment_offset)
        ).all()
        report.checked["spooled"] = report.checked.get("spooled", 0) + len(spooled)
        if row.name not in names:
            if spooled:
                yield Finding(where, f"missing, with {len(spooled)} trajectories", RESTORE)
            continue
        yield from _segment(store.path("segments", row.name), where, spooled, deep)
    for name in sorted(names - {row.name for row in rows}):
        where = f"segments/{name}"
        yield from _segment(store.path("segments", name), where, (), deep)
        yield Finding(where, "not in the index yet", "the next start", note=True)
    nowhere = c.execute(
        sa.select(t.id)
        .outerjoin(segments, segments.c.pk == t.segment_pk)
        .where(t.state == "spooled", sa.func.coalesce(segments.c.state, "") != "open")
        .where(sa.func.coalesce(segments.c.state, "") != "damaged")
    ).scalars()
    for trajectory_id in nowhere:
        yield Finding("index.sqlite", f"{trajectory_id} is spooled in no segment", RESTORE)


def _segment(path: Path, where: str, spooled: Any, deep: bool) -> Iterator[Finding]:
    if path.stat().st_size <= len(MAGIC):
        if spooled:
            yield Finding(where, f"empty, with {len(spooled)} trajectories", RESTORE)
        return
    try:
        file = SegmentFile(path)
    except SegmentDamaged as error:
        yield Finding(where, str(error), RESTORE)
        return
    for row in spooled:
        try:
            record = file.record(row.segment_offset)
            entry = record.entry
            if (entry.id, entry.digest) != (row.id, row.digest):
                raise SegmentDamaged(f"holds {entry.id} where the index has {row.id}")
            if deep:
                spec = EnvSpec.from_json(json.loads(row.spec))
                _compare_digest(record.batch(arrow_schema(spec)), entry.header, spec, row.digest)
        except (SegmentDamaged, InvalidData) as error:
            yield Finding(where, f"{row.id}: {error}", RESTORE)


def _shards(c: Connection, store: Store, report: Report, deep: bool) -> Iterator[Finding]:
    s, t = shards.c, trajectories.c
    rows = c.execute(sa.select(shards).where(s.state != "deleted")).mappings().all()
    report.checked["shards"] = len(rows)
    for row in rows:
        where = f"shards/{row['partition']}/{row['id']}.parquet"
        path = store.path(f"shards/{row['partition']}", f"{row['id']}.parquet")
        if row["state"] == "deleting":
            yield Finding(where, "about to be deleted", "the next round of upkeep", note=True)
            continue
        if row["state"] == "quarantined":
            yield Finding(where, "damaged, taken out of circulation", RESTORE_SHARD)
            continue
        if not path.exists():
            yield Finding(where, "missing", RESTORE)
            continue
        if path.stat().st_size != row["bytes"] or _sha256(path) != row["sha256"]:
            yield Finding(where, "its content is not what was written (sha256 differs)", RESTORE)
            continue
        members = c.execute(
            sa.select(t.id, t.digest, t.traj_idx, t.row_start, t.length)
            .where(t.shard_pk == row["pk"])
            .order_by(t.traj_idx)
        ).all()
        report.checked["sealed"] = report.checked.get("sealed", 0) + len(members)
        yield from _shard(path, where, row, members, deep)
    held = sa.func.coalesce(s.state, "").in_(("live", "quarantined"))
    nowhere = c.execute(
        sa.select(t.id).outerjoin(shards, s.pk == t.shard_pk).where(t.state == "sealed", ~held)
    ).scalars()
    for trajectory_id in nowhere:
        what = f"{trajectory_id} is alive, but in no shard that will be kept"
        yield Finding("index.sqlite", what, REBUILD)


def _shard(path: Path, where: str, row: Any, members: Any, deep: bool) -> Iterator[Finding]:
    try:
        footer = read_footer(path)
        if sum(entry.rows for entry in footer.entries) != row["rows"]:
            yield Finding(where, "the index has another number of rows", RESTORE)
        for member in members:
            entry = footer.entries[member.traj_idx]
            here = (entry.id, entry.digest, entry.row_start, entry.rows - 1)
            if here != (member.id, member.digest, member.row_start, member.length):
                yield Finding(where, f"{member.id}: the footer has {here}", RESTORE)
        if deep:
            for entry, batch in read_batches(path):
                _compare_digest(batch, entry.header, footer.spec, entry.digest)
    except (ShardDamaged, InvalidData, IndexError) as error:
        yield Finding(where, str(error), RESTORE)


def _compare_digest(batch: Any, header: dict[str, Any], spec: EnvSpec, digest: str) -> None:
    trajectory = from_batch(batch, {HEADER_KEY: json.dumps(header).encode()}, spec)
    if trajectory.digest != digest:
        raise ShardDamaged(f"{trajectory.id}: its content is not what was acknowledged")


def _snapshots(c: Connection, store: Store, report: Report) -> Iterator[Finding]:
    """Every leased snapshot must be whole; an expired one may have lost what was evicted."""
    rows = c.execute(sa.select(snapshots.c.pk, snapshots.c.id, snapshots.c.file)).all()
    report.checked["snapshots"] = len(rows)
    live = set(
        c.execute(sa.select(shards.c.id).where(shards.c.state.in_(("live", "retired")))).scalars()
    )
    now = time.time()
    for row in rows:
        where = f"snapshots/{row.file}"
        try:
            table = read_table(store.path("snapshots", row.file))
        except (OSError, ValueError) as error:
            yield Finding(where, f"cannot be read ({error})", "make the snapshot anew")
            continue
        lost = [
            identity
            for identity, shard in zip(
                table.column("id").to_pylist(), table.column("shard").to_pylist(), strict=True
            )
            if shard not in live
        ]
        if not lost:
            continue
        there: set[str] = set()
        for some in chunks(lost):
            t = trajectories.c
            there |= set(
                c.execute(
                    sa.select(t.id)
                    .join(shards, shards.c.pk == t.shard_pk)
                    .where(t.id.in_(some), shards.c.state.in_(("live", "retired")))
                ).scalars()
            )
        leased = c.execute(
            sa.select(sa.func.max(leases.c.expires_at)).where(leases.c.snapshot_pk == row.pk)
        ).scalar()
        missing = len(set(lost) - there)
        if missing:
            held = leased is not None and leased > now
            yield Finding(
                where,
                f"{missing} trajectories of {row.id} are gone",
                "make the snapshot anew",
                note=not held,
            )


def _policies(c: Connection, store: Store, report: Report) -> Iterator[Finding]:
    rows = c.execute(sa.select(policies.c.file, policies.c.sha256)).all()
    report.checked["policies"] = len(rows)
    for row in rows:
        path = store.path("policies", row.file)
        if not path.exists():
            yield Finding(f"policies/{row.file}", "missing", "publish the policy again")
        elif _sha256(path) != row.sha256:
            yield Finding(f"policies/{row.file}", "damaged", "publish the policy again")


def _orphans(db: Database, store: Store) -> Iterator[Finding]:
    for orphan in orphans(db, store):
        where = f"{orphan.folder}/{orphan.name}"
        if orphan.removable:
            yield Finding(where, "left over by a crash", "the next start removes it", note=True)
        else:
            yield Finding(
                where,
                "holds trajectories that the index does not know",
                "if the index is the older one: stepwell fsck --rebuild --data DIR",
            )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the command ----------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 clean, 1 problems, 2 could not look."""
    parser = common.parser("fsck", ABOUT, EXAMPLES)
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("STEPWELL_DATA"),
        help="the service's directory (STEPWELL_DATA); no service may run there",
    )
    parser.add_argument("--deep", action="store_true", help="also recompute every digest")
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="make the index anew, from the files",
    )
    parser.add_argument("--sandbox", action="store_true", help="show active confinements")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    if options.sandbox:
        return _print_sandbox(as_json=options.json)
    if options.data is None:
        print("stepwell: say which data directory: --data DIR or STEPWELL_DATA", file=sys.stderr)
        return 2
    try:
        if options.rebuild:
            return _rebuild(Path(options.data), as_json=options.json)
        report = check(Path(options.data), deep=options.deep)
    except (DirectoryInUse, IndexUnusable, sqlite3.DatabaseError, sa.exc.DatabaseError) as error:
        print(f"stepwell: {error}", file=sys.stderr)
        return 2
    if options.json:
        document = {
            "clean": report.clean,
            "checked": report.checked,
            "findings": [asdict(finding) for finding in report.findings],
        }
        print(json.dumps(document, indent=2))
    else:
        for finding in report.findings:
            mark = "note   " if finding.note else "PROBLEM"
            print(f"{mark} {finding.where}: {finding.what}\n        cure: {finding.cure}")
        looked = ", ".join(f"{count} {what}" for what, count in report.checked.items())
        print(f"{'clean' if report.clean else 'NOT CLEAN'}: {looked}")
    return 0 if report.clean else 1


def _rebuild(data: Path, *, as_json: bool) -> int:
    from server.upkeep.rebuild import rebuild

    lock = DirectoryLock(data)
    try:
        result = asdict(rebuild(data))
    finally:
        lock.release()
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        lists = ("unreadable", "lost")
        print("rebuilt:", ", ".join(f"{v} {k}" for k, v in result.items() if k not in lists))
        for name in result["unreadable"]:
            print(f"PROBLEM {name}: cannot be read")
        print("not brought back:")
        for what in result["lost"]:
            print(f"  - {what}")
    return 1 if result["unreadable"] else 0


def _print_sandbox(*, as_json: bool) -> int:
    from server.imports.sandbox import active

    found = active()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for name, is_active in found.items():
            print(f"{'active  ' if is_active else 'inactive'} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
