"""Rebuilds a lost index from the contents of the files: shards, segments, policies.

Restored: datasets with their specs, every trajectory with its data and everything it was sent with,
versions of datasets, annotations, described policies and videos with their runs and evaluations;
and from the old index, where it is readable, everything that index_recovery.py copies. Files in
quarantine are read like all others. Not restored: snapshots, launches, jobs, tombstones. Evicted
trajectories and those of deleted datasets are alive again, up to the capacity, if their files were
still kept. An uncommitted import is left out. `Rebuilt.lost` lists it. Data files are only read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import (
    Database,
    next_change_id,
    next_dataset_pk,
    next_epoch,
    upgrade,
)
from server.index.dialect import DatabaseError
from server.index.index_file import foreign_log, read_index_mark
from server.index.tables import datasets, shards
from server.index.wal import absorb_log, into_one_file, rename_log
from server.ingest.bulk_insert import pending_shards
from server.ingest.evict import evict_over_capacity
from server.ingest.index_rows import NOWHERE, chunks, insert_rows, insert_segment, row_of
from server.ingest.seal import insert_shard_row, shard_row
from server.ingest.segments import MAGIC, Record, SegmentDamaged, SegmentFile, open_segment
from server.maintenance.annotation_recovery import insert_annotations
from server.maintenance.index_recovery import Recovered, from_files, from_old_index
from server.maintenance.unknown_files import SHARD_FOLDERS, quarantined_files
from server.maintenance.verified_shard import verified_shard
from server.maintenance.version_recovery import insert_versions, protect
from server.storage.index_mark import NAME as MARK
from server.storage.index_mark import write_mark
from server.storage.shards import Entry, ShardDamaged
from server.storage.store import Store, sync_directory
from stepwell.errors import InvalidData
from stepwell.failpoints import failpoint
from stepwell.spaces import EnvSpec


@dataclass(slots=True)
class Rebuilt:
    """The result."""

    datasets: int = 0
    trajectories: int = 0
    shards: int = 0
    segments: int = 0
    runs: int = 0
    metrics: int = 0
    policies: int = 0
    evaluations: int = 0
    videos: int = 0
    versions: int = 0
    annotations: int = 0
    """Files of annotations."""
    labelled: int = 0
    """Trajectories whose tags, flags, notes or protection were set after they were stored."""
    unreadable: list[str] = field(default_factory=list)
    """Unreadable files."""
    lost: list[str] = field(default_factory=list)
    """What could not be restored, for people."""


@dataclass(slots=True)
class _Found:
    """A dataset as reconstructed: its spec, and where each trajectory is stored."""

    spec: EnvSpec
    entries: dict[str, tuple[Entry, dict[str, object]]] = field(default_factory=dict)


NAMED = 5
"""Trajectories that a line names."""
ALWAYS_LOST = (
    "snapshots (trainers create new ones), launches, jobs",
    "evictions and deletions: trajectories whose files still exist are alive again",
)


def rebuild(data: Path) -> Rebuilt:
    """Create DIR/index.sqlite; an existing one is kept beside it as index.sqlite.<time>.

    The new index replaces the old one when it is complete: an error or a crash leaves one of them.
    No service may be using the directory.
    """
    store = Store(data)
    store.clear_tmp()
    for file in quarantined_files(store):
        if not store.exists(file.folder, file.name):
            store.take_back(file.folder, file.name)
    index, new = data / "index.sqlite", data / "tmp" / "index.sqlite"
    upgrade(new)
    result = Rebuilt()
    with contextlib.closing(Database(new)) as db, db.write() as connection:
        recovered = from_old_index(connection, store, index if index.exists() else None)
        found = {
            name: _Found(EnvSpec.from_json(row["spec"])) for name, row in recovered.datasets.items()
        }
        # Segments first: a trajectory that is also in a shard is then taken from the shard.
        _read_segments(connection, store, found, result)
        _read_shards(connection, store, found, result)
        files = protect(store, recovered)
        _insert(connection, found, result, recovered)
        result.versions = insert_versions(connection, store, files, recovered)
        result.annotations = insert_annotations(connection, store, recovered)
        from_files(connection, store, recovered)
        next_epoch(connection)
        for name in ("runs", "metrics", "policies", "evaluations", "videos"):
            setattr(result, name, recovered.counts[name])
        result.lost += [*recovered.lost, *_in_no_file(found, recovered), *ALWAYS_LOST]
        failpoint("rebuild.before_commit")
    # Without a mark either index is accepted: the new one is another history than the old one.
    (data / MARK).unlink(missing_ok=True)
    sync_directory(data)
    _replace(index, new)
    for folder, name in recovered.aside:
        store.quarantine(folder, name)
    mark = read_index_mark(index)
    assert mark is not None, "just written"
    write_mark(data, mark)
    return result


def _in_no_file(found: dict[str, _Found], recovered: Recovered) -> Iterator[str]:
    """Trajectories that the old index lists and no file holds."""
    there = {one for dataset in found.values() for one in dataset.entries}
    for name, ids in recovered.living.items():
        if missing := sorted(ids - there):
            some = ", ".join(missing[:NAMED]) + (", …" if len(missing) > NAMED else "")
            yield f"{len(missing)} trajectories of dataset {name}, which no file holds: {some}"


def _replace(index: Path, new: Path) -> None:
    """Rename `new` to `index`; keep the old index as index.sqlite.<time>."""
    # Both become one file: a log that the old index left would be applied to the new one.
    into_one_file(new)
    stamp = int(time.time())
    while (kept := index.with_name(f"{index.name}.{stamp}")).exists():
        stamp += 1
    foreign = bool(foreign_log(index))
    if index.exists():
        if not foreign:
            with contextlib.suppress(DatabaseError):
                absorb_log(index)
        os.link(index, kept)
    # Still there if the old index is damaged or lost, or the log another's.
    rename_log(index, kept, foreign=foreign)
    failpoint("rebuild.before_rename")
    os.rename(new, index)
    sync_directory(index.parent)
    failpoint("rebuild.after_rename")


def _read_segments(
    connection: Connection, store: Store, found: dict[str, _Found], result: Rebuilt
) -> None:
    for name in store.names("segments"):
        if store.size("segments", name) <= len(MAGIC):
            continue
        try:
            file = open_segment(store, name)
        except SegmentDamaged:
            result.unreadable.append(name)
            continue
        pk = insert_segment(connection, name, store.modified_at("segments", name))
        result.segments += 1
        earlier = set()  # datasets of the same name, but with another spec
        for record in _records(file, result):
            if "spec" in record.head:
                spec = EnvSpec.from_json(record.head["spec"])
                dataset = found.setdefault(record.dataset, _Found(spec))
                if dataset.spec.digest != spec.digest:
                    earlier.add(record.dataset)
            elif record.dataset in found and record.dataset not in earlier:
                place = {"state": "spooled", "segment_pk": pk, "segment_offset": record.offset}
                found[record.dataset].entries[record.entry.id] = (record.entry, NOWHERE | place)
        result.lost += [f"{one} in {name}: of an earlier dataset" for one in sorted(earlier)]


def _records(file: SegmentFile, result: Rebuilt) -> Iterator[Record]:
    """Every whole record, including those behind damaged ones."""
    name, end = file.path.name, len(MAGIC)
    for record in file.all_records():
        if record.offset > end:
            result.unreadable.append(f"{name}: bytes {end} to {record.offset}")
        end = record.end
        yield record
    if end < file.size:
        result.lost.append(
            f"the last {file.size - end} bytes of {name}: torn by a crash (never acknowledged),"
            " or damaged"
        )


def _read_shards(
    connection: Connection, store: Store, found: dict[str, _Found], result: Rebuilt
) -> None:
    unfinished = pending_shards(store)
    files = [
        (folder, name)
        for folder in SHARD_FOLDERS
        for name in store.names(folder)
        if name.removesuffix(".parquet") not in unfinished
    ]
    # By name, which is by age: of two copies (a compaction's old and new) the newer one wins.
    for folder, name in sorted(files, key=lambda file: file[1]):
        try:
            # No other digest exists: all content is verified, which is slow.
            stored, footer = verified_shard(store, folder, name)
        except (OSError, ShardDamaged, InvalidData):
            result.unreadable.append(name)
            continue
        dataset = found.setdefault(footer.dataset, _Found(footer.spec))
        if dataset.spec.digest != footer.spec.digest:
            result.unreadable.append(name)  # of an earlier dataset with that name
            continue
        shard_id, partition = name.removesuffix(".parquet"), folder.removeprefix("shards/")
        row = shard_row(shard_id, partition, stored, footer.entries)
        pk = insert_shard_row(connection, row, None, store.modified_at(folder, name))
        result.shards += 1
        for index, entry in enumerate(footer.entries):
            for other in found.values():
                # Ids are unique: a deleted dataset's files may still exist. The newer one wins.
                if other is not dataset:
                    other.entries.pop(entry.id, None)
            place = {"state": "sealed", "shard_pk": pk, "traj_idx": index}
            place |= {"row_start": entry.row_start}
            dataset.entries[entry.id] = (entry, NOWHERE | place)


def _insert(
    connection: Connection, found: dict[str, _Found], result: Rebuilt, recovered: Recovered
) -> None:
    change_id = next_change_id(connection)
    for name, dataset in found.items():
        # Spooled ones have no seq yet; they follow those that have one, in the order of arrival.
        ordered = sorted(
            dataset.entries.values(),
            key=lambda one: (one[0].seq == 0, one[0].seq, one[0].created_at),
        )
        greatest = max((entry.seq for entry, _ in ordered), default=0)
        values = {
            "name": name,
            "spec": dataset.spec.to_json(),
            "spec_digest": dataset.spec.digest,
            "description": "rebuilt from files",
            "created_at": time.time(),
        }
        said = recovered.datasets.get(name, {})
        values |= said
        pk = next_dataset_pk(connection)
        connection.execute(sa.insert(datasets).values(pk=pk, **values))
        rows, taken = [], set()
        for entry, place in ordered:
            seq = entry.seq
            if seq == 0 or seq in taken:
                greatest += 1
                seq = greatest
            taken.add(seq)
            labels = recovered.labels.get(entry.id, {})
            # Protected if either copy is.
            if entry.partition == "protected":
                labels = labels | {"partition": "protected"}
            row = row_of(entry, pk, seq, change_id, dataset.spec.env)
            result.labelled += any(row.get(key) != value for key, value in labels.items())
            rows.append({"flags": "[]", "notes": "", **row, **labels, **place})
        for some in chunks(rows, 2000):
            insert_rows(connection, list(some))
        shard_pks = {place["shard_pk"] for _, place in ordered} - {None}
        for some in chunks(list(shard_pks)):
            connection.execute(sa.update(shards).where(shards.c.pk.in_(some)).values(dataset_pk=pk))
        result.datasets += 1
        evicted = evict_over_capacity(connection, pk, change_id)
        result.trajectories += len(rows) - evicted
        counted = {
            "next_seq": max(greatest + 1, said.get("next_seq", 1)),
            # The old index counted those that are now evicted again.
            "evicted": max(evicted, said.get("evicted", 0)),
        }
        connection.execute(sa.update(datasets).where(datasets.c.pk == pk).values(counted))
