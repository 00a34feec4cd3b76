"""Datasets: create, read, change and delete them. A dataset's spec never changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query

from server.problems import ProblemError
from server.registry import datasets
from server.rights import CREATE_FIRST, Access
from server.service import AccessDep, Caller, Limit, ServiceDep
from stepwell.messages import CreateDataset, Dataset, FlushResult, Page, PatchDataset

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])


@router.post("", status_code=201)
def create_dataset(service: ServiceDep, body: CreateDataset, caller: Caller) -> Dataset:
    return datasets.create(service.db, body, caller)


@router.get("")
def list_datasets(
    service: ServiceDep,
    access: AccessDep,
    limit: Limit = 100,
    cursor: str | None = None,
) -> Page[Dataset]:
    """Sorted by name; those that the caller may read."""
    return datasets.page(service.db, access, limit, cursor)


@router.get("/{name}")
def get_dataset(service: ServiceDep, name: str, access: AccessDep) -> Dataset:
    with create_first(access):
        return datasets.get(service.db, name, access)


@contextlib.contextmanager
def create_first(access: Access) -> Iterator[None]:
    """Tell a caller who may not create the dataset that is missing who may."""
    try:
        yield
    except ProblemError as error:
        if error.status == 404 and access.principal.may("ingest") and not access.creates:
            error.detail += f"; {CREATE_FIRST}"
        raise


@router.patch("/{name}")
def patch_dataset(service: ServiceDep, name: str, body: PatchDataset, caller: Caller) -> Dataset:
    """Change settings, also during ingest; a smaller capacity evicts at once."""
    return datasets.change(service.db, name, body, caller)


@router.delete("/{name}", status_code=204)
def delete_dataset(
    service: ServiceDep,
    name: str,
    caller: Caller,
    protected: Annotated[
        bool, Query(description="also its protected trajectories; each is in the audit log")
    ] = False,
) -> None:
    """Delete a dataset; 409 if it has versions, or holds protected trajectories, unless
    `?protected=true`."""
    datasets.delete(service.db, service.store, service.ingest, name, caller, protected=protected)


@router.post("/{name}/flush")
def flush(service: ServiceDep, name: str, caller: Caller) -> FlushResult:
    """Seal what was acknowledged, so that SQL `steps` contains it."""
    sealed = service.ingest.flush(name)
    datasets.note_flush(service.db, name, sealed, caller)
    return sealed
