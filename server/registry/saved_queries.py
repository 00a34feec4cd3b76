"""SQL under a name. Only the owner of a saved query, or an admin, may change it."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import Database, find_row, read_page, set_row, write_audit
from server.index.lost_rows import refuse_if_lost
from server.index.tables import saved_queries
from server.problems import not_found
from server.rights import Access
from stepwell.messages import Page, SavedQuery, SaveQuery


def page(db: Database, limit: int, cursor: int | None) -> Page[SavedQuery]:
    """Newest first."""
    with db.read() as c:
        query = sa.select(saved_queries)
        return read_page(c, SavedQuery, query, saved_queries.c.pk, limit, cursor)


def get(db: Database, name: str) -> SavedQuery:
    """Raises 404."""
    with db.read() as c:
        return SavedQuery(**_known(c, name))


def save(db: Database, name: str, body: SaveQuery, access: Access) -> SavedQuery:
    now = db.clock.wall()
    values = {**body.model_dump(), "updated_at": now}
    with db.write() as c:
        old = find_row(c, saved_queries, name=name)
        if old is None:
            refuse_if_lost(c, saved_queries, name)
            made = {"name": name, "owner": access.who, "created_at": now}
            c.execute(sa.insert(saved_queries).values(**values, **made))
        else:
            access.require(old["owner"], f"the query {name!r}")
            set_row(c, saved_queries, {"name": name}, **values)
        write_audit(c, access.who, "saved_query.save", name)
        return SavedQuery(**_known(c, name))


def delete(db: Database, name: str, access: Access) -> None:
    """Raises 404, 403."""
    with db.write() as c:
        old = _known(c, name)
        access.require(old["owner"], f"the query {name!r}")
        c.execute(sa.delete(saved_queries).where(saved_queries.c.name == name))
        write_audit(c, access.who, "saved_query.delete", name, sql=old["sql"])


def _known(c: Connection, name: str) -> RowMapping:
    row = find_row(c, saved_queries, name=name)
    if row is None:
        raise not_found("saved query", name, c.execute(sa.select(saved_queries.c.name)).scalars())
    return row
