"""On startup: finds damage in the index, and sets apart the rows that it took.

    as at the last clean stop           nothing to do (clean_stop.py)
    else every row is verified          and the structure of the file
    damaged                             → a new index of the intact rows, under the old one's name;
                                          the old file stays beside it as index.sqlite.<time>
    what is lost cannot be named        → refused, with the command that rebuilds

The new index holds every intact row unchanged, also those that refer to a lost one: their files
stay known. Lost rows are listed in `lost_rows` (index/lost_rows.py). What other rows or files prove
is put back: an index of a table, totals, a segment, a shard.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from server.index import row_checksums
from server.index.db import IndexUnusable, upgrade
from server.index.dialect import (
    TRIGGERS,
    DatabaseError,
    Error,
    Raw,
    insert_or_skip_raw,
    integrity_check,
    mend,
    one_transaction,
    open_damaged,
    open_unused,
    total_sql,
)
from server.index.row_checksums import quoted
from server.index.table_reader import TableReader, first_wrong_row
from server.index.tables import metadata
from server.ingest.seal import shard_row
from server.maintenance.clean_stop import take_mark
from server.maintenance.rebuild import _replace as replace_index
from server.maintenance.verified_shard import verified_shard
from server.storage.shards import ShardDamaged, shard_file
from server.storage.store import Store
from stepwell.errors import InvalidData
from stepwell.failpoints import failpoint

log = structlog.get_logger("stepwell.index_repair")
SCHEMA = "the schema is not what was written"
SURVIVORS = ("metrics", "audit", "lost_rows")
"""Tables of which an unknown number of rows may be lost: nothing else depends on them."""


class CannotName(Exception):
    """The index has lost what nothing else tells."""


def repair_index(index: Path, store: Store) -> None:
    """Make the index fit to be served. Raises `IndexUnusable`."""
    if take_mark(index) or not index.exists():
        return
    try:
        if trouble := mend(index).trouble:
            raise CannotName(trouble)
        found = damage(index)
        if not found:
            return
        log.error("the index is damaged: intact rows are copied to a new one", found=found[:5])
        if SCHEMA in found:
            raise CannotName(SCHEMA)
        lost = _Salvage(index, store).run()
    except (Error, CannotName) as error:
        raise IndexUnusable(
            f"{index} is damaged ({error}); rebuild it from the files:"
            f" stepwell fsck --rebuild --data {index.parent}"
        ) from None
    log.error("the index was damaged and is served without the lost rows", lost=lost)


def damage(index: Path) -> list[str]:
    """What is wrong with an index, in words; empty if nothing is."""
    try:
        with closing(open_unused(index)) as source:
            if not row_checksums.rows_are_protected(source):
                return []
            with ThreadPoolExecutor(1) as beside:
                structure = beside.submit(_wrong_structure, index)
                found = [] if row_checksums.schema_is_intact(source) else [SCHEMA]
                if wrong := first_wrong_row(source):
                    found.append(wrong)
            return structure.result() + found
    except DatabaseError as error:  # of one page: the others may be readable
        return [str(error)]


def _wrong_structure(index: Path) -> list[str]:
    """What the database finds, which takes no turns with Python's threads."""
    with closing(open_unused(index)) as source:
        return integrity_check(source, most=20)


@dataclass(slots=True)
class _Lost:
    table: str
    values: dict[str, Any]
    damaged: bool = False
    """The values are those of a damaged row, not of the table's indexes."""
    key: list[Any] = field(default_factory=list)


