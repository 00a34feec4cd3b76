"""Makes a backup of a data directory, whether a service uses it or not.

    hold        from now on no file that the index knows is deleted (storage/hold.py)
      → index   a consistent copy
      → files   all that this copy names, each verified; those that the target has are not copied
      → manifest, written last

Whatever was acknowledged before the index was copied is in the backup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from server.backup.target import (
    Damaged,
    Item,
    Manifest,
    Progress,
    Target,
    checksums_fit,
    copy_file,
    new_id,
    sha256_of,
)
from server.index.db import upgrade
from server.index.dialect import connect, copy_index
from server.index.index_file import read_index_mark, refuse_wrong_index
from server.index.tables import FILES, segments, shards, snapshots, trajectories
from server.index.wal import into_one_file
from server.ingest.segments import SegmentDamaged, SegmentFile
from server.storage.checksums import Checksums
from server.storage.descriptions import DESCRIBED, FOLDER, name_of
from server.storage.hold import DeletionHold
from server.storage.shards import shard_file
from server.storage.store import QUARANTINE, DirectoryInUse, DirectoryLock
from stepwell.errors import InvalidData
from stepwell.failpoints import failpoint

KEPT = ("live", "retired", "quarantined")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to be copied, and what the index says of it."""

    path: str
    size: int | None = None
    sha256: str | None = None
    checksums: Checksums | None = None
    """Where there is no sha256."""
    optional: bool = False
    """Nothing is lost without it."""


@dataclass(slots=True)
class Plan:
    files: list[Wanted]
    segments: list[Wanted]
    offsets: dict[str, list[int]]
    """Segment → where its acknowledged records begin."""

    @property
    def bytes(self) -> int:
        return sum(one.size or 0 for one in (*self.files, *self.segments))


def back_up(
    data: Path,
    target: Target,
    *,
    verify: bool = False,
    start: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Back up `data` to `target`. `start` gets the number of bytes of all files, `progress` those
    of each piece. With `verify` files that the target has are read again.

    Raises `IndexUnusable`, `HeldByAnother`, OSError. Files that are damaged or missing are named in
    the manifest's `problems`; all others are in the backup.
    """
    index = data / "index.sqlite"
    if not index.exists():
        raise InvalidData(
            f"{data} has no index", expected="the directory of a service (stepwell serve --data)"
        )
    _refuse_wrong_index(data, index)
    target.remove_incomplete()
    with closing(DeletionHold(data)):
        manifest = Manifest(new_id(), time.time(), 0, "")
        folder = target.folder(manifest.id)
        (folder / "segments").mkdir(parents=True)
        copy = folder / "index.sqlite"
        _copy_index(index, copy)
        failpoint("backup.after_index")
        plan = _plan(copy, data)
        start(plan.bytes)
        for wanted in plan.files:
            _copy(data, target, wanted, manifest, verify, progress)
        failpoint("backup.before_segments")
        for wanted in plan.segments:
            _copy_segment(data, folder, wanted, plan.offsets[wanted.path], manifest, progress)
        mark = read_index_mark(copy)
        assert mark is not None, "just copied"
        manifest.serial, manifest.index_sha256 = mark.serial, sha256_of(copy)
        target.write_manifest(manifest)
    return manifest


def _refuse_wrong_index(data: Path, index: Path) -> None:
    try:
        with closing(DirectoryLock(data)):
            refuse_wrong_index(data, index)
    except DirectoryInUse:
        refuse_wrong_index(data, index, running=True)


def _copy_index(index: Path, copy: Path) -> None:
    """A consistent copy in one file, of this program's revision. Raises `InvalidData` if it is
    damaged."""
    if found := copy_index(index, copy):
        raise InvalidData(
            f"the index is damaged ({found}): stop the service, and rebuild it from the files:"
            f" stepwell fsck --rebuild --data {index.parent}",
            expected="an index that can be read",
        )
    os.chmod(copy, 0o600)  # it holds hashes of tokens
    upgrade(copy)


def _plan(copy: Path, data: Path) -> Plan:
    """What the copied index names."""
    engine = connect(copy)
    try:
        with engine.connect() as c:
            files = list(_files(c, data))
            plan = Plan(files, [], {})
            g, t = segments.c, trajectories.c
            rows = c.execute(sa.select(g.pk, g.name).where(g.state != "consumed")).all()
            for row in rows:
                path = f"segments/{row.name}"
                places = sa.select(t.segment_offset).where(
                    t.segment_pk == row.pk, t.state == "spooled"
                )
                plan.offsets[path] = list(c.execute(places).scalars())
                size = data / path
                plan.segments.append(Wanted(path, size.stat().st_size if size.exists() else 0))
            return plan
    finally:
        engine.dispose()
        into_one_file(copy)


def _files(c: sa.Connection, data: Path) -> Iterator[Wanted]:
    s = shards.c
    for row in c.execute(
        sa.select(s.partition, s.id, s.bytes, s.sha256).where(s.state.in_(KEPT)).order_by(s.pk)
    ):
        yield Wanted("/".join(shard_file(row.partition, row.id)), row.bytes, row.sha256)
    for table in FILES:
        t = table.c
        for file, size, sha256 in c.execute(sa.select(t.file, t.bytes, t.sha256).order_by(t.pk)):
            yield Wanted(f"{table.name}/{file}", size, sha256)
            if table.name in DESCRIBED:
                yield Wanted(f"{FOLDER}/{name_of(file)}", optional=True)
    for file, checksums in c.execute(sa.select(snapshots.c.file, snapshots.c.checksums)):
        yield Wanted(f"snapshots/{file}", checksums=checksums, optional=True)
    for path in sorted((data / QUARANTINE).rglob("*")):
        if path.is_file():
            yield Wanted(str(path.relative_to(data)), optional=True)


def _copy(
    data: Path,
    target: Target,
    wanted: Wanted,
    manifest: Manifest,
    verify: bool,
    progress: Progress,
) -> None:
    """Copy one file, unless the target has it."""
    source, place = data / wanted.path, target.file(wanted.path)
    try:
        if place.exists():
            size = place.stat().st_size
            fits = size == source.stat().st_size
            sha256 = wanted.sha256 or (sha256_of(source) if fits else "")
            if fits and (verify or wanted.sha256 is None):
                fits = sha256_of(place) == sha256
            if fits:
                manifest.files.append(Item(wanted.path, size, sha256))
                progress(size)
                return
        item = copy_file(source, place, wanted.sha256, progress)
        if wanted.checksums is not None and not checksums_fit(place, wanted.checksums):
            raise Damaged(f"{source} is not what was written")
    except FileNotFoundError:
        if not wanted.optional:
            manifest.problems.append(f"{wanted.path} is missing")
    except Damaged:
        manifest.problems.append(f"{wanted.path} is damaged")
    else:
        manifest.files.append(replace(item, path=wanted.path))
        failpoint("backup.after_file")


def _copy_segment(
    data: Path,
    folder: Path,
    wanted: Wanted,
    offsets: list[int],
    manifest: Manifest,
    progress: Progress,
) -> None:
    """Copy a segment as it is now: it may have grown, and may end within a record."""
    place = folder / wanted.path
    try:
        item = copy_file(data / wanted.path, place, None, progress)
        file = SegmentFile(place)
        for offset in offsets:
            file.record(offset)
    except FileNotFoundError:
        if offsets:
            manifest.problems.append(f"{wanted.path} is missing")
        return
    except SegmentDamaged as error:
        manifest.problems.append(f"{wanted.path} is damaged: {error}")
    manifest.segments.append(replace(item, path=wanted.path))
