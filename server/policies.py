"""Policies: published acting weights, addressed as run/version, put once and never changed.

    PUT  body → DIR/tmp (hashed while it streams) → rename → one index row → 201
         the same bytes again → 200; other bytes under that version → 409

A file whose row was never written (a crash in between) is an orphan, which maintenance removes.
The bytes are opaque here; the program that loads them checks them. `latest` is the greatest
version, never stored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
import structlog
from pydantic import TypeAdapter
from sqlalchemy.engine import Connection, RowMapping

from server import runs
from server.checksums import Source, examine
from server.index.db import Database, first_rows
from server.index.tables import policies, policy_aliases
from server.integrity import IntegrityChecker
from server.problems import ProblemError
from server.storage.store import Store, Stored, Writer, new_name
from stepwell.failpoints import failpoint
from stepwell.messages import Document, Page, Policy

log = structlog.get_logger("stepwell.policies")
LATEST = "latest"
_DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(Document)
MAX_NUMBER = 2**53
"""Of versions and steps: what every JSON reader keeps exact."""


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A policy and the file that holds its bytes."""

    policy: Policy
    source: Source
    where: str
    """The file, as folder/name."""


def open_writer(db: Database, store: Store, run: str) -> Writer:
    """Where the body of a PUT goes; 404 before a byte is read if there is no such run."""
    with db.read() as c:
        runs.find(c, run)
    return store.new("policies", new_name("pol", ".bin"))


def parse_metadata(header: str | None) -> dict[str, Any]:
    """The X-Stepwell-Metadata header: a JSON object, of which `step` becomes a column."""
    if not header:
        return {}
    try:
        found = _DOCUMENT.validate_python(json.loads(header), strict=True)
    except RecursionError:
        raise _bad_metadata("nested too deeply") from None
    except ValueError as error:  # pydantic's ValidationError is one too
        raise _bad_metadata(f"{header[:80]} ({str(error).splitlines()[-1]})") from None
    step = found.get("step")
    if step is not None and not (type(step) is int and 0 <= step <= MAX_NUMBER):
        raise _bad_metadata(f"step {step!r}")
    return found


def publish(
    db: Database,
    store: Store,
    integrity: IntegrityChecker,
    run: str,
    version: int,
    writer: Writer,
    metadata: dict[str, Any],
) -> tuple[Policy, bool]:
    """Settle a written body as run/version; says whether it is new.

    Raises 422 for an empty body, 409 when the version holds other bytes.
    """
    stored = writer.commit()
    failpoint("policy.after_rename")
    try:
        policy, new = _insert(db, run, version, stored, metadata)
    except BaseException:
        store.delete("policies", stored.path.name)
        raise
    if not new and not _replace_damaged(db, store, integrity, run, version, stored):
        store.delete("policies", stored.path.name)
    return policy, new


def _replace_damaged(
    db: Database, store: Store, integrity: IntegrityChecker, run: str, version: int, stored: Stored
) -> bool:
    """Publishing the same bytes again is how a damaged policy is cured. True if it was one."""
    with db.read() as c:
        row = _row(c, runs.find(c, run), version)
    if row is None:
        return False
    try:
        if examine(store.path("policies", row["file"])).sha256 == row["sha256"]:
            return False
    except OSError as error:
        log.warning("a policy cannot be read", file=row["file"], error=str(error))
    with db.write() as c:
        p = policies.c
        hit = c.execute(
            sa.update(policies)
            .where(p.pk == row["pk"], p.file == row["file"])
            .values(
                file=stored.path.name,
                bytes=stored.bytes,
                checksums=stored.checksums,
                verified_at=time.time(),
            )
        ).rowcount
    failpoint("policy.after_replace")
    if hit:
        store.delete("policies", row["file"])
        integrity.damaged_files.discard(f"policies/{row['file']}")
        log.info("a damaged policy was replaced", run=run, version=version)
    return bool(hit)


def _insert(
    db: Database, run: str, version: int, stored: Stored, metadata: dict[str, Any]
) -> tuple[Policy, bool]:
    if stored.bytes == 0:
        raise ProblemError(
            422, "invalid_policy", "the body is empty", expected="the bytes of a policy file"
        )
    with db.write() as c:
        run_pk = runs.find(c, run)
        found = _row(c, run_pk, version)
        if found is not None and found["sha256"] != stored.sha256:
            raise ProblemError(
                409,
                "conflict",
                f"policy {run}/{version} exists with other content; policies never change, publish"
                " a new version",
                expected=f"sha256 {found['sha256']}",
                got=f"sha256 {stored.sha256}",
            )
        if found is None:
            c.execute(
                sa.insert(policies).values(
                    run_pk=run_pk,
                    version=version,
                    sha256=stored.sha256,
                    file=stored.path.name,
                    bytes=stored.bytes,
                    checksums=stored.checksums,
                    verified_at=time.time(),
                    step=metadata.get("step"),
                    metadata=json.dumps(metadata),
                    created_at=time.time(),
                )
            )
        return _policies(c, run, run_pk, _some(c, run_pk, version))[0], found is None


