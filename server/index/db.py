"""Access to the index: many readers, one writer, every commit on disk.

    with db.read() as c:  …      a consistent view; never blocks, never blocked
    with db.write() as c: …      one at a time; commits at the end, or not at all

    db.uptime()             seconds that services could answer on this index, over all processes
    db.tick()               a sign that it can be answered now; the event loop calls it

Uptime is monotonic time, summed and stored in the index: leases, grace periods and tombstones use
it, because the wall clock may jump. Only time in which a lease could be renewed counts: uptime
stands still from MAX_GAP seconds after the last tick. There is no tick before the service serves,
while its process or its machine is stopped, while its event loop is blocked, and while nothing can
be written. The few seconds that a crash loses make a lease longer, never shorter.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.engine import Connection, RowMapping

from server.index import row_checksums
from server.index.dialect import (
    TRIGGERS,
    DatabaseError,
    OperationalError,
    connect,
    json_add_sql,
    mend,
    names_in_schema,
    open_for_reading,
    raw_of,
)
from server.index.lost_rows import read_lost_rows
from server.index.tables import REVISION, audit, counters, metadata
from server.problems import MAX_HINTS, not_found
from server.storage.index_mark import Mark, MarkFile
from stepwell.messages import Page

M = TypeVar("M", bound=BaseModel)

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
UPGRADE = "stepwell db upgrade --data DIR"
REBUILD = "stepwell fsck --rebuild --data DIR"
FIRST_REVISION = "0009"
"""Revision of the first release, from which migrations start."""

PAGE_BYTES = 4 << 20
"""A page of a list ends with the row that exceeds this."""
COUNTERS = ("change_id", "epoch", "uptime", "dataset", "serial", "store")
"""The rows of `counters`. All start at 0, but for `store`, which is random."""


class IndexUnusable(RuntimeError):
    """The index cannot be used; the message says what to do."""


DAY = 86_400.0
_COUNT = """
    UPDATE audit SET count = count + 1, until = :now, detail = {summed}
    WHERE pk = (SELECT max(pk) FROM audit
                WHERE action = :action_ AND subject = :subject_ AND who = :who_)
    AND time >= :today AND until IS NOT NULL
"""

SAVE_UPTIME_EVERY = 1.0
"""Seconds; uptime is also saved with every other transaction."""
TICK_EVERY = 0.5
"""Seconds between two ticks of a service that serves."""
MAX_GAP = 2.0
"""Seconds that count between two ticks. A few periods: under load a tick is late, and time in which
a busy service does answer counts in full."""


class Clock:
    """The time. Tests pass another one, whose wall clock jumps."""

    def wall(self) -> float:
        """Unix seconds, for people only: nothing waits for it."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; monotonic."""
        return time.monotonic()


