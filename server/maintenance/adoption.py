"""On startup: what the index names and the directory misses is looked for in other files.

    a row of FILES without its file     any file of that folder with the same bytes
    a trajectory without its shard or   a shard or segment with the same id and digest, which the
    segment                             index does not use (unknown, given up, or in quarantine)

So an index that was copied before its files, or that is newer than they are, finds the data where
it is. Runs before anything is deleted. What is not found stays missing, and is named.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import Database, next_change_id
from server.index.tables import FILES, lost_rows, segments, shards, trajectories
from server.ingest.index_rows import NOWHERE, chunks, insert_segment
from server.ingest.seal import insert_shard_row, move_to_shard, shard_row
from server.ingest.segments import SegmentDamaged, open_segment
from server.maintenance.unknown_files import SHARD_FOLDERS
from server.maintenance.verified_shard import verified_shard
from server.storage.shards import Entry, ShardDamaged, read_footer
from server.storage.store import QUARANTINE, Store, Stored
from stepwell.errors import InvalidData
from stepwell.failpoints import failpoint

log = structlog.get_logger("stepwell.adoption")
_IN_USE = ("live", "quarantined")


@dataclass(slots=True)
class Missing:
    """What the index names and the directory does not hold."""

    trajectories: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Id → (key, digest) of those whose file is missing."""
    shards: list[str] = field(default_factory=list)
    """Ids of shards whose file is missing."""
    files: list[str] = field(default_factory=list)
    """Other missing files, as folder/name."""
    adopted: int = 0
    """Trajectories and files that were found elsewhere."""


def adopt_missing(db: Database, store: Store) -> Missing:
    """Find what is missing. Returns what is still missing then."""
    with db.read() as connection:
        missing = _missing_trajectories(connection, store)
        candidates = _candidates(connection, store) if missing.trajectories else []
    for shard in candidates:
        _adopt_shard(db, store, shard, missing)
    if missing.trajectories:
        for place, names in _everywhere(store, "segments"):
            _adopt_segments(db, store, missing, place, names)
    _give_up_shards(db, missing)
    for table in FILES:
        _adopt_files(db, store, table, missing)
    if missing.adopted or missing.trajectories or missing.files:
        log.warning(
            "files that the index names are missing; see stepwell fsck",
            found_elsewhere=missing.adopted,
            trajectories_missing=len(missing.trajectories),
            files_missing=len(missing.files),
        )
    return missing


def findable(connection: Connection, store: Store) -> set[str]:
    """Ids of missing trajectories that other files hold; `adopt_missing` would find them."""
    missing = _missing_trajectories(connection, store)
    found: set[str] = set()
    if not missing.trajectories:
        return found
    for one in _candidates(connection, store):
        with contextlib.suppress(ShardDamaged):
            entries = read_footer(store.source(one.place, one.name)).entries
            found |= {entry.id for entry in entries if _is_missing(entry, missing)}
    for place, names in _everywhere(store, "segments"):
        for name in names:
            found |= dict(_records(store, place, name, missing)).keys()
    return found


# --- trajectories -------------------------------------------------------------------------------


def _missing_trajectories(connection: Connection, store: Store) -> Missing:
    s, g, t = shards.c, segments.c, trajectories.c
    names = (name for folder in SHARD_FOLDERS for name in store.names(folder))
    there = {name.removesuffix(".parquet") for name in names}
    spooled = set(store.names("segments"))
    live = connection.execute(sa.select(s.pk, s.id).where(s.state.in_(_IN_USE))).all()
    gone = [row for row in live if row.id not in there]
    rows = connection.execute(sa.select(g.pk, g.name).where(g.state != "consumed")).all()
    unread = [row.pk for row in rows if row.name not in spooled]
    wanted: list[sa.ColumnElement[bool]] = [
        *(t.shard_pk.in_(some) for some in chunks([row.pk for row in gone])),
        *(t.segment_pk.in_(some) for some in chunks(unread)),
    ]
    if connection.execute(sa.select(lost_rows.c.pk).limit(1)).first() is not None:
        # A row of shards or segments may be lost: its trajectories refer to nothing.
        wanted.append(
            sa.case(
                (t.state == "spooled", t.segment_pk.not_in(sa.select(g.pk))),
                else_=t.shard_pk.not_in(sa.select(s.pk)),
            )
        )
    missing = Missing(shards=[row.id for row in gone])
    for where in wanted:
        found = connection.execute(
            sa.select(t.id, t.pk, t.digest).where(where, t.state != "evicted")
        )
        missing.trajectories |= {row.id: (row.pk, row.digest) for row in found}
    return missing


