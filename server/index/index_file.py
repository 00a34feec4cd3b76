"""Whether an index belongs to its directory, and is not older than the files in it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from server.index.db import REBUILD, IndexUnusable
from server.index.schema_copy import mend_schema
from server.index.wal import mend_wal
from server.storage.mark import Mark, read_mark

DATA = ("shards/*", "segments", "policies", "videos", "versions", "annotations", "quarantine/*")
RESTORING = "restoring"
"""Exists while `stepwell restore` copies into a directory."""


def refuse_wrong_index(data: Path, index: Path, *, in_use: bool = False) -> None:
    """Raise `IndexUnusable` for an index that is missing, empty, of another directory or older
    than this one's files: the service would not know what they hold.

    `in_use`: by a service, which mended it when it started and writes to it now.
    """
    rebuild = REBUILD.replace("DIR", str(data))
    if (data / RESTORING).exists():
        raise IndexUnusable(
            f"{data} is being restored from a backup, which has not ended; run the same"
            " `stepwell restore` again: it goes on where it stopped"
        )
    mark = read_mark(data)  # before the index, which may go on meanwhile
    found = read_index_mark(index, in_use=in_use)
    if found is None:
        if held := _holds_data(data):
            state = "is empty" if index.exists() else "is missing"
            raise IndexUnusable(
                f"{index} {state}, but {held} holds data; restore it from a backup, or rebuild it"
                f" from the files: {rebuild}"
            )
        return
    if mark is None or (found.store == mark.store and found.serial >= mark.serial):
        return
    if found.store != mark.store:
        what = "belongs to another directory, or to an earlier state of this one"
    else:
        what = (
            f"is older than the files beside it ({mark.serial - found.serial} transactions are"
            " missing): it was put back from a backup, or copied before them"
        )
    raise IndexUnusable(
        f"{index} {what}. Nothing was changed. Merge it with the files, which keeps what it knows"
        f" (metrics, evaluations, labels, tokens): {rebuild}. Or put the newer index back"
    )


def read_index_mark(index: Path, *, in_use: bool = False) -> Mark | None:
    """The mark of an index; None if there is no index, or an empty one. One without counters, from
    an earlier version, has Mark(0, 0). Mends it if it is damaged, unless it is in use."""
    if not index.exists():
        return None
    if not in_use:
        mend_wal(index)
    try:
        return _read_mark(index)
    except sqlite3.DatabaseError:
        if not in_use:
            mend_schema(index)
    try:
        return _read_mark(index)
    except sqlite3.DatabaseError as error:
        raise IndexUnusable(
            f"{index} is damaged ({error}); rebuild it from the files:"
            f" {REBUILD.replace('DIR', str(index.parent))}"
        ) from None


def _read_mark(index: Path) -> Mark | None:
    # Without a log, as a clean stop leaves it, SQLite must not make one.
    log = index.with_name(f"{index.name}-wal")
    how = "mode=ro" if log.exists() else "mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(f"file:{index}?{how}", uri=True)) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return None
        try:
            rows = dict(connection.execute("SELECT name, value FROM counters"))
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return Mark(0, 0)
            raise
    return Mark(int(rows.get("store", 0)), int(rows.get("serial", 0)))


def _holds_data(data: Path) -> Path | None:
    """A folder with data in it."""
    for pattern in (f"{folder}/*" for folder in DATA):
        for path in data.glob(pattern):
            if path.is_file():
                return path.parent
    return None
