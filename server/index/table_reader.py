"""Reads the intact rows of a table of an index that may be damaged, and names the others.

A row is intact if its checksum is right (row_checksums.py); in an index from before there were
checksums every row that can be read is. Where SQLite cannot read a page, reading goes on behind it:
from the end backwards, then in halves of what lies between.

A lost row is one whose checksum is wrong, or that the table's indexes, which lie on other pages,
name and the table does not have.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from server.index.row_checksums import COLUMN, columns, key_of, quoted, register, row_crc, tables

Row = tuple[Any, ...]
STORED = 3
"""How SQLite lists a stored generated column."""


def wrong_rows(source: sqlite3.Connection, table: str) -> Iterator[Row]:
    """Keys of the rows of a table whose checksum is wrong. Raises sqlite3.DatabaseError."""
    register(source)
    key, covered = (", ".join(map(quoted, f(source, table))) for f in (key_of, columns))
    # In SQL: rows that are right are not made into Python's, which takes as long again.
    text = f"SELECT {key} FROM {quoted(table)} NOT INDEXED WHERE row_crc({covered}) IS NOT {COLUMN}"
    try:
        yield from source.execute(text)
    except sqlite3.OperationalError as error:
        if "user-defined function" not in str(error):
            raise
        raise sqlite3.DatabaseError(f"a text of {table} is not what was written") from None


def first_wrong_row(source: sqlite3.Connection) -> str:
    """A row of any table whose checksum is wrong, in words; "" if there is none."""
    for table in tables(source):
        for key in wrong_rows(source, table):
            return f"{table} {list(key)}: the row is not what was written"
    return ""


@dataclass(frozen=True, slots=True)
class _Index:
    """A b-tree of its own over all rows of a table."""

    name: str
    columns: tuple[str, ...]
    unique: bool


class TableReader:
    """One pass over `rows()`; afterwards `wrong`, `unread`, `lost()` and `nameless()` say what is
    missing."""

    def __init__(self, source: sqlite3.Connection, table: str):
        self._source, self.table = source, table
        self.columns, self.key = columns(source, table), key_of(source, table)
        found = source.execute(f'PRAGMA table_xinfo("{table}")').fetchall()
        self.protected = any(row[1] == COLUMN and row[6] == STORED for row in found)
        text = source.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        self._has_rowid = text is None or "WITHOUT ROWID" not in str(text[0])
        self.wrong: list[dict[str, Any]] = []
        """Rows whose checksum is wrong, as they are."""
        self.unread = ""
        """Why a part could not be read."""
        self._indexes = list(self._find_indexes())
        self._places: set[Row] = set()
        """Where the intact rows are: rowids, or keys."""
        self._taken: dict[tuple[str, ...], set[Row]] = {
            tuple(self.key): set(),
            **{index.columns: set() for index in self._indexes if index.unique},
        }
        """Values of the intact rows that no other row may have."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """The intact rows; each key once."""
        for crc, place, values in self._all():
            row = dict(zip(self.columns, values, strict=True))
            if self.protected and row_crc(*values) != crc:
                self.wrong.append(row)
                continue
            self._places.add(place)
            if not self._is_taken(row, (tuple(self.key),)):
                for names, taken in self._taken.items():
                    taken.add(tuple(row[name] for name in names))
                yield row

    def lost(self) -> list[dict[str, Any]]:
        """The missing rows, each with the columns that are known of it: those of the table's
        indexes, or of the damaged row itself."""
        unique = tuple(self._taken)
        named = [
            row
            for place, row in (self._in_indexes() or {}).items()
            if place not in self._places and not self._is_taken(row, unique)
        ]
        for row in self.wrong:  # its place may be damaged, too
            if not self._is_taken(row, unique) and not any(_agree(row, other) for other in named):
                named.append(row)
        return named

    def nameless(self) -> bool:
        """Whether rows may be missing that are not among the lost."""
        return bool(self.unread) and self._in_indexes() is None

    def _is_taken(self, row: dict[str, Any], unique: tuple[tuple[str, ...], ...]) -> bool:
        """Whether an intact row has the values that only one row may have."""
        return any(
            tuple(row[name] for name in names) in self._taken[names]
            for names in unique
            if names and all(row.get(name) is not None for name in names)
        )

    # --- around what cannot be read ---------------------------------------------------------------

    def _all(self) -> Iterator[tuple[int, Row, Row]]:
        """All readable rows: checksum, place, values."""
        first = last = None
        try:
            for row in self._select("ASC"):
                yield row
                first = row[1]
            return
        except sqlite3.DatabaseError as error:
            self.unread = str(error)
        try:
            for row in self._select("DESC"):
                last = row[1]
                if last == first:
                    return
                yield row
        except sqlite3.DatabaseError:
            pass
        known = [place[0] for place in self._in_indexes() or ()]
        if self._has_rowid and known:
            low = min(known) if first is None else first[0] + 1
            yield from self._between(low, max(known) if last is None else last[0] - 1)

    def _between(self, low: int, high: int) -> Iterator[tuple[int, Row, Row]]:
        """The readable rows among these row numbers."""
        if low > high:
            return
        try:
            yield from self._select("ASC", f"WHERE rowid BETWEEN {low} AND {high}")
        except sqlite3.DatabaseError:
            if low < high:
                middle = (low + high) // 2
                yield from self._between(low, middle)
                yield from self._between(middle + 1, high)

    def _select(self, direction: str, where: str = "") -> Iterator[tuple[int, Row, Row]]:
        place = ["rowid"] if self._has_rowid else list(map(quoted, self.key))
        crc = COLUMN if self.protected else "NULL"
        text = (
            f"SELECT {', '.join((crc, *place, *map(quoted, self.columns)))}"
            f" FROM {quoted(self.table)} {'NOT INDEXED' if self._has_rowid else ''} {where}"
            f" ORDER BY {', '.join(f'{name} {direction}' for name in place)}"
        )
        count = 1 + len(place)
        for row in self._source.execute(text):
            yield row[0], row[1:count], row[count:]

    # --- what the indexes know --------------------------------------------------------------------

    def _find_indexes(self) -> Iterator[_Index]:
        listed = self._source.execute(f'PRAGMA index_list("{self.table}")').fetchall()
        for _, name, unique, origin, partial in listed:
            parts = [row[2] for row in self._source.execute(f'PRAGMA index_info("{name}")')]
            own = origin == "pk" and not self._has_rowid  # the table itself
            if not partial and not own:
                yield _Index(str(name), tuple(parts), bool(unique))

    def _in_indexes(self) -> dict[Row, dict[str, Any]] | None:
        """Place → what the indexes know of the row there; None if no index can be read.

        A row that only one of several names is an entry whose place is damaged.
        """
        place = ["rowid"] if self._has_rowid else self.key
        merged: dict[Row, dict[str, Any]] = {}
        count: dict[Row, int] = {}
        whole = 0
        for index in self._indexes:
            names = list(index.columns if self._has_rowid else {*self.key, *index.columns})
            text = (
                f"SELECT {', '.join(map(quoted, (*place, *names)))} FROM {quoted(self.table)}"
                f" INDEXED BY {quoted(index.name)}"
            )
            try:
                rows = self._source.execute(text).fetchall()
            except sqlite3.DatabaseError:
                continue
            whole += 1
            for row in rows:
                where = row[: len(place)]
                known = dict(zip(names, row[len(place) :], strict=True))
                if self._has_rowid and len(self.key) == 1:
                    known = self._with_rowid_key(known, where[0])
                merged[where] = merged.get(where, {}) | known
                count[where] = count.get(where, 0) + 1
        if not whole:
            return None
        return {where: row for where, row in merged.items() if count[where] == whole}

    def _with_rowid_key(self, known: dict[str, Any], rowid: int) -> dict[str, Any]:
        """`pk` is the row's number: every index knows it."""
        return {"pk": rowid, **known} if self.key == ["pk"] else known


def _agree(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two descriptions may be of one row: what is known of both differs in one column at
    most."""
    shared = row.keys() & other.keys()
    differ = [name for name in shared if row[name] != other[name]]
    return len(differ) <= 1 < len(shared)
