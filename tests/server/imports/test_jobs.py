"""Jobs keep their promises: progress, an end, a reason, and honesty after a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from server.app import create_app
from server.imports.jobs import JobContext, Jobs
from server.index.db import Database, upgrade
from server.index.tables import jobs as table
from server.problems import ProblemError
from server.settings import Settings
from stepwell.testing import wait_until


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    path = tmp_path / "index.sqlite"
    upgrade(path)
    database = Database(path)
    yield database
    database.close()


@pytest.fixture
def jobs(db: Database) -> Iterator[Jobs]:
    made = Jobs(db)
    yield made
    made.close()


def wait(jobs: Jobs, job_id: str) -> Any:
    running = ("queued", "running")
    wait_until(lambda: jobs.get(job_id).state not in running, what="the end of the job")
    return jobs.get(job_id)


def test_a_job_that_succeeds(jobs: Jobs) -> None:
    def work(context: JobContext) -> dict[str, Any]:
        context.report(0.5, "half")
        return {"twice": 42}

    job = wait(jobs, jobs.submit("double", work, {}).id)
    assert (job.kind, job.state, job.progress, job.result) == (
        "double",
        "succeeded",
        1.0,
        {"twice": 42},
    )
    assert job.finished_at is not None


def test_progress_is_seen_while_it_runs_and_never_goes_back(jobs: Jobs) -> None:
    reached, go = threading.Event(), threading.Event()

    def work(context: JobContext) -> dict[str, Any]:
        context.report(0.4, "reading")
        context.report(0.3)
        reached.set()
        go.wait(240)
        return {}

    submitted = jobs.submit("slow", work, {})
    assert reached.wait(240)
    job = jobs.get(submitted.id)
    assert (job.state, job.progress, job.message) == ("running", 0.4, "reading")
    go.set()
    assert wait(jobs, submitted.id).state == "succeeded"


def test_a_refusal_is_kept_as_its_problem(jobs: Jobs) -> None:
    def work(_context: JobContext) -> dict[str, Any]:
        raise ProblemError(422, "import_refused", "no", expected="yes", got="no")

    job = wait(jobs, jobs.submit("bad", work, {}).id)
    assert job.state == "failed"
    assert (job.error.code, job.error.expected, job.error.got) == ("import_refused", "yes", "no")


def test_a_defect_fails_the_job_and_not_the_thread(jobs: Jobs) -> None:
    def work(_context: JobContext) -> dict[str, Any]:
        raise ZeroDivisionError("oops")

    for _ in range(4):
        job = wait(jobs, jobs.submit("broken", work, {}).id)
        assert (job.state, job.error.code) == ("failed", "internal_error")


def test_cancelling_a_running_and_a_queued_job(jobs: Jobs) -> None:
    started = threading.Semaphore(0)

    def work(context: JobContext) -> dict[str, Any]:
        started.release()
        while True:
            context.check()

    submitted = [jobs.submit("endless", work, {}) for _ in range(3)]
    assert started.acquire(timeout=240)
    assert started.acquire(timeout=240)
    assert jobs.get(submitted[2].id).state == "queued"
    for job in reversed(submitted):
        jobs.cancel(job.id)
    assert [wait(jobs, job.id).state for job in submitted] == ["cancelled"] * 3
    assert jobs.cancel(submitted[0].id).state == "cancelled"


def test_after_a_crash_unfinished_jobs_are_failed_with_what_to_do(db: Database) -> None:
    with db.write() as c:
        for state in ("queued", "running", "succeeded"):
            c.execute(
                sa.insert(table).values(
                    id=f"job_{state}", kind="import", state=state, created_at=1.0
                )
            )
    jobs = Jobs(db)
    for state in ("queued", "running"):
        job = jobs.get(f"job_{state}")
        assert (job.state, job.error.code) == ("failed", "interrupted")  # type: ignore[union-attr]
        assert "upload again" in job.error.detail  # type: ignore[union-attr]
    assert jobs.get("job_succeeded").state == "succeeded"
    jobs.close()


def test_a_stop_ends_running_jobs_as_interrupted(db: Database) -> None:
    jobs = Jobs(db)
    started = threading.Event()

    def work(context: JobContext) -> dict[str, Any]:
        started.set()
        while True:
            context.check()

    job_id = jobs.submit("endless", work, {}).id
    assert started.wait(240)
    jobs.close()
    job = jobs.get(job_id)
    assert (job.state, job.error.code) == ("failed", "interrupted")  # type: ignore[union-attr]


def test_jobs_over_http(tmp_path: Path) -> None:
    """Newest first, by pages, by state; cancelling is DELETE; unknown ones are 404."""
    app = create_app(Settings(data=tmp_path / "data", sql_workers=1))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        jobs = app.state.service.jobs
        ids = [jobs.submit("quick", lambda _: {}, {}).id for _ in range(5)]
        for job_id in ids:
            wait(jobs, job_id)
        seen, cursor = [], None
        while True:
            query = "limit=2" + (f"&cursor={cursor}" if cursor else "")
            page = client.get(f"/v1/jobs?{query}").json()
            seen += [job["id"] for job in page["items"]]
            cursor = page["next"]
            if cursor is None:
                break
        assert seen == ids[::-1]
        assert client.get("/v1/jobs?state=failed").json()["items"] == []
        assert client.get(f"/v1/jobs/{ids[0]}").json()["state"] == "succeeded"
        assert client.delete(f"/v1/jobs/{ids[0]}").json()["state"] == "succeeded"
        for answer in (client.get("/v1/jobs/nope"), client.delete("/v1/jobs/nope")):
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
