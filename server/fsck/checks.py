"""The checks of fsck, part by part: each yields the problems it finds, with their cures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.imports.jobs import JobContext
from server.index import row_checksums
from server.index.db import Database
from server.index.dialect import (
    TRIGGERS,
    DatabaseError,
    Raw,
    broken_references,
    integrity_check,
    names_in_schema,
    raw_of,
)
from server.index.table_reader import wrong_rows
from server.index.tables import (
    FILES,
    counters,
    datasets,
    leases,
    lost_rows,
    partition_stats,
    segments,
    shards,
    snapshots,
    tombstones,
    trajectories,
    version_trajectories,
    versions,
)
from server.ingest.index_rows import bucket_of, find_known
from server.ingest.segments import MAGIC, SegmentDamaged, open_segment
from server.maintenance.adoption import findable
from server.maintenance.unknown_files import ids_of, quarantined_files, unknown_files
from server.snapshots import manifests
from server.storage.checksums import Source
from server.storage.shards import (
    ShardDamaged,
    check_digest,
    read_batches,
    read_footer,
    shard_file,
)
from server.storage.store import Store
from server.storage.version_file import digest_of
from stepwell._wording import pluralize
from stepwell.errors import InvalidData
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec

REBUILD = "stepwell fsck --rebuild --data DIR"
RESTORE = "restore the file from a backup (stepwell restore, into another directory)"
KEPT_ASIDE = f"{REBUILD} takes what it misses from such files; delete it if you miss nothing"
ELSEWHERE = "the next start takes them from files that hold them, too"
RESTORE_SHARD = "restore the file from a backup: the next start verifies it and makes it live"
CURES = {
    "policies": "publish the policy again",
    "videos": "restore the file from a backup, or delete the video",
    "annotations": "the service gives the file up; then annotate again, with the same name",
    "versions": "restore the file from a backup; the version itself is in the index",
}


@dataclass(frozen=True, slots=True)
class FsckProblem:
    """A difference between index and files. `note`: the next start or sweep repairs it."""

    where: str
    what: str
    cure: str
    note: bool = False


@dataclass(slots=True)
class Report:
    """The number of checked objects, and the problems found."""

    problems: list[FsckProblem] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, set[Any]] = field(default_factory=dict)
    """Table → keys of its damaged rows: a file that disagrees with one of them is not at fault."""
    index_damaged: bool = False

    @property
    def clean(self) -> bool:
        return all(problem.note for problem in self.problems)


def check_rows(c: Connection, report: Report) -> Iterator[FsckProblem]:
    """Every row against its checksum; and the rows that a start has left out."""
    try:
        yield from _wrong_rows(raw_of(c), report)
    except DatabaseError:
        report.index_damaged = True
        raise
    for lost in c.execute(sa.select(lost_rows)).all():
        report.index_damaged = True
        name = lost.name or lost.key
        of = f" of dataset {lost.dataset}" if lost.dataset else ""
        yield _of_index(f"a row of {lost.table_name} is lost: {name}{of}")


def _wrong_rows(raw: Raw, report: Report) -> Iterator[FsckProblem]:
    if not row_checksums.schema_is_intact(raw):
        report.index_damaged = True
        yield _of_index("its schema is not what was written")
    report.index_damaged |= bool(integrity_check(raw, most=1))
    for table in row_checksums.tables(raw):
        for key in wrong_rows(raw, table):
            report.index_damaged = True
            report.wrong.setdefault(table, set()).add(key[0] if len(key) == 1 else key)
            what = f"a row of {table} is not what was written: {', '.join(map(str, key))}"
            yield _of_index(what)


def _of_index(what: str, cure: str = REBUILD) -> FsckProblem:
    return FsckProblem("index.sqlite", what, cure)


def _trajectories(count: int) -> str:
    return pluralize(count, "trajectory", "trajectories")


def _cure(report: Report, table: str, key: Any, otherwise: str) -> str:
    """What to do where a row and a file disagree."""
    return REBUILD if key in report.wrong.get(table, ()) else otherwise


def check_index(c: Connection) -> Iterator[FsckProblem]:
    """The database's own checks, missing triggers, and contradicting rows."""
    raw = raw_of(c)
    for line in integrity_check(raw):
        yield _of_index(line)
    for table, other in broken_references(raw):
        yield _of_index(f"a row of {table} refers to nothing in {other}")
    for name in sorted(set(TRIGGERS) - names_in_schema(raw)):
        yield _of_index(f"the trigger {name} is missing")
    t, d = trajectories.c, datasets.c
    behind = c.execute(
        sa.select(d.name).where(
            d.next_seq
            <= sa.select(sa.func.max(t.seq)).where(t.dataset_pk == d.pk).scalar_subquery()
        )
    ).scalars()
    for name in behind:
        yield _of_index(f"dataset {name} would assign a sequence number twice")
    twice = c.execute(sa.select(t.id).join(tombstones, tombstones.c.id == t.id)).scalars()
    for trajectory_id in twice:
        yield _of_index(f"{trajectory_id} is both a row and a tombstone")
    yield from check_totals(c)


