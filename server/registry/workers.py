"""The state of workers, what they are told, and what launchers can start (routes/workers.py)."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import (
    SERVICE,
    Database,
    count_audit,
    equal,
    find_row,
    get_row,
    read_page,
    set_row,
    write_audit,
)
from server.index.tables import programs, workers
from server.problems import ProblemError, not_found
from server.registry.runs import find_run
from server.rights import Access
from stepwell.messages import Page, PostCommand, Program, PutWorker, Worker

ALIVE_SECONDS = 45.0
"""A worker without a heartbeat for this long counts as dead; workers report every few seconds."""

FORGET_SECONDS = 7 * 86_400.0
"""Workers without a heartbeat for this long are deleted when a new one registers."""

ENDED = ("stopped", "failed")


def heartbeat(db: Database, worker_id: str, body: PutWorker, access: Access) -> Worker:
    """Store a worker's report; the answer carries its command. Raises 403."""
    now = time.time()
    given: dict[str, Any] = body.model_dump()
    given["counters"] = {k: v for k, v in body.counters.items() if math.isfinite(v)}
    with db.write() as c:
        row = find_row(c, workers, id=worker_id)
        _refuse_foreign(c, row, worker_id, body, access)
        count_audit(c, access.who, "worker.heartbeat", worker_id)
        # Whoever takes a worker over, as `train` may, has it from then on.
        given["owner"] = access.who
        if row is None:
            _forget(c, now)
            c.execute(
                sa.insert(workers).values(id=worker_id, started_at=now, heartbeat_at=now, **given)
            )
        else:
            if _restarted(row, body):
                given |= {"started_at": now, "command": "none", "command_at": None}
            else:
                given |= _command_after(row, body.state)
            given["heartbeat_at"] = now
            set_row(c, workers, {"id": worker_id}, **given)
        return _worker(get_row(c, workers, id=worker_id), now)


def _refuse_foreign(
    c: Connection, row: RowMapping | None, worker_id: str, body: PutWorker, access: Access
) -> None:
    """Raises 403 unless the caller may report for this worker, in this role and of this run."""
    if access.every:
        return
    if row is not None:
        access.require(row["owner"], f"worker {worker_id!r}")
    if body.role not in ("collect", "eval"):
        raise ProblemError(
            403,
            "forbidden",
            f"the token may not report a worker of role {body.role!r}",
            expected="role collect or eval, or one of the scopes train, admin",
            got=", ".join(access.principal.scopes),
        )
    if body.run is not None:
        find_run(c, body.run, access)


def _restarted(row: RowMapping, body: PutWorker) -> bool:
    """Whether another process now uses this id."""
    if row["state"] in ENDED and body.state not in ENDED:
        return True
    return body.pid is not None and row["pid"] is not None and body.pid != row["pid"]


def _command_after(row: RowMapping, state: str) -> dict[str, Any]:
    """The command to send now (`none` if it is done), marked as sent (`command_at` = NULL)."""
    command = row["command"]
    answered = row["command_at"] is None
    done = (command == "resume" and answered and state != "paused") or (
        command in ("drain", "stop") and state in ENDED
    )
    return {"command": "none" if done else command, "command_at": None}


def command(db: Database, worker_id: str, body: PostCommand, caller: str) -> Worker:
    """Raises 404, 409 if the worker has ended."""
    now, what = time.time(), body.command
    with db.write() as c:
        row = get_row(c, workers, id=worker_id)
        if row["state"] in ENDED and what != "none":
            raise ProblemError(
                409,
                "conflict",
                f"worker {worker_id!r} has ended and cannot {what}; start a new one",
                expected="a running worker",
                got=row["state"],
            )
        set_row(c, workers, {"id": worker_id}, command=what, command_at=now)
        write_audit(c, caller, "worker.command", worker_id, command=what)
        return _worker(get_row(c, workers, id=worker_id), now)


def page(
    db: Database,
    access: Access,
    *,
    role: str | None,
    run: str | None,
    limit: int,
    cursor: str | None,
) -> Page[Worker]:
    """Sorted by id."""
    wanted = [*access.mine(workers.c.owner), *equal(workers, role=role, run=run)]
    query, by = sa.select(workers).where(*wanted), workers.c.id
    make = partial(_worker, now=time.time())
    with db.read() as c:
        return read_page(c, Worker, query, by, limit, cursor, ascending=True, make=make)


def save_program(db: Database, worker_id: str, role: str, body: Program, caller: str) -> None:
    """Replaces the program of that role. Raises 404."""
    document = body.model_dump_json()
    with db.write() as c:
        get_row(c, workers, id=worker_id)
        c.execute(sa.delete(programs).where(_is_program(worker_id, role)))
        c.execute(
            sa.insert(programs).values(
                worker_id=worker_id, role=role, document=document, updated_at=time.time()
            )
        )
        count_audit(c, caller, "worker.program", f"{worker_id}/{role}")


def program(db: Database, worker_id: str, role: str) -> Program:
    """Raises 404."""
    with db.read() as c:
        document = c.execute(sa.select(programs.c.document).where(_is_program(worker_id, role)))
        text = document.scalar()
    if text is None:
        raise not_found("program", f"{worker_id}/{role}")
    return Program.model_validate_json(text)


def _is_program(worker_id: str, role: str) -> sa.ColumnElement[bool]:
    return sa.and_(programs.c.worker_id == worker_id, programs.c.role == role)


def _forget(c: Connection, now: float) -> None:
    old = sa.delete(workers).where(workers.c.heartbeat_at < now - FORGET_SECONDS)
    if gone := c.execute(old).rowcount:
        count_audit(c, SERVICE, "worker.forget", "workers", workers=gone)
    c.execute(sa.delete(programs).where(programs.c.worker_id.not_in(sa.select(workers.c.id))))


def _worker(row: RowMapping, now: float) -> Worker:
    # A heartbeat in the future means that the clock was set back: a live worker sends another soon.
    fresh = abs(now - row["heartbeat_at"]) < ALIVE_SECONDS
    return Worker(**row, alive=fresh and row["state"] not in ENDED)
