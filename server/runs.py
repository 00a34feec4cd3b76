"""Runs and their metrics: one row per execution of a trainer, collector or evaluator.

    PATCH is the heartbeat.  Metrics are idempotent on (key, step): the last word counts, so that a
    learner resumed from step 100 rewrites what the killed one had logged beyond it.

Policies of a run are in policies.py; which trajectories a run made is in `trajectories.run`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import Database, first_rows
from server.index.tables import metrics, policies, policy_aliases, runs
from server.problems import MAX_HINTS, ProblemError, not_found
from stepwell.messages import (
    CreateRun,
    MetricsAccepted,
    MetricSeries,
    PatchRun,
    PostMetrics,
    Run,
    RunPage,
    Series,
)

LOG_LIMIT = 1_000_000
"""Characters of a run's log that are kept: its tail."""

MAX_POINTS = 10_000
"""Most points of one series in one answer."""

ALIVE_SECONDS = 45.0
"""A running run without a heartbeat for so long counts as dead. Runs and workers report every few
seconds."""

_POLICIES = (
    sa.select(sa.func.count())
    .where(policies.c.run_pk == runs.c.pk)
    .correlate(runs)
    .scalar_subquery()
    .label("policies")
)
# The log can be a megabyte: it has its own route and is not read for a list.
_COLUMNS = [c for c in runs.c if c.name != "log"]
_BRIEF = [c for c in _COLUMNS if c.name != "config"]

# Keys of a run and each key's newest point, by jumping through the primary key instead of reading
# every point: a run of a million points costs as much as one of a thousand.
_LATEST = sa.text(
    """
    WITH RECURSIVE keys(key) AS (
        SELECT min(key) FROM metrics WHERE run_pk = :run
        UNION ALL
        SELECT (SELECT min(m.key) FROM metrics m WHERE m.run_pk = :run AND m.key > keys.key)
        FROM keys WHERE keys.key IS NOT NULL
    )
    SELECT m.key, m.step, m.value FROM keys JOIN metrics m
    ON m.run_pk = :run AND m.key = keys.key
    AND m.step = (SELECT max(n.step) FROM metrics n WHERE n.run_pk = :run AND n.key = keys.key)
    WHERE keys.key IS NOT NULL
    """
)

# One row for the lowest and one for the highest value of each bucket of steps: with a lone min() or
# max(), SQLite takes the other columns from the row that has it.
_EXTREMES = """
    SELECT step, time, {aggregate}(value) AS value FROM metrics
    WHERE run_pk = :run AND key = :key AND step >= :first
    GROUP BY (step - :first) / ((:last - :first) / :buckets + 1)
"""
_EXTREME_QUERIES = (
    sa.text(_EXTREMES.format(aggregate="min")),
    sa.text(_EXTREMES.format(aggregate="max")),
)


# --- runs --------------------------------------------------------------------------------------


def create(db: Database, body: CreateRun) -> tuple[Run, bool]:
    """A new run, or the old one taken up again (`exist_ok`); says whether it is new.

    Raises 409 when the name is taken, or taken by a run of another kind; 404 for an unknown parent.
    """
    now = time.time()
    with db.write() as c:
        found = c.execute(sa.select(runs).where(runs.c.name == body.name)).mappings().first()
        if found is not None:
            _resume(c, found, body, now)
        else:
            if body.parent is not None:
                find(c, body.parent)
            c.execute(
                sa.insert(runs).values(
                    name=body.name,
                    kind=body.kind,
                    status="running",
                    parent=body.parent,
                    created_at=now,
                    heartbeat_at=now,
                    **_described(body),
                )
            )
        return _read(c, body.name), found is None


