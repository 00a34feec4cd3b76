"""Evaluations: what a policy scored on an environment with fixed seeds. Rows that never change.

The episodes themselves are trajectories of purpose `eval`; how the numbers were made (bootstrap,
IQM) is the evaluator's business, this only keeps them and refuses what cannot be.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from server import runs
from server.index.db import Database, first_rows, newest_first
from server.index.tables import evaluations
from server.problems import ProblemError
from stepwell import new_id
from stepwell.messages import CreateEvaluation, Evaluation, Page

_NUMBERS = ("mean", "iqm", "ci_low", "ci_high")
_JSON = ("seeds", "returns", "lengths", "details")


def create(db: Database, body: CreateEvaluation) -> Evaluation:
    """Keep an evaluation. 404 for an unknown run, 422 for numbers that contradict one another."""
    _check(body)
    made = Evaluation(id=f"ev_{new_id()}", created_at=time.time(), **body.model_dump())
    values = made.model_dump()
    with db.write() as c:
        if body.run is not None:
            runs.find(c, body.run)
        c.execute(
            sa.insert(evaluations).values(
                **{k: v for k, v in values.items() if k not in _JSON},
                **{k: json.dumps(values[k]) for k in _JSON},
                episodes=len(body.returns),
            )
        )
    return made


def _check(body: CreateEvaluation) -> None:
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
        422, "validation_error", f"{name} of the evaluation", expected=expected, got=got
    )


def page(
    db: Database,
    *,
    env: str | None = None,
    run: str | None = None,
    policy: str | None = None,
    limit: int = 100,
    before: int | None = None,
) -> Page[Evaluation]:
    """Newest first."""
    with db.read() as c:
        query = newest_first(evaluations, before, env=env, run=run, policy=policy)
        rows, last = first_rows(c, query, limit)
    items = [_evaluation(row) for row in rows]
    return Page[Evaluation](items=items, next=None if last is None else str(last["pk"]))


def _evaluation(row: RowMapping) -> Evaluation:
    values: dict[str, Any] = {k: row[k] for k in Evaluation.model_fields}
    for key in _JSON:
        values[key] = json.loads(values[key])
    return Evaluation(**values)
