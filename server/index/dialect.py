"""All that is SQLite's, under names of what it means.

Another database would replace this module, the migrations, and the four modules that know how
SQLite stores an index: row_checksums.py, schema_copy.py, table_reader.py and wal.py.

Functions whose names end with `_sql` return text, for statements that are written as text.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.engine import Connection

from server.index import row_checksums
from server.index.row_checksums import quoted
from server.index.schema_copy import mend_schema
from server.index.wal import Log, mend_wal
from server.problems import ProblemError

Raw = sqlite3.Connection
"""A connection without SQLAlchemy, which takes half of the time of many small rows."""
Error = sqlite3.Error
DatabaseError = sqlite3.DatabaseError
"""Of a `Raw` connection: damage, for instance."""
OperationalError = sqlite3.OperationalError
DAMAGE = (sqlite3.DatabaseError, sa.exc.DatabaseError)
"""What either kind of connection raises for an index that is damaged."""
WAIT = 30.0
"""Seconds to wait for another process that writes."""
PAGES = 4096
"""Pages of the index that are copied at once."""

# --- connections ----------------------------------------------------------------------------------


def connect(path: Path) -> sa.Engine:
    """Many readers, one writer, every commit on disk. The driver opens transactions implicitly,
    which would break the first two: its own handling is switched off, and BEGIN is issued here."""
    engine = sa.create_engine(
        f"sqlite:///{path}",
        connect_args={"check_same_thread": False, "timeout": WAIT},
        pool_size=16,
        max_overflow=64,
        hide_parameters=True,  # errors are logged; user data must not be
    )

    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        row_checksums.register(connection)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "busy_timeout = 30000",
            "temp_store = MEMORY",
            "cache_size = -16000",
        ):
            connection.execute(f"PRAGMA {pragma}")

    def on_begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("stepwell_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    return engine


def raw_of(connection: Connection) -> Raw:
    """The connection below SQLAlchemy's, in the same transaction."""
    if not connection.in_transaction():
        connection.begin()
    raw = connection.connection.driver_connection
    assert isinstance(raw, Raw)
    return raw


def open_for_reading(path: Path, *, alone: bool = False) -> Raw:
    """`alone`: the file as it is without its log. Raises as soon as it is read."""
    how = "mode=ro&immutable=1" if alone else "mode=ro"
    return sqlite3.connect(
        f"file:{path}?{how}",
        uri=True,
        timeout=WAIT,
        check_same_thread=False,
        isolation_level=None,
    )


def open_damaged(path: Path, *, alone: bool = False) -> Raw:
    """The same. A damaged text may be no text: its row is then lost, and not those behind it."""
    raw = open_for_reading(path, alone=alone)
    raw.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    return raw


def open_unused(path: Path) -> Raw:
    """An index that nothing else has open. Closing it copies its log into it."""
    return sqlite3.connect(path)


@contextmanager
def one_transaction(path: Path) -> Iterator[Raw]:
    """Write to an index that nothing else uses: all of it, or nothing."""
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        row_checksums.register(raw)
        raw.execute("BEGIN IMMEDIATE")
        yield raw
        raw.execute("COMMIT")


def commit_number(raw: Raw) -> int:
    """Another one after every commit of another connection."""
    return int(raw.execute("PRAGMA data_version").fetchone()[0])


# --- the file -------------------------------------------------------------------------------------


def mend(index: Path) -> Log:
    """Undo what flipped bits do to the schema and to the log. Only while nothing has it open."""
    mend_schema(index)
    return mend_wal(index)


def copy_index(index: Path, copy: Path) -> str:
    """A consistent copy in one file, whether the index is in use or not. Returns what is wrong with
    it; "" if nothing is."""
    try:
        with closing(sqlite3.connect(index, timeout=WAIT)) as source:
            with closing(sqlite3.connect(copy)) as made:
                source.execute("BEGIN")  # one state, though it is copied in pieces
                source.execute("SELECT count(*) FROM sqlite_master")
                source.backup(made, pages=PAGES)
                made.execute("PRAGMA journal_mode = DELETE")
                return quick_check(made)
    except DatabaseError as error:
        return str(error)


def names_in_schema(raw: Raw) -> set[str]:
    """Of tables, triggers and indexes; none of an empty file."""
    # As bytes: damaged text may be none.
    rows = raw.execute("SELECT CAST(name AS BLOB) FROM sqlite_master")
    return {bytes(name).decode("utf-8", "replace") for (name,) in rows}


def quick_check(raw: Raw) -> str:
    """The first thing that is wrong with the structure of the file, in words; "" if nothing is."""
    found = str(raw.execute("PRAGMA quick_check(1)").fetchone()[0])
    return "" if found == "ok" else found


def integrity_check(raw: Raw, most: int = 100) -> list[str]:
    """The same, with the indexes against their tables."""
    rows = raw.execute(f"PRAGMA integrity_check({most})")
    return [str(line) for (line,) in rows if line != "ok"]


