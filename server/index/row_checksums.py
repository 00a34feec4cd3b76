"""Each row of the index carries a checksum of its other columns, kept by SQLite itself.

    crc INTEGER GENERATED ALWAYS AS (row_crc("a", "b", …)) STORED     columns by name, all of them

SQLite checks the structure of its pages and not what stands in them: a flipped bit in a number is
a valid number. A generated column is computed in the statement that writes the row, whatever the
statement is, and costs no second write. `row_crc` is a function of this module, which every
connection that writes must have (`register`); reading needs none, so any tool reads the index.

`PRAGMA user_version` holds a checksum of the schema and the revision, which no row covers.
"""

from __future__ import annotations

import marshal
import sqlite3
import zlib
from collections.abc import Iterable
from typing import Any, Protocol

COLUMN = "crc"
UNPROTECTED = "alembic_version"
"""Table of Alembic; `schema_crc` covers its only row."""
_FORMAT = 2
"""Version of marshal: the last without references, which depend on identity, not value. It has not
changed since Python 2.5, and `_KNOWN` would tell."""
_KNOWN = (None, 1, -(2**40), 1.5, "", "Aé€😀", b"\x00\xff")


def row_crc(*values: Any) -> int:
    """The checksum of a row: NULL, integers, floats, texts and blobs, as Python has them."""
    return zlib.crc32(marshal.dumps(values, _FORMAT))


if row_crc(*_KNOWN) != 0x7A8CE375:  # pragma: no cover: another Python than any that is known
    raise ImportError("this Python computes other checksums of the index's rows: use another")


class Executes(Protocol):
    """What sqlite3's connections have, and SQLAlchemy's in other words (`exec_driver_sql`)."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any: ...


def register(connection: sqlite3.Connection) -> None:
    """Let a connection write rows."""
    connection.create_function("row_crc", -1, row_crc, deterministic=True)


def tables(connection: Executes) -> list[str]:
    """Names of the tables whose rows carry, or should carry, a checksum."""
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite~_%'"
        f" ESCAPE '~' AND name <> '{UNPROTECTED}' ORDER BY name"
    )
    return [str(name) for (name,) in rows]


def columns(connection: Executes, table: str) -> list[str]:
    """The columns of a table that its checksum covers, in its order."""
    return sorted(str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")'))


def key_of(connection: Executes, table: str) -> list[str]:
    """The columns of a table's primary key, in their order."""
    found = [row for row in connection.execute(f'PRAGMA table_info("{table}")') if row[5]]
    return [str(row[1]) for row in sorted(found, key=lambda row: row[5])]


def protect_rows(connection: Executes, names: Iterable[str]) -> None:
    """Give tables their column `crc`, or give it again after a column was added to them. For new
    indexes and migrations, inside their transaction.

    SQLite adds no stored column to an existing table, and a copy of the table would lose its
    triggers: a virtual one is added, and its one word in the schema is changed.
    """
    changed = list(names)
    for table in changed:
        covered = ", ".join(quoted(name) for name in columns(connection, table))
        wanted = f"{COLUMN} INTEGER GENERATED ALWAYS AS (row_crc({covered}))"
        (text,) = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
        ).fetchone()
        begins = text.find(f"{COLUMN} INTEGER GENERATED ALWAYS AS (row_crc(")
        if begins < 0:
            connection.execute(f"ALTER TABLE {quoted(table)} ADD COLUMN {wanted} VIRTUAL")
            before, after = f"{wanted} VIRTUAL", f"{wanted} STORED"
        else:
            ends = text.index(" STORED", begins)
            before, after = text[begins:ends], wanted
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE type = 'table' AND name = ?",
            (before, after, table),
        )
    ((version,),) = connection.execute("PRAGMA schema_version").fetchall()
    connection.execute(f"PRAGMA schema_version = {version + 1}")  # other connections read it again
    connection.execute("PRAGMA writable_schema = RESET")
    for table in changed:
        column = quoted(_outside_indexes(connection, table))
        connection.execute(f"UPDATE {quoted(table)} SET {column} = {column}")


def _outside_indexes(connection: Executes, table: str) -> str:
    """A column whose update writes rows only, if there is one."""
    used = set(key_of(connection, table))
    for row in connection.execute(f'PRAGMA index_list("{table}")').fetchall():
        used |= {part[2] for part in connection.execute(f'PRAGMA index_info("{row[1]}")')}
    names = columns(connection, table)
    return next((name for name in names if name not in used), names[-1])


def schema_crc(connection: Executes) -> int:
    """The checksum of the revision and of every table, index and trigger."""
    schema = connection.execute(
        # As bytes: damaged text may be none.
        "SELECT CAST(type AS BLOB), CAST(name AS BLOB), CAST(tbl_name AS BLOB), CAST(sql AS BLOB)"
        " FROM sqlite_master WHERE name NOT LIKE 'sqlite~_%' ESCAPE '~' ORDER BY type, name"
    ).fetchall()
    there = any(row[1] == UNPROTECTED.encode() for row in schema)
    what = f"CAST(version_num AS BLOB) FROM {UNPROTECTED}" if there else "'' LIMIT 0"
    text = f"SELECT {what}"
    values = [value for row in (*schema, *connection.execute(text)) for value in row]
    return (row_crc(*values) & 0x7FFFFFFF) or 1


def seal_schema(connection: Executes) -> None:
    """Store `schema_crc`, as the last act of a schema change, in the same transaction."""
    connection.execute(f"PRAGMA user_version = {schema_crc(connection)}")


def schema_is_intact(connection: Executes) -> bool:
    """Whether the schema is what was sealed; True for indexes from before there was a seal."""
    sealed = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if sealed:
        return sealed == schema_crc(connection)
    return not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'lost_rows'").fetchone()


def rows_are_protected(connection: Executes) -> bool:
    """False for indexes from before rows had checksums, and empty ones."""
    if connection.execute("PRAGMA user_version").fetchone()[0]:
        return True
    text = "SELECT count(*) FROM sqlite_master WHERE sql LIKE '%row_crc(%'"
    return bool(connection.execute(text).fetchone()[0])


def quoted(name: str) -> str:
    """A name in SQL; ours hold no quotes."""
    return f'"{name}"'
