"""Points of named series of a run."""

from __future__ import annotations

import math
import time

import sqlalchemy as sa

from server.index.db import Database, count_audit
from server.index.dialect import upsert, with_its_row_sql
from server.index.tables import metrics, runs
from server.registry.runs import LATEST, find_run
from server.rights import Access
from stepwell.messages import PostMetrics, Series

# One row for the lowest and one for the highest value of each bucket of steps.
_EXTREMES = """
    SELECT step, time, {extreme} AS value FROM metrics
    WHERE run_pk = :run AND key = :key AND step >= :first
    GROUP BY (step - :first) / ((:last - :first) / :buckets + 1)
"""
_EXTREME_QUERIES = tuple(
    sa.text(_EXTREMES.format(extreme=with_its_row_sql(of, "value"))) for of in ("min", "max")
)


def add(db: Database, name: str, body: PostMetrics, access: Access) -> int:
    """Store points; one that is sent again replaces the stored one. Returns their number. Raises
    404, 403."""
    with db.write() as c:
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
            c.execute(upsert(metrics, "time", "value"), list(rows.values()))
            count_audit(c, access.who, "run.metrics", name, points=len(rows))
        c.execute(sa.update(runs).where(runs.c.pk == pk).values(heartbeat_at=time.time()))
    return len(rows)


def find(db: Database, name: str, keys: list[str] | None, access: Access) -> tuple[int, list[str]]:
    """The key of a run; and `keys`, or the names of all its series. Raises 404, 403."""
    with db.read() as c:
        pk = find_run(c, name, access)
        if keys is None:
            keys = [key for key, _, _ in c.execute(LATEST, {"run": pk})]
        return pk, keys


def series(db: Database, pk: int, key: str, after: int | None, points: int) -> Series:
    """One key's points after step `after`, in order of step, at most `points` of them.

    With more points, steps are divided into equal buckets and the lowest and the highest point of
    each are kept, with the first and the last of all: averages would hide spikes.
    """
    m = metrics.c
    where = sa.and_(m.run_pk == pk, m.key == key)
    if after is not None:
        where = sa.and_(where, m.step > after)
    with db.read() as c:
        total, first, last = c.execute(
            sa.select(sa.func.count(), sa.func.min(m.step), sa.func.max(m.step)).where(where)
        ).one()
        whole = sa.select(m.step, m.time, m.value).where(where)
        if total <= points:
            rows = [tuple(row) for row in c.execute(whole.order_by(m.step))]
        else:
            ends = c.execute(whole.where(m.step.in_([first, last])))
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
