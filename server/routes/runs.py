"""Runs: one row per execution of a trainer, collector or evaluator.

PATCH is the heartbeat. Metrics are in run_metrics.py, policies in policies.py; the column
`trajectories.run` names the run that made a trajectory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy.engine import Connection, RowMapping

from server.index import run_conditions
from server.index.db import count_audit, equal, find_pk, first_rows, write_audit
from server.index.deleted_files import delete_given_up, give_up_files
from server.index.lost_rows import refuse_if_lost
from server.index.tables import metrics, policies, policy_aliases, runs
from server.problems import ProblemError
from server.rights import Access
from server.service import AccessDep, Caller, Cursor, Limit, ServiceDep
from stepwell.messages import CreateRun, PatchRun, Run, RunKind, RunPage, RunStatus

router = APIRouter(prefix="/v1/runs", tags=["runs"])

LOG_LIMIT = 1_000_000
"""Characters that are kept of a run's log (its tail)."""

ALIVE_SECONDS = 45.0
"""A running run without a heartbeat for this long counts as dead. Runs and workers report every few
seconds."""

_POLICIES = (
    sa.select(sa.func.count())
    .where(policies.c.run_pk == runs.c.pk)
    .correlate(runs)
    .scalar_subquery()
    .label("policies")
)
# The log can be a megabyte: it has its own route and lists do not read it.
_COLUMNS = [c for c in runs.c if c.name != "log"]
_BRIEF = [c for c in _COLUMNS if c.name != "config"]

# Keys of a run and each key's newest point, without reading every point: a run of a million points
# costs as much as one of a thousand. SQLite keeps the order of a CROSS JOIN; of a JOIN it would
# read all the metrics of the run first.
LATEST = sa.text(
    f"""{run_conditions.KEYS}
    SELECT m.key, m.step, m.value FROM keys CROSS JOIN metrics m
    WHERE keys.key IS NOT NULL AND m.run_pk = :run AND m.key = keys.key
    AND m.step = (SELECT max(n.step) FROM metrics n WHERE n.run_pk = :run AND n.key = keys.key)
    """
)
# The same for keys that are named, of many runs: for a table.
LATEST_OF = sa.text(
    """
    SELECT m.run_pk, m.key, m.step, m.value
    FROM json_each(:runs) r CROSS JOIN json_each(:keys) k CROSS JOIN metrics m
    WHERE m.run_pk = r.value AND m.key = k.value
    AND m.step = (SELECT max(n.step) FROM metrics n WHERE n.run_pk = r.value AND n.key = k.value)
    """
)
MOST_NAMED = 100
"""Names of runs or of metrics in one request for a list."""


@router.post("", status_code=201, responses={200: {"model": Run}})
def create_run(service: ServiceDep, body: CreateRun, response: Response, access: AccessDep) -> Run:
    """Create a run (201), or with `exist_ok` resume an existing one (200)."""
    # 409 if the name is taken, or taken by a run of another kind; 404 for an unknown parent.
    now = time.time()
    if body.kind == "train" and not access.every:
        raise _no_trainer(access)
    with service.db.write() as c:
        found = c.execute(sa.select(runs).where(runs.c.name == body.name)).mappings().first()
        if found is not None:
            _resume(c, found, body, now, access)
            response.status_code = 200
        else:
            if body.parent is not None:
                find_run(c, body.parent, access)
            refuse_if_lost(c, runs, body.name)
            times = {"created_at": now, "heartbeat_at": now}
            given = body.model_dump(exclude={"exist_ok"})
            c.execute(sa.insert(runs).values(status="running", owner=access.who, **times, **given))
            write_audit(c, access.who, "run.create", body.name, kind=body.kind)
        return _read(c, find_pk(c, runs, body.name))


def _no_trainer(access: Access) -> ProblemError:
    return ProblemError(
        403,
        "forbidden",
        "the token may not make a run of kind 'train'",
        expected="kind collect or eval, or one of the scopes train, admin",
        got=", ".join(access.principal.scopes),
    )