def check_running(db: Database, context: JobContext) -> dict[str, Any]:
    """The work of a job: the index of a service that runs, without its files."""
    found = []
    with db.read() as c:  # one state of the index, whatever is written
        for problem in chain(check_rows(c, Report()), check_index(c)):
            found.append(asdict(problem))
            context.check()
    return {"clean": not found, "problems": found}


def check_totals(c: Connection) -> Iterator[FsckProblem]:
    """The running totals, compared with the rows."""
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
            yield _of_index(f"totals of dataset {key[0]} {key[1]}: {was} instead of {is_}")


def check_segments(
    c: Connection, store: Store, report: Report, deep: bool
) -> Iterator[FsckProblem]:
    """Every segment against the records that the index has of it; `deep`: their digests."""
    t = trajectories.c
    names = set(store.names("segments"))
    elsewhere = findable(c, store)
    rows = c.execute(sa.select(segments.c.pk, segments.c.name, segments.c.state)).all()
    report.checked["segments"] = len(rows)
    for row in rows:
        where = f"segments/{row.name}"
        if row.state == "consumed":
            if row.name in names:
                yield FsckProblem(where, "sealed, not yet removed", "the next start", note=True)
            continue
        spooled = c.execute(
            sa.select(t.pk, t.id, t.digest, t.segment_offset, datasets.c.spec)
            .join(datasets, datasets.c.pk == t.dataset_pk)
            .where(t.segment_pk == row.pk, t.state == "spooled")
            .order_by(t.segment_offset)
        ).all()
        report.checked["spooled"] = report.checked.get("spooled", 0) + len(spooled)
        if row.name not in names:
            if spooled:
                ids = {member.id for member in spooled}
                yield _missing(where, ids, elsewhere, _cure(report, "segments", row.pk, RESTORE))
            continue
        yield from _segment(store, row.name, spooled, deep, report)
    for name in sorted(names - {row.name for row in rows}):
        where = f"segments/{name}"
        yield from _segment(store, name, (), deep, report)
        yield FsckProblem(where, "not in the index yet", "the next start", note=True)
    nowhere = c.execute(
        sa.select(t.id)
        .outerjoin(segments, segments.c.pk == t.segment_pk)
        .where(t.state == "spooled", sa.func.coalesce(segments.c.state, "") != "open")
        .where(sa.func.coalesce(segments.c.state, "") != "damaged")
    ).scalars()
    for trajectory_id in nowhere:
        what = f"{trajectory_id} is spooled but in no segment"
        yield _of_index(what, REBUILD if report.index_damaged else RESTORE)


def _missing(where: str, members: set[str], elsewhere: set[str], cure: str) -> FsckProblem:
    lost = len(members - elsewhere)
    what = f"missing, with {_trajectories(len(members))}"
    if not lost:
        return FsckProblem(where, what, ELSEWHERE, note=True)
    return FsckProblem(where, f"{what}, {lost} of them in no other file", cure)


