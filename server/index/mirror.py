"""The index as Parquet files that the SQL worker can read: it must not open the live SQLite.

    trajectories   in pieces of PIECE rows by `pk`; a piece is rewritten when one of its rows has a
                   newer `change_id` than at the last refresh (tables.py), so a query pays for what
                   changed; beside each piece lie the columns of a manifest for its rows
                   (manifest_columns.py)
    metrics        in pieces of a few runs each; checked when one of them had a heartbeat, rewritten
                   when a piece's counts and sums changed
    all others     small; rewritten when their rows changed

Only living trajectories are here. A cache and nothing more: it is emptied at every start, refreshed
before every query, and costs one PRAGMA when nothing was committed. Replaced files stay a while for
the queries that still read them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from server.checksums import Source, checksums_of
from server.index.manifest_columns import CHANGED, changed_rows, locations_of, locations_of_rows
from server.index.sql_tables import (
    EXCLUDED,
    METRIC_SUMS,
    METRICS,
    SMALL,
    TABLES,
    TRAJECTORIES,
    TRAJECTORY_SQL,
)
from stepwell._background import BackgroundLoop

PIECE = 8192
RUNS_PER_PIECE = 8
KEEP_SECONDS = 180.0
"""Longer than any query may run."""

_ARROW: dict[str, pa.DataType] = {
    "VARCHAR": pa.string(),
    "BIGINT": pa.int64(),
    "INTEGER": pa.int32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "VARCHAR[]": pa.list_(pa.string()),
    "BIGINT[]": pa.list_(pa.int64()),
    "DOUBLE[]": pa.list_(pa.float64()),
    "MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64()),
}


@dataclass(frozen=True, slots=True)
class MirrorState:
    """What the files were at one moment. Paths are relative to the data directory."""

    version: int
    """Equal versions are equal states."""
    tables: dict[str, list[str]]
    specs: dict[str, str]
    """Dataset → its EnvSpec as JSON."""
    shards: dict[str, list[str]]
    """Dataset → its living shards."""
    change_id: int = -1
    epoch: int = -1
    """What `trajectories` and the locations have seen of the index's counters."""
    locations: dict[int, str] = field(default_factory=dict)
    """Number of a piece (pk / PIECE) → file of its locations."""
    excluded: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Dataset → its damaged files, and how many trajectories lie in each."""
    checksums: Mapping[str, bytes] = field(default_factory=dict)
    """Of all these files (server/checksums.py)."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Trajectories whose `change_id` is newer than some earlier one's."""

    change_id: int
    locations: pa.RecordBatch
    """Of those that are alive."""
    columns: pa.Table
    """Of the same rows: `id`, which is the row's number here, and columns of `trajectories`."""
    dead: dict[str, NDArray[np.int64]]
    """Dataset → seqs of those that are not."""


@dataclass(slots=True)
class _Piece:
    path: str | None
    """None: no row of it is alive."""
    stamp: Any
    seqs: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Dataset → least and greatest seq in this piece of `trajectories`."""
    locations: str | None = None


@dataclass(slots=True)
class _Content:
    version: int = 0
    change_id: int = -1
    epoch: int = -1
    pieces: dict[str, dict[int, _Piece]] = field(default_factory=dict)
    specs: dict[str, str] = field(default_factory=dict)
    shards: dict[str, list[str]] = field(default_factory=dict)
    excluded: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    checksums: dict[str, bytes] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    """Pieces of `trajectories` whose files are damaged."""
    seen: dict[str, int] = field(default_factory=dict)
    """Table → the database's version when it was last looked at."""


