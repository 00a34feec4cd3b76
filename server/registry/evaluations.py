"""Scores of a policy on an environment with fixed seeds. Rows that never change."""

from __future__ import annotations

import math
import time

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import Database, equal, read_page, write_audit
from server.index.tables import evaluations, runs
from server.problems import ProblemError
from server.registry.runs import find_run
from server.rights import Access
from stepwell import new_id
from stepwell.messages import CreateEvaluation, Evaluation, Page

_NUMBERS = ("mean", "iqm", "ci_low", "ci_high")


def create(db: Database, body: CreateEvaluation, access: Access) -> Evaluation:
    """Raises 404, 403, and 422 for contradicting numbers."""
    _check(body)
    made = Evaluation(
        id=f"ev_{new_id()}", created_at=time.time(), owner=access.who, **body.model_dump()
    )
    with db.write() as c:
        _refuse_foreign(c, body, access)
        values = {**made.model_dump(), "episodes": len(body.returns)}
        c.execute(sa.insert(evaluations).values(values))
        about = {"policy": body.policy[:200], "run": body.run, "mean": body.mean}
        write_audit(c, access.who, "evaluation.create", made.id, **about)
    return made


def _refuse_foreign(c: Connection, body: CreateEvaluation, access: Access) -> None:
    """Raises 404 for an unknown run, 403 for a run, a policy or a dataset of others."""
    if body.run is not None:
        find_run(c, body.run, access)
    if access.every:
        return
    if body.dataset is not None:
        access.require_fit(body.dataset)
    run, slash, _ = body.policy.rpartition("/")
    # A name without a slash is no policy of any run; one with it could become one of a later run.
    if slash and not access.principal.may(f"play:{run}"):
        owner = c.execute(sa.select(runs.c.owner).where(runs.c.name == run)).scalar()
        if owner is None or not access.owns(owner):
            raise ProblemError(
                403,
                "not_owner",
                f"the token may not evaluate policies of run {run[:128]!r}",
                expected=f"one of play:{run[:128]}, train, admin",
                got=", ".join(access.principal.scopes),
            )


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


def page(
    db: Database,
    access: Access,
    *,
    env: str | None,
    run: str | None,
    policy: str | None,
    limit: int,
    cursor: int | None,
) -> Page[Evaluation]:
    """Newest first."""
    wanted = equal(evaluations, env=env, run=run, policy=policy)
    query = sa.select(evaluations).where(*access.mine(evaluations.c.owner), *wanted)
    with db.read() as c:
        return read_page(c, Evaluation, query, evaluations.c.pk, limit, cursor)
