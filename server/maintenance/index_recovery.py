"""Recovers what an index stored besides the data: from the readable part of the old index file, and
from the policy files, which name their run.

rebuild.py calls it on an index that is still empty in these tables. A damaged index yields the rows
on its readable pages; `Recovered.lost` lists in words what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.dialect import (
    DatabaseError,
    Raw,
    insert_or_skip,
    mend,
    names_in_schema,
    open_damaged,
    open_for_reading,
)
from server.index.index_file import foreign_log
from server.index.table_reader import TableReader
from server.index.tables import FILES, metadata, policies, videos
from server.index.wal import log_of
from server.maintenance.described_files import add_policy, add_video
from server.storage.store import QUARANTINE, Store
from stepwell.errors import InvalidData
from stepwell.spaces import EnvSpec

# In this order: each refers only to earlier ones.
TABLES = (
    *("runs", "metrics", "policies", "policy_aliases", "evaluations", "videos"),
    *("tokens", "audit", "saved_queries"),
)
LABELS = ("tags", "flags", "notes")
CAPACITY = ("capacity_trajectories", "capacity_steps", "capacity_bytes")
DATASET = (
    *("spec", "spec_digest", *CAPACITY, "description", "tags"),
    *("next_seq", "evicted", "created_at", "last_ingest_at", "created_by"),
)
ROWS_AT_ONCE = 1000


@dataclass(slots=True)
class Recovered:
    """What was recovered. `datasets`: name → columns. `labels`: trajectory → labels set after it
    was stored. `aside`: (folder, name) of files without a row, which the caller quarantines.
    """

    counts: dict[str, int] = field(default_factory=dict)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    aside: list[tuple[str, str]] = field(default_factory=list)
    living: dict[str, set[str]] = field(default_factory=dict)
    """Dataset → ids of the trajectories that the old index lists."""
    damaged: set[str] = field(default_factory=set)
    """Policy files that differ from what the old index says."""


def from_old_index(connection: Connection, store: Store, old: Path | None) -> Recovered:
    """Copy the registry of the index file `old`, and read its settings of datasets and labels."""
    found = Recovered(counts=dict.fromkeys(TABLES, 0))
    alone = False
    if old is not None:
        if trouble := mend(old).trouble:
            found.lost.append(f"changes in the log of the old index ({trouble})")
        if reason := foreign_log(old):
            alone = True
            found.lost.append(
                f"changes that are only in {log_of(old).name}, which is kept: it {reason}"
            )
    if old is None or not _is_index(old, alone):
        found.lost += [
            "runs with their metrics and logs, evaluations with their videos, tokens, the audit,"
            " saved queries",
            "capacities, descriptions and tags of datasets; labels set on trajectories after"
            " they were stored, including 'protected'",
        ]
        return found
    files = {table.name: set(store.names(table.name)) for table in FILES}
    kept: dict[str, set[int]] = {}
    with closing(open_damaged(old, alone=alone)) as source:
        lost_before = _lost_before(source)
        found.lost += [
            f"{row['table_name']}: the row {row['name'] or row['key']} was damaged"
            + (f" (of dataset {row['dataset']})" if row["dataset"] else "")
            for row in lost_before
        ]
        for table in TABLES:
            columns = metadata.tables[table].c
            rows = _Rows(source, table, [column.name for column in columns])
            rest, count = iter(rows), 0
            while some := list(islice(rest, ROWS_AT_ONCE)):
                count += len(some)
                good = [row for row in some if _fits(table, row, kept, files)]
                if table == "policies":
                    good = [row for row in good if _has_checksums(row, store, found)]
                _insert(connection, table, good)
            if "pk" in columns:
                kept[table] = set(connection.execute(sa.select(columns["pk"])).scalars())
            there = sa.select(sa.func.count()).select_from(metadata.tables[table])
            found.counts[table] = connection.execute(there).scalar_one()
            if missing := count - found.counts[table]:
                found.lost.append(
                    f"{table}: {missing} of {count} rows: damaged, or what they refer to is missing"
                )
            if rows.trouble:
                found.lost.append(
                    f"{table}: {found.counts[table]} rows read, the others lost ({rows.trouble})"
                )
            found.lost += [f"{table}: the row {_described(row)} is damaged" for row in rows.lost]
        rows = _Rows(source, "datasets", ["name", *DATASET])
        for row in rows:
            name, dataset = row.pop("name"), _dataset(row)
            if isinstance(name, str) and dataset is not None:
                found.datasets[name] = dataset
            else:
                found.lost.append(f"dataset {name}: its row in the old index is damaged")
        found.lost += [f"settings of the dataset {_described(row)}: damaged" for row in rows.lost]
        names = {row["pk"]: row["name"] for row in _Rows(source, "datasets", ["pk", "name"])}
        labelled = ["id", "dataset_pk", "state", "partition", *LABELS]
        labels = _Rows(source, "trajectories", labelled)
        for row in labels:
            name, state = names.get(row.pop("dataset_pk")), row.pop("state")
            if state != "evicted" and isinstance(name, str) and isinstance(row["id"], str):
                found.living.setdefault(name, set()).add(row["id"])
            if row["partition"] == "fifo" and all(row[name] in ("", "[]") for name in LABELS):
                continue  # most rows: no labels were set
            if row["partition"] in ("fifo", "protected") and _lists(row["tags"], row["flags"]):
                found.labels[row.pop("id")] = row
        found.lost += [
            f"labels of the trajectory {_described(row)}: damaged" for row in labels.lost
        ]
        unnamed = any(row["table_name"] == "trajectories" for row in lost_before)
        if labels.trouble or labels.lost or unnamed:
            # Which trajectories are protected is unknown, so none may be evicted.
            for row in found.datasets.values():
                row |= dict.fromkeys(CAPACITY)
            found.lost.append("capacities of datasets: datasets are now unlimited, set them again")
        for what, read in (("settings of datasets", rows), ("labels of trajectories", labels)):
            if read.trouble:
                found.lost.append(f"{what}, in part ({read.trouble})")
    return found


def from_files(connection: Connection, store: Store, recovered: Recovered) -> None:
    """Insert rows for files of policies and videos without a row, as their descriptions say
    (storage/descriptions.py); set the others aside."""
    for table, add, missing in (
        (policies, add_policy, "run and version"),
        (videos, add_video, "evaluation and seed"),
    ):
        known = set(connection.execute(sa.select(table.c.file)).scalars())
        aside = [
            name
            for name in sorted(set(store.names(table.name)) - known)
            if name in recovered.damaged or not add(connection, store, name, recovered.counts)
        ]
        set_aside(store, table.name, aside, missing, recovered)


def set_aside(
    store: Store, kind: str, names: Sequence[str], missing: str, recovered: Recovered
) -> None:
    """Note files of the folder `kind` that get no row; says what of them is `missing`."""
    if not names:
        return
    recovered.aside += [(kind, name) for name in names]
    folder = f"{store}/{QUARANTINE}/{kind}"
    recovered.lost.append(f"{missing} of {len(names)} files of {kind}; they are kept in {folder}")


def _is_index(path: Path, alone: bool) -> bool:
    with closing(open_for_reading(path, alone=alone)) as source:
        try:
            return bool(names_in_schema(source))
        except DatabaseError:
            return False


def _lost_before(source: Raw) -> list[dict[str, Any]]:
    """What an earlier start has left out of the old index (maintenance/index_repair.py)."""
    rows = _Rows(source, "lost_rows", ["table_name", "key", "name", "dataset"])
    return [row for row in rows if row["table_name"] in (*TABLES, "datasets", "trajectories")]


def _described(row: dict[str, Any]) -> str:
    """A damaged row by what is known of it."""
    name = next((row[key] for key in ("id", "name", "key", "alias") if row.get(key)), None)
    known = {k: v for k, v in row.items() if k in ("pk", "run_pk", "version", "step", "seed")}
    text = str(name if name is not None else known)[:80]
    return text.encode("utf-8", "replace").decode()


def _lists(*texts: Any) -> bool:
    """Whether all texts are JSON lists: a damaged page may contain anything."""
    try:
        return all(isinstance(json.loads(text), list) for text in texts)
    except (ValueError, TypeError, RecursionError):
        return False


class _Rows:
    """Intact rows of a table of another file, as dicts."""

    def __init__(self, source: Raw, table: str, columns: Sequence[str]):
        self._source, self._table, self._columns = source, table, columns
        self.trouble = ""
        """Why a part was not read."""
        self.lost: list[dict[str, Any]] = []
        """What is known of damaged and unread rows."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            reader = TableReader(self._source, self._table)
            names = [name for name in self._columns if name in reader.columns]
            if not names:
                # Indexes from before revision 0012 have no videos.
                self.trouble = "" if self._table == "videos" else "there is no such table"
                return
            for row in reader.rows():
                yield {name: row[name] for name in names}
            self.lost = reader.lost()
            self.trouble = reader.unread
        except DatabaseError as error:
            self.trouble = str(error)