class Mirror:
    """Keeps `directory` in step with the index. Thread-safe; one per process."""

    def __init__(self, index_file: Path, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.iterdir():
            old.unlink()
        self._directory = directory
        self._lock = threading.Lock()
        self._db = _open(index_file)
        # What changed is read beside a mirror that is being filled, and does not wait for it.
        self._changes_lock = threading.Lock()
        self._changes_db = _open(index_file)
        self._content = _Content(pieces={name: {} for name in TABLES})
        self._checksums: tuple[int, dict[str, bytes]] = (-1, {})
        """Of the content at a version: replaced, never changed, so that states can share it."""
        self._garbage: list[tuple[float, str]] = []
        self._written = 0
        self._filling = BackgroundLoop("mirror", self._fill, every=0.0, expected=(OSError,))

    def state(self, sql: str | None = None) -> MirrorState:
        """The state now, refreshed as far as `sql` may look (None: everything).

        A table whose name is nowhere in the text cannot be read by it.
        """
        text = None if sql is None else sql.lower()
        wanted = {name for name in TABLES if text is None or name in text}
        if text is None or "steps" in text:
            wanted |= {"trajectories", "steps"}
        with self._lock:
            self._refresh(wanted)
            self._collect_garbage()
            content = self._content
            if self._checksums[0] != content.version:
                self._checksums = (content.version, dict(content.checksums))
            return MirrorState(
                content.version,
                {
                    name: [p.path for p in pieces.values() if p.path is not None]
                    for name, pieces in content.pieces.items()
                },
                dict(content.specs),
                dict(content.shards),
                content.change_id,
                content.epoch,
                {
                    number: piece.locations
                    for number, piece in content.pieces["trajectories"].items()
                    if piece.locations is not None
                },
                dict(content.excluded),
                self._checksums[1],
            )

    def read_locations(self, state: MirrorState, path: str) -> pa.RecordBatch:
        """A file of `state.locations`. Raises `Corrupt`, and FileNotFoundError when it is gone
        (KEEP_SECONDS)."""
        source = Source(self._directory.parent / path, checksums=state.checksums[path])
        return pa.ipc.open_file(pa.py_buffer(source.read())).get_batch(0)

    def count_changes(self, change_id: int, epoch: int, most: int) -> int | None:
        """How many trajectories have a newer `change_id`, counted up to `most`; None when rows
        vanished in bulk meanwhile."""
        with self._changes_lock:
            db = self._changes_db
            found = dict(db.execute("SELECT name, value FROM counters"))
            if int(found.get("epoch", 0)) != epoch:
                return None
            sql = "SELECT count(*) FROM (SELECT 1 FROM trajectories WHERE change_id > ? LIMIT ?)"
            return int(db.execute(sql, (change_id, most)).fetchone()[0])

    def changes(self, change_id: int, epoch: int, columns: Iterable[str]) -> Changes | None:
        """All that changed since, at one moment; None when rows vanished in bulk meanwhile.

        `columns` are names of `trajectories`, those of the SQL surface.
        """
        with self._changes_lock:
            db = self._changes_db
            db.execute("BEGIN")
            try:
                found = dict(db.execute("SELECT name, value FROM counters"))
                if int(found.get("epoch", 0)) != epoch:
                    return None
                return _changes(db, change_id, int(found.get("change_id", 0)), list(columns))
            finally:
                db.execute("ROLLBACK")

    def discard(self, files: Iterable[str]) -> None:
        """These could not be read as they should: pieces are made anew, checksums of shards are
        read from the index again."""
        wanted = set(files)
        with self._lock:
            content = self._content
            for table, pieces in content.pieces.items():
                for number, piece in pieces.items():
                    if wanted & {piece.path, piece.locations}:
                        piece.stamp = None
                        if table == "trajectories":
                            content.lost.add(number)
            for file in wanted:
                content.checksums.pop(file, None)
            content.seen.clear()
            content.version += 1

    def start(self) -> None:
        """Fill it ahead of the first query: a million trajectories take ten seconds."""
        self._filling.start()

    @property
    def trouble(self) -> str:
        """Why it cannot be filled ahead; queries try it themselves."""
        return self._filling.trouble

    def _fill(self) -> None:
        self.state()
        self._filling.stop()

    def close(self) -> None:
        self._filling.stop()
        with self._lock, self._changes_lock:
            self._db.close()
            self._changes_db.close()

    def _refresh(self, wanted: set[str]) -> None:
        content = self._content
        seen = int(self._db.execute("PRAGMA data_version").fetchone()[0])
        stale = {name for name in wanted if content.seen.get(name) != seen}
        if not stale:
            return
        self._db.execute("BEGIN")
        try:
            # Asked again inside: what is read now is of this version or newer, never older.
            seen = int(self._db.execute("PRAGMA data_version").fetchone()[0])
            if stale & {"trajectories", "steps"}:
                self._refresh_trajectories()
            if "steps" in stale:
                self._refresh_shards()
            if "metrics" in stale:
                self._refresh_metrics()
            for name in stale & SMALL.keys():
                self._refresh_small(name)
            for name in stale:
                content.seen[name] = seen
        finally:
            self._db.execute("ROLLBACK")

    def _refresh_trajectories(self) -> None:
        content = self._content
        counters = dict(self._db.execute("SELECT name, value FROM counters"))
        change_id, epoch = int(counters.get("change_id", 0)), int(counters.get("epoch", 0))
        if epoch != content.epoch:
            content.change_id, content.epoch = -1, epoch
            for number in list(content.pieces["trajectories"]):
                self._put("trajectories", number, [], None)
        if change_id == content.change_id and not content.lost:
            return
        changed = self._db.execute(
            f"SELECT DISTINCT pk / {PIECE} FROM trajectories WHERE change_id > ?",
            (content.change_id,),
        )
        dirty = {int(number) for (number,) in changed} | self._pieces_with_removals(
            content.change_id
        )
        dirty |= content.lost
        content.lost = set()
        for number in sorted(dirty):
            low = number * PIECE
            rows = self._db.execute(TRAJECTORIES, (low, low + PIECE - 1)).fetchall()
            self._put("trajectories", number, rows, None)
        content.change_id = change_id

    def _pieces_with_removals(self, change_id: int) -> set[int]:
        """Pieces that lost rows for good: evicted, then removed, since the last look.

        A tombstone does not know its `pk`, but within a dataset `pk` and `seq` rise together.
        """
        lost: dict[str, list[int]] = {}
        for name, seq in self._db.execute(
            "SELECT d.name, b.seq FROM tombstones AS b JOIN datasets AS d ON d.pk = b.dataset_pk"
            " WHERE b.change_id > ?",
            (change_id,),
        ):
            lost.setdefault(name, []).append(seq)
        gone = {name: np.asarray(seqs) for name, seqs in lost.items()}
        return {
            number
            for number, piece in self._content.pieces["trajectories"].items()
            for name, (low, high) in piece.seqs.items()
            if name in gone and bool(((gone[name] >= low) & (gone[name] <= high)).any())
        }

    def _refresh_shards(self) -> None:
        content = self._content
        shards: dict[str, list[str]] = {}
        fresh: dict[str, int] = {}
        for name, partition, shard, pk in self._db.execute(
            "SELECT d.name, s.partition, s.id, s.pk FROM shards AS s JOIN datasets AS d"
            " ON d.pk = s.dataset_pk WHERE s.state = 'live' ORDER BY s.id"
        ):
            file = f"shards/{partition}/{shard}.parquet"
            shards.setdefault(name, []).append(file)
            if file not in content.checksums:
                fresh[file] = pk
        excluded: dict[str, list[tuple[str, int]]] = {}
        for name, file, count in self._db.execute(EXCLUDED):
            excluded.setdefault(name, []).append((file, count))
        specs = dict(self._db.execute("SELECT name, spec FROM datasets ORDER BY name"))
        if (shards, excluded, specs) != (content.shards, content.excluded, content.specs):
            gone = set(chain(*content.shards.values())) - set(chain(*shards.values()))
            content.checksums = {f: c for f, c in content.checksums.items() if f not in gone}
            content.shards, content.excluded, content.specs = shards, excluded, specs
            content.version += 1
        for file, pk in fresh.items():
            row = self._db.execute("SELECT checksums FROM shards WHERE pk = ?", (pk,)).fetchone()
            content.checksums[file] = row[0] or b""  # empty: of nothing, so it will be looked at

    def _refresh_metrics(self) -> None:
        """Check only pieces with a run that had a heartbeat: points never come without one
        (server/runs.py), and of a run that has ended nothing is read again."""
        pieces = self._content.pieces["metrics"]
        heard: dict[int, list[tuple[int, float, float]]] = {}
        for row in self._db.execute("SELECT pk, created_at, heartbeat_at FROM runs ORDER BY pk"):
            heard.setdefault(row[0] // RUNS_PER_PIECE, []).append(row)
        for number in pieces.keys() - heard.keys():
            if pieces[number].path is not None:
                self._put("metrics", number, [], None)
        for number, runs in heard.items():
            old = pieces.get(number)
            if old is not None and old.stamp is not None and old.stamp[0] == runs:
                continue
            low = number * RUNS_PER_PIECE
            bounds = (low, low + RUNS_PER_PIECE - 1)
            which = [(pk, created_at) for pk, created_at, _ in runs]
            content = (which, self._db.execute(METRIC_SUMS, bounds).fetchone())
            if old is not None and old.stamp is not None and old.stamp[1] == content:
                old.stamp = (runs, content)
                continue
            rows = self._db.execute(METRICS, bounds).fetchall()
            self._put("metrics", number, rows, (runs, content))

    def _refresh_small(self, name: str) -> None:
        rows = self._db.execute(SMALL[name]).fetchall()
        stamp = hash(tuple(rows))
        old = self._content.pieces[name].get(0)
        if old is None or old.stamp != stamp:
            self._put(name, 0, rows, stamp)

    def _put(self, table: str, number: int, rows: list[tuple[Any, ...]], stamp: Any) -> None:
        """Replace one piece by these rows."""
        pieces = self._content.pieces[table]
        old = pieces.pop(number, None)
        if old is not None:
            for gone in (old.path, old.locations):
                if gone is not None:
                    self._garbage.append((time.monotonic(), gone))
                    self._content.checksums.pop(gone, None)
        piece = pieces[number] = _Piece(None, stamp)
        if rows:
            self._written += 1
            name = f"{table}_{number}_{self._written}"
            folder, columns = self._directory.name, TABLES[table]
            values = dict(zip([n for n, _ in columns], zip(*rows, strict=True), strict=False))
            piece.path = f"{folder}/{name}.parquet"
            made = _write(self._directory / f"{name}.parquet", columns, values)
            self._content.checksums[piece.path] = made
            if table == "trajectories":
                piece.seqs = _seqs(rows)
                locations = locations_of(values, values["_pk"], [row[-1] for row in rows])
                name = f"places_{number}_{self._written}.arrow"
                piece.locations = f"{folder}/{name}"
                made = _write_arrow(self._directory / name, locations)
                self._content.checksums[piece.locations] = made
        self._content.pieces[table] = dict(sorted(pieces.items()))
        self._content.version += 1

    def _collect_garbage(self) -> None:
        limit = time.monotonic() - KEEP_SECONDS
        while self._garbage and self._garbage[0][0] < limit:
            _, path = self._garbage.pop(0)
            (self._directory.parent / path).unlink(missing_ok=True)


def _seqs(rows: list[tuple[Any, ...]]) -> dict[str, tuple[int, int]]:
    """Dataset → (least, greatest) seq; the columns stand in TABLES["trajectories"]."""
    found: dict[str, tuple[int, int]] = {}
    for _, seq, dataset, *_rest in rows:
        low, high = found.get(dataset, (seq, seq))
        found[dataset] = (min(low, seq), max(high, seq))
    return found


def _write(path: Path, columns: list[tuple[str, str]], values: dict[str, tuple[Any, ...]]) -> bytes:
    """Returns its checksums: of what was to be written, not of what the disk made of it."""
    arrays = [pa.array(_convert(kind, values[name]), type=_ARROW[kind]) for name, kind in columns]
    table = pa.Table.from_arrays(arrays, names=[name for name, _ in columns])
    unique = {"id", "digest", "episode_id", "notes", "config", "spec", "error", "returns"}
    repeated = [n for n, kind in columns if kind == "VARCHAR" and n not in unique]
    unfinished = path.with_suffix(".tmp")
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="lz4", use_dictionary=repeated, row_group_size=PIECE)
    content = memoryview(sink.getvalue())
    unfinished.write_bytes(content)
    os.chmod(unfinished, 0o644)
    os.rename(unfinished, path)
    return checksums_of(content)


def _write_arrow(path: Path, batch: pa.RecordBatch) -> bytes:
    """Returns its checksums."""
    unfinished = path.with_suffix(".tmp")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = memoryview(sink.getvalue())
    unfinished.write_bytes(content)
    os.rename(unfinished, path)
    return checksums_of(content)


def _open(index_file: Path) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"file:{index_file}?mode=ro", uri=True, check_same_thread=False, isolation_level=None
    )
    db.execute("PRAGMA busy_timeout = 30000")
    return db


