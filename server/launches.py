"""Launches: requests to start programs. A launcher on some machine claims one and reports on it.

    queued ──claim──▶ claimed ──▶ running ──▶ finished | failed
       └────────────────┴────────────┴──────▶ cancelled

Only names and values are kept, never a shell string; the launcher checks them against the recipe.
"""

from __future__ import annotations

import json
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import Database, first_rows, newest_first
from server.index.tables import launches
from server.problems import ProblemError, not_found
from stepwell import new_id
from stepwell.messages import Claimed, ClaimLaunch, CreateLaunch, Launch, Page, PatchLaunch

ENDED = ("finished", "failed", "cancelled")


def create(db: Database, body: CreateLaunch) -> Launch:
    launch_id = f"la_{new_id()}"
    with db.write() as c:
        c.execute(
            sa.insert(launches).values(
                id=launch_id,
                role=body.role,
                recipe=body.recipe,
                args=json.dumps(body.args),
                count=body.count,
                state="queued",
                created_at=time.time(),
            )
        )
        return _read(c, launch_id)


def page(
    db: Database,
    *,
    role: str | None = None,
    state: str | None = None,
    limit: int = 100,
    before: int | None = None,
) -> Page[Launch]:
    """Newest first."""
    with db.read() as c:
        rows, last = first_rows(c, newest_first(launches, before, role=role, state=state), limit)
    items = [_launch(row) for row in rows]
    return Page[Launch](items=items, next=None if last is None else str(last["pk"]))


def get(db: Database, launch_id: str) -> Launch:
    with db.read() as c:
        return _read(c, launch_id)


def claim(db: Database, body: ClaimLaunch) -> Claimed:
    """The oldest queued launch of those roles, now the caller's; null when there is none.

    Two launchers never get the same one: the index has one writer at a time.
    """
    with db.write() as c:
        oldest = (
            sa.select(launches.c.id)
            .where(launches.c.state == "queued", launches.c.role.in_(body.roles))
            .order_by(launches.c.pk)
            .limit(1)
        )
        launch_id = c.execute(oldest).scalar()
        if launch_id is None:
            return Claimed(launch=None)
        _set(c, launch_id, state="claimed", claimed_by=body.worker, claimed_at=time.time())
        return Claimed(launch=_read(c, launch_id))


def patch(db: Database, launch_id: str, body: PatchLaunch) -> Launch:
    """The claiming launcher's report. 409 once the launch has ended, above all if cancelled."""
    with db.write() as c:
        now = _read(c, launch_id)
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
        values: dict[str, Any] = {"state": body.state}
        for key in ("error", "run"):
            if key in body.model_fields_set:
                values[key] = getattr(body, key)
        _set(c, launch_id, **values)
        return _read(c, launch_id)


def cancel(db: Database, launch_id: str) -> Launch:
    """It is not started any more; a launcher that has claimed it stops what it started."""
    with db.write() as c:
        now = _read(c, launch_id)
        if now.state == "cancelled":
            return now
        if now.state in ENDED:
            raise _ended(now, "cancelled")
        _set(c, launch_id, state="cancelled")
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
    row = c.execute(sa.select(launches).where(launches.c.id == launch_id)).mappings().first()
    if row is None:
        raise not_found("launch", launch_id)
    return _launch(row)


def _launch(row: RowMapping) -> Launch:
    values = {k: row[k] for k in Launch.model_fields}
    values["args"] = json.loads(row["args"])
    return Launch(**values)
