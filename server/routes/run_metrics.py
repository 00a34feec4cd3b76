"""Metrics of runs: points of named series.

Idempotent on (key, step): the last value wins, so a learner that resumes from step 100 overwrites
the points that the killed one logged after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Annotated

import orjson
import sqlalchemy as sa
from fastapi import APIRouter, Query, Response
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.engine import Connection

from server.answer_memory import Answer
from server.index.db import count_audit
from server.index.tables import metrics, runs
from server.problems import ProblemError
from server.routes.runs import LATEST, find_run
from server.service import AccessDep, ServiceDep
from stepwell.messages import MetricsAccepted, MetricSeries, PostMetrics, Series

router = APIRouter(prefix="/v1/runs", tags=["runs"])

MAX_POINTS = 10_000
"""Most points of one series in one response."""
POINT_BYTES = 1024
"""Memory of a point while its series is read and written."""

# One row for the lowest and one for the highest value of each bucket of steps: with only min() or
# only max(), SQLite takes the other columns from the row with that value.
_EXTREMES = """
    SELECT step, time, {aggregate}(value) AS value FROM metrics
    WHERE run_pk = :run AND key = :key AND step >= :first
    GROUP BY (step - :first) / ((:last - :first) / :buckets + 1)
"""
_EXTREME_QUERIES = (
    sa.text(_EXTREMES.format(aggregate="min")),
    sa.text(_EXTREMES.format(aggregate="max")),
)


@router.post("/{name}/metrics")
def post_metrics(
    service: ServiceDep, name: str, body: PostMetrics, access: AccessDep
) -> MetricsAccepted:
    """Idempotent on (key, step): a point that is sent again replaces the stored one."""
    with service.db.write() as c:
        pk = find_run(c, name, access)
        # The last point wins within one body too. Infinite values are stored as NULL.
        rows = {
            (point.key, point.step): {
                "run_pk": pk,
                "key": point.key,
                "step": point.step,
                "time": point.time,
                "value": point.value
                if point.value is not None and math.isfinite(point.value)
                else None,
            }
            for point in body.points
        }
        if rows:
            statement = upsert(metrics)
            statement = statement.on_conflict_do_update(
                index_elements=["run_pk", "key", "step"],
                set_={"time": statement.excluded.time, "value": statement.excluded.value},
            )
            c.execute(statement, list(rows.values()))
            count_audit(c, access.who, "run.metrics", name, points=len(rows))
        c.execute(sa.update(runs).where(runs.c.pk == pk).values(heartbeat_at=time.time()))
    return MetricsAccepted(stored=len(rows))


@router.get("/{name}/metrics", response_model=MetricSeries)
def get_metrics(
    service: ServiceDep,
    name: str,
    access: AccessDep,
    keys: str | None = None,
    after: Annotated[str | None, Query(pattern=r"^-?\d{1,18}(,-?\d{1,18})*$")] = None,
    points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 500,
) -> Response:
    """Series of `keys` (comma-separated; default: all), down-sampled to `points` each.

    `after`: a step for each key (comma-separated); returns only later points.
    """
    wanted = None if keys is None else [key for key in keys.split(",") if key]
    steps = None if after is None else [int(step) for step in after.split(",")]
    if steps is not None and (wanted is None or len(steps) != len(wanted)):
        raise ProblemError(
            422,
            "validation_error",
            "`after` has a step for each of `keys`",
            expected=f"{len(wanted or ())} steps",
            got=f"{len(steps)}",
        )
    with service.db.read() as c:
        pk = find_run(c, name, access)
        if wanted is None:
            wanted = [key for key, _, _ in c.execute(LATEST, {"run": pk})]
        beyond = {} if steps is None else dict(zip(wanted, steps, strict=True))

    def parts() -> Iterator[bytes]:
        """A `MetricSeries`, one series at a time."""
        yield b'{"run":' + orjson.dumps(name) + b',"series":['
        comma = b""
        for key in dict.fromkeys(wanted):
            with service.db.read() as c:
                series = _series(c, pk, key, beyond.get(key), points)
            if series.total:
                yield comma + series.model_dump_json().encode()
                comma = b","
        yield b"]}"

    memory = POINT_BYTES * points
    return Answer(service.answers, memory, parts, media_type="application/json")


def _series(c: Connection, pk: int, key: str, after: int | None, points: int) -> Series:
    """One key's points after step `after`, in order of step, at most `points` of them.

    With more points, steps are divided into equal buckets and the lowest and the highest point of
    each are kept, with the first and the last of all: averages would hide spikes.
    """
    where = sa.and_(metrics.c.run_pk == pk, metrics.c.key == key)
    if after is not None:
        where = sa.and_(where, metrics.c.step > after)
    total, first, last = c.execute(
        sa.select(sa.func.count(), sa.func.min(metrics.c.step), sa.func.max(metrics.c.step)).where(
            where
        )
    ).one()
    whole = sa.select(metrics.c.step, metrics.c.time, metrics.c.value).where(where)
    if total <= points:
        rows = [tuple(row) for row in c.execute(whole.order_by(metrics.c.step))]
    else:
        ends = c.execute(whole.where(metrics.c.step.in_([first, last])))
        picked = {row.step: tuple(row) for row in ends}
        buckets = (points - 2) // 2
        if buckets > 0:
            scale = {"run": pk, "key": key, "first": first, "last": last, "buckets": buckets}
            for query in _EXTREME_QUERIES:
                picked |= {row.step: tuple(row) for row in c.execute(query, scale)}
        rows = [picked[step] for step in sorted(picked)]
    steps, times, values = zip(*rows, strict=True) if rows else ((), (), ())
    return Series(
        key=key, steps=list(steps), times=list(times), values=list(values), total=int(total)
    )