class Database:
    """One per process; complete when constructed: the file exists and has the current schema."""

    revision = REVISION

    def __init__(self, path: Path, clock: Clock | None = None, mark: MarkFile | None = None):
        """`mark`: written after every commit (storage/index_mark.py)."""
        self.path = path
        self.clock = Clock() if clock is None else clock
        self._mark = mark
        found = revision(path)
        if found != REVISION:
            _refuse_unknown(path, found)
            raise IndexUnusable(
                f"the index is at revision {found}, this program needs {REVISION}; run {UPGRADE}"
            )
        self.engine = connect(path)
        self._lock = threading.Lock()
        self._writer: int | None = None
        self._write_began: float | None = None
        self._write_failed = False
        with self.read() as connection:
            counted = read_counters(connection)
            self.lost = read_lost_rows(connection)
        self.saved_uptime = float(counted["uptime"]) / 1e3
        self._store_id = counted["store"]
        if mark is not None:
            mark.write(Mark(self._store_id, counted["serial"]))
        # Uptime at the last tick, and the monotonic time of that tick. One tuple: other threads
        # read it.
        self._ticked = (self.saved_uptime, self.clock.monotonic())

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self.engine.connect() as connection:
            yield connection
            connection.rollback()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """The only write transaction of the process at this moment. Not to be nested."""
        assert self._writer != threading.get_ident(), "nested writes would deadlock"
        with self._lock, self.engine.connect() as connection:
            self._writer = threading.get_ident()
            self._write_began = self.clock.monotonic()
            try:
                connection = connection.execution_options(stepwell_write=True)
                with connection.begin():
                    yield connection
                    if self.uptime() - self.saved_uptime >= SAVE_UPTIME_EVERY:
                        self._save_uptime(connection)
                    serial = _bump(connection, "serial")
                if self._mark is not None:
                    self._mark.write(Mark(self._store_id, serial))
                self._write_failed = False
            except sa.exc.OperationalError:  # a full disk, an I/O error, a foreign lock
                self._write_failed = True
                raise
            finally:
                self._writer = self._write_began = None

    def uptime(self) -> float:
        """Seconds that count for leases and grace periods; see the module docstring."""
        before, tick = self._ticked
        return before + min(self.clock.monotonic() - tick, MAX_GAP)

    def tick(self) -> None:
        """Called every TICK_EVERY seconds by the loop that answers requests."""
        now, began = self.clock.monotonic(), self._write_began
        stuck = began is not None and now - began > MAX_GAP
        if stuck or self._write_failed:
            return
        before, tick = self._ticked
        self._ticked = (before + min(now - tick, MAX_GAP), now)

    @property
    def write_failed(self) -> bool:
        """Whether the last transaction could not be written; uptime stands still until one is."""
        return self._write_failed

    def save_uptime(self) -> None:
        """Called periodically and on close, when nothing else is written."""
        with self.write() as connection:
            self._save_uptime(connection)

    def _save_uptime(self, connection: Connection) -> None:
        now = self.uptime()
        connection.execute(
            sa.update(counters).where(counters.c.name == "uptime").values(value=int(now * 1e3))
        )
        self.saved_uptime = now

    def close(self) -> None:
        self.engine.dispose()
        if self._mark is not None:
            self._mark.close()


def next_change_id(connection: Connection) -> int:
    """The change_id for trajectories changed in this transaction; see tables.py."""
    return _bump(connection, "change_id")


def next_epoch(connection: Connection) -> int:
    """Record that rows were removed in bulk: the mirror is rebuilt."""
    return _bump(connection, "epoch")


def next_dataset_pk(connection: Connection) -> int:
    """A key that no dataset had before: clients of a deleted one must not reach another."""
    return _bump(connection, "dataset")


def renew_store(connection: Connection) -> None:
    """Give the index an identity that no other has."""
    value = secrets.randbits(62)
    connection.execute(sa.update(counters).where(counters.c.name == "store").values(value=value))


def read_counters(connection: Connection) -> dict[str, int]:
    rows = connection.execute(sa.select(counters.c.name, counters.c.value))
    return {row.name: row.value for row in rows}


def _bump(connection: Connection, name: str) -> int:
    value = connection.execute(
        sa.update(counters)
        .where(counters.c.name == name)
        .values(value=counters.c.value + 1)
        .returning(counters.c.value)
    ).scalar_one()
    return int(value)


SERVICE = "service"
"""Who, in the audit log, where nobody asked."""


def write_audit(c: Connection, who: str, action: str, subject: str, **detail: Any) -> None:
    """Insert a row of the audit log, in the transaction of the change it records."""
    row = {"time": time.time(), "who": who, "action": action, "subject": subject}
    c.execute(sa.insert(audit).values(**row, detail=detail))


def count_audit(c: Connection, who: str, action: str, subject: str, **amounts: float) -> None:
    """The same for what happens often: one row a day for each (who, action, subject), with the
    number of times, the last time, and the sums of `amounts`. An action is always written or always
    counted."""
    now = time.time()
    found = c.execute(
        sa.text(_COUNT.format(summed=json_add_sql("detail", amounts))),
        {"now": now, "today": now - now % DAY, **amounts}
        | {"who_": who, "action_": action, "subject_": subject},
    )
    if found.rowcount == 0:
        row = {"who": who, "action": action, "subject": subject, "detail": amounts}
        c.execute(sa.insert(audit).values(time=now, until=now, **row))


