"""The audit log, which index/db.py writes."""

from __future__ import annotations

from server.index.db import Database, first_rows, newest_first
from server.index.tables import audit
from stepwell.messages import AuditEntry, Page


def page(db: Database, limit: int, cursor: int | None) -> Page[AuditEntry]:
    """Newest first."""
    with db.read() as c:
        rows, last = first_rows(c, newest_first(audit, cursor), limit)
    return Page[AuditEntry](
        items=[AuditEntry.model_validate(dict(row)) for row in rows],
        next=None if last is None else str(last["pk"]),
    )
