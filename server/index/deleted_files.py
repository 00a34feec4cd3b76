"""Deletes files that the index has given up, never others.

transaction   the row goes, the file's name is inserted into `deleted_files`
  → unlink    at once, or when a running backup ends (storage/hold.py), or at the next start
  → the name is removed
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import Database
from server.index.dialect import insert_or_skip
from server.index.tables import deleted_files
from server.storage.descriptions import DESCRIBED, FOLDER, name_of
from server.storage.store import Store
from stepwell.failpoints import failpoint


def give_up_files(connection: Connection, folder: str, names: Iterable[str]) -> None:
    """In the transaction that deletes their rows. Their descriptions go with them."""
    rows = [{"folder": folder, "name": name} for name in names]
    if folder in DESCRIBED:
        rows += [{"folder": FOLDER, "name": name_of(row["name"])} for row in rows]
    if rows:
        connection.execute(insert_or_skip(deleted_files), rows)


def delete_given_up(db: Database, store: Store) -> int:
    """Delete the files, unless a backup is running; returns their number."""
    with db.read() as connection:
        rows = connection.execute(sa.select(deleted_files)).all()
    if not rows:
        return 0
    with store.deleting() as allowed:
        if not allowed:
            return 0
        for row in rows:
            store.delete(row.folder, row.name)
    failpoint("give_up.after_unlink")
    d = deleted_files.c
    with db.write() as connection:
        for row in rows:
            where = sa.and_(d.folder == row.folder, d.name == row.name)
            connection.execute(sa.delete(deleted_files).where(where))
    return len(rows)