def _fits(
    table: str, row: dict[str, Any], kept: dict[str, set[int]], files: dict[str, set[str]]
) -> bool:
    """Whether everything that the row refers to exists."""
    for key in metadata.tables[table].foreign_keys:
        if row[key.parent.name] not in kept[key.column.table.name]:
            return False
    return table not in files or row["file"] in files[table]


def _has_checksums(row: dict[str, Any], store: Store, recovered: Recovered) -> bool:
    """Compute the checksums that the row of a policy lacks; returns False if its file is damaged.

    Indexes from before revision 0005 have none.
    """
    if row.get("checksums") is not None:
        return True
    try:
        file = store.examine("policies", row["file"])
    except OSError:
        file = None
    if file is None or file.sha256 != row["sha256"]:
        recovered.damaged.add(row["file"])
        recovered.lost.append(f"policy {row['version']}: its file {row['file']} is damaged")
        return False
    row["checksums"] = file.checksums
    return True


def _dataset(row: dict[str, Any]) -> dict[str, Any] | None:
    """Columns of a dataset, with JSON parsed; None where a damaged page left anything else."""
    try:
        parsed = {name: json.loads(row[name]) for name in ("spec", "tags")}
        digest = EnvSpec.from_json(parsed["spec"]).digest
        fits = (
            digest == row["spec_digest"]
            and isinstance(parsed["tags"], list)
            and isinstance(row["description"], str)
            and isinstance(row.get("created_by", ""), str)
            and all(type(row[name]) is int for name in ("next_seq", "evicted"))
            and all(isinstance(row[name], int | None) for name in CAPACITY)
            and type(row["created_at"]) is float
            and isinstance(row["last_ingest_at"], float | None)
        )
    except (InvalidData, ValueError, TypeError, KeyError, RecursionError):
        return None
    return row | parsed if fits else None


def _insert(connection: Connection, table: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        # Without types: JSON is copied as text. A damaged page may contain rows that violate a
        # constraint.
        connection.execute(insert_or_skip(sa.table(table, *map(sa.column, rows[0]))), rows)
