"""The audit log, which index/db.py writes."""

from __future__ import annotations

import sqlalchemy as sa

from server.index.db import Database, read_page
from server.index.tables import audit
from stepwell.messages import AuditEntry, Page


def page(db: Database, limit: int, cursor: int | None) -> Page[AuditEntry]:
    """Newest first."""
    with db.read() as c:
        return read_page(c, AuditEntry, sa.select(audit), audit.c.pk, limit, cursor)