@dataclass(frozen=True, slots=True)
class _Candidate:
    folder: str
    name: str
    place: str
    """`folder`, or the same folder in quarantine."""


def _everywhere(store: Store, folder: str) -> list[tuple[str, list[str]]]:
    """The files of a folder, and those in quarantine that can be taken back: no other has their
    name."""
    there = store.names(folder)
    taken = set(there)
    aside = [name for name in store.quarantined(folder) if name not in taken]
    return [(folder, there), (f"{QUARANTINE}/{folder}", aside)]


def _candidates(connection: Connection, store: Store) -> list[_Candidate]:
    """Shard files that no living trajectory is read from, the newest first."""
    s = shards.c
    used = set(connection.execute(sa.select(s.id).where(s.state.in_(_IN_USE))).scalars())
    found = [
        _Candidate(folder, name, place)
        for folder in SHARD_FOLDERS
        for place, names in _everywhere(store, folder)
        for name in names
        if name.removesuffix(".parquet") not in used
    ]
    return sorted(found, key=lambda one: one.name, reverse=True)


def _adopt_shard(db: Database, store: Store, one: _Candidate, missing: Missing) -> None:
    wanted = _read_shard(store, one, missing)
    if wanted is None:
        return
    if one.place != one.folder:
        store.take_back(one.folder, one.name)
    stored, entries, numbers = wanted
    partition = one.folder.removeprefix("shards/")
    with db.write() as connection:
        change_id = next_change_id(connection)
        key = _shard_key(connection, stored, partition, entries, missing)
        locations = [
            {
                "key": missing.trajectories[entries[number].id][0],
                "number": number,
                "row": entries[number].row_start,
            }
            for number in numbers
        ]
        move_to_shard(connection, key, locations, change_id)
        failpoint("adopt.before_commit")
    failpoint("adopt.after_commit")
    missing.adopted += len(numbers)
    for number in numbers:
        del missing.trajectories[entries[number].id]
    log.warning("a shard was adopted", shard=one.name, trajectories=len(numbers))


def _read_shard(
    store: Store, one: _Candidate, missing: Missing
) -> tuple[Stored, list[Entry], list[int]] | None:
    """The file as read and verified, and which of its trajectories are missing; None if none."""
    try:
        footer = read_footer(store.source(one.place, one.name))
        if not any(_is_missing(entry, missing) for entry in footer.entries):
            return None
        stored, footer = verified_shard(store, one.place, one.name)
    except (OSError, ShardDamaged, InvalidData) as error:
        log.warning("a shard that the index does not use cannot be read", error=str(error)[:300])
        return None
    entries = list(footer.entries)
    numbers = [n for n, entry in enumerate(entries) if _is_missing(entry, missing)]
    return stored, entries, numbers


def _is_missing(entry: Entry, missing: Missing) -> bool:
    return missing.trajectories.get(entry.id, (0, ""))[1] == entry.digest


