"""Who deleted, demoted, gave or revoked what: the audit log, for admins."""

from __future__ import annotations

from fastapi import APIRouter

from server.registry import audit
from server.service import Cursor, Limit, ServiceDep
from stepwell.messages import AuditEntry, Page

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("")
def list_audit(service: ServiceDep, limit: Limit = 100, cursor: Cursor = None) -> Page[AuditEntry]:
    """Newest first."""
    return audit.page(service.db, limit, cursor)