def find_run(c: Connection, name: str, access: Access) -> int:
    """The key of a run to which the caller may do what its request says. Raises 404, 403."""
    pk = find_pk(c, runs, name, hint=access.reads)
    owner = c.execute(sa.select(runs.c.owner).where(runs.c.pk == pk)).scalar_one()
    access.require(owner, f"run {name!r}")
    return pk


def _resume(c: Connection, found: RowMapping, body: CreateRun, now: float, access: Access) -> None:
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
    access.require(found["owner"], f"run {body.name!r}")
    given = body.model_dump(exclude_unset=True, exclude={"name", "kind", "parent", "exist_ok"})
    # A resumed run reads further snapshots; the earlier ones, and tags given since, stay listed.
    given["snapshots"] = list(dict.fromkeys([*found["snapshots"], *body.snapshots]))
    given["tags"] = list(dict.fromkeys([*found["tags"], *body.tags]))
    c.execute(
        sa.update(runs)
        .where(runs.c.pk == found["pk"])
        .values(status="running", error="", finished_at=None, heartbeat_at=now, **given)
    )
    write_audit(c, access.who, "run.resume", body.name, fields=[*given])


@router.get("")
def list_runs(
    service: ServiceDep,
    access: AccessDep,
    kind: RunKind | None = None,
    status: RunStatus | None = None,
    tag: str | None = None,
    parent: str | None = None,
    search: Annotated[str | None, Query(max_length=200)] = None,
    where: Annotated[str | None, Query(max_length=2000)] = None,
    alive: bool | None = None,
    since: float | None = None,
    without_tag: str | None = None,
    name: Annotated[list[str] | None, Query(max_length=MOST_NAMED)] = None,
    key: Annotated[list[str] | None, Query(max_length=MOST_NAMED)] = None,
    brief: bool = False,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> RunPage:
    """Sorted newest first, with the total number of matches; those that the caller may read.

    `search`: text in the name, the title or a tag. `where`: conditions over settings and newest
    metrics, such as `agent.discount = 0.99 and eval/return > 200`. `alive=false&status=running`:
    runs without a heartbeat. `since`: heartbeat at or after that Unix time. `name`, repeated: only
    these. `key`, repeated: newest metrics of these keys only. `brief`: without config, and without
    newest metrics but for those of `key`.
    """
    wanted = [*access.mine(runs.c.owner), *equal(runs, kind=kind, status=status, parent=parent)]
    each = sa.func.json_each(runs.c.tags).table_valued("value")
    if tag is not None:
        wanted.append(sa.exists().select_from(each).where(each.c.value == tag))
    if without_tag is not None:
        wanted.append(~sa.exists().select_from(each).where(each.c.value == without_tag))
    if name is not None:
        wanted.append(runs.c.name.in_(name))
    if search:
        tagged = sa.exists().select_from(each).where(_contains(each.c.value, search))
        named = [_contains(column, search) for column in (runs.c.name, runs.c.title)]
        wanted.append(sa.or_(*named, tagged))
    conditions = run_conditions.parse(where) if where else []
    wanted += [condition.sql() for condition in conditions]
    if alive is not None:
        wanted.append(_alive() if alive else sa.not_(_alive()))
    if since is not None:
        wanted.append(runs.c.heartbeat_at >= since)
    columns = _BRIEF if brief else _COLUMNS
    query = sa.select(*columns, _POLICIES, _alive()).where(*wanted).order_by(runs.c.pk.desc())
    if cursor is not None:
        query = query.where(runs.c.pk < cursor)
    with service.db.read() as c:
        total = c.execute(sa.select(sa.func.count()).select_from(runs).where(*wanted)).scalar_one()
        if not total and access.every:  # names of settings of others are not for everyone
            run_conditions.check_names(c, conditions)
        rows, last = first_rows(c, query, limit)
        newest = _newest(c, rows, key, brief)
    items = [_run(row, points) for row, points in zip(rows, newest, strict=True)]
    return RunPage(items=items, next=None if last is None else str(last["pk"]), total=total)


def _alive() -> sa.Label[bool]:
    """Whether it runs and its latest heartbeat is recent.

    A heartbeat in the future means that the clock was set back: a running run sends the next soon.
    """
    near = sa.func.abs(runs.c.heartbeat_at - time.time()) < ALIVE_SECONDS
    return sa.and_(runs.c.status == "running", near).label("alive")


def _contains(column: sa.ColumnElement[Any], text: str) -> sa.ColumnElement[bool]:
    """Whether the column contains `text`, ignoring case; % and _ are literal."""
    return sa.func.instr(sa.func.lower(column), sa.func.lower(text)) > 0


@router.get("/{name}")
def get_run(service: ServiceDep, name: str, access: AccessDep) -> Run:
    with service.db.read() as c:
        return _read(c, find_run(c, name, access))


@router.patch("/{name}")
def patch_run(service: ServiceDep, name: str, body: PatchRun, access: AccessDep) -> Run:
    """Update a run. Also the heartbeat: an empty body only records that the run is alive."""
    given = body.model_dump(exclude_unset=True, exclude_none=True)
    text = given.pop("log", "")
    if "title" in given:
        given["title"] = given["title"] or None
    values: dict[str, Any] = {"heartbeat_at": time.time(), **given}
    with service.db.write() as c:
        pk = find_run(c, name, access)
        if "status" in given:
            values["finished_at"] = None if given["status"] == "running" else values["heartbeat_at"]
        if text:
            text = text if text.endswith("\n") else text + "\n"
            values["log"] = sa.func.substr(runs.c.log.concat(text), -LOG_LIMIT)
        c.execute(sa.update(runs).where(runs.c.pk == pk).values(**values))
        changed = dict.fromkeys([*given, *(["log"] if text else [])], 1)
        action = "run.change" if changed else "run.heartbeat"
        count_audit(c, access.who, action, name, **changed)
        return _read(c, pk)


@router.delete("/{name}", status_code=204)
def delete_run(service: ServiceDep, name: str, caller: Caller) -> None:
    """Delete the run, its metrics and its policies; trajectories and evaluations stay."""
    with service.db.write() as c:
        pk = find_pk(c, runs, name)
        files = c.execute(sa.select(policies.c.file).where(policies.c.run_pk == pk)).scalars().all()
        for table in (policy_aliases, policies, metrics):
            c.execute(sa.delete(table).where(table.c.run_pk == pk))
        c.execute(sa.delete(runs).where(runs.c.pk == pk))
        give_up_files(c, "policies", files)
        write_audit(c, caller, "run.delete", name, policies=len(files))
    delete_given_up(service.db, service.store)


@router.get("/{name}/log", response_class=PlainTextResponse)
def get_log(service: ServiceDep, name: str, access: AccessDep) -> str:
    """The tail of the run's log (PATCH `log` appends)."""
    with service.db.read() as c:
        pk = find_run(c, name, access)
        return str(c.execute(sa.select(runs.c.log).where(runs.c.pk == pk)).scalar_one())


def _read(c: Connection, pk: int) -> Run:
    query = sa.select(*_COLUMNS, _POLICIES, _alive()).where(runs.c.pk == pk)
    row = c.execute(query).mappings().one()
    return _run(row, _newest(c, [row], None, brief=False)[0])


Newest = Sequence[tuple[str, int, float | None]]
"""Keys of a run with the step and the value of their newest point."""


def _newest(
    c: Connection, rows: Sequence[RowMapping], keys: list[str] | None, brief: bool
) -> list[Newest]:
    """Return each run's newest values of `keys`; without `keys` all, or none with `brief`."""
    if keys is None and not brief:
        return [[(*p,) for p in c.execute(LATEST, {"run": row["pk"]})] for row in rows]
    found: dict[int, list[tuple[str, int, float | None]]] = {row["pk"]: [] for row in rows}
    if keys:
        named = {"runs": json.dumps(list(found)), "keys": json.dumps(list(dict.fromkeys(keys)))}
        for pk, name, step, value in c.execute(LATEST_OF, named):
            found[pk].append((name, step, value))
    return list(found.values())


def _run(row: RowMapping, newest: Newest) -> Run:
    return Run(
        **row,
        number=row["pk"],
        latest={key: value for key, _, value in newest if value is not None},
        latest_steps={key: step for key, step, _ in newest},
    )
