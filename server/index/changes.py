"""Reads what changed in the index since an earlier `change_id` (tables.py). A repeated snapshot
selection reads only these changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from server.index.dialect import Raw, by_index_sql, open_for_reading
from server.index.manifest_columns import read_columns
from server.index.sql_tables import ARROW, TABLES, TRAJECTORY_SQL, arrow_array

_CHANGED = (
    f"trajectories AS t {by_index_sql('ix_trajectories_change_id')}"
    " WHERE t.change_id > ? AND t.state <> 'evicted'"
)


@dataclass(frozen=True, slots=True)
class Changes:
    """Trajectories whose `change_id` is newer than an earlier one."""

    change_id: int
    locations: pa.RecordBatch
    """Locations of those that are alive (manifest_columns.py)."""
    columns: pa.Table
    """The same rows: `id`, which is the row's number here, and columns of `trajectories`."""
    dead: dict[str, NDArray[np.int64]]
    """Dataset → seqs of those that are not alive."""


class ChangeReader:
    """Thread-safe. Has its own connection, so it does not wait while the mirror is filled."""

    def __init__(self, index_file: Path):
        self._lock = threading.Lock()
        self._db = open_for_reading(index_file)

    def count(self, change_id: int, epoch: int, most: int) -> int | None:
        """Number of trajectories with a newer `change_id`, counted up to `most`; None if rows
        were removed since and nothing says which."""
        with self._lock:
            _, now, forgotten = counters(self._db)
            if now != epoch or forgotten > change_id:
                return None
            sql = "SELECT count(*) FROM (SELECT 1 FROM trajectories WHERE change_id > ? LIMIT ?)"
            return int(self._db.execute(sql, (change_id, most)).fetchone()[0])

    def read(self, change_id: int, epoch: int, columns: Iterable[str]) -> Changes | None:
        """All changes since, in one transaction; None if rows were removed since and nothing says
        which.

        `columns` are columns of `trajectories` in the SQL surface.
        """
        with self._lock:
            self._db.execute("BEGIN")
            try:
                newest, now, forgotten = counters(self._db)
                if now != epoch or forgotten > change_id:
                    return None
                return self._read(change_id, newest, list(columns))
            finally:
                self._db.execute("ROLLBACK")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _read(self, since: int, newest: int, columns: list[str]) -> Changes:
        names = dict(self._db.execute("SELECT pk, name FROM datasets"))
        dead: dict[str, list[int]] = {}
        for table, where in (("trajectories", " AND state = 'evicted'"), ("tombstones", "")):
            for pk, seq in self._db.execute(
                f"SELECT dataset_pk, seq FROM {table} WHERE change_id > ?{where}", (since,)
            ):
                if pk in names:  # else the dataset's row is lost
                    dead.setdefault(names[pk], []).append(seq)
        locations = read_columns(self._db, _CHANGED, since)
        return Changes(
            newest,
            locations,
            self._columns(since, locations, columns),
            {name: np.asarray(seqs, np.int64) for name, seqs in dead.items()},
        )

    def _columns(self, since: int, locations: pa.RecordBatch, columns: list[str]) -> pa.Table:
        """The columns of changed rows that a selection reads; from `locations` where possible."""
        kinds = dict(TABLES["trajectories"])
        arrays: dict[str, Any] = {"id": pa.array(np.arange(locations.num_rows))}
        others = [name for name in columns if name not in locations.schema.names]
        rows = []
        if others:
            wanted = ", ".join(TRAJECTORY_SQL[name] for name in others)
            # In the order of the index, like `locations`.
            rows = self._db.execute(f"SELECT {wanted} FROM {_CHANGED}", (since,)).fetchall()
        for name in columns:
            if name in others:
                place = others.index(name)
                arrays[name] = arrow_array(kinds[name], [row[place] for row in rows])
            else:
                arrays[name] = locations[name].cast(ARROW[kinds[name]])
        return pa.table(arrays)


def counters(db: Raw) -> tuple[int, int, int]:
    """The current (change_id, epoch), and the greatest change_id of removals that no tombstone
    tells of any more."""
    found = dict(db.execute("SELECT name, value FROM counters"))
    return int(found["change_id"]), int(found["epoch"]), int(found.get("forgotten", 0))