class _Salvage:
    """One repair: the intact rows of `index` in a new file, which then takes its name."""

    def __init__(self, index: Path, store: Store):
        self._index, self._store = index, store
        self._lost: list[_Lost] = []

    def run(self) -> int:
        """Returns the number of rows that are lost for good."""
        new = self._index.parent / "tmp" / self._index.name
        upgrade(new)
        with closing(open_damaged(self._index)) as source, one_transaction(new) as target:
            if not row_checksums.schema_is_intact(source):
                raise CannotName(SCHEMA)
            for name in TRIGGERS:  # they refuse rows whose companions are lost
                target.execute(f"DROP TRIGGER {name}")
            target.execute("DELETE FROM counters")
            for table in metadata.sorted_tables:
                self._copy(source, target, table.name)
            self._put_back(target)
            self._write_lost(target)
            for trigger in TRIGGERS.values():
                target.execute(trigger)
            row_checksums.seal_schema(target)
            failpoint("repair.before_commit")
        failpoint("repair.after_commit")
        replace_index(self._index, new)
        return len(self._lost)

    # --- rows -------------------------------------------------------------------------------------

    def _copy(self, source: Raw, target: Raw, table: str) -> None:
        reader = TableReader(source, table)
        if set(reader.columns) != {column.name for column in metadata.tables[table].c}:
            raise CannotName(f"the table {table} is of another revision")
        if not reader.protected:
            raise CannotName(f"the rows of {table} carry no checksums")
        for row in reader.rows():
            insert_or_skip_raw(target, table, row)
        damaged = {id(row) for row in reader.wrong}
        for row in reader.lost():
            key = [row.get(name) for name in reader.key]
            if id(row) not in damaged and row.keys() >= {*reader.columns}:
                insert_or_skip_raw(target, table, row)  # an index of the table holds the whole row
            else:
                self._lost.append(_Lost(table, row, id(row) in damaged, key))
        if reader.nameless():
            if table not in SURVIVORS:
                raise CannotName(f"{table}: {reader.unread}")
            self._lost.append(_Lost(table, {}))

    # --- what else tells --------------------------------------------------------------------------

    def _put_back(self, target: Raw) -> None:
        by_table = {table: self._of(table) for table in ("counters", "segments", "shards")}
        if by_table["counters"]:
            raise CannotName("counters")
        for lost in by_table["segments"]:
            self._segment(target, lost)
        for lost in by_table["shards"]:
            self._shard(target, lost)
        if self._of("trajectories") or self._of("partition_stats"):
            _count_again(target)
            self._lost = [lost for lost in self._lost if lost.table != "partition_stats"]
        for lost in self._lost:
            _disown(target, lost)
        target.execute(
            "UPDATE versions SET missing = (SELECT count(*) FROM version_trajectories AS m"
            " WHERE m.version_pk = versions.pk"
            " AND NOT EXISTS (SELECT 1 FROM trajectories AS t WHERE t.pk = m.trajectory_pk))"
            " WHERE missing = 0"
        )
        # Whoever read the index before reads all of it again.
        target.execute("UPDATE counters SET value = value + 1 WHERE name IN ('change_id', 'epoch')")

    def _of(self, table: str) -> list[_Lost]:
        return [lost for lost in self._lost if lost.table == table]

    def _segment(self, target: Raw, lost: _Lost) -> None:
        """Its file is there, or its trajectories are damaged: recovery decides as for any other."""
        name, pk = lost.values.get("name"), lost.values.get("pk")
        if lost.damaged or name is None or pk is None:
            raise CannotName("segments")
        row = {"pk": pk, "name": name, "state": "open", "created_at": time.time()}
        insert_or_skip_raw(target, "segments", row)
        self._lost.remove(lost)

    def _shard(self, target: Raw, lost: _Lost) -> None:
        """From its file, if that holds what the rows of its trajectories say; else quarantined:
        its trajectories are then named wherever they are left out."""
        identity, pk = lost.values.get("id"), lost.values.get("pk")
        if lost.damaged or identity is None or pk is None:
            raise CannotName("shards")
        row = self._shard_row(target, str(identity), int(pk))
        if row is None:
            return  # a deleted one: nothing refers to it
        row |= {"pk": pk, "id": identity, "created_at": time.time()}
        insert_or_skip_raw(target, "shards", row)
        self._lost.remove(lost)

    def _shard_row(self, target: Raw, identity: str, pk: int) -> Any:
        members = target.execute(
            "SELECT id, digest, traj_idx, row_start, dataset_pk, partition, seq, state"
            " FROM trajectories WHERE shard_pk = ?",
            (pk,),
        ).fetchall()
        places = [
            partition
            for partition in ("fifo", "protected")
            if self._store.exists(*shard_file(partition, identity))
        ]
        if not members and not places:
            return None
        seqs = [member[6] for member in members] or [0]
        dataset = members[0][4] if members else None
        row = {
            "dataset_pk": dataset,
            "partition": places[0] if places else members[0][5],
            "state": "quarantined",
            "sha256": "",
            "bytes": 0,
            "rows": 0,
            "trajectories": len(members),
            "seq_min": min(seqs),
            "seq_max": max(seqs),
            "checksums": b"",
        }
        try:
            stored, footer = verified_shard(self._store, *shard_file(places[0], identity))
            for member in members:
                entry = footer.entries[member[2]]
                if (entry.id, entry.digest, entry.row_start) != (member[0], member[1], member[3]):
                    return row
        except (OSError, ShardDamaged, InvalidData, IndexError, TypeError):
            return row
        alive = any(member[7] != "evicted" for member in members)
        state = {"state": "live" if alive else "retired", "dataset_pk": dataset}
        return shard_row(identity, places[0], stored, footer.entries) | state

    # --- what is lost -----------------------------------------------------------------------------

    def _write_lost(self, target: Raw) -> None:
        names = dict(target.execute("SELECT pk, name FROM datasets"))
        runs = dict(target.execute("SELECT pk, name FROM runs"))
        for lost in self._of("datasets"):
            names[lost.values.get("pk")] = lost.values.get("name")
        now = time.time()
        for lost in self._lost:
            values = lost.values
            dataset = values.get("name") if lost.table == "datasets" else None
            if dataset is None:
                dataset = names.get(values.get("dataset_pk"))
            name = values.get("id", values.get("name"))
            if lost.table == "policies" and values.get("run_pk") in runs:
                name = f"{runs[values['run_pk']]}/{values.get('version')}"
            row = {
                "table_name": lost.table,
                "key": json.dumps(lost.key, default=repr),
                "name": _text(name),
                "dataset": _text(dataset),
                "found_at": now,
            }
            insert_or_skip_raw(target, "lost_rows", row)
            log.error("a row of the index is lost", **row)


