"""Whether an index belongs to its directory and to its log, and is not older than the files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from server.index.db import REBUILD, IndexUnusable
from server.index.dialect import DatabaseError, mend, names_in_schema, open_for_reading
from server.index.row_checksums import row_crc
from server.index.wal import log_of
from server.storage.index_mark import Mark, read_mark

DATA = ("shards/*", "segments", "policies", "videos", "versions", "annotations", "quarantine/*")
RESTORING = "restoring"
"""Exists while `stepwell restore` copies into a directory."""


def refuse_wrong_index(data: Path, index: Path, *, running: bool = False) -> None:
    """Raise `IndexUnusable` for an index that is missing, empty, of another directory or older
    than this one's files: the service would not know what they hold; and for one with the log of
    another. `running`: a service has the index open, and has looked at its log."""
    rebuild = REBUILD.replace("DIR", str(data))
    if (data / RESTORING).exists():
        raise IndexUnusable(
            f"{data} is being restored from a backup, which has not ended; run the same"
            " `stepwell restore` again: it goes on where it stopped"
        )
    mark = read_mark(data)  # first: a service that runs goes on
    if not running:
        if reason := foreign_log(index):
            raise IndexUnusable(
                f"{log_of(index)} {reason}. Nothing was changed. Put the {index.name} back that it"
                f" belongs to; or rebuild it from the files and from this one, without its log:"
                f" {rebuild}"
            )
    found = read_index_mark(index)
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


def foreign_log(index: Path) -> str:
    """What shows that the log beside the index is not its own, in words; "" if nothing does.

    Nothing in a log says which file it is to be applied to: the pages of two times would be
    mixed. But every transaction adds 1 to `counters.serial`, and a log is begun anew when the file
    has all that it holds. So the file is as old as the log's beginning or newer, and not newer than
    its end. Only while nothing has the index open.
    """
    if not index.exists() or not (commits := mend(index).commits):
        return ""
    try:
        alone = _intact_mark(index, alone=True)
    except DatabaseError:
        return ""  # a crash while the log was copied into it: the log has those pages
    if alone is None:
        return ""
    try:
        applied = _intact_mark(index)
    except DatabaseError as error:
        return f"cannot be applied to {index.name} ({error}): it is another's, or damaged"
    if applied is None:
        return ""
    if applied.store != alone.store:
        return "belongs to the index of another directory, or of an earlier state of this one"
    if (missing := applied.serial - commits - alone.serial) > 0:
        return (
            f"belongs to another {index.name}: it begins {missing} transactions behind this one,"
            " which is older"
        )
    if (newer := alone.serial - applied.serial) > 0:
        return (
            f"belongs to another {index.name}: it ends {newer} transactions before this one, which"
            " is newer"
        )
    return ""


def read_index_mark(index: Path) -> Mark | None:
    """The mark of an index; None if there is no index, or an empty one. One without counters, from
    an earlier version, has Mark(0, 0)."""
    if not index.exists():
        return None
    try:
        return _read_mark(index)
    except DatabaseError as error:
        raise IndexUnusable(
            f"{index} is damaged ({error}); rebuild it from the files:"
            f" {REBUILD.replace('DIR', str(index.parent))}"
        ) from None


def _read_mark(index: Path) -> Mark | None:
    # Without a log, as a clean stop leaves it, none must be made.
    with closing(open_for_reading(index, alone=not log_of(index).exists())) as raw:
        names = names_in_schema(raw)
        if not names:
            return None
        if "counters" not in names:
            return Mark(0, 0)
        rows = dict(raw.execute("SELECT name, value FROM counters"))
    return Mark(int(rows.get("store", 0)), int(rows.get("serial", 0)))


def _intact_mark(index: Path, *, alone: bool = False) -> Mark | None:
    """None if there is none, or if its rows are not what was written."""
    with closing(open_for_reading(index, alone=alone)) as raw:
        if "counters" not in names_in_schema(raw):
            return None
        rows = raw.execute("SELECT * FROM counters WHERE name IN ('store', 'serial')").fetchall()
    found = {name: value for name, value, *crc in rows if crc in ([], [row_crc(name, value)])}
    return Mark(found["store"], found["serial"]) if len(found) == 2 else None


def _holds_data(data: Path) -> Path | None:
    """A folder with data in it."""
    for pattern in (f"{folder}/*" for folder in DATA):
        for path in data.glob(pattern):
            if path.is_file():
                return path.parent
    return None
