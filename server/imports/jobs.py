"""Import jobs: a table, two threads, progress and cancelling.

    queued → running → succeeded | failed | cancelled

A job's row outlives the process; its thread does not. Jobs that were queued or running when the
service died become failed on the next start, with an error that says what to do. Progress is kept
in memory, because each write would cost an fsync.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa
import structlog
import uuid_utils

from server.index.db import Database, equal, get_row, read_page, write_audit
from server.index.tables import jobs as table
from server.problems import ProblemError
from server.rights import EVERYTHING, Access
from stepwell.messages import Job, Page, Problem

log = structlog.get_logger("stepwell.jobs")

Work = Callable[["JobContext"], dict[str, Any]]


class JobCancelled(Exception):
    """Raised inside a cancelled job."""


class JobContext:
    """The interface for a job's work: report progress, and check for cancellation."""

    def __init__(self, job_id: str):
        self.id = job_id
        self.progress = 0.0
        self.message = ""
        self._cancel = threading.Event()

    def report(self, progress: float, message: str | None = None) -> None:
        """Report the progress (0 … 1) and the current activity. Raises `JobCancelled`."""
        self.progress = min(1.0, max(self.progress, progress))
        if message is not None:
            self.message = message
        self.check()

    def check(self) -> None:
        if self._cancel.is_set():
            raise JobCancelled

    def cancel(self) -> None:
        self._cancel.set()


class Jobs:
    """Runs and stores jobs. Thread-safe; one per process."""

    def __init__(self, db: Database, *, threads: int = 2):
        self._db = db
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="job")
        self._live: dict[str, JobContext] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._fail_interrupted()

    def submit(
        self,
        kind: str,
        work: Work,
        payload: dict[str, Any],
        message: str = "",
        *,
        who: str = "local",
    ) -> Job:
        """Queue `work`. Its arguments, `payload`, and its owner are stored in its row."""
        job_id = f"job_{uuid_utils.uuid7()}"
        context = JobContext(job_id)
        context.message = message
        with self._db.write() as c:
            c.execute(
                sa.insert(table).values(
                    id=job_id,
                    kind=kind,
                    state="queued",
                    message=message,
                    payload=payload,
                    created_at=time.time(),
                    owner=who,
                )
            )
            about = {"kind": kind, "dataset": payload.get("dataset", "")}
            write_audit(c, who, "job.create", job_id, **about)
        with self._lock:
            if self._closed:
                raise ProblemError(503, "shutting_down", "the service is stopping")
            self._live[job_id] = context
            self._pool.submit(self._run, context, work)
        return self.get(job_id)

    def get(self, job_id: str, access: Access = EVERYTHING) -> Job:
        with self._db.read() as c:
            row = get_row(c, table, id=job_id)
        access.require(row["owner"], f"job {job_id}")
        return self._message(row)

    def page(
        self,
        *,
        limit: int = 100,
        cursor: int | None = None,
        state: str | None = None,
        access: Access = EVERYTHING,
    ) -> Page[Job]:
        """Sorted newest first; those that the caller may read."""
        wanted = [*access.mine(table.c.owner), *equal(table, state=state)]
        query = sa.select(table).where(*wanted)
        with self._db.read() as c:
            return read_page(c, Job, query, table.c.pk, limit, cursor, make=self._message)

    def cancel(self, job_id: str, access: Access = EVERYTHING) -> Job:
        """Request cancellation, which the job checks regularly. An ended job is returned as is."""
        self.get(job_id, access)
        with self._lock:
            context = self._live.get(job_id)
        if context is not None:
            context.cancel()
            with self._db.write() as c:
                write_audit(c, access.who, "job.cancel", job_id)
        return self.get(job_id, access)

    def close(self) -> None:
        """Stop: running jobs are cancelled and marked as interrupted."""
        with self._lock:
            self._closed = True
            for context in self._live.values():
                context.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._fail_interrupted()

    def _run(self, context: JobContext, work: Work) -> None:
        state, result, error = "failed", None, None
        try:
            context.check()
            self._save(context.id, state="running", started_at=time.time())
            result = work(context)
            state = "succeeded"
        except JobCancelled:
            state = "failed" if self._closed else "cancelled"
            error = _interrupted() if self._closed else None
        except ProblemError as problem:
            error = problem.problem()
        except BaseException as defect:  # SystemExit too: else the job would stay running
            log.error(
                "a job failed with an internal error; please report it with these lines",
                job=context.id,
                exc_info=defect,
            )
            error = ProblemError(
                500, "internal_error", f"internal error of the service: {defect!r}"[:500]
            ).problem()
        done = 1.0 if state == "succeeded" else context.progress
        try:
            self._save(
                context.id,
                state=state,
                progress=done,
                message=context.message if state != "succeeded" else "done",
                result=result,
                error=None if error is None else error.model_dump(mode="json"),
                finished_at=time.time(),
            )
        except Exception as defect:
            # The row stays unchanged until the next start, which marks it failed.
            log.error(
                "the end of a job was not saved: check the disk; the next start marks it failed",
                job=context.id,
                exc_info=defect,
            )
        finally:
            with self._lock:
                self._live.pop(context.id, None)

    def _save(self, job_id: str, **values: Any) -> None:
        with self._db.write() as c:
            c.execute(sa.update(table).where(table.c.id == job_id).values(**values))

    def _fail_interrupted(self) -> None:
        unfinished = table.c.state.in_(("queued", "running"))
        with self._db.read() as c:
            if not c.execute(sa.select(table.c.pk).where(unfinished).limit(1)).first():
                return
        with self._db.write() as c:
            c.execute(
                sa.update(table)
                .where(unfinished)
                .values(
                    state="failed",
                    error=_interrupted().model_dump(mode="json"),
                    finished_at=time.time(),
                )
            )

    def _message(self, row: Any) -> Job:
        with self._lock:
            live = self._live.get(row["id"])
        shown = {**row, "dataset": (row["payload"] or {}).get("dataset", "")}
        if live is not None and row["state"] in ("queued", "running"):
            shown |= {"progress": live.progress, "message": live.message}
        return Job(**shown)


def _interrupted() -> Problem:
    return ProblemError(
        503,
        "interrupted",
        "the service stopped before the job was done; nothing was stored: upload again",
    ).problem()