def _disown(target: Raw, lost: _Lost) -> None:
    """Let what refers to a lost row refer to nothing: its number is given to a new row one day."""
    pk = lost.values.get("pk")
    if not isinstance(pk, int):
        return
    for table in metadata.sorted_tables:
        columns = {k.parent.name for k in table.foreign_keys if k.column.table.name == lost.table}
        if table.name == lost.table == "snapshots":
            columns.add("base_pk")
        for name in map(quoted, columns):
            target.execute(
                f"UPDATE {quoted(table.name)} SET {name} = ? WHERE {name} = ?", (-pk, pk)
            )


def _count_again(target: Raw) -> None:
    """The running totals, from the rows."""
    target.execute("DELETE FROM partition_stats")
    target.execute(
        "INSERT INTO partition_stats (dataset_pk, bucket, trajectories, steps, bytes, return_sum)"
        " SELECT dataset_pk, CASE purpose WHEN 'eval' THEN 'eval' ELSE partition END AS b,"
        f" count(*), sum(length), sum(bytes), {total_sql(quoted('return'))} FROM trajectories"
        " WHERE state <> 'evicted' GROUP BY dataset_pk, b"
    )


def _text(value: Any) -> str:
    """What can be stored and shown: a damaged row may hold anything."""
    return "" if value is None else str(value).encode("utf-8", "replace").decode()[:200]
