"""Who deleted, demoted, gave or revoked what: the audit log, for admins."""

from __future__ import annotations

from fastapi import APIRouter

from server.index.db import first_rows, newest_first
from server.index.tables import audit
from server.service import Cursor, Limit, ServiceDep
from stepwell.messages import AuditEntry, Page

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("")
def list_audit(service: ServiceDep, limit: Limit = 100, cursor: Cursor = None) -> Page[AuditEntry]:
    """Newest first."""
    with service.db.read() as c:
        rows, last = first_rows(c, newest_first(audit, cursor), limit)
    return Page[AuditEntry](
        items=[AuditEntry.model_validate(dict(row)) for row in rows],
        next=None if last is None else str(last["pk"]),
    )
