"""Datasets over HTTP; the work is in server/datasets.py.

A new route also needs its scope in auth.py:RULES, a message, a client method and a row in
docs/http.md.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from server import datasets
from server.service import Limit, ServiceDep, may, who
from stepwell.messages import CreateDataset, Dataset, FlushResult, Page, PatchDataset

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])


@router.post("", status_code=201)
def create_dataset(service: ServiceDep, body: CreateDataset) -> Dataset:
    return datasets.create(service.db, body)


@router.get("")
def list_datasets(
    service: ServiceDep,
    limit: Limit = 100,
    cursor: str | None = None,
) -> Page[Dataset]:
    """By name."""
    return datasets.page(service.db, limit=limit, cursor=cursor)


@router.get("/{name}")
def get_dataset(service: ServiceDep, name: str, request: Request) -> Dataset:
    return datasets.get(service.db, name, hint=may(request, "read", "train"))


@router.patch("/{name}")
def patch_dataset(service: ServiceDep, name: str, body: PatchDataset) -> Dataset:
    """Works while data flows in; a smaller capacity evicts at once."""
    return datasets.patch(service.db, name, body)


@router.delete("/{name}", status_code=204)
def delete_dataset(service: ServiceDep, name: str, request: Request) -> None:
    """409 while it holds protected trajectories."""
    datasets.delete(service.db, service.ingest, name, who(request))


@router.post("/{name}/flush")
def flush(service: ServiceDep, name: str) -> FlushResult:
    """Seal what was acknowledged, so that SQL `steps` shows it."""
    return service.ingest.flush(name)
