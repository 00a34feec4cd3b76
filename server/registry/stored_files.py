"""A received body that becomes a file with one row of the index.

    rename → description → one index row; the same bytes again replace a damaged file

A file whose row was not written (a crash in between) is quarantined by the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import Database
from server.index.deleted_files import delete_given_up, give_up_files
from server.integrity import IntegrityChecker
from server.storage.descriptions import FOLDER, describe, name_of
from server.storage.store import Store, Stored, Writer
from stepwell.failpoints import failpoint

R = TypeVar("R")
log = structlog.get_logger("stepwell.files")


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Where they go."""

    db: Database
    store: Store
    integrity: IntegrityChecker


def insert_row(
    files: StoredFiles,
    table: sa.Table,
    writer: Writer,
    insert: Callable[[Connection, Stored], tuple[int, R, bool]],
    *,
    description: Mapping[str, Any],
    points: tuple[str, str],
) -> tuple[R, bool]:
    """Complete a written file of a table of `tables.FILES`, describe it (storage/descriptions.py),
    and insert its row.

    `insert(connection, file)` returns (pk of the row, result, whether the row is new), or raises:
    then the file is deleted. Returns the result and whether the row is new. If the row exists
    already, with the same bytes, the file replaces the stored one if that is damaged, and is
    deleted otherwise. `points`: failpoints after the rename and after such a replacement.
    """
    stored = writer.commit()
    failpoint(points[0])
    try:
        describe(files.store, stored.name, stored.sha256, description)
        with files.db.write() as c:
            pk, result, new = insert(c, stored)
    except BaseException:
        _discard(files, table, stored)
        raise
    if not new and not _replace_damaged(files, table, pk, stored, points[1]):
        _discard(files, table, stored)
    return result, new


def _discard(files: StoredFiles, table: sa.Table, stored: Stored) -> None:
    """Delete a file that never had a row."""
    files.store.delete(table.name, stored.name)
    files.store.delete(FOLDER, name_of(stored.name))


def _replace_damaged(
    files: StoredFiles, table: sa.Table, pk: int, stored: Stored, point: str
) -> bool:
    """Replace a damaged file by the same bytes, received again. False if it is not damaged."""
    t, folder = table.c, table.name
    with files.db.read() as c:
        row = c.execute(sa.select(t.file, t.sha256).where(t.pk == pk)).one_or_none()
    if row is None:
        return False
    try:
        if files.store.examine(folder, row.file).sha256 == row.sha256:
            return False
    except OSError as error:
        log.warning("a file cannot be read", file=f"{folder}/{row.file}", error=str(error))
    with files.db.write() as c:
        hit = c.execute(
            sa.update(table)
            .where(t.pk == pk, t.file == row.file)
            .values(**stored.columns, verified_at=time.time())
        ).rowcount
        if hit:
            give_up_files(c, folder, [row.file])
    failpoint(point)
    if hit:
        delete_given_up(files.db, files.store)
        files.integrity.damaged_files.discard(f"{folder}/{row.file}")
        log.info("a damaged file was replaced", file=f"{folder}/{row.file}")
    return bool(hit)