def _shard_key(
    connection: Connection, stored: Stored, partition: str, entries: list[Entry], missing: Missing
) -> int:
    """The key of the file's row, which is `live` from now on; a new one where it has none."""
    s, t = shards.c, trajectories.c
    shard_id = stored.name.removesuffix(".parquet")
    found = connection.execute(sa.select(s.pk, s.sha256).where(s.id == shard_id)).one_or_none()
    first = next(missing.trajectories[e.id][0] for e in entries if _is_missing(e, missing))
    dataset = connection.execute(sa.select(t.dataset_pk).where(t.pk == first)).scalar_one()
    if found is None:
        row = shard_row(shard_id, partition, stored, entries)
        return insert_shard_row(connection, row, dataset, time.time())
    connection.execute(
        sa.update(shards)
        .where(s.pk == found.pk)
        .values(
            state="live",
            dataset_pk=dataset,
            partition=partition,
            sha256=stored.sha256,
            bytes=stored.bytes,
            checksums=stored.checksums,
            retired_uptime=None,
        )
    )
    return int(found.pk)


def _adopt_segments(
    db: Database, store: Store, missing: Missing, place: str, names: list[str]
) -> None:
    """Point missing trajectories to segments that hold them; those become open again."""
    for name in reversed(names):
        places = dict(_records(store, place, name, missing))
        if not places:
            continue
        if place != "segments":
            store.take_back("segments", name)
        with db.write() as connection:
            g, t = segments.c, trajectories.c
            found = connection.execute(sa.select(g.pk).where(g.name == name)).scalar()
            pk = found if found is not None else insert_segment(connection, name, time.time())
            connection.execute(sa.update(segments).where(g.pk == pk).values(state="open"))
            values = {**NOWHERE, "state": "spooled", "segment_pk": pk}
            values["change_id"] = next_change_id(connection)
            for trajectory_id, offset in places.items():
                connection.execute(
                    sa.update(trajectories)
                    .where(t.pk == missing.trajectories[trajectory_id][0])
                    .values({**values, "segment_offset": offset})
                )
            failpoint("adopt.before_commit")
        missing.adopted += len(places)
        for trajectory_id in places:
            del missing.trajectories[trajectory_id]
        log.warning("a segment was adopted", segment=name, trajectories=len(places))


def _records(store: Store, place: str, name: str, missing: Missing) -> Iterator[tuple[str, int]]:
    """(id, offset) of the missing trajectories that a segment holds."""
    try:
        file = open_segment(store, name, place)
    except (SegmentDamaged, OSError):
        return
    for record in file.all_records():
        if "entry" in record.head and _is_missing(record.entry, missing):
            yield record.entry.id, record.offset


def _give_up_shards(db: Database, missing: Missing) -> None:
    """A missing shard is quarantined: left out of answers until its file is back."""
    if not missing.shards:
        return
    s, t = shards.c, trajectories.c
    needed = sa.exists().where(t.shard_pk == s.pk, t.state != "evicted")
    with db.write() as connection:
        for some in chunks(missing.shards):
            mine = sa.and_(s.id.in_(some), s.state == "live")
            connection.execute(sa.update(shards).where(mine, needed).values(state="quarantined"))
            connection.execute(
                sa.update(shards)
                .where(s.id.in_(some), ~needed, s.state.in_(_IN_USE))
                .values(state="retired", retired_uptime=db.uptime())
            )


# --- policies, videos, versions, annotations ------------------------------------------------------


def _adopt_files(db: Database, store: Store, table: sa.Table, missing: Missing) -> None:
    t = table.c
    with db.read() as connection:
        rows = connection.execute(sa.select(t.pk, t.file, t.bytes, t.sha256)).all()
    everywhere = _everywhere(store, table.name)
    there = set(everywhere[0][1])
    gone = {row.sha256: row for row in rows if row.file not in there}
    if not gone:
        return
    used = {row.file for row in rows}
    sizes = {row.bytes for row in gone.values()}
    for place, names in everywhere:
        for name in names:
            known = place == table.name and name in used
            if known or store.size(place, name) not in sizes:
                continue
            row = gone.pop(store.examine(place, name).sha256, None)
            if row is None:
                continue
            if place != table.name:
                store.take_back(table.name, name)
            with db.write() as connection:
                connection.execute(sa.update(table).where(t.pk == row.pk).values(file=name))
            missing.adopted += 1
            log.warning("a file was adopted", file=f"{table.name}/{name}")
    missing.files += [f"{table.name}/{row.file}" for row in gone.values()]
