"""Versions of datasets over HTTP, implemented in server/versions/versions.py."""

from __future__ import annotations

from fastapi import APIRouter

from server.service import Caller, Cursor, Limit, ServiceDep
from stepwell.messages import CreateVersion, Page, Version, VersionDiff

router = APIRouter(prefix="/v1/datasets/{name}/versions", tags=["versions"])


@router.post("", status_code=201)
def create_version(service: ServiceDep, name: str, body: CreateVersion, caller: Caller) -> Version:
    """Run the selection once; its trajectories become protected. 409 if the name is taken."""
    return service.versions.create(name, body, caller)


@router.get("")
def list_versions(
    service: ServiceDep, name: str, limit: Limit = 100, cursor: Cursor = None
) -> Page[Version]:
    """Newest first."""
    return service.versions.page(name, limit=limit, cursor=cursor)


@router.get("/{version}")
def get_version(service: ServiceDep, name: str, version: str) -> Version:
    return service.versions.get(name, version)


@router.get("/{version}/diff")
def diff_versions(service: ServiceDep, name: str, version: str, before: str) -> VersionDiff:
    """What the version has and `before`, another version of the dataset, has not, and the
    reverse."""
    return service.versions.diff(name, before, version)


@router.delete("/{version}", status_code=204)
def delete_version(service: ServiceDep, name: str, version: str, caller: Caller) -> None:
    """For admins; audited. The trajectories stay, and stay protected."""
    service.versions.delete(name, version, caller)