def _changes(db: sqlite3.Connection, since: int, change_id: int, columns: list[str]) -> Changes:
    """Inside a transaction: rows by `change_id`, without a join (names come from small tables)."""
    names = dict(db.execute("SELECT pk, name FROM datasets"))
    dead: dict[str, list[int]] = {}
    for table, where in (("trajectories", " AND state = 'evicted'"), ("tombstones", "")):
        for pk, seq in db.execute(
            f"SELECT dataset_pk, seq FROM {table} WHERE change_id > ?{where}", (since,)
        ):
            dead.setdefault(names[pk], []).append(seq)
    rows = changed_rows(db, since)
    shards = {0: None}
    for pk in np.unique(rows["shard_pk"]).tolist():
        if pk:
            shards[pk] = db.execute("SELECT id FROM shards WHERE pk = ?", (pk,)).fetchone()[0]
    locations = locations_of_rows(rows, names, shards)
    return Changes(
        change_id,
        locations,
        _changed_columns(db, since, rows["pk"], locations, columns),
        {name: np.asarray(seqs, np.int64) for name, seqs in dead.items()},
    )


def _changed_columns(
    db: sqlite3.Connection,
    since: int,
    pks: NDArray[np.int64],
    locations: pa.RecordBatch,
    columns: list[str],
) -> pa.Table:
    """What a selection reads of changed rows; from `locations` where that has it."""
    kinds = dict(TABLES["trajectories"])
    arrays: dict[str, Any] = {"id": pa.array(np.arange(len(pks)))}
    others = []
    for name in columns:
        if name in locations.schema.names:
            arrays[name] = locations[name].cast(_ARROW[kinds[name]])
        else:
            others.append(name)
    if others:
        asked = ", ".join(TRAJECTORY_SQL[name] for name in others)
        rows = db.execute(f"SELECT t.pk, {asked} {CHANGED}", (since,)).fetchall()
        order = np.argsort([row[0] for row in rows])[np.argsort(np.argsort(pks))]
        for i, name in enumerate(others, 1):
            values = _convert(kinds[name], [row[i] for row in rows])
            arrays[name] = pa.array(values, _ARROW[kinds[name]]).take(pa.array(order))
    return pa.table(arrays)


def _convert(kind: str, values: Iterable[Any]) -> list[Any]:
    """SQLite's values as Arrow takes them; lists and maps lie there as JSON text."""
    if kind == "BOOLEAN":
        return [None if v is None else bool(v) for v in values]
    if kind.endswith("[]"):
        return _parsed(values, list)
    if kind.startswith("MAP"):
        return _parsed(values, _map_items)
    return list(values)


def _map_items(document: Any) -> list[tuple[str, float]]:
    return [(str(key), float(value)) for key, value in document.items() if value is not None]


def _parsed(values: Iterable[Any], make: Callable[[Any], Any]) -> list[Any]:
    # Nearly all are empty or alike: each text is parsed once.
    known: dict[str, Any] = {}
    out = []
    for value in values:
        if value not in known:
            known[value] = make(json.loads(value or "[]"))
        out.append(known[value])
    return out
