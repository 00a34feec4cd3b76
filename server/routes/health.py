"""Liveness, readiness and metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from server.service import ServiceDep
from stepwell import __version__
from stepwell._wording import pluralize
from stepwell.messages import Health

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz(service: ServiceDep, request: Request) -> Health:
    """Liveness: 200 while the process responds, also when all threads wait for the disk."""
    return _health(service, request)


@router.get("/readyz", responses={503: {"model": Health}})
async def readyz(service: ServiceDep, request: Request, response: Response) -> Health:
    """Readiness to ingest: 503 while read-only."""
    health = _health(service, request)
    if not health.writable:
        response.status_code = 503
    return health


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(service: ServiceDep) -> Response:
    """Prometheus text."""
    service.scrub.measure()
    service.telemetry.free_bytes.set(service.store.free())
    return Response(service.telemetry.text(), media_type="text/plain; version=0.0.4")


def _health(service: ServiceDep, request: Request) -> Health:
    """All details for callers with a token; only the status for others."""
    trouble = service.ingest.committer.trouble
    why = [str(trouble.got)] if trouble is not None else []
    if service.ingest.sealer.failure:
        why.append(f"sealing: {service.ingest.sealer.failure}")
    loops = (service.ingest.committer.loop, service.ingest.sealer.loop)
    others = (service.maintenance, service.scrub, service.snapshots.cache, service.mirror)
    why += [part.trouble for part in (*loops, *others) if part.trouble]
    if service.db.lost:
        why.append(service.db.lost.sentence())
    if bad := sorted(service.integrity.quarantined):
        why.append(f"{len(bad)} damaged shards, see stepwell fsck: {', '.join(bad[:5])}")
    if bad := sorted(service.integrity.damaged_files | service.ingest.sealer.damaged):
        why.append(f"{len(bad)} damaged files, see stepwell fsck: {', '.join(bad[:5])}")
    if aside := service.maintenance.aside:
        files = pluralize(len(aside), "file")
        why.append(
            f"the index does not know what {files} in quarantine may hold, see stepwell fsck:"
            f" {', '.join(aside[:5])}"
        )
    status: Literal["ok", "degraded"] = "degraded" if why else "ok"
    if getattr(request.state, "principal", None) is None:
        return Health(status=status, version="", writable=trouble is None)
    return Health(
        status=status,
        version=__version__,
        database_revision=service.db.revision,
        writable=trouble is None,
        detail="; ".join(why),
    )
