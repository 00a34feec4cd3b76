"""Requests to start programs, and who has claimed them (routes/launches.py)."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import Database, count_audit, equal, get_row, read_page, write_audit
from server.index.tables import launches
from server.problems import ProblemError, not_found
from server.rights import Access
from stepwell import new_id
from stepwell.messages import ClaimLaunch, CreateLaunch, Launch, Page, PatchLaunch

ENDED = ("finished", "failed", "cancelled")
LISTED = [column for column in launches.c if column.name != "log"]


def create(db: Database, body: CreateLaunch, caller: str) -> Launch:
    launch_id = f"la_{new_id()}"
    values = {"id": launch_id, "state": "queued", "created_at": time.time(), **body.model_dump()}
    with db.write() as c:
        c.execute(sa.insert(launches).values(owner=caller, **values))
        about = body.model_dump(include={"role", "recipe", "count"})
        write_audit(c, caller, "launch.create", launch_id, **about)
        return _read(c, launch_id)


def page(
    db: Database, *, role: str | None, state: str | None, limit: int, cursor: int | None
) -> Page[Launch]:
    """Newest first."""
    query = sa.select(*LISTED).where(*equal(launches, role=role, state=state))
    with db.read() as c:
        return read_page(c, Launch, query, launches.c.pk, limit, cursor)


def claim(db: Database, body: ClaimLaunch, caller: str) -> Launch | None:
    """The oldest queued launch, which is the caller's now. Two never claim the same one: the index
    has one writer at a time."""
    with db.write() as c:
        oldest = (
            sa.select(launches.c.id)
            .where(launches.c.state == "queued", launches.c.role.in_(body.roles))
            .order_by(launches.c.pk)
            .limit(1)
        )
        launch_id = c.execute(oldest).scalar()
        if launch_id is None:
            return None
        claimed = {"state": "claimed", "claimed_by": body.worker, "claimer": caller}
        _set(c, launch_id, claimed_at=time.time(), **claimed)
        write_audit(c, caller, "launch.claim", launch_id, worker=body.worker)
        return _read(c, launch_id)


def get(db: Database, launch_id: str) -> Launch:
    """Raises 404."""
    with db.read() as c:
        return _read(c, launch_id)


def log(db: Database, launch_id: str) -> str:
    """Raises 404."""
    with db.read() as c:
        return str(get_row(c, launches, id=launch_id)["log"])


def report(db: Database, launch_id: str, body: PatchLaunch, access: Access) -> Launch:
    """Raises 403 for another token than that of the claim, 409 if the launch has ended."""
    with db.write() as c:
        now = _read(c, launch_id)
        access.require(now.claimer, f"the claim of launch {launch_id}")
        if now.state in ENDED and now.state != body.state:
            raise _ended(now, body.state)
        if now.state == "queued" and body.state != "cancelled":
            raise ProblemError(
                409,
                "conflict",
                f"launch {launch_id} has not been claimed; claim it first",
                expected="state claimed or running",
                got=now.state,
            )
        _set(c, launch_id, **body.model_dump(exclude_unset=True))
        count_audit(c, access.who, "launch.report", launch_id, **{body.state: 1})
        return _read(c, launch_id)


def cancel(db: Database, launch_id: str, caller: str) -> Launch:
    """Raises 404, 409 if it has ended otherwise."""
    with db.write() as c:
        now = _read(c, launch_id)
        if now.state == "cancelled":
            return now
        if now.state in ENDED:
            raise _ended(now, "cancelled")
        _set(c, launch_id, state="cancelled")
        write_audit(c, caller, "launch.cancel", launch_id)
        return _read(c, launch_id)


def _ended(launch: Launch, wanted: str) -> ProblemError:
    return ProblemError(
        409,
        "conflict",
        f"launch {launch.id} has ended and cannot become {wanted}",
        expected="state queued, claimed or running",
        got=launch.state,
    )


def _set(c: Connection, launch_id: str, **values: Any) -> None:
    c.execute(sa.update(launches).where(launches.c.id == launch_id).values(**values))


def _read(c: Connection, launch_id: str) -> Launch:
    row = c.execute(sa.select(*LISTED).where(launches.c.id == launch_id)).mappings().first()
    if row is None:
        raise not_found("launch", launch_id)
    return Launch(**row)
