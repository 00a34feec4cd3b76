"""The index as Parquet files for the SQL workers, which must not open the live one.

    trajectories   in pieces of PIECE rows by `pk`; a piece is rewritten when one of its rows has a
                   newer `change_id` than at the last refresh (tables.py), so a query pays only for
                   changes; beside each piece are the columns of a manifest for its rows
                   (manifest_columns.py)
    metrics        in pieces of a few runs each; checked when one of the runs had a heartbeat,
                   rewritten when the piece's counts and sums changed
    version_trajectories   a piece for each version, which never changes
    annotations    not written here: its pieces are the files of annotations themselves
    all others     small; rewritten when their rows changed

`Mirror.changes` (changes.py) reads recent changes from the index itself.

Evicted trajectories are left out. The mirror is a cache, refreshed before every query, which costs
one look at a number if nothing was committed. Replaced files are kept for KEEP_SECONDS, because
running queries still read them. The large tables survive a restart (mirror_base.py): every
`save_every` seconds, and when the service stops, the pieces of this moment become the base, from
which the next start goes on; their files stay until a newer base has replaced it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from server.index import mirror_base
from server.index.changes import ChangeReader, counters
from server.index.db import Database
from server.index.dialect import BY_KEY_SQL, commit_number, open_for_reading
from server.index.manifest_columns import SCHEMA, read_columns
from server.index.mirror_base import KEPT, Base, Piece
from server.index.sql_tables import (
    EXCLUDED,
    METRIC_SUMS,
    METRICS,
    SMALL,
    TABLES,
    TRAJECTORIES,
    VERSION_TRAJECTORIES,
    arrow_array,
)
from server.storage.checksums import Source, checksums_of
from stepwell._background import BackgroundLoop

log = structlog.get_logger("stepwell.mirror")
PIECE = 8192
RUNS_PER_PIECE = 8
AT_ONCE, YIELD = 4, 0.001
"""Pieces of `trajectories` that are written at once; between them, queries of other tables are
answered. Then a state is complete when no piece is left."""
KEEP_SECONDS = 180.0
"""Longer than the deadline of any query."""
_OF_PIECE = f"trajectories AS t {BY_KEY_SQL} WHERE t.pk BETWEEN ? AND ? AND t.state <> 'evicted'"


@dataclass(frozen=True, slots=True)
class MirrorState:
    """The files at one moment. Paths are relative to the data directory."""

    version: int
    """Equal versions mean equal states."""
    tables: dict[str, list[str]]
    specs: dict[str, str]
    """Dataset → its EnvSpec as JSON."""
    shards: dict[str, list[str]]
    """Dataset → its live shards, the one with the most rows first: DuckDB estimates all from it
    (sql/query_tables.py)."""
    change_id: int = -1
    epoch: int = -1
    """The index's counters at which `trajectories` and the locations were refreshed."""
    locations: dict[int, str] = field(default_factory=dict)
    """Number of a piece (pk / PIECE) → file of its locations."""
    excluded: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Dataset → its damaged files, with the number of trajectories in each."""
    checksums: Mapping[str, bytes] = field(default_factory=dict)
    """Checksums of all these files (server/storage/checksums.py)."""
    most_rows: dict[str, int] = field(default_factory=dict)
    """Dataset → rows of its first shard."""


class Mirror:
    """Keeps `directory` up to date with the index. Thread-safe; one per process."""

    def __init__(
        self,
        index_file: Path,
        directory: Path,
        db: Database | None = None,
        save_every: float = 0.0,
    ):
        """With `db`, into which marks are written, the next start finds this mirror's base."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._lock = threading.Lock()
        self._db = open_for_reading(index_file)
        self.changes = ChangeReader(index_file)
        self._version = 0
        self._change_id = self._epoch = -1
        self._pieces: dict[str, dict[int, Piece]] = {name: {} for name in TABLES}
        self._specs: dict[str, str] = {}
        self._shards: dict[str, list[str]] = {}
        self._most_rows: dict[str, int] = {}
        self._excluded: dict[str, list[tuple[str, int]]] = {}
        self._checksums: dict[str, bytes] = {}
        """Replaced, never mutated: states share it."""
        self._lost: set[int] = set()
        """Pieces of `trajectories` that are to be written: they have changed, or are damaged."""
        self._seen: dict[str, int] = {}
        """Table → the database's version at its last check."""
        self._garbage: list[tuple[float, str]] = []
        self._names = secrets.token_hex(6)
        """Prefix of this process's files, so that a name is never reused for other content."""
        self._written = 0
        self._marks, self._save_every = db, save_every
        self._saving = threading.Lock()
        self._saved: Base | None = None
        self._closed = False
        self._kept: set[str] = set()
        """Files of the base, and of the one that is being saved."""
        self._start_from(None if db is None else mirror_base.load(self._db, directory, _layout()))
        self._filling = BackgroundLoop("mirror", self._fill, every=save_every, expected=(OSError,))

    def _start_from(self, base: Base | None) -> None:
        """Take over the base, and remove every other file."""
        if base is not None:
            self._change_id, self._epoch = base.change_id, base.epoch
            self._pieces |= {name: dict(pieces) for name, pieces in base.pieces.items()}
            self._checksums = dict(base.checksums)
            self._kept, self._saved = set(base.checksums), base
        kept = {Path(file).name for file in self._kept}
        if base is not None:
            kept.add(mirror_base.NAME)
        for old in self._directory.iterdir():
            if old.name not in kept:
                old.unlink()

    def state(self, sql: str | None = None) -> MirrorState:
        """The current state; refreshes the tables that `sql` may read (None: all).

        A query cannot read a table whose name does not occur in its text.
        """
        text = None if sql is None else sql.lower()
        wanted = {name for name in TABLES if text is None or name in text}
        if text is None or "steps" in text:
            wanted |= {"trajectories", "steps"}
        if "annotations" in wanted:
            wanted.add("trajectories")  # those of the living are shown
        while True:
            with self._lock:
                self._refresh(wanted)
                if not self._lost or not wanted & {"trajectories", "steps"}:
                    self._collect_garbage()
                    return self._state()
            time.sleep(YIELD)  # to who waits for the lock

    def _state(self) -> MirrorState:
        return MirrorState(
            self._version,
            {
                name: [p.path for p in pieces.values() if p.path is not None]
                for name, pieces in self._pieces.items()
            },
            self._specs,
            self._shards,
            self._change_id,
            self._epoch,
            {
                number: piece.locations
                for number, piece in self._pieces["trajectories"].items()
                if piece.locations is not None
            },
            self._excluded,
            self._checksums,
            self._most_rows,
        )

    def read_locations(self, state: MirrorState, path: str) -> pa.RecordBatch:
        """A file of `state.locations`. Raises `Corrupt`, and FileNotFoundError if it was deleted
        (KEEP_SECONDS)."""
        source = Source(self._directory.parent / path, checksums=state.checksums[path])
        return pa.ipc.open_file(pa.py_buffer(source.read())).get_batch(0)

    def discard(self, files: Iterable[str]) -> None:
        """Discard damaged files: pieces are rewritten, checksums of shards are read from the index
        again."""
        wanted = set(files)
        with self._lock:
            for table, pieces in self._pieces.items():
                for number, piece in pieces.items():
                    if wanted & {piece.path, piece.locations}:
                        piece.stamp = None
                        if table == "trajectories":
                            self._lost.add(number)
            self._forget_checksums(wanted)
            self._seen.clear()
            self._version += 1

    def start(self) -> None:
        """Fill the mirror before the first query: without a base, a million trajectories take ten
        seconds."""
        self._filling.start()

    @property
    def trouble(self) -> str:
        """Why it cannot be filled in advance; queries then try themselves."""
        return self._filling.trouble

    def _fill(self) -> None:
        if self._marks is None or not self._save_every:
            self.state()
            self._filling.stop()
        else:
            self.save()

    def save(self) -> None:
        """Make the current pieces the base of the next start, if they have changed."""
        if self._marks is None:
            return
        with self._saving:
            self.state(" ".join(KEPT))
            with self._lock:
                base = self._base()
                if base is None or base == self._saved:
                    return
                if not base.checksums and not self._kept:  # nothing to keep, and nothing was
                    return
                self._kept |= base.checksums.keys()
            mirror_base.save(self._marks, self._directory, base, _layout())
            with self._lock:
                self._saved, self._kept = base, set(base.checksums)

    def _base(self) -> Base | None:
        """None while damaged files wait to be written again."""
        pieces = {
            name: {number: replace(piece) for number, piece in self._pieces[name].items()}
            for name in KEPT
        }
        files = [f for parts in pieces.values() for piece in parts.values() for f in piece.files]
        if self._lost or not all(file in self._checksums for file in files):
            return None
        checksums = {file: self._checksums[file] for file in files}
        return Base(self._change_id, self._epoch, pieces, checksums)

    def close(self) -> None:
        """Save, and close the index. Has no effect the second time."""
        self._filling.stop()
        if self._closed:
            return
        self._closed = True
        if self._change_id >= 0:
            try:
                self.save()
            except BaseException as error:  # the next start fills it: closing goes on
                log.error("the base of the SQL tables was not saved", exc_info=error)
        self.changes.close()
        with self._lock:
            self._db.close()

    def _refresh(self, wanted: set[str]) -> None:
        seen = commit_number(self._db)
        stale = {name for name in wanted if self._seen.get(name) != seen}
        if not stale:
            return
        self._db.execute("BEGIN")
        try:
            # Read again inside the transaction: the data is of this version or newer, never older.
            seen = commit_number(self._db)
            if stale & {"trajectories", "steps"}:
                self._refresh_trajectories()
            if "steps" in stale:
                self._refresh_shards()
            if "metrics" in stale:
                self._refresh_metrics()
            if "version_trajectories" in stale:
                self._refresh_versions()
            if "annotations" in stale:
                self._refresh_annotations()
            for name in stale & SMALL.keys():
                self._refresh_small(name)
            for name in stale - ({"trajectories", "steps"} if self._lost else set()):
                self._seen[name] = seen
        finally:
            self._db.execute("ROLLBACK")

    def _refresh_trajectories(self) -> None:
        change_id, epoch, forgotten = counters(self._db)
        if epoch != self._epoch or forgotten > self._change_id >= 0:
            self._change_id, self._epoch = -1, epoch
            for number in list(self._pieces["trajectories"]):
                self._put("trajectories", number, [], None)
        if change_id == self._change_id and not self._lost:
            return
        changed = self._db.execute(
            f"SELECT DISTINCT pk / {PIECE} FROM trajectories WHERE change_id > ?",
            (self._change_id,),
        )
        dirty = {int(number) for (number,) in changed} | self._lost
        dirty |= self._pieces_with_removals(self._change_id)
        self._lost, self._change_id = dirty, change_id
        for number in sorted(dirty)[:AT_ONCE]:
            self._put("trajectories", number, self._read_piece(number), None)
            self._lost.discard(number)

    def _read_piece(self, number: int) -> list[tuple[Any, ...]]:
        """The rows of a piece of `trajectories`: nothing else of them comes from the index, but
        their locations (manifest_columns.py)."""
        bounds = (number * PIECE, number * PIECE + PIECE - 1)
        return self._db.execute(TRAJECTORIES, bounds).fetchall()

    def _pieces_with_removals(self, change_id: int) -> set[int]:
        """Pieces from which evicted rows were removed since the last refresh.

        A tombstone has no `pk`, but within a dataset `pk` and `seq` increase together.
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
            for number, piece in self._pieces["trajectories"].items()
            for name, (low, high) in piece.seqs.items()
            if name in gone and bool(((gone[name] >= low) & (gone[name] <= high)).any())
        }

    def _refresh_shards(self) -> None:
        shards: dict[str, list[str]] = {}
        most_rows: dict[str, int] = {}
        fresh: dict[str, int] = {}
        for name, partition, shard, pk, rows in self._db.execute(
            "SELECT d.name, s.partition, s.id, s.pk, s.rows FROM shards AS s JOIN datasets AS d"
            " ON d.pk = s.dataset_pk WHERE s.state = 'live' ORDER BY s.id"
        ):
            file = f"shards/{partition}/{shard}.parquet"
            files = shards.setdefault(name, [])
            if rows > most_rows.get(name, -1):
                most_rows[name] = rows
                files.insert(0, file)
            else:
                files.append(file)
            if file not in self._checksums:
                fresh[file] = pk
        excluded: dict[str, list[tuple[str, int]]] = {}
        for name, file, count in self._db.execute(EXCLUDED):
            excluded.setdefault(name, []).append((file, count))
        specs = dict(self._db.execute("SELECT name, spec FROM datasets ORDER BY name"))
        if (shards, excluded, specs) != (self._shards, self._excluded, self._specs):
            self._forget_checksums({*chain(*self._shards.values())} - {*chain(*shards.values())})
            self._shards, self._excluded, self._specs = shards, excluded, specs
            self._most_rows = most_rows
            self._version += 1
        self._learn_checksums("shards", fresh)

    def _learn_checksums(self, table: str, files: Mapping[str, int]) -> None:
        """`files`: path → key of its row."""
        found = dict(self._checksums)
        statement = f"SELECT checksums FROM {table} WHERE pk = ?"
        for file, pk in files.items():
            # Empty ones: every read fails and the file is rechecked.
            found[file] = self._db.execute(statement, (pk,)).fetchone()[0] or b""
        self._checksums = found

    def _forget_checksums(self, files: set[str]) -> None:
        self._checksums = {f: c for f, c in self._checksums.items() if f not in files}

    def _refresh_metrics(self) -> None:
        """Check only pieces with a run that had a heartbeat: points never arrive without one
        (server/registry/run_metrics.py), and finished runs do not change."""
        pieces = self._pieces["metrics"]
        heard: dict[int, tuple[tuple[int, float, float], ...]] = {}
        for row in self._db.execute("SELECT pk, created_at, heartbeat_at FROM runs ORDER BY pk"):
            number = row[0] // RUNS_PER_PIECE
            heard[number] = (*heard.get(number, ()), row)
        for number in pieces.keys() - heard.keys():
            if pieces[number].path is not None:
                self._put("metrics", number, [], None)
        for number, runs in heard.items():
            old = pieces.get(number)
            if old is not None and old.stamp is not None and old.stamp[0] == runs:
                continue
            low = number * RUNS_PER_PIECE
            bounds = (low, low + RUNS_PER_PIECE - 1)
            which = tuple((pk, created_at) for pk, created_at, _ in runs)
            content = (which, self._db.execute(METRIC_SUMS, bounds).fetchone())
            if old is not None and old.stamp is not None and old.stamp[1] == content:
                old.stamp = (runs, content)
                continue
            rows = self._db.execute(METRICS, bounds).fetchall()
            self._put("metrics", number, rows, (runs, content))

    def _refresh_versions(self) -> None:
        pieces = self._pieces["version_trajectories"]
        # A key may be used again, a file never.
        files = dict(self._db.execute("SELECT pk, file FROM versions"))
        for number in files.keys() | pieces.keys():
            stamp, old = files.get(number), pieces.get(number)
            if old is None or old.stamp != stamp:
                rows = self._db.execute(VERSION_TRAJECTORIES, (number,)).fetchall()
                self._put("version_trajectories", number, rows, stamp)

    def _refresh_annotations(self) -> None:
        pieces = self._pieces["annotations"]
        # A key may be used again, a file never.
        files = dict(self._db.execute("SELECT pk, file FROM annotations"))
        gone = {n for n, piece in pieces.items() if n not in files or piece.stamp != files[n]}
        fresh = files.keys() - (pieces.keys() - gone)
        if not gone and not fresh:
            return
        self._forget_checksums({path for n in gone if (path := pieces.pop(n).path) is not None})
        paths = {number: f"annotations/{files[number]}" for number in fresh}
        pieces |= {number: Piece(path, files[number]) for number, path in paths.items()}
        self._learn_checksums("annotations", {path: number for number, path in paths.items()})
        self._pieces["annotations"] = dict(sorted(pieces.items()))
        self._version += 1

    def _refresh_small(self, name: str) -> None:
        rows = self._db.execute(SMALL[name]).fetchall()
        stamp = hash(tuple(rows))
        old = self._pieces[name].get(0)
        if old is None or old.stamp != stamp:
            self._put(name, 0, rows, stamp)

    def _put(self, table: str, number: int, rows: list[tuple[Any, ...]], stamp: Any) -> None:
        """Replace one piece by these rows."""
        pieces = self._pieces[table]
        if (old := pieces.pop(number, None)) is not None:
            gone = {file for file in (old.path, old.locations) if file is not None}
            self._garbage += [(time.monotonic(), file) for file in gone]
            self._forget_checksums(gone)
        piece = pieces[number] = Piece(None, stamp)
        if rows:
            self._written += 1
            columns = dict(zip([n for n, _ in TABLES[table]], zip(*rows, strict=True), strict=True))
            name = f"{table}_{number}_{self._names}{self._written:x}.parquet"
            piece.path = self._write(name, _parquet(TABLES[table], columns))
            if table == "trajectories":
                piece.seqs = _seqs(columns["dataset"], columns["seq"])
                bounds = (number * PIECE, number * PIECE + PIECE - 1)
                locations = read_columns(self._db, _OF_PIECE, *bounds)
                name = f"locations_{number}_{self._names}{self._written:x}.arrow"
                piece.locations = self._write(name, _arrow(locations))
        self._pieces[table] = dict(sorted(pieces.items()))
        self._version += 1

    def _write(self, name: str, content: memoryview) -> str:
        """Returns the file's path. Its checksums are computed from `content`, not from the written
        file."""
        unfinished = self._directory / "unfinished"
        unfinished.write_bytes(content)
        os.chmod(unfinished, 0o644)
        os.rename(unfinished, self._directory / name)
        path = f"{self._directory.name}/{name}"
        self._checksums = {**self._checksums, path: checksums_of(content)}
        return path

    def _collect_garbage(self) -> None:
        limit = time.monotonic() - KEEP_SECONDS
        if not self._garbage or self._garbage[0][0] >= limit:
            return
        garbage, self._garbage = self._garbage, []
        for since, path in garbage:
            if since >= limit or path in self._kept:
                self._garbage.append((since, path))
            else:
                (self._directory.parent / path).unlink(missing_ok=True)


def _layout() -> str:
    """Describe the pieces that a base keeps: their sizes and columns, and how they are read."""
    made_of = (
        *(PIECE, RUNS_PER_PIECE, TRAJECTORIES, METRICS, METRIC_SUMS, VERSION_TRAJECTORIES),
        *(TABLES[name] for name in KEPT),
        str(SCHEMA),
    )
    return hashlib.sha256(repr(made_of).encode()).hexdigest()


def _seqs(datasets: Iterable[str], seqs: Iterable[int]) -> dict[str, tuple[int, int]]:
    """Dataset → (least, greatest) seq."""
    found: dict[str, tuple[int, int]] = {}
    for dataset, seq in zip(datasets, seqs, strict=True):
        low, high = found.get(dataset, (seq, seq))
        found[dataset] = (min(low, seq), max(high, seq))
    return found


def _parquet(columns: list[tuple[str, str]], values: dict[str, tuple[Any, ...]]) -> memoryview:
    table = pa.table({name: arrow_array(kind, values[name]) for name, kind in columns})
    unique = {
        "id",
        "digest",
        "episode_id",
        "notes",
        "config",
        "spec",
        "error",
        "returns",
        "trajectory",
    }
    repeated = [n for n, kind in columns if kind == "VARCHAR" and n not in unique]
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="lz4", use_dictionary=repeated, row_group_size=PIECE)
    return memoryview(sink.getvalue())


def _arrow(batch: pa.RecordBatch) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())