def broken_references(raw: Raw) -> list[tuple[str, str]]:
    """(table, the table in which what a row of it refers to is missing)"""
    return [(row[0], row[2]) for row in raw.execute("PRAGMA foreign_key_check")]


def reason(error: BaseException) -> str:
    """What the database says, without SQLAlchemy's words around it."""
    return str(getattr(error, "orig", None) or error)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SICK = frozenset({errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE})
_SICK_WORDS = ("disk i/o error", "readonly database", "unable to open database")


def disk_problem(error: BaseException, detail: str) -> ProblemError | None:
    """507 or 503 when `error` is a disk error, of a file or of the database; else None."""
    number = error.errno if isinstance(error, OSError) else None
    # SQLAlchemy wraps the driver's message, which is in `orig`.
    words = "" if number is not None else str(getattr(error, "orig", "")).lower()
    full = number in _FULL or "disk is full" in words
    if not (full or number in _SICK or any(text in words for text in _SICK_WORDS)):
        return None
    return ProblemError(
        507 if full else 503,
        "storage_full" if full else "read_only",
        detail,
        expected="free disk space" if full else "a working disk",
        got=(getattr(error, "strerror", None) or words)[:200],
        headers={"Retry-After": "5"},
    )


# --- writing rows ---------------------------------------------------------------------------------


