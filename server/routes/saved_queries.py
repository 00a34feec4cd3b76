"""Saved queries: SQL under a name, for everybody who may query. Whoever saved one may change it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter
from sqlalchemy.engine import Connection

from server.index.db import find_row, first_rows, newest_first, write_audit
from server.index.lost_rows import refuse_if_lost
from server.index.tables import saved_queries
from server.problems import not_found
from server.service import AccessDep, Cursor, Limit, ServiceDep
from stepwell.messages import Name, Page, SavedQuery, SaveQuery

router = APIRouter(prefix="/v1/queries", tags=["sql"])


@router.get("")
def list_saved_queries(
    service: ServiceDep, limit: Limit = 100, cursor: Cursor = None
) -> Page[SavedQuery]:
    """Newest first."""
    with service.db.read() as connection:
        rows, last = first_rows(connection, newest_first(saved_queries, cursor), limit)
    return Page[SavedQuery](
        items=[SavedQuery.model_validate(dict(row)) for row in rows],
        next=None if last is None else str(last["pk"]),
    )


@router.get("/{name}")
def get_saved_query(service: ServiceDep, name: Name) -> SavedQuery:
    with service.db.read() as connection:
        return SavedQuery.model_validate(dict(_row(connection, name)))


@router.put("/{name}")
def save_query(service: ServiceDep, name: Name, body: SaveQuery, access: AccessDep) -> SavedQuery:
    """Save a query, or replace the one of that name, which only its owner or an admin may."""
    now = service.db.clock.wall()
    values = {**body.model_dump(), "updated_at": now}
    with service.db.write() as connection:
        old = find_row(connection, saved_queries, name=name)
        if old is None:
            refuse_if_lost(connection, saved_queries, name)
            made = {"name": name, "owner": access.who, "created_at": now}
            connection.execute(sa.insert(saved_queries).values(**values, **made))
        else:
            access.require(old["owner"], f"the query {name!r}")
            connection.execute(
                sa.update(saved_queries).where(saved_queries.c.name == name).values(**values)
            )
        write_audit(connection, access.who, "saved_query.save", name)
        return SavedQuery.model_validate(dict(_row(connection, name)))


@router.delete("/{name}", status_code=204)
def delete_saved_query(service: ServiceDep, name: Name, access: AccessDep) -> None:
    """Only its owner or an admin may."""
    with service.db.write() as connection:
        old = _row(connection, name)
        access.require(old["owner"], f"the query {name!r}")
        connection.execute(sa.delete(saved_queries).where(saved_queries.c.name == name))
        write_audit(connection, access.who, "saved_query.delete", name, sql=old["sql"])


def _row(connection: Connection, name: str) -> Any:
    """Raises 404."""
    row = find_row(connection, saved_queries, name=name)
    if row is None:
        known = connection.execute(sa.select(saved_queries.c.name)).scalars()
        raise not_found("saved query", name, known)
    return row
