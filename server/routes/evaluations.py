"""Evaluations over HTTP; the work is in server/evaluations.py."""

from __future__ import annotations

from fastapi import APIRouter

from server import evaluations
from server.service import Cursor, Limit, ServiceDep
from stepwell.messages import CreateEvaluation, Evaluation, Page

router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])


@router.post("", status_code=201)
def create_evaluation(service: ServiceDep, body: CreateEvaluation) -> Evaluation:
    return evaluations.create(service.db, body)


@router.get("")
def list_evaluations(
    service: ServiceDep,
    env: str | None = None,
    run: str | None = None,
    policy: str | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Evaluation]:
    """Newest first."""
    return evaluations.page(service.db, env=env, run=run, policy=policy, limit=limit, before=cursor)
