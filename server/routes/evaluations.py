"""Evaluations: scores of a policy on an environment with fixed seeds. Rows that never change.

The episodes themselves are trajectories of purpose `eval`. The evaluator computes the numbers
(bootstrap, IQM); these routes validate and store them.
"""

from __future__ import annotations

import math
import time

import sqlalchemy as sa
from fastapi import APIRouter

from server.index.db import find_pk, first_rows, newest_first
from server.index.tables import evaluations, runs
from server.problems import ProblemError
from server.service import Cursor, Limit, ServiceDep
from stepwell import new_id
from stepwell.messages import CreateEvaluation, Evaluation, Page

router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])
_NUMBERS = ("mean", "iqm", "ci_low", "ci_high")


@router.post("", status_code=201)
def create_evaluation(service: ServiceDep, body: CreateEvaluation) -> Evaluation:
    _check(body)
    made = Evaluation(id=f"ev_{new_id()}", created_at=time.time(), **body.model_dump())
    with service.db.write() as c:
        if body.run is not None:
            find_pk(c, runs, body.run)
        values = {**made.model_dump(), "episodes": len(body.returns)}
        c.execute(sa.insert(evaluations).values(values))
    return made


def _check(body: CreateEvaluation) -> None:
    """Raises 422 for contradicting numbers."""
    numbers = {name: getattr(body, name) for name in _NUMBERS}
    if body.normalised is not None:
        numbers["normalised"] = body.normalised
    numbers |= {f"returns[{i}]": value for i, value in enumerate(body.returns)}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise _bad(name, "a finite number", str(value))
    if not body.ci_low <= body.ci_high:
        raise _bad("ci_low", f"at most ci_high, {body.ci_high}", str(body.ci_low))
    if not 0 < body.confidence < 1:
        raise _bad("confidence", "between 0 and 1, for instance 0.95", str(body.confidence))
    for name in ("seeds", "lengths"):
        given = getattr(body, name)
        if given and len(given) != len(body.returns):
            raise _bad(name, f"one for each of {len(body.returns)} returns", str(len(given)))


def _bad(name: str, expected: str, got: str) -> ProblemError:
    return ProblemError(
        422, "validation_error", f"invalid {name} of the evaluation", expected=expected, got=got
    )


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
    with service.db.read() as c:
        query = newest_first(evaluations, cursor, env=env, run=run, policy=policy)
        rows, last = first_rows(c, query, limit)
    items = [Evaluation(**row) for row in rows]
    return Page[Evaluation](items=items, next=None if last is None else str(last["pk"]))