def _resume(c: Connection, found: RowMapping, body: CreateRun, now: float) -> None:
    if not body.exist_ok:
        raise ProblemError(
            409,
            "conflict",
            f"there is already a run {body.name!r}; choose another name, or resume it (exist_ok)",
        )
    if found["kind"] != body.kind:
        raise ProblemError(
            409,
            "conflict",
            f"run {body.name!r} is of another kind and cannot be resumed as this one",
            expected=found["kind"],
            got=body.kind,
        )
    values = _described(body)
    # A resumed run reads further snapshots; the ones it has read stay true.
    values["snapshots"] = json.dumps(
        list(dict.fromkeys([*json.loads(found["snapshots"]), *body.snapshots]))
    )
    given = {k: v for k, v in values.items() if k == "snapshots" or k in body.model_fields_set}
    c.execute(
        sa.update(runs)
        .where(runs.c.pk == found["pk"])
        .values(status="running", error="", finished_at=None, heartbeat_at=now, **given)
    )


def _described(body: CreateRun) -> dict[str, Any]:
    return {
        "config": json.dumps(body.config),
        "seed": body.seed,
        "git_commit": body.git_commit,
        "host": body.host,
        "snapshots": json.dumps(body.snapshots),
        "tags": json.dumps(body.tags),
        "command": body.command,
    }


def absent(c: Connection, name: str) -> ProblemError:
    """404 that offers the nearest of the newest names."""
    newest = sa.select(runs.c.name).order_by(runs.c.pk.desc()).limit(MAX_HINTS)
    return not_found("run", name, c.execute(newest).scalars())


def find(c: Connection, name: str) -> int:
    """The key of a run, or 404."""
    pk = c.execute(sa.select(runs.c.pk).where(runs.c.name == name)).scalar()
    if pk is None:
        raise absent(c, name)
    return int(pk)


def get(db: Database, name: str) -> Run:
    with db.read() as c:
        return _read(c, name)


def page(
    db: Database,
    *,
    kind: str | None = None,
    status: str | None = None,
    tag: str | None = None,
    parent: str | None = None,
    search: str | None = None,
    alive: bool | None = None,
    since: float | None = None,
    brief: bool = False,
    limit: int = 100,
    before: int | None = None,
) -> RunPage:
    """Newest first. `before` is the cursor that the page before gave as `next`; `total` counts all
    that match, on whichever page. `brief` leaves out what is long: config and metrics."""
    wanted: list[sa.ColumnElement[bool]] = []
    for column, value in (("kind", kind), ("status", status), ("parent", parent)):
        if value is not None:
            wanted.append(runs.c[column] == value)
    each = sa.func.json_each(runs.c.tags).table_valued("value")
    if tag is not None:
        wanted.append(sa.exists().select_from(each).where(each.c.value == tag))
    if search:
        tagged = sa.exists().select_from(each).where(_contains(each.c.value, search))
        wanted.append(sa.or_(_contains(runs.c.name, search), tagged))
    if alive is not None:
        # As `_run` says it, so that the count and the rows agree.
        heard = sa.and_(
            runs.c.status == "running",
            sa.func.abs(runs.c.heartbeat_at - time.time()) < ALIVE_SECONDS,
        )
        wanted.append(heard if alive else sa.not_(heard))
    if since is not None:
        wanted.append(runs.c.heartbeat_at >= since)
    query = sa.select(*(_BRIEF if brief else _COLUMNS), _POLICIES).where(*wanted)
    query = query.order_by(runs.c.pk.desc())
    if before is not None:
        query = query.where(runs.c.pk < before)
    with db.read() as c:
        total = c.execute(sa.select(sa.func.count()).select_from(runs).where(*wanted)).scalar_one()
        rows, last = first_rows(c, query, limit)
        items = [_run(c, row, brief=brief) for row in rows]
    return RunPage(items=items, next=None if last is None else str(last["pk"]), total=total)


def _contains(column: sa.ColumnElement[Any], text: str) -> sa.ColumnElement[bool]:
    """Whether `text` is in it, in whatever case; % and _ mean themselves."""
    return sa.func.instr(sa.func.lower(column), sa.func.lower(text)) > 0


