"""Creates, describes, compares and deletes versions (docs/reference/versions.md).

SQL → pks of the mirror → ids and digests in the index
  → DIR/versions/<file>.parquet (immutable)
  → one transaction: members become protected, the version and its members are inserted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import (
    Database,
    find_pk,
    next_change_id,
    read_page,
    write_audit,
)
from server.index.deleted_files import delete_given_up, give_up_files
from server.index.dialect import elements_sql
from server.index.tables import audit, datasets, version_trajectories, versions
from server.ingest.index_rows import add_totals, bucket_of
from server.problems import ProblemError, not_found
from server.sql.pool import SqlPool
from server.storage.store import Store, new_name
from server.storage.version_file import VersionHeader, digest_of, write_version
from server.versions.version_statistics import COLUMNS, statistics_of
from stepwell._sql import version_condition
from stepwell.failpoints import failpoint
from stepwell.messages import CreateVersion, Page, Version, VersionDiff, VersionPart

log = structlog.get_logger("stepwell.versions")
MAX_TRAJECTORIES = 2_000_000
NAMED = 5
"""Versions that an error names."""

_SELECTED = sa.text(
    f"SELECT t.id, t.digest, coalesce(s.state = 'quarantined', 0), {COLUMNS}"
    f" FROM {elements_sql('pks')} AS j CROSS JOIN trajectories AS t ON t.pk = j.value"
    " LEFT JOIN shards AS s ON s.pk = t.shard_pk"
    " WHERE t.dataset_pk = :dataset AND t.state <> 'evicted'"
)
_MINE = (
    "dataset_pk = :dataset AND state <> 'evicted'"
    f" AND id IN (SELECT value FROM {elements_sql('ids')})"
)
_MOVED = sa.text(
    f"""SELECT purpose, count(*), sum(length), sum(bytes), sum("return") FROM trajectories
    WHERE {_MINE} AND partition = 'fifo' GROUP BY purpose"""
)
_PROTECT = sa.text(
    "UPDATE trajectories SET partition = 'protected', change_id = :change_id"
    f" WHERE {_MINE} AND partition = 'fifo'"
)
_INSERT = sa.text(
    "INSERT INTO version_trajectories (version_pk, trajectory_pk)"
    f" SELECT :version, pk FROM trajectories WHERE {_MINE}"
)
_IN = "EXISTS (SELECT 1 FROM version_trajectories WHERE version_pk = {} AND trajectory_pk = t.pk)"
_PART = f"""SELECT {COLUMNS} FROM version_trajectories AS v
    JOIN trajectories AS t ON t.pk = v.trajectory_pk WHERE v.version_pk = :version"""


class Versions:
    """`flush` seals what was acknowledged, so that a condition may read `steps`."""

    def __init__(self, db: Database, store: Store, flush: Callable[[str], object], sql: SqlPool):
        self._db, self._store, self._flush, self._sql = db, store, flush, sql

    # --- create ---------------------------------------------------------------------------------

    def create(self, dataset: str, body: CreateVersion, caller: str) -> Version:
        """Raises 404, 409 (the name is or was taken), 410 (damaged), 422 (SQL error, empty)."""
        with self._db.read() as connection:
            pk = find_pk(connection, datasets, dataset)
            _refuse_taken(connection, pk, dataset, body.name)
            if body.parent is not None:
                _row(connection, dataset, body.parent)
        self._flush(dataset)
        selected = self._sql.select_rows(_select(dataset, body), dataset)
        if not 0 < len(selected.rows) <= MAX_TRAJECTORIES:
            raise _bad_size(len(selected.rows))
        with self._db.read() as connection:
            values = {"pks": orjson.dumps(selected.rows.tolist()).decode(), "dataset": pk}
            rows = connection.execute(_SELECTED, values).all()
        if len(rows) != len(selected.rows):
            raise _moved()
        if damaged := sum(row[2] for row in rows):
            raise ProblemError(
                410,
                "damaged",
                f"{damaged} of {len(rows)} selected trajectories are in damaged files: restore"
                " these (stepwell fsck names them), or leave them out: shard NOT IN (…)",
                expected="a selection without damaged files",
                got=damaged,
            )
        members = [(row[0], row[1]) for row in rows]
        header = VersionHeader(
            dataset=dataset,
            name=body.name,
            digest=digest_of(members),
            parent=body.parent,
            condition=body.where or "",
            include_eval=body.include_eval,
            description=body.description,
            licence=body.licence,
            statistics=statistics_of([row[3:] for row in rows]),
            created_by=caller,
            created_at=self._db.clock.wall(),
        )
        failpoint("version.before_tmp")
        stored = write_version(self._store, new_name("vn", ".parquet"), header, members)
        try:
            with self._db.write() as connection:
                if find_pk(connection, datasets, dataset) != pk:
                    raise _moved()
                _refuse_taken(connection, pk, dataset, body.name)
                version = connection.execute(
                    sa.insert(versions)
                    .values(
                        dataset_pk=pk,
                        **header.model_dump(exclude={"dataset"}),
                        **stored.columns,
                    )
                    .returning(versions.c.pk)
                ).scalar_one()
                if _add_members(connection, pk, version, members) != len(members):
                    raise _moved()
                write_audit(connection, caller, "version.create", f"{dataset}@{body.name}")
                failpoint("version.before_commit")
        except ProblemError:
            self._store.delete("versions", stored.name)
            raise
        failpoint("version.after_commit")
        log.info("version created", version=f"{dataset}@{body.name}", trajectories=len(members))
        return self.get(dataset, body.name)

    # --- read -----------------------------------------------------------------------------------

    def get(self, dataset: str, name: str) -> Version:
        with self._db.read() as connection:
            return _message(_row(connection, dataset, name))

    def page(self, dataset: str, *, limit: int, cursor: int | None) -> Page[Version]:
        """Newest first."""
        with self._db.read() as connection:
            pk = find_pk(connection, datasets, dataset)
            query, by = _VERSIONS.where(versions.c.dataset_pk == pk), versions.c.pk
            return read_page(connection, Version, query, by, limit, cursor, make=_message)

    def diff(self, dataset: str, before: str, after: str) -> VersionDiff:
        """What `after` has and `before` has not, and the reverse."""
        with self._db.read() as connection:
            old, new = (_row(connection, dataset, name)["pk"] for name in (before, after))

            def part(version: int, other: int, *, shared: bool = False) -> VersionPart:
                names = {old: f"{dataset}@{before}", new: f"{dataset}@{after}"}
                sql = f"{_PART} AND {'' if shared else 'NOT '}{_IN.format(':other')}"
                found = connection.execute(sa.text(sql), {"version": version, "other": other})
                rest = version_condition(names[other])
                return VersionPart(
                    statistics=statistics_of(found.all()),
                    sql=f"SELECT * FROM trajectories WHERE {version_condition(names[version])}"
                    f" AND {rest if shared else rest.replace('IN', 'NOT IN', 1)}",
                )

            return VersionDiff(
                before=f"{dataset}@{before}",
                after=f"{dataset}@{after}",
                kept=part(new, old, shared=True),
                added=part(new, old),
                removed=part(old, new),
            )

    # --- delete ---------------------------------------------------------------------------------

    def delete(self, dataset: str, name: str, caller: str) -> None:
        """The trajectories stay, and stay protected."""
        with self._db.write() as connection:
            row = _row(connection, dataset, name)
            members = version_trajectories.c.version_pk == row["pk"]
            connection.execute(sa.delete(version_trajectories).where(members))
            connection.execute(sa.delete(versions).where(versions.c.pk == row["pk"]))
            write_audit(
                connection, caller, "version.delete", f"{dataset}@{name}", digest=row["digest"]
            )
            give_up_files(connection, "versions", [row["file"]])
            failpoint("version.before_delete")
        failpoint("version.after_delete")
        delete_given_up(self._db, self._store)


def refuse_if_versioned(connection: Connection, what: str, *where: sa.ColumnElement[bool]) -> None:
    """Raise 409, naming the versions, if one that `where` selects needs what is to be deleted."""
    found = connection.execute(
        sa.select(datasets.c.name + "@" + versions.c.name)
        .join(datasets, datasets.c.pk == versions.c.dataset_pk)
        .where(*where)
        .order_by(versions.c.pk)
    ).scalars()
    if names := found.all():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise ProblemError(
            409,
            "versioned",
            f"{what} is in {', '.join(names[:NAMED])}{more}, which never changes; an admin may"
            f" delete the version first: stepwell versions delete {names[0]} --yes",
            expected="no version",
            got=names[:NAMED],
        )


def holding(trajectory_pk: int) -> sa.ColumnElement[bool]:
    """Versions with this trajectory, for `refuse_if_versioned`."""
    v = version_trajectories.c
    return versions.c.pk.in_(sa.select(v.version_pk).where(v.trajectory_pk == trajectory_pk))


_VERSIONS = sa.select(versions, datasets.c.name.label("dataset"), datasets.c.spec).join(
    datasets, datasets.c.pk == versions.c.dataset_pk
)


def _row(connection: Connection, dataset: str, name: str) -> Any:
    pk = find_pk(connection, datasets, dataset)
    mine = versions.c.dataset_pk == pk
    found = connection.execute(_VERSIONS.where(mine, versions.c.name == name))
    row = found.mappings().one_or_none()
    if row is None:
        known = connection.execute(sa.select(versions.c.name).where(mine)).scalars()
        raise not_found(f"version of {dataset}", name, known)
    return row


def _message(row: Any) -> Version:
    dataset, parent = row["dataset"], row["parent"]
    version = f"{dataset}@{row['name']}"
    values = dict(row) | {"parent": None if parent is None else f"{dataset}@{parent}"}
    return Version(
        **values,
        version=version,
        where=row["condition"],
        select=f"SELECT id FROM trajectories WHERE {version_condition(version)}",
    )


def _select(dataset: str, body: CreateVersion) -> str:
    purpose = "" if body.include_eval else " AND purpose = 'train'"
    # On its own line: a comment at the end of `where` must not hide the parenthesis.
    where = f" AND (\n{body.where}\n)" if body.where else ""
    return f"SELECT id FROM trajectories WHERE dataset = '{dataset}'{purpose}{where}"


def _refuse_taken(connection: Connection, dataset_pk: int, dataset: str, name: str) -> None:
    there = sa.select(versions.c.pk).where(
        versions.c.dataset_pk == dataset_pk, versions.c.name == name
    )
    subject = f"{dataset}@{name}"
    deleted = sa.select(audit.c.pk).where(
        audit.c.action == "version.delete", audit.c.subject == subject
    )
    for statement, why in ((there, "exists and never changes"), (deleted, "was deleted")):
        if connection.execute(statement.limit(1)).first() is not None:
            raise ProblemError(
                409,
                "version_exists",
                f"{subject} {why}; choose another name: a name is given once",
                expected="a new name",
                got=name,
            )


def _add_members(
    connection: Connection, dataset_pk: int, version_pk: int, members: Sequence[tuple[str, str]]
) -> int:
    """Protect the members and insert them; returns how many are still alive."""
    ids = orjson.dumps([trajectory for trajectory, _ in members]).decode()
    values = {"ids": ids, "dataset": dataset_pk}
    for purpose, *numbers in connection.execute(_MOVED, values).all():
        if (bucket := bucket_of("fifo", purpose)) == "fifo":
            add_totals(connection, dataset_pk, bucket, *(-number for number in numbers))
            add_totals(connection, dataset_pk, "protected", *numbers)
    change_id = next_change_id(connection)
    connection.execute(_PROTECT, values | {"change_id": change_id})
    return connection.execute(_INSERT, values | {"version": version_pk}).rowcount


def _bad_size(count: int) -> ProblemError:
    if count:
        detail = "a version has too many trajectories; select less, or make several versions"
        limit = f"at most {MAX_TRAJECTORIES} trajectories"
        return ProblemError(422, "selection_too_large", detail, expected=limit, got=count)
    return ProblemError(
        422,
        "empty_selection",
        "the condition selects no trajectory (those of purpose 'eval' are left out unless"
        " include_eval is set)",
        expected="at least one trajectory",
        got="none",
    )


def _moved() -> ProblemError:
    return ProblemError(
        503,
        "selection_moved",
        "selected trajectories were evicted while the version was created; try again",
        headers={"Retry-After": "1"},
    )
