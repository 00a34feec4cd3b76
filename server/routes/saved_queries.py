"""Saved queries: SQL under a name, for everybody who may query. Whoever saved one may change it."""

from __future__ import annotations

from fastapi import APIRouter

from server.registry import saved_queries
from server.service import AccessDep, Cursor, Limit, ServiceDep
from stepwell.messages import Name, Page, SavedQuery, SaveQuery

router = APIRouter(prefix="/v1/queries", tags=["sql"])


@router.get("")
def list_saved_queries(
    service: ServiceDep, limit: Limit = 100, cursor: Cursor = None
) -> Page[SavedQuery]:
    """Newest first."""
    return saved_queries.page(service.db, limit, cursor)


@router.get("/{name}")
def get_saved_query(service: ServiceDep, name: Name) -> SavedQuery:
    return saved_queries.get(service.db, name)


@router.put("/{name}")
def save_query(service: ServiceDep, name: Name, body: SaveQuery, access: AccessDep) -> SavedQuery:
    """Save a query, or replace the one of that name, which only its owner or an admin may."""
    return saved_queries.save(service.db, name, body, access)


@router.delete("/{name}", status_code=204)
def delete_saved_query(service: ServiceDep, name: Name, access: AccessDep) -> None:
    """Only its owner or an admin may."""
    saved_queries.delete(service.db, name, access)
