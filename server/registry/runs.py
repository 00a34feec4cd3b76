"""Executions of a trainer, collector or evaluator (routes/runs.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.index import run_conditions
from server.index.db import Database, count_audit, equal, find_pk, find_row, first_rows, write_audit
from server.index.deleted_files import delete_given_up, give_up_files
from server.index.dialect import contains, elements, elements_sql, holds, last_characters
from server.index.lost_rows import refuse_if_lost
from server.index.tables import metrics, policies, policy_aliases, runs
from server.problems import ProblemError
from server.rights import Access
from server.storage.store import Store
from stepwell.messages import CreateRun, ListRuns, PatchRun, Run, RunPage

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
# costs as much as one of a thousand. CROSS JOIN keeps the order of the tables: by a JOIN all the
# metrics of the run would be read first.
LATEST = sa.text(
    f"""{run_conditions.KEYS}
    SELECT m.key, m.step, m.value FROM keys CROSS JOIN metrics m
    WHERE keys.key IS NOT NULL AND m.run_pk = :run AND m.key = keys.key
    AND m.step = (SELECT max(n.step) FROM metrics n WHERE n.run_pk = :run AND n.key = keys.key)
    """
)
# The same for keys that are named, of many runs: for a table.
LATEST_OF = sa.text(
    f"""
    SELECT m.run_pk, m.key, m.step, m.value
    FROM {elements_sql("runs")} r CROSS JOIN {elements_sql("keys")} k CROSS JOIN metrics m
    WHERE m.run_pk = r.value AND m.key = k.value
    AND m.step = (SELECT max(n.step) FROM metrics n WHERE n.run_pk = r.value AND n.key = k.value)
    """
)


def create(db: Database, body: CreateRun, access: Access) -> tuple[Run, bool]:
    """The run, and whether it is new. Raises 409 if the name is taken, or taken by a run of another
    kind; 404 for an unknown parent; 403."""
    now = time.time()
    if body.kind == "train" and not access.every:
        raise _no_trainer(access)
    with db.write() as c:
        found = find_row(c, runs, name=body.name)
        if found is not None:
            _resume(c, found, body, now, access)
        else:
            if body.parent is not None:
                find_run(c, body.parent, access)
            refuse_if_lost(c, runs, body.name)
            times = {"created_at": now, "heartbeat_at": now}
            given = body.model_dump(exclude={"exist_ok"})
            c.execute(sa.insert(runs).values(status="running", owner=access.who, **times, **given))
            write_audit(c, access.who, "run.create", body.name, kind=body.kind)
        return _read(c, find_pk(c, runs, body.name)), found is None


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


def page(db: Database, access: Access, wanted: ListRuns) -> RunPage:
    """Newest first. Raises 422 for a wrong condition."""
    same = {name: getattr(wanted, name) for name in ("kind", "status", "parent")}
    found = [*access.mine(runs.c.owner), *equal(runs, **same)]
    if wanted.tag is not None:
        found.append(holds(runs.c.tags, wanted.tag))
    if wanted.without_tag is not None:
        found.append(~holds(runs.c.tags, wanted.without_tag))
    if wanted.name is not None:
        found.append(runs.c.name.in_(wanted.name))
    if search := wanted.search:
        each = elements(runs.c.tags)
        tagged = sa.exists().select_from(each).where(contains(each.c.value, search))
        named = [contains(column, search) for column in (runs.c.name, runs.c.title)]
        found.append(sa.or_(*named, tagged))
    conditions = run_conditions.parse(wanted.where) if wanted.where else []
    found += [condition.sql() for condition in conditions]
    if wanted.alive is not None:
        found.append(_alive() if wanted.alive else sa.not_(_alive()))
    if wanted.since is not None:
        found.append(runs.c.heartbeat_at >= wanted.since)
    columns = _BRIEF if wanted.brief else _COLUMNS
    query = sa.select(*columns, _POLICIES, _alive()).where(*found).order_by(runs.c.pk.desc())
    if wanted.cursor is not None:
        query = query.where(runs.c.pk < wanted.cursor)
    with db.read() as c:
        total = c.execute(sa.select(sa.func.count()).select_from(runs).where(*found)).scalar_one()
        if not total and access.every:  # names of settings of others are not for everyone
            run_conditions.check_names(c, conditions)
        rows, last = first_rows(c, query, wanted.limit)
        newest = _newest(c, rows, wanted.key, wanted.brief)
    items = [_run(row, points) for row, points in zip(rows, newest, strict=True)]
    return RunPage(items=items, next=None if last is None else str(last["pk"]), total=total)


def _alive() -> sa.Label[bool]:
    """Whether it runs and its latest heartbeat is recent.

    A heartbeat in the future means that the clock was set back: a running run sends the next soon.
    """
    near = sa.func.abs(runs.c.heartbeat_at - time.time()) < ALIVE_SECONDS
    return sa.and_(runs.c.status == "running", near).label("alive")


def get(db: Database, name: str, access: Access) -> Run:
    """Raises 404, 403."""
    with db.read() as c:
        return _read(c, find_run(c, name, access))


def change(db: Database, name: str, body: PatchRun, access: Access) -> Run:
    """Also the heartbeat: an empty body only records that the run is alive. Raises 404, 403."""
    given = body.model_dump(exclude_unset=True, exclude_none=True)
    text = given.pop("log", "")
    if "title" in given:
        given["title"] = given["title"] or None
    values: dict[str, Any] = {"heartbeat_at": time.time(), **given}
    with db.write() as c:
        pk = find_run(c, name, access)
        if "status" in given:
            values["finished_at"] = None if given["status"] == "running" else values["heartbeat_at"]
        if text:
            text = text if text.endswith("\n") else text + "\n"
            values["log"] = last_characters(runs.c.log.concat(text), LOG_LIMIT)
        c.execute(sa.update(runs).where(runs.c.pk == pk).values(**values))
        changed = dict.fromkeys([*given, *(["log"] if text else [])], 1)
        action = "run.change" if changed else "run.heartbeat"
        count_audit(c, access.who, action, name, **changed)
        return _read(c, pk)


def delete(db: Database, store: Store, name: str, caller: str) -> None:
    """With its metrics and its policies. Raises 404."""
    with db.write() as c:
        pk = find_pk(c, runs, name)
        files = c.execute(sa.select(policies.c.file).where(policies.c.run_pk == pk)).scalars().all()
        for table in (policy_aliases, policies, metrics):
            c.execute(sa.delete(table).where(table.c.run_pk == pk))
        c.execute(sa.delete(runs).where(runs.c.pk == pk))
        give_up_files(c, "policies", files)
        write_audit(c, caller, "run.delete", name, policies=len(files))
    delete_given_up(db, store)


def log(db: Database, name: str, access: Access) -> str:
    """Raises 404, 403."""
    with db.read() as c:
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
    """Of each run, those of `keys`; without `keys`, all of them, or with `brief` none."""
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