def find_pk(c: Connection, table: sa.Table, name: str, *, hint: bool = True) -> int:
    """The key of the row of `datasets` or `runs` that has this name.

    Raises 404; with `hint` it suggests the nearest of the newest names, for callers who may read
    all of them.
    """
    pk = c.execute(sa.select(table.c.pk).where(table.c.name == name)).scalar()
    if pk is None:
        newest = sa.select(table.c.name).order_by(table.c.pk.desc()).limit(MAX_HINTS)
        known = c.execute(newest).scalars() if hint else ()
        raise not_found(table.name.removesuffix("s"), name, known)
    return int(pk)


def equal(table: sa.Table, **wanted: Any) -> list[sa.ColumnElement[bool]]:
    """Conditions: each named column has this value; None matches any."""
    return [table.c[name] == value for name, value in wanted.items() if value is not None]


def find_row(c: Connection, table: sa.Table, **key: Any) -> RowMapping | None:
    """The row whose columns are `equal` to `key`."""
    return c.execute(sa.select(table).where(*equal(table, **key))).mappings().first()


def get_row(c: Connection, table: sa.Table, **key: Any) -> RowMapping:
    """The same. Raises 404, which names the last value of `key`."""
    row = find_row(c, table, **key)
    if row is None:
        raise not_found(table.name.removesuffix("s"), [*key.values()][-1])
    return row


def set_row(c: Connection, table: sa.Table, key: Mapping[str, Any], **values: Any) -> None:
    """Change the row whose columns are `equal` to `key`."""
    c.execute(sa.update(table).where(*equal(table, **key)).values(**values))


def read_page(
    c: Connection,
    model: type[M],
    query: sa.Select[Any],
    by: sa.Column[Any],
    limit: int,
    cursor: int | str | None,
    *,
    ascending: bool = False,
    make: Callable[[RowMapping], M] | None = None,
) -> Page[M]:
    """A page of a list that is sorted by the unique column `by`; newest, or greatest, first.

    `cursor` is `next` of the page before. `make` turns a row into a message, whose fields are the
    columns without it.
    """
    if cursor is not None:
        query = query.where(by > cursor if ascending else by < cursor)
    rows, last = first_rows(c, query.order_by(by if ascending else by.desc()), limit)
    items = [model(**row) if make is None else make(row) for row in rows]
    after = None if last is None else str(last[by.name])
    return Page[model](items=items, next=after)  # type: ignore[valid-type]


def first_rows(
    c: Connection, query: sa.Select[Any], limit: int
) -> tuple[list[RowMapping], RowMapping | None]:
    """A page of at most `limit` rows, and its last row if more follow (the next page's cursor).

    Shorter if its rows are long: configs of runs can be megabytes each.
    """
    result = c.execute(query.limit(limit + 1)).mappings()
    rows: list[RowMapping] = []
    size = 0
    while (row := result.fetchone()) is not None:  # one by one: the others are not read
        if len(rows) == limit or size > PAGE_BYTES:
            result.close()
            return rows, rows[-1]
        rows.append(row)
        size += sum(map(_size, row.values()))
    return rows, None


def _size(value: Any) -> int:
    """Bytes of a value in JSON, if they can be many."""
    if isinstance(value, dict | list):
        return len(json.dumps(value, default=str))  # orjson has no integers beyond 64 bits
    return len(value) if isinstance(value, str | bytes) else 0


