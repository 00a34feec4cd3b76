"""The mirror's base: which of its files a restart keeps, and of which state of the index they are.

    DIR/mirror/base.json     sha256 of the rest | JSON: mark, change_id, epoch, pieces, files, …

A base counts only with the index that it was made of. `mark` is a random number, written into the
index (`counters`) with every base: an index of another history, a rebuilt one, or one put back from
a backup holds another mark or none. An index that holds it descends from the state of the base, so
all that has changed since has a newer `change_id`, wherever the process died, and is read again as
by any refresh. Whatever does not fit is no base; the mirror is then filled from the index.

The base names files with their sizes and checksums; their content is verified when it is read, as
that of every other file. So it needs no fsync: after a power failure a file is as it was written,
or damaged, and a damaged one is written again.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from server.index.changes import counters
from server.index.db import Database
from server.index.dialect import Raw, greatest, upsert
from server.index.tables import REVISION, tombstones
from server.index.tables import counters as table
from server.storage.sealed import sealed, unsealed
from stepwell.failpoints import failpoint

NAME = "base.json"
FORMAT = 1
"""Increased when pieces of the same layout would have another content."""
MARK = "mirror"
"""Counter: the newest base's mark."""
FORGOTTEN = "forgotten"
"""Counter: the greatest `change_id` of tombstones that were deleted (changes.py). From an older
`change_id` on, not all removals can be found."""
KEPT = ("trajectories", "metrics", "version_trajectories")
"""Tables whose pieces are kept. The others are small, or not the mirror's own files."""
_PATH = re.compile(r"[a-z_]+_\d+_[0-9a-f]+\.(parquet|arrow)")


@dataclass(slots=True)
class Piece:
    path: str | None
    """None: no row of it is alive."""
    stamp: Any
    seqs: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Dataset → least and greatest seq in this piece of `trajectories`."""
    locations: str | None = None

    @property
    def files(self) -> list[str]:
        return [file for file in (self.path, self.locations) if file is not None]


@dataclass(frozen=True, slots=True)
class Base:
    """Pieces of one state of the index."""

    change_id: int
    epoch: int
    pieces: Mapping[str, Mapping[int, Piece]]
    """Table (of KEPT) → number → piece."""
    checksums: Mapping[str, bytes]
    """Checksums of exactly their files."""


def save(db: Database, directory: Path, base: Base, layout: str) -> None:
    """Make it the base of the next start. Its files must exist until the next call returns.

    `layout` says what pieces are made of; a base of another one does not count.
    """
    mark = secrets.randbits(62)
    content = sealed(
        {
            "format": FORMAT,
            "revision": REVISION,
            "layout": layout,
            "mark": mark,
            "change_id": base.change_id,
            "epoch": base.epoch,
            "pieces": {
                name: {
                    str(number): [piece.path, piece.stamp, piece.seqs, piece.locations]
                    for number, piece in pieces.items()
                }
                for name, pieces in base.pieces.items()
            },
            "files": {
                file: [
                    (directory.parent / file).stat().st_size,
                    base64.b64encode(checksums).decode(),
                ]
                for file, checksums in base.checksums.items()
            },
        }
    )
    try:
        with db.write() as connection:
            connection.execute(upsert(table, "value").values(name=MARK, value=mark))
    except sa.exc.OperationalError as error:  # a full disk, for instance
        raise OSError(f"the mark of the mirror's base was not written: {error.orig}") from None
    failpoint("mirror.after_mark")
    unfinished = directory / f"{NAME}.unfinished"
    unfinished.write_bytes(content)
    failpoint("mirror.before_rename")
    os.rename(unfinished, directory / NAME)
    failpoint("mirror.after_rename")


def load(db: Raw, directory: Path, layout: str) -> Base | None:
    """The base, if it is whole and of this index."""
    try:
        found = unsealed((directory / NAME).read_bytes())
        made_by = (found["format"], found["revision"], found["layout"])
        if made_by != (FORMAT, REVISION, layout):
            return None
        mark = db.execute("SELECT value FROM counters WHERE name = ?", (MARK,)).fetchone()
        change_id, epoch, forgotten = counters(db)
        since = int(found["change_id"])
        if mark != (found["mark"],) or found["epoch"] != epoch:
            return None
        if not forgotten <= since <= change_id:
            return None
        pieces = {
            name: {
                int(number): Piece(path, _tuples(stamp), _tuples(seqs), locations)
                for number, (path, stamp, seqs, locations) in found["pieces"][name].items()
            }
            for name in KEPT
        }
        sizes = {file: size for file, (size, _) in found["files"].items()}
        checksums = {file: base64.b64decode(text) for file, (_, text) in found["files"].items()}
        named = {f for parts in pieces.values() for piece in parts.values() for f in piece.files}
        if named != checksums.keys() or not all(
            _is_there(directory, *one) for one in sizes.items()
        ):
            return None
        return Base(since, epoch, pieces, checksums)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def forget_tombstones(connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
    """Delete tombstones, and record the greatest `change_id` of them."""
    newest = connection.execute(
        sa.select(sa.func.max(tombstones.c.change_id)).where(which)
    ).scalar()
    if newest is None:
        return
    statement = upsert(table, "value", combine=greatest)
    connection.execute(statement.values(name=FORGOTTEN, value=newest))
    connection.execute(sa.delete(tombstones).where(which))


def _is_there(directory: Path, file: str, size: int) -> bool:
    folder, _, name = file.partition("/")
    if folder != directory.name or _PATH.fullmatch(name) is None:
        return False
    return (directory / name).stat().st_size == size


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that were written."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
