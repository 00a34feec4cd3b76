"""Every change has a row of the audit log: one of its own, or one that counts those of a day."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from server.index import db as module
from server.index.db import count_audit, write_audit
from server.index.tables import audit
from stepwell.codec import encode
from stepwell.messages import ARROW
from stepwell.testing import make_trajectory
from tests.server.registry.conftest import client_of
from tests.server.registry.rights_world import OPERATOR, SPEC, World
from tests.server.registry.test_rights import EXPECTED

READS = {"POST /v1/query"}
"""Sent with a method of changes; they change nothing."""
WRITES = [r for r in EXPECTED if not r.startswith(("GET", "HEAD")) and r not in READS]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with client_of(tmp_path_factory.mktemp("audit") / "data", token=OPERATOR) as app:
        yield World(app)


def counted(world: World) -> dict[int, tuple[str, str, str, int]]:
    """Rows of the log by their key."""
    a = audit.c
    with world.app.app.state.service.db.read() as c:  # type: ignore[attr-defined]
        return {
            row.pk: tuple(row[1:])
            for row in c.execute(sa.select(a.pk, a.who, a.action, a.subject, a.count))
        }  # type: ignore[misc]


@pytest.mark.parametrize("route", WRITES)
def test_every_change_is_in_the_log(world: World, route: str) -> None:
    """A new row of the caller, or one more in a row that counts."""
    world.own("")
    if route == "PUT /v1/evaluations/{evaluation_id}/videos/{seed}":
        world.ask("DELETE", "/v1/evaluations/ev_1/videos/1")
    if route == "DELETE /v1/jobs/{job_id}":
        pytest.skip("the job of this test has ended; see test_a_cancelled_job_is_in_the_log")
    asked = world.request(route)
    before = counted(world)
    world.ask(asked.pop("method"), asked.pop("url"), **asked)
    after = counted(world)
    new = [row for pk, row in after.items() if before.get(pk) != row]
    assert new and all(who in ("operator", "service") for who, *_ in new)
    assert any(who == "operator" for who, *_ in new)


def test_a_cancelled_job_is_in_the_log(world: World) -> None:
    """Its upload is cancelled while it is parsed, or before."""
    jobs = world.app.app.state.service.jobs  # type: ignore[attr-defined]
    job = jobs.submit("import", lambda context: context._cancel.wait(60) and {}, {})
    world.ask("DELETE", f"/v1/jobs/{job.id}")
    assert ("operator", "job.cancel", job.id, 1) in counted(world).values()


def rows(app: TestClient, action: str) -> list[dict[str, object]]:
    items = app.get("/v1/audit?limit=1000").json()["items"]
    return [item for item in items if item["action"] == action]


def test_evictions_are_counted_by_the_service(start_app: Callable[..., TestClient]) -> None:
    """Not one row for each: they are sums of a day, beside those of who posted."""
    app = start_app()
    capacity = {"trajectories": 2}
    app.post("/v1/datasets", json={"name": "d", "spec": SPEC.to_json(), "capacity": capacity})
    for seed in range(5):
        body = encode([make_trajectory(SPEC, length=4, seed=seed)], SPEC)
        url, kind = "/v1/datasets/d/trajectories", {"content-type": ARROW}
        assert app.post(url, content=body, headers=kind).json()["items"][0]["status"] == "stored"
        assert app.post(url, content=body, headers=kind).status_code == 200, "a repeat"
    (evicted,), (posted,) = rows(app, "trajectories.evict"), rows(app, "trajectories.post")
    assert (evicted["who"], evicted["subject"], evicted["count"]) == ("service", "d", 3)
    assert (posted["who"], posted["subject"], posted["count"]) == ("local", "d", 5)
    sums = posted["detail"]
    assert isinstance(sums, dict)
    assert (sums["trajectories"], sums["steps"]) == (5, 20)
    assert evicted["detail"] == {
        "trajectories": 3, "steps": 12, "bytes": sums["bytes"] * 3 // 5,
    }  # fmt: skip
    app.patch("/v1/datasets/d", json={"capacity": {"trajectories": 1}})
    (evicted,) = rows(app, "trajectories.evict")
    assert evicted["count"] == 4
    assert app.get("/v1/datasets/d").json()["evicted"] == 4


def test_what_happens_often_is_one_row_a_day(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By caller, action and subject; the first and the last time are kept."""
    day = 20_000 * module.DAY
    now = [day + 10]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    service = app.app.state.service  # type: ignore[attr-defined]

    def count(who: str, subject: str, **amounts: float) -> None:
        with service.db.write() as c:
            count_audit(c, who, "x.count", subject, **amounts)

    count("a", "s", n=1)
    now[0] += 1
    count("b", "s")
    count("a", "t", n=1)
    with service.db.write() as c:
        write_audit(c, "a", "x.other", "s")
    count("a", "s", n=2, m=0.5)
    found = {(r["who"], r["subject"]): r for r in rows(app, "x.count")}
    assert len(found) == 3
    mine = found["a", "s"]
    assert (mine["count"], mine["time"], mine["until"]) == (2, day + 10, day + 11)
    assert mine["detail"] == {"n": 3, "m": 0.5}
    now[0] = day + module.DAY
    count("a", "s", n=1)
    assert [r["count"] for r in rows(app, "x.count") if r["subject"] == "s"] == [1, 1, 2]


def test_a_change_that_fails_is_not_in_the_log(app: TestClient) -> None:
    """The row is of the transaction of the change."""
    before = len(app.get("/v1/audit").json()["items"])
    service = app.app.state.service  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError), service.db.write() as c:
        count_audit(c, "a", "x.count", "s")
        raise RuntimeError
    assert app.post("/v1/runs", json={"name": "a", "kind": "collect", "parent": "none"}).is_error
    assert len(app.get("/v1/audit").json()["items"]) == before


def test_counting_stays_fast_in_a_long_log(app: TestClient) -> None:
    """The row is found in an index, whatever the log holds of the same action and subject."""
    service = app.app.state.service  # type: ignore[attr-defined]
    with service.db.read() as c:
        plan = " ".join(
            str(row)
            for row in c.exec_driver_sql(
                "EXPLAIN QUERY PLAN SELECT max(pk) FROM audit"
                " WHERE action = 'a' AND subject = 's' AND who = 'w'"
            )
        )
    assert "USING COVERING INDEX ix_audit_action_subject_who" in plan, time.time()