def _segment(
    store: Store, name: str, spooled: Any, deep: bool, report: Report
) -> Iterator[FsckProblem]:
    where = f"segments/{name}"
    if store.size("segments", name) <= len(MAGIC):
        if spooled:
            what = f"empty, with {_trajectories(len(spooled))}"
            yield FsckProblem(where, what, RESTORE)
        return
    try:
        file = open_segment(store, name)
    except SegmentDamaged as error:
        yield FsckProblem(where, str(error), RESTORE)
        return
    for row in spooled:
        try:
            record = file.record(row.segment_offset)
            entry = record.entry
            if (entry.id, entry.digest) != (row.id, row.digest):
                what = f"holds {entry.id}, intact, where the index has {row.id}"
                yield FsckProblem(where, what, REBUILD)
                continue
            if deep:
                spec = EnvSpec.from_json(row.spec)
                check_digest(entry, record.batch(arrow_schema(spec)), spec)
        except (SegmentDamaged, ShardDamaged, InvalidData) as error:
            cure = _cure(report, "trajectories", row.pk, RESTORE)
            yield FsckProblem(where, f"{row.id}: {error}", cure)


def check_shards(c: Connection, store: Store, report: Report, deep: bool) -> Iterator[FsckProblem]:
    """Every shard against its checksum and its trajectories; `deep`: their digests."""
    s, t = shards.c, trajectories.c
    elsewhere = findable(c, store)
    rows = c.execute(sa.select(shards).where(s.state != "deleted")).mappings().all()
    report.checked["shards"] = len(rows)
    for row in rows:
        file = shard_file(row["partition"], row["id"])
        where = "/".join(file)
        if row["state"] == "deleting":
            yield FsckProblem(
                where, "marked for deletion", "the next round of maintenance", note=True
            )
            continue
        cure = _cure(report, "shards", row["pk"], RESTORE)
        if not store.exists(*file):
            living = sa.select(t.id).where(t.shard_pk == row["pk"], t.state != "evicted")
            if lost := set(c.execute(living).scalars()):
                yield _missing(where, lost, elsewhere, cure)
            continue
        if row["state"] == "quarantined":
            yield FsckProblem(where, "damaged and quarantined", RESTORE_SHARD)
            continue
        found = store.examine(*file)
        if found.sha256 != row["sha256"]:
            yield FsckProblem(where, "its content differs from what was written (sha256)", cure)
            continue
        if row["checksums"] not in (None, found.checksums):
            yield FsckProblem(
                where, "its checksums in the index are wrong", "the next read", note=True
            )
        members = c.execute(
            sa.select(t.id, t.digest, t.traj_idx, t.row_start, t.length)
            .where(t.shard_pk == row["pk"])
            .order_by(t.traj_idx)
        ).all()
        report.checked["sealed"] = report.checked.get("sealed", 0) + len(members)
        yield from _shard(store.source(*file), where, row, members, deep)
    held = sa.func.coalesce(s.state, "").in_(("live", "quarantined"))
    nowhere = c.execute(
        sa.select(t.id).outerjoin(shards, s.pk == t.shard_pk).where(t.state == "sealed", ~held)
    ).scalars()
    for trajectory_id in nowhere:
        what = f"{trajectory_id} is alive, but its shard is missing or about to be deleted"
        yield _of_index(what)


def _shard(source: Source, where: str, row: Any, members: Any, deep: bool) -> Iterator[FsckProblem]:
    try:
        footer = read_footer(source)
        if sum(entry.rows for entry in footer.entries) != row["rows"]:
            yield FsckProblem(where, "the index has a different number of rows", REBUILD)
        for member in members:
            entry = footer.entries[member.traj_idx]
            here = (entry.id, entry.digest, entry.row_start, entry.rows - 1)
            if here != (member.id, member.digest, member.row_start, member.length):
                # The whole file has its sha256: the index is at fault.
                yield FsckProblem(where, f"{member.id}: the footer has {here}", REBUILD)
        if deep:
            for entry, batch in read_batches(source):
                check_digest(entry, batch, footer.spec)
    except IndexError:
        yield FsckProblem(where, "the index has more trajectories than the file", REBUILD)
    except (ShardDamaged, InvalidData) as error:
        yield FsckProblem(where, str(error), RESTORE)