def page(db: Database, run: str, *, limit: int = 100, before: int | None = None) -> Page[Policy]:
    """Greatest version first."""
    with db.read() as c:
        run_pk = runs.find(c, run)
        query = sa.select(policies).where(policies.c.run_pk == run_pk)
        if before is not None:
            query = query.where(policies.c.version < before)
        rows, last = first_rows(c, query.order_by(policies.c.version.desc()), limit)
        items = _policies(c, run, run_pk, rows)
    return Page[Policy](items=items, next=None if last is None else str(last["version"]))


def locate(db: Database, store: Store, run: str, which: str) -> PolicyFile:
    """The policy of a version or an alias, or 404."""
    with db.read() as c:
        run_pk = runs.find(c, run)
        row = _which(c, run_pk, which)
        if row is None:
            raise _absent(c, run, run_pk, which)
        policy = _policies(c, run, run_pk, [row])[0]
    source = Source(store.path("policies", row["file"]), row["bytes"], row["checksums"])
    return PolicyFile(policy, source, f"policies/{row['file']}")


def set_alias(db: Database, run: str, alias: str, version: int) -> Policy:
    """Point a name at a version; the same name moves, nothing is copied."""
    if alias == LATEST:
        raise ProblemError(
            409, "conflict", "'latest' is always the greatest version and cannot be set"
        )
    with db.write() as c:
        run_pk = runs.find(c, run)
        row = _row(c, run_pk, version)
        if row is None:
            raise _absent(c, run, run_pk, str(version))
        where = sa.and_(policy_aliases.c.run_pk == run_pk, policy_aliases.c.alias == alias)
        c.execute(sa.delete(policy_aliases).where(where))
        c.execute(sa.insert(policy_aliases).values(run_pk=run_pk, alias=alias, policy_pk=row["pk"]))
        return _policies(c, run, run_pk, [row])[0]


def remove_files(store: Store, names: Sequence[str]) -> None:
    """After the rows are gone: what a crash leaves here is an orphan for the sweep."""
    for name in names:
        store.delete("policies", name)


def _which(c: Connection, run_pk: int, which: str) -> RowMapping | None:
    if which.isascii() and which.isdecimal():
        # Longer than any version we gave out: Python refuses to read numbers of any length.
        return _row(c, run_pk, int(which)) if len(which) <= len(str(MAX_NUMBER)) else None
    query = sa.select(policies).where(policies.c.run_pk == run_pk)
    if which == LATEST:
        query = query.order_by(policies.c.version.desc()).limit(1)
    else:
        query = query.join(policy_aliases, policy_aliases.c.policy_pk == policies.c.pk).where(
            policy_aliases.c.run_pk == run_pk, policy_aliases.c.alias == which
        )
    return c.execute(query).mappings().first()


def _row(c: Connection, run_pk: int, version: int) -> RowMapping | None:
    query = sa.select(policies).where(policies.c.run_pk == run_pk, policies.c.version == version)
    return c.execute(query).mappings().first()


def _some(c: Connection, run_pk: int, version: int) -> list[RowMapping]:
    row = _row(c, run_pk, version)
    assert row is not None, "just written in this transaction"
    return [row]


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
            run=run,
            version=row["version"],
            sha256=row["sha256"],
            bytes=row["bytes"],
            step=row["step"],
            created_at=row["created_at"],
            metadata=json.loads(row["metadata"]),
            aliases=([LATEST] if row["version"] == newest else []) + names.get(row["pk"], []),
        )
        for row in rows
    ]


def _absent(c: Connection, run: str, run_pk: int, which: str) -> ProblemError:
    newest = c.execute(
        sa.select(sa.func.max(policies.c.version)).where(policies.c.run_pk == run_pk)
    ).scalar()
    hint = "none has been published yet" if newest is None else f"the latest version is {newest}"
    return ProblemError(404, "not_found", f"run {run!r} has no policy {which!r}; {hint}")


def _bad_metadata(got: str) -> ProblemError:
    return ProblemError(
        422,
        "validation_error",
        "the X-Stepwell-Metadata header cannot be read",
        expected='a JSON object in ASCII, for instance {"step": 1000}',
        got=got[:200],
    )