def revision(path: Path) -> str | None:
    """The revision of the file; None for a new or empty file."""
    if not path.exists():
        return None
    try:
        with closing(open_for_reading(path)) as raw:
            if "alembic_version" not in names_in_schema(raw):
                return None
            row = raw.execute("SELECT version_num FROM alembic_version").fetchone()
    except OperationalError as error:
        raise IndexUnusable(
            f"{path} cannot be read ({error}); rebuild it with: {REBUILD}"
        ) from None
    except DatabaseError as error:
        raise IndexUnusable(f"{path} is damaged ({error}); rebuild it with: {REBUILD}") from None
    return str(row[0]) if row else None


def has_admin_token(path: Path) -> bool:
    """Whether the index has a token with the scope admin that is neither revoked nor expired."""
    if not path.exists():
        return False
    with closing(open_for_reading(path)) as raw:
        try:
            rows = raw.execute(
                "SELECT scopes FROM tokens WHERE revoked_at IS NULL"
                " AND (expires_at IS NULL OR expires_at > ?)",
                (time.time(),),
            ).fetchall()
            return any("admin" in json.loads(row[0]) for row in rows)
        except (DatabaseError, ValueError, TypeError) as error:
            raise IndexUnusable(f"{path} cannot be read ({error}); see: {REBUILD}") from None


def upgrade(path: Path) -> str:
    """Migrate the file to the current revision; create it if there is none. Returns the revision.

    Raises `IndexUnusable` if the file is newer than the code, or older than every migration;
    nothing is changed then.
    """
    refuse_damage(path)
    found = revision(path)
    if found is None:
        _create(path)
    elif found != REVISION:
        _refuse_unknown(path, found)
        _migrate(path)
    return REVISION


def refuse_damage(path: Path) -> None:
    """Mend the log that a killed service left. Raises `IndexUnusable` if that cannot be done, or if
    tables, triggers or the revision are not what was written: with another schema no row means what
    it says. Only while nothing else has the index open."""
    if not path.exists():
        return
    if trouble := mend(path).trouble:
        raise IndexUnusable(f"{trouble}; rebuild the index with: {REBUILD}")
    try:
        with closing(open_for_reading(path)) as raw:
            damaged = not row_checksums.schema_is_intact(raw)
    except DatabaseError as error:
        raise IndexUnusable(f"{path} is damaged ({error}); rebuild it with: {REBUILD}") from None
    if damaged:
        raise IndexUnusable(
            f"{path} is damaged, or was changed by another program: its schema is not what was"
            f" written; rebuild it with: {REBUILD}"
        )


def _refuse_unknown(path: Path, found: str | None) -> None:
    """Raises `IndexUnusable` if no migration leads from `found` to `REVISION`."""
    if found is None:
        return
    # Revisions are four-digit numbers.
    if found > REVISION:
        raise IndexUnusable(
            f"{path} was written by a newer Stepwell (revision {found}, this program knows"
            f" {REVISION}); install that version"
        )
    if found < FIRST_REVISION:
        raise IndexUnusable(
            f"{path} was written before the first release (revision {found}, this program needs"
            f" {REVISION}); import its data with: {REBUILD}"
        )


def _create(path: Path) -> None:
    """Create an index from tables.py, in one transaction."""
    engine = connect(path)
    try:
        connection = engine.connect().execution_options(stepwell_write=True)
        with connection, connection.begin():
            metadata.create_all(connection)
            for trigger in TRIGGERS.values():
                connection.execute(sa.text(trigger))
            connection.execute(
                sa.insert(counters), [{"name": name, "value": 0} for name in COUNTERS]
            )
            renew_store(connection)
            # Alembic stores the revision here.
            connection.execute(
                sa.text(
                    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"
                )
            )
            connection.execute(sa.text(f"INSERT INTO alembic_version VALUES ('{REVISION}')"))
            raw = raw_of(connection)
            row_checksums.protect_rows(raw, row_checksums.tables(raw))
            row_checksums.seal_schema(raw)
    finally:
        engine.dispose()


def _migrate(path: Path) -> None:
    # Imported here: alembic takes a quarter of a second, which most starts do not need.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["path"] = path
    command.upgrade(config, "head")
