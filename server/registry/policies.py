"""Published weights, addressed as run/version, immutable (routes/policies.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import Database, find_pk, find_row, first_rows, write_audit
from server.index.lost_rows import refuse_if_lost
from server.index.tables import policies, policy_aliases, runs
from server.maintenance.described_files import policy_description
from server.problems import ProblemError, index_damaged
from server.registry.runs import find_run
from server.registry.stored_files import StoredFiles, insert_row
from server.rights import Access
from server.storage.store import Stored, Writer, new_name
from stepwell.messages import Page, Policy, PutAlias

LATEST = "latest"
MAX_NUMBER = 2**53
"""Largest version or step: integers that every JSON reader represents exactly."""


def open_writer(files: StoredFiles, run: str) -> Writer:
    """The file for the bytes of a policy. Raises 404 before they are read."""
    with files.db.read() as c:
        find_pk(c, runs, run)
    return files.store.new("policies", new_name("pol", ".bin"))


def publish(
    files: StoredFiles, run: str, version: int, writer: Writer, metadata: dict[str, Any], who: str
) -> tuple[Policy, bool]:
    """Publish a written body as run/version; returns whether it is new.

    Raises 422 for an empty body, 409 if the version holds other bytes.
    """

    def insert(c: Connection, stored: Stored) -> tuple[int, Policy, bool]:
        return _insert(c, run, version, stored, metadata, who)

    with files.db.read() as c:
        description = policy_description(c, run, version, metadata, time.time())
    points = ("policy.after_rename", "policy.after_replace")
    return insert_row(files, policies, writer, insert, description=description, points=points)


def _insert(
    c: Connection, run: str, version: int, stored: Stored, metadata: dict[str, Any], who: str
) -> tuple[int, Policy, bool]:
    """(pk, policy, whether it is new)"""
    if stored.bytes == 0:
        raise ProblemError(
            422, "invalid_policy", "the body is empty", expected="the bytes of a policy file"
        )
    run_pk = find_pk(c, runs, run)
    found = find_row(c, policies, run_pk=run_pk, version=version)
    if found is not None and found["sha256"] != stored.sha256:
        raise ProblemError(
            409,
            "conflict",
            f"policy {run}/{version} exists with other content; policies are immutable, publish"
            " a new version",
            expected=f"sha256 {found['sha256']}",
            got=f"sha256 {stored.sha256}",
        )
    if found is None:
        refuse_if_lost(c, policies, f"{run}/{version}")
        c.execute(
            sa.insert(policies).values(
                run_pk=run_pk,
                version=version,
                **stored.columns,
                verified_at=time.time(),
                step=metadata.get("step"),
                metadata=metadata,
                created_at=time.time(),
            )
        )
        about = {"sha256": stored.sha256, "bytes": stored.bytes}
        write_audit(c, who, "policy.publish", f"{run}/{version}", **about)
    row = find_row(c, policies, run_pk=run_pk, version=version)
    assert row is not None, "just written in this transaction"
    return row["pk"], _policies(c, run, run_pk, [row])[0], found is None


def page(db: Database, name: str, access: Access, limit: int, cursor: int | None) -> Page[Policy]:
    """Sorted by version, greatest first. Raises 404, 403."""
    with db.read() as c:
        run_pk = find_run(c, name, access)
        query = sa.select(policies).where(policies.c.run_pk == run_pk)
        if cursor is not None:
            query = query.where(policies.c.version < cursor)
        rows, last = first_rows(c, query.order_by(policies.c.version.desc()), limit)
        items = _policies(c, name, run_pk, rows)
    for item in items:
        if LATEST in item.aliases and any(
            _may_be_newer(lost.name, item) for lost in db.lost.of("policies")
        ):
            item.aliases.remove(LATEST)
    return Page[Policy](items=items, next=None if last is None else str(last["version"]))


def get(db: Database, name: str, which: str, access: Access) -> RowMapping:
    """The row of a version or an alias. Raises 404, 403."""
    with db.read() as c:
        run_pk = find_run(c, name, access)
        row = _which(c, run_pk, which)
        if not which.isdecimal() and db.lost.of("policies", "policy_aliases"):
            # The one it means may be among the lost.
            raise index_damaged(db.lost.sentence())
        if row is None:
            raise _absent(c, name, run_pk, which)
    return row


def set_alias(db: Database, name: str, alias: str, body: PutAlias, caller: str) -> Policy:
    """An existing alias moves; nothing is copied. Raises 404, 409."""
    if alias == LATEST:
        raise ProblemError(
            409, "conflict", "'latest' is always the greatest version and cannot be set"
        )
    with db.write() as c:
        run_pk = find_pk(c, runs, name)
        row = find_row(c, policies, run_pk=run_pk, version=body.version)
        if row is None:
            raise _absent(c, name, run_pk, str(body.version))
        where = sa.and_(policy_aliases.c.run_pk == run_pk, policy_aliases.c.alias == alias)
        c.execute(sa.delete(policy_aliases).where(where))
        c.execute(sa.insert(policy_aliases).values(run_pk=run_pk, alias=alias, policy_pk=row["pk"]))
        write_audit(c, caller, "policy.alias", f"{name}/{alias}", version=body.version)
        return _policies(c, name, run_pk, [row])[0]


def _which(c: Connection, run_pk: int, which: str) -> RowMapping | None:
    if which.isascii() and which.isdecimal():
        # Longer than any stored version: Python limits the length of integers that it parses.
        if len(which) > len(str(MAX_NUMBER)):
            return None
        return find_row(c, policies, run_pk=run_pk, version=int(which))
    query = sa.select(policies).where(policies.c.run_pk == run_pk)
    if which == LATEST:
        query = query.order_by(policies.c.version.desc()).limit(1)
    else:
        query = query.join(policy_aliases, policy_aliases.c.policy_pk == policies.c.pk).where(
            policy_aliases.c.run_pk == run_pk, policy_aliases.c.alias == which
        )
    return c.execute(query).mappings().first()


def _policies(c: Connection, run: str, run_pk: int, rows: Sequence[RowMapping]) -> list[Policy]:
    names: dict[int, list[str]] = {}
    query = sa.select(policy_aliases.c.policy_pk, policy_aliases.c.alias)
    query = query.where(policy_aliases.c.run_pk == run_pk).order_by(policy_aliases.c.alias)
    for policy_pk, alias in c.execute(query):
        names.setdefault(policy_pk, []).append(alias)
    newest = c.execute(
        sa.select(sa.func.max(policies.c.version)).where(policies.c.run_pk == run_pk)
    ).scalar()
    return [
        Policy(
            **row,
            run=run,
            aliases=([LATEST] if row["version"] == newest else []) + names.get(row["pk"], []),
        )
        for row in rows
    ]


def _may_be_newer(lost: str, policy: Policy) -> bool:
    """Whether a lost policy of that name may be a later one of the same run."""
    run, _, version = lost.rpartition("/")
    if run not in (policy.run, ""):
        return False
    return not version.isdecimal() or int(version) > policy.version


def _absent(c: Connection, run: str, run_pk: int, which: str) -> ProblemError:
    newest = c.execute(
        sa.select(sa.func.max(policies.c.version)).where(policies.c.run_pk == run_pk)
    ).scalar()
    hint = "none has been published yet" if newest is None else f"the latest version is {newest}"
    return ProblemError(404, "not_found", f"run {run!r} has no policy {which!r}; {hint}")
