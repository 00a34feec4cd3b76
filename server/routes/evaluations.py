"""Evaluations: scores of a policy on an environment with fixed seeds. Rows that never change.

The episodes themselves are trajectories of purpose `eval`. The evaluator computes the numbers
(bootstrap, IQM); registry/evaluations.py validates and stores them.
"""

from __future__ import annotations

from fastapi import APIRouter

from server.registry import evaluations
from server.service import AccessDep, Cursor, Limit, ServiceDep
from stepwell.messages import CreateEvaluation, Evaluation, Page

router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])


@router.post("", status_code=201)
def create_evaluation(service: ServiceDep, body: CreateEvaluation, access: AccessDep) -> Evaluation:
    """Without the scope `train`: of a run of one's own, and of a policy that one may play."""
    return evaluations.create(service.db, body, access)


@router.get("")
def list_evaluations(
    service: ServiceDep,
    access: AccessDep,
    env: str | None = None,
    run: str | None = None,
    policy: str | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Evaluation]:
    """Newest first; those that the caller may read."""
    return evaluations.page(
        service.db, access, env=env, run=run, policy=policy, limit=limit, cursor=cursor
    )