def check_snapshots(c: Connection, store: Store, report: Report) -> Iterator[FsckProblem]:
    """Every leased snapshot must be complete; an expired one may have lost evicted trajectories."""
    rows = c.execute(sa.select(snapshots)).mappings().all()
    report.checked["snapshots"] = len(rows)
    uptime = c.execute(sa.select(counters.c.value).where(counters.c.name == "uptime")).scalar_one()
    for row in rows:
        where = f"snapshots/{row['file']}"
        try:
            blocks = manifests.load(store, c, row)
        except (OSError, ValueError) as error:
            yield FsckProblem(where, f"cannot be read ({error})", "create the snapshot again")
            continue
        _, missing = manifests.relocated(c, blocks)
        if missing:
            longest = c.execute(
                sa.select(sa.func.max(leases.c.expires_uptime)).where(
                    leases.c.snapshot_pk == row["pk"]
                )
            ).scalar()
            yield FsckProblem(
                where,
                f"{row['id']} misses {_trajectories(missing)}",
                "create the snapshot again",
                note=longest is None or longest <= uptime / 1e3,
            )


def check_versions(c: Connection, report: Report) -> Iterator[FsckProblem]:
    """Every version's trajectories in the index, against its digest."""
    t, v = trajectories.c, version_trajectories.c
    rows = c.execute(
        sa.select(versions, datasets.c.name.label("dataset")).join(
            datasets, datasets.c.pk == versions.c.dataset_pk
        )
    ).all()
    for row in rows:
        where = f"version {row.dataset}@{row.name}"
        if row.missing:
            cure = REBUILD if report.index_damaged else RESTORE
            yield FsckProblem(where, f"misses {row.missing} trajectories", cure)
            continue
        members = c.execute(
            sa.select(t.id, t.digest)
            .join(version_trajectories, v.trajectory_pk == t.pk)
            .where(v.version_pk == row.pk, t.dataset_pk == row.dataset_pk)
        ).all()
        if digest_of([(member.id, member.digest) for member in members]) != row.digest:
            yield FsckProblem(where, "its trajectories differ from its digest", REBUILD)


def check_files(c: Connection, store: Store, report: Report) -> Iterator[FsckProblem]:
    """Every policy, video, version and annotation against its checksum."""
    for table in FILES:
        rows = c.execute(sa.select(table.c.pk, table.c.file, table.c.sha256)).all()
        report.checked[table.name] = len(rows)
        for row in rows:
            where = f"{table.name}/{row.file}"
            cure = _cure(report, table.name, row.pk, CURES[table.name])
            if not store.exists(table.name, row.file):
                yield FsckProblem(where, "missing", cure)
            elif store.examine(table.name, row.file).sha256 != row.sha256:
                yield FsckProblem(where, "damaged", cure)


def check_unknown(db: Database, store: Store, report: Report) -> Iterator[FsckProblem]:
    """Files that no row names, and those in quarantine."""
    for file in unknown_files(db, store):
        where = f"{file.folder}/{file.name}"
        if report.index_damaged:
            yield FsckProblem(where, "not in the index, which is damaged", REBUILD)
            continue
        what = "the index does not know this file"
        yield FsckProblem(where, what, "the next start moves it to quarantine/", note=True)
    aside = quarantined_files(store)
    report.checked["in quarantine"] = len(aside)
    for file in aside:
        where = f"quarantine/{file.folder}/{file.name}"
        ids = ids_of(store, file)
        with db.read() as connection:
            new = len(set(ids) - set(find_known(connection, ids)))
        if new:
            what = f"holds {_trajectories(new)} that the index does not know"
            yield FsckProblem(where, what, REBUILD)
        else:
            what = "no row of the index names it" + (", which has its trajectories" if ids else "")
            yield FsckProblem(where, what, KEPT_ASIDE, note=True)