def patch(db: Database, name: str, body: PatchRun) -> Run:
    """Change the fields given, and note that the run is alive."""
    given = body.model_dump(exclude_unset=True, exclude_none=True)
    values: dict[str, Any] = {"heartbeat_at": time.time()}
    for key in ("status", "notes", "error"):
        if key in given:
            values[key] = given[key]
    for key in ("snapshots", "tags"):
        if key in given:
            values[key] = json.dumps(given[key])
    with db.write() as c:
        pk = find(c, name)
        if "status" in given:
            values["finished_at"] = None if given["status"] == "running" else values["heartbeat_at"]
        if given.get("log"):
            text = given["log"] if given["log"].endswith("\n") else given["log"] + "\n"
            values["log"] = sa.func.substr(runs.c.log.concat(text), -LOG_LIMIT)
        c.execute(sa.update(runs).where(runs.c.pk == pk).values(**values))
        return _read(c, name)


def log(db: Database, name: str) -> str:
    with db.read() as c:
        text = c.execute(sa.select(runs.c.log).where(runs.c.name == name)).scalar()
        if text is None:
            raise absent(c, name)
    return str(text)


def delete(db: Database, name: str) -> list[str]:
    """Forget a run, its metrics and its policies. Returns names of policy files to remove.

    Its trajectories and evaluations stay: they are data, and say by name where they came from.
    """
    with db.write() as c:
        pk = find(c, name)
        files = c.execute(sa.select(policies.c.file).where(policies.c.run_pk == pk)).scalars().all()
        for table in (policy_aliases, policies, metrics):
            c.execute(sa.delete(table).where(table.c.run_pk == pk))
        c.execute(sa.delete(runs).where(runs.c.pk == pk))
    return [str(file) for file in files]


def _read(c: Connection, name: str) -> Run:
    query = sa.select(*_COLUMNS, _POLICIES).where(runs.c.name == name)
    row = c.execute(query).mappings().first()
    if row is None:
        raise absent(c, name)
    return _run(c, row)


def _run(c: Connection, row: RowMapping, *, brief: bool = False) -> Run:
    newest = [] if brief else c.execute(_LATEST, {"run": row["pk"]}).all()
    return Run(
        **{k: row[k] for k in Run.model_fields if k in row and k not in _JSON},
        **{k: json.loads(row[k]) for k in _JSON if k in row},
        # One from the future is of before a clock was put back: who lives reports again at once.
        alive=row["status"] == "running" and abs(row["heartbeat_at"] - time.time()) < ALIVE_SECONDS,
        latest={key: value for key, _, value in newest if value is not None},
        latest_steps={key: step for key, step, _ in newest},
    )


_JSON = ("config", "snapshots", "tags")


# --- metrics -----------------------------------------------------------------------------------


def add_metrics(db: Database, name: str, body: PostMetrics) -> MetricsAccepted:
    """Store points; the same (key, step) again replaces the value. Infinite means NULL."""
    with db.write() as c:
        pk = find(c, name)
        # Within one body, too, the last word counts.
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
        c.execute(sa.update(runs).where(runs.c.pk == pk).values(heartbeat_at=time.time()))
    return MetricsAccepted(stored=len(rows))


def series(
    db: Database,
    name: str,
    *,
    keys: Sequence[str] | None = None,
    after: Sequence[int] | None = None,
    points: int = 500,
) -> MetricSeries:
    """Each key's points in order of step, at most `points` of them.

    Where there are more, steps are cut into equal buckets and the lowest and the highest point of
    each are kept, with the first and the last of all: spikes survive, which averages would hide.
    `after`: of each key only what lies beyond this step; who looks again reads only what is new.
    """
    if after is not None and (keys is None or len(after) != len(keys)):
        raise ProblemError(
            422,
            "validation_error",
            "after: one step for each of keys",
            expected=f"{len(keys or ())} steps",
            got=f"{len(after)}",
        )
    with db.read() as c:
        pk = find(c, name)
        if keys is None:
            keys = [key for key, _, _ in c.execute(_LATEST, {"run": pk})]
        beyond = dict(zip(keys, after, strict=True)) if after is not None else {}
        found = [_series(c, pk, key, beyond.get(key), points) for key in dict.fromkeys(keys)]
    return MetricSeries(run=name, series=[s for s in found if s.total])


def _series(c: Connection, pk: int, key: str, after: int | None, points: int) -> Series:
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
