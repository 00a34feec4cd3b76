"""Consumers: who samples from a dataset, how much so far, and the ratio that it keeps to inserts.

    trainer    PUT every second: samples so far ──▶ samples_until: draw no more than this
    collector  GET every second                 ──▶ inserts_until: begin no episode beyond this

So the faster side waits for the slower one (the rate limiter of Reverb; SampleRatio has the
formula). Inserts count from `base`, which is set such that neither side is ahead when a consumer
registers and when its ratio changes: a dataset that was full before does not make anyone wait.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from server.registry import consumers
from server.service import Caller, Limit, ServiceDep
from stepwell.messages import Consumer, Page, PatchConsumer, PutConsumer

router = APIRouter(prefix="/v1/datasets/{name}/consumers", tags=["consumers"])

ConsumerName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


@router.put("/{consumer}")
def put_consumer(
    service: ServiceDep, name: str, consumer: ConsumerName, body: PutConsumer, caller: Caller
) -> Consumer:
    """Report samples, or register; 404 if it is not registered and the body has no ratio."""
    return consumers.report(service.db, name, consumer, body, caller)


@router.patch("/{consumer}")
def patch_consumer(
    service: ServiceDep, name: str, consumer: ConsumerName, body: PatchConsumer, caller: Caller
) -> Consumer:
    """Change the ratio from here on, while both sides run."""
    return consumers.change(service.db, name, consumer, body, caller)


@router.get("")
def list_consumers(
    service: ServiceDep, name: str, limit: Limit = 100, cursor: str | None = None
) -> Page[Consumer]:
    """Sorted by name, including those that no longer report."""
    return consumers.page(service.db, name, limit, cursor)


@router.delete("/{consumer}", status_code=204)
def delete_consumer(service: ServiceDep, name: str, consumer: ConsumerName, caller: Caller) -> None:
    """Unregister: collectors no longer wait for it. A trainer that still reports registers anew."""
    consumers.delete(service.db, name, consumer, caller)