def insert_rows(connection: Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows with equal keys. Not by SQLAlchemy, which takes as long for the parameters of a
    row as the database for the row."""
    names = list(rows[0])
    columns = ", ".join(map(quoted, names))
    statement = f"INSERT INTO {table.name} ({columns}) VALUES ({', '.join('?' * len(names))})"
    connection.exec_driver_sql(statement, [tuple(map(row.__getitem__, names)) for row in rows])


def upsert(
    table: sa.Table,
    *names: str,
    combine: Callable[[Any, Any], Any] = lambda _old, new: new,
) -> Insert:
    """INSERT; in a row that is there already, by its primary key, the columns `names` become
    `combine(old, new)`."""
    statement = Insert(table)
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={name: combine(table.c[name], statement.excluded[name]) for name in names},
    )


def insert_or_skip(table: sa.TableClause) -> sa.Insert:
    """INSERT that leaves out rows that violate a constraint."""
    return sa.insert(table).prefix_with("OR IGNORE")


def insert_or_skip_raw(raw: Raw, table: str, row: dict[str, Any]) -> None:
    names, marks = ", ".join(map(quoted, row)), ", ".join("?" * len(row))
    raw.execute(
        f"INSERT OR IGNORE INTO {quoted(table)} ({names}) VALUES ({marks})", list(row.values())
    )


# --- JSON -----------------------------------------------------------------------------------------


def elements(document: Any) -> sa.TableValuedAlias:
    """The elements of a JSON list, as rows with a column `value`."""
    return sa.func.json_each(document).table_valued("value")


def elements_sql(parameter: str) -> str:
    """The same of a list that a parameter holds."""
    return f"json_each(:{parameter})"


def holds(column: sa.ColumnElement[Any], value: str) -> sa.ColumnElement[bool]:
    """Whether the JSON list in a column has this element."""
    each = elements(column)
    return sa.exists().select_from(each).where(each.c.value == value)


def among(column: sa.ColumnElement[Any], values: Iterable[str]) -> sa.ColumnElement[bool]:
    """`IN` for any number of values; those of a list are limited."""
    return column.in_(sa.select(elements(json.dumps(list(values))).c.value))


def json_value(column: sa.ColumnElement[Any], *keys: str) -> sa.ColumnElement[Any]:
    """What a JSON object has under a key, or under keys within one another; NULL if nothing."""
    return sa.func.json_extract(column, _path(keys))


def json_kind(column: sa.ColumnElement[Any], *keys: str) -> sa.ColumnElement[Any]:
    """The type of that: text, integer, real, true, false, null, array, object; NULL if nothing."""
    return sa.func.json_type(column, _path(keys))


def _path(keys: Sequence[str]) -> str:
    return "$" + "".join(f".{json.dumps(key)}" for key in keys)


def json_value_sql(column: str, key: str) -> str:
    return f"json_extract({column}, '$.{key}')"


def json_add_sql(column: str, keys: Iterable[str]) -> str:
    """The JSON object in a column, with the parameter of each name added to the number under it."""
    sums = (f", '$.{key}', coalesce({json_value_sql(column, key)}, 0) + :{key}" for key in keys)
    return f"json_set({column}{''.join(sums)})"


def json_list_sql(expression: str) -> str:
    """All rows' values as one JSON list."""
    return f"json_group_array({expression})"


# --- expressions ----------------------------------------------------------------------------------


def contains(column: sa.ColumnElement[Any], text: str) -> sa.ColumnElement[bool]:
    """Whether the column contains `text`, ignoring case; % and _ are literal."""
    return sa.func.instr(sa.func.lower(column), sa.func.lower(text)) > 0


def matches(column: sa.ColumnElement[str], pattern: str) -> sa.ColumnElement[bool]:
    """Whether the column is the pattern, in which * stands for any characters; of these patterns
    none has another sign."""
    return column.op("GLOB", is_comparison=True)(pattern)


def last_characters(text: sa.ColumnElement[str], count: int) -> sa.ColumnElement[str]:
    return sa.func.substr(text, -count)


def greatest(one: Any, other: Any) -> sa.ColumnElement[Any]:
    return sa.func.max(one, other)


def joined_sql(expression: str, separator: str = ",") -> str:
    """All rows' values as one text."""
    return f"group_concat({expression}, '{separator}')"


def total_sql(expression: str) -> str:
    """Their sum as a float; 0.0 of no rows."""
    return f"total({expression})"


def with_its_row_sql(aggregate: str, expression: str) -> str:
    """min() or max(), where the other columns are to be those of the row that has it. Only one of
    them in a SELECT."""
    return f"{aggregate}({expression})"


# --- which index is used --------------------------------------------------------------------------
#
# The tables of a CROSS JOIN are read in their order; those of a JOIN in the planner's. And an index
# of some rows is used only where its condition stands as a literal: parameters are not looked at.

BY_KEY_SQL = "NOT INDEXED"
"""Behind a table: read in the order of its key, by no other index."""


def by_index_sql(index: str) -> str:
    """Behind a table: read by this index, in its order."""
    return f"INDEXED BY {index}"


def not_by_index_sql(column: str) -> str:
    """The column, for a condition by which no index is chosen."""
    return f"+{column}"


# --- the schema -----------------------------------------------------------------------------------

STORED_BY_KEY: dict[str, Any] = {"sqlite_with_rowid": False}
"""For a table whose rows are small, and read in the order of their key."""


def only_where(condition: str) -> dict[str, Any]:
    """For an index of some rows."""
    return {"sqlite_where": sa.text(condition)}


TRIGGERS: dict[str, str] = {
    # The system never deletes protected trajectories: not by quota, compaction, or a bug. Only an
    # admin demotes them, and the audit row must be written before, in the same transaction.
    "protected_update": """
        CREATE TRIGGER protected_update BEFORE UPDATE ON trajectories
        WHEN OLD.partition = 'protected' AND (
            NEW.state = 'evicted'
            OR (NEW.partition <> 'protected' AND NOT EXISTS (
                SELECT 1 FROM audit WHERE action = 'demote' AND subject = OLD.id)))
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never evicted'); END
    """,
    "protected_delete": """
        CREATE TRIGGER protected_delete BEFORE DELETE ON trajectories
        WHEN OLD.partition = 'protected'
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never deleted'); END
    """,
    # REPLACE deletes without firing the trigger above.
    "protected_replace": """
        CREATE TRIGGER protected_replace BEFORE INSERT ON trajectories
        WHEN EXISTS (SELECT 1 FROM trajectories WHERE id = NEW.id AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories WHERE pk = NEW.pk AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories
                WHERE dataset_pk = NEW.dataset_pk AND seq = NEW.seq AND partition = 'protected')
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never replaced'); END
    """,
    # A version means the same trajectories as long as it exists. The foreign key of
    # version_trajectories refuses their deletion.
    "version_update": """
        CREATE TRIGGER version_update BEFORE UPDATE OF partition, digest ON trajectories
        WHEN (NEW.partition <> 'protected' OR NEW.digest <> OLD.digest) AND EXISTS (
            SELECT 1 FROM version_trajectories WHERE trajectory_pk = OLD.pk)
        BEGIN SELECT RAISE(ABORT, 'trajectories of a version stay as they are'); END
    """,
    "version_insert": """
        CREATE TRIGGER version_insert BEFORE INSERT ON version_trajectories
        WHEN NOT EXISTS (SELECT 1 FROM trajectories
            WHERE pk = NEW.trajectory_pk AND partition = 'protected' AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'trajectories of a version are protected'); END
    """,
    # A shard or segment that living trajectories need must not be deleted.
    "living_shard": """
        CREATE TRIGGER living_shard BEFORE UPDATE OF state ON shards
        WHEN NEW.state IN ('retired', 'deleting', 'deleted') AND EXISTS (
            SELECT 1 FROM trajectories WHERE shard_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a shard that living trajectories need is never given up'); END
    """,
    "living_segment": """
        CREATE TRIGGER living_segment BEFORE UPDATE OF state ON segments
        WHEN NEW.state = 'consumed' AND EXISTS (
            SELECT 1 FROM trajectories WHERE segment_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a segment that living trajectories need is never given up'); END
    """,
}
"""By name; a test asserts that they exist after every migration."""
