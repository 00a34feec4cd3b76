"""Recovers what an index stored besides the data: from the readable part of the old index file, and
from the policy files, which name their run.

rebuild.py calls it on an index that is still empty in these tables. A damaged index yields the rows
on its readable pages; `Recovered.lost` lists in words what is missing.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.checksums import examine
from server.index.tables import metadata, policies, runs
from server.storage.store import Store
from stepwell.messages import CreateRun

# In this order: each refers only to earlier ones.
TABLES = ("runs", "metrics", "policies", "policy_aliases", "evaluations", "tokens", "audit")
OWNERS = {"metrics": ("run_pk", "runs"), "policies": ("run_pk", "runs")}
OWNERS["policy_aliases"] = ("policy_pk", "policies")
LABELS = ("tags", "flags", "notes")
CAPACITY = ("capacity_trajectories", "capacity_steps", "capacity_bytes")
DATASET = (*CAPACITY, "description", "tags")
ROWS_AT_ONCE = 1000
LONGEST_HEADER = 100_000_000
MAX_NUMBER = 2**53
ASIDE = "lost-policies"


@dataclass(slots=True)
class Recovered:
    """What was recovered. `labels`: trajectory → labels set after it was stored."""

    counts: dict[str, int] = field(default_factory=dict)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def from_old_index(connection: Connection, store: Store, old: Path | None) -> Recovered:
    """Copy the registry of the index file `old`, and read its settings of datasets and labels."""
    found = Recovered(counts=dict.fromkeys(TABLES, 0))
    if old is None or not _is_index(old):
        found.lost += [
            "runs with their metrics and logs, evaluations, tokens, the audit",
            "capacities, descriptions and tags of datasets; labels set on trajectories after"
            " they were stored, including 'protected'",
        ]
        return found
    files = set(store.names("policies"))
    kept: dict[str, set[int]] = {}
    with contextlib.closing(sqlite3.connect(f"file:{old}?mode=ro", uri=True)) as source:
        for table in TABLES:
            rows = _Rows(source, table, [column.name for column in metadata.tables[table].c])
            kept[table] = set()
            rest = iter(rows)
            while some := list(islice(rest, ROWS_AT_ONCE)):
                good = [row for row in some if _fits(table, row, kept, files)]
                _insert(connection, table, good)
                found.counts[table] += len(good)
                kept[table] |= {row["pk"] for row in good if "pk" in row}
            if rows.trouble:
                found.lost.append(
                    f"{table}: {found.counts[table]} rows read, the others lost ({rows.trouble})"
                )
        rows = _Rows(source, "datasets", ["name", "spec_digest", *DATASET])
        for row in rows:
            if _lists(row["tags"]):
                found.datasets[row.pop("name")] = row | {"tags": json.loads(row["tags"])}
        labels = _Rows(source, "trajectories", ["id", "partition", *LABELS])
        for row in labels:
            if row["partition"] == "fifo" and all(row[name] in ("", "[]") for name in LABELS):
                continue  # most rows: no labels were set
            if row["partition"] in ("fifo", "protected") and _lists(row["tags"], row["flags"]):
                found.labels[row.pop("id")] = row
        if labels.trouble:
            # Which trajectories are protected is unknown, so none may be evicted.
            for row in found.datasets.values():
                row |= dict.fromkeys(CAPACITY)
            found.lost.append("capacities of datasets: datasets are now unlimited, set them again")
        for what, read in (("settings of datasets", rows), ("labels of trajectories", labels)):
            if read.trouble:
                found.lost.append(f"{what}, in part ({read.trouble})")
    return found


def from_policy_files(connection: Connection, store: Store, recovered: Recovered) -> None:
    """Insert rows for policy files without a row; set aside files that do not name their run.

    A trainer's policy names its run and its version. Orphan sweeping would delete the other files
    if they stayed in place.
    """
    known = set(connection.execute(sa.select(policies.c.file)).scalars())
    aside = 0
    for name in sorted(set(store.names("policies")) - known):
        path = store.path("policies", name)
        document = _policy_document(path)
        if document is None or not _add_policy(connection, path, document, recovered):
            (store.root / ASIDE).mkdir(exist_ok=True)
            path.rename(store.root / ASIDE / name)
            aside += 1
    if aside:
        recovered.lost.append(
            f"run and version of {aside} policy files; they are kept in {store.root / ASIDE}"
        )


def _add_policy(
    connection: Connection, path: Path, document: dict[str, Any], recovered: Recovered
) -> bool:
    """Insert the policy, and its run if missing; returns whether the policy exists now."""
    extra, version = document["extra"], document["step"]
    made = path.stat().st_mtime
    try:
        run = CreateRun(
            name=extra["run"],
            kind="train",
            config=extra.get("training") or {},
            git_commit=extra.get("git_commit") or "",
            snapshots=[extra["snapshot"]] if extra.get("snapshot") else [],
        )
    except (KeyError, ValueError):
        return False
    r, p = runs.c, policies.c
    pk = connection.execute(sa.select(r.pk).where(r.name == run.name)).scalar()
    if pk is None:
        values = {
            **run.model_dump(exclude={"exist_ok"}),
            "status": "stopped",
            "notes": "rebuilt from its policy files",
            "created_at": made,
            "heartbeat_at": made,
            "finished_at": made,
        }
        pk = connection.execute(sa.insert(runs).values(values).returning(r.pk)).scalar_one()
        recovered.counts["runs"] += 1
    taken = sa.select(p.pk).where(p.run_pk == pk, p.version == version)
    if connection.execute(taken).scalar() is not None:
        return False
    file = examine(path)
    said = {k: extra[k] for k in ("run", "snapshot", "git_commit") if k in extra}
    connection.execute(
        sa.insert(policies).values(
            run_pk=pk,
            version=version,
            sha256=file.sha256,
            file=path.name,
            bytes=file.size,
            checksums=file.checksums,
            verified_at=made,
            step=version,
            metadata={**said, "step": version},
            created_at=made,
        )
    )
    recovered.counts["policies"] += 1
    return True


def _policy_document(path: Path) -> dict[str, Any] | None:
    """The metadata in the header of a policy file (safetensors); None for other files."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(LONGEST_HEADER, path.stat().st_size):
                return None
            document = json.loads(json.loads(file.read(size))["__metadata__"]["policy"])
        step = document["step"]
        if type(step) is int and 0 <= step <= MAX_NUMBER and isinstance(document["extra"], dict):
            return dict(document)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _is_index(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source:
        try:
            return bool(source.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        except sqlite3.DatabaseError:
            return False


def _lists(*texts: Any) -> bool:
    """Whether all texts are JSON lists: a damaged page may contain anything."""
    try:
        return all(isinstance(json.loads(text), list) for text in texts)
    except (ValueError, TypeError, RecursionError):
        return False


class _Rows:
    """Rows of a table of another file, as dicts, up to the first unreadable one."""

    def __init__(self, source: sqlite3.Connection, table: str, columns: Sequence[str]):
        self._source, self._table, self._columns = source, table, columns
        self.trouble = ""
        """Why reading stopped early."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            there = {row[1] for row in self._source.execute(f"PRAGMA table_info({self._table})")}
            names = [name for name in self._columns if name in there]
            if not names:
                self.trouble = "there is no such table"
                return
            cursor = self._source.execute(f"SELECT {', '.join(names)} FROM {self._table}")
            for row in cursor:
                yield dict(zip(names, row, strict=True))
        except sqlite3.DatabaseError as error:
            self.trouble = str(error)


def _fits(table: str, row: dict[str, Any], kept: dict[str, set[int]], files: set[str]) -> bool:
    """Whether everything that the row refers to exists."""
    if table in OWNERS:
        column, owner = OWNERS[table]
        if row[column] not in kept[owner]:
            return False
    return table != "policies" or row["file"] in files


def _insert(connection: Connection, table: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        # Without types: JSON is copied as text. OR IGNORE: a damaged page may contain rows that
        # violate a constraint.
        plain = sa.table(table, *map(sa.column, rows[0]))
        connection.execute(plain.insert().prefix_with("OR IGNORE"), rows)
