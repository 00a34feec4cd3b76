"""A disk that fills up, fails or comes back: what was acknowledged stays, the rest is said."""

from __future__ import annotations

import errno
import itertools
import os
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from server.index.dialect import disk_problem
from server.problems import ProblemError
from server.storage.store import Appender
from stepwell.codec import encode
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory

SPEC = make_spec(observation=3, action=2)


def make(count: int, first: int = 0) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4 + i, seed=first + i) for i in range(count)]


def sqlite_error(words: str) -> sa.exc.OperationalError:
    return sa.exc.OperationalError("COMMIT", {}, sqlite3.OperationalError(words))


FULL = OSError(errno.ENOSPC, "No space left on device")


def refuse(*_: Any, **__: Any) -> None:
    raise sqlite_error("database or disk is full")


def test_what_was_acknowledged_before_the_disk_ran_low_is_sealed_after(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment that was open then must not be forgotten when writing comes back."""
    live.create()
    sent = make(3)
    live.post(sent[:2])
    store = live.service.store
    monkeypatch.setattr("server.ingest.commit.PROBE_EVERY", 0.0)
    monkeypatch.setattr(store, "free", lambda: 1)
    for _ in range(5):
        response = live.send(encode(sent[2:], SPEC))
        assert (response.status_code, response.json()["code"]) == (507, "storage_full")
    assert len(store.names("segments")) == 1, "looking whether there is room takes none"
    monkeypatch.setattr(store, "free", lambda: 1 << 40)
    assert live.post(sent[2:]) == [("stored", 3)]
    assert live.flush()["sealed"] == 3
    assert store.names("segments") == []
    assert all(live.info(t)["state"] == "sealed" for t in sent)


def test_a_refused_record_is_not_believed_by_the_next_start(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole in the file, its fsync failed, its sender was told no: a restart must say no too."""
    live = start()
    live.create()
    first, second = make(2)
    live.post([first])

    def fail(self: Appender) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Appender, "sync", fail)
    assert live.send(encode([second], SPEC)).status_code == 503
    (segment,) = (live.data / "segments").iterdir()
    assert second.id.encode() not in segment.read_bytes()


def test_a_long_refusal_keeps_no_bodies_in_memory(
    live: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception that is raised again and again collects the frames of each time."""
    live.create()
    monkeypatch.setattr(live.service.store, "free", lambda: 1)
    for _ in range(3):
        assert live.send(encode(make(1), SPEC)).status_code == 507
    assert live.service.ingest.committer.trouble.__traceback__ is None
    said = capsys.readouterr()
    assert (said.out + said.err).count("read-only: free disk space") == 1, "once, not for each post"
    error = ProblemError(507, "storage_full", "x", headers={"Retry-After": "5"})
    assert error.copy() is not error and error.copy().headers == error.headers


def test_one_poisonous_post_does_not_take_its_neighbours_with_it(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks in a group is tried one by one; nothing of the broken one stays on disk."""
    live.create()
    good, bad = make(2)
    from server.ingest import commit

    insert = commit.insert_rows

    def fail(connection: Any, rows: list[dict[str, Any]]) -> None:
        insert(connection, rows)
        if any(row["id"] == bad.id for row in rows):
            raise OverflowError("Python int too large to convert to SQLite INTEGER")

    monkeypatch.setattr("server.ingest.commit.insert_rows", fail)
    ingest = live.service.ingest
    dataset = ingest.registry.get("d")
    from server.ingest.commit import Submission
    from server.ingest.segments import encode_entry
    from server.ingest.validate import ValidTrajectory, entry_of
    from stepwell.codec import to_batch

    group = []
    for one in (bad, good):
        entry = entry_of(ValidTrajectory(one, one.digest), "fifo", time.time())
        record = encode_entry("d", entry, to_batch(one, SPEC, dataset.schema).serialize())
        group.append(Submission(dataset, "fifo", [(entry, record)]))
    ingest.committer._handle(group)
    assert group[1].answer.result(1)[0].status == "stored"
    with pytest.raises(ProblemError) as caught:
        group[0].answer.result(1)
    assert caught.value.status == 500
    assert live.http.get("/readyz").json()["writable"] is True
    assert [item["id"] for item in live.listing()] == [good.id]
    assert bad.id.encode() not in b"".join(
        path.read_bytes() for path in (live.data / "segments").iterdir()
    )


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/runs", {"name": "r2", "kind": "train"}),
        ("POST", "/v1/datasets", {"name": "e", "spec": SPEC.to_json()}),
        ("PUT", "/v1/workers/w", {"role": "train"}),
    ],
)
def test_every_write_says_507_when_the_index_is_full(
    live: Any, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: dict[str, Any]
) -> None:
    from contextlib import contextmanager

    @contextmanager
    def full() -> Any:
        raise sqlite_error("database or disk is full")
        yield

    monkeypatch.setattr(live.service.db, "write", full)
    response = live.http.request(method, path, json=body)
    assert (response.status_code, response.json()["code"]) == (507, "storage_full")
    assert response.headers["retry-after"] == "5"


@pytest.mark.parametrize("failure", [sqlite_error("database or disk is full"), FULL])
def test_a_read_on_a_full_disk_speaks_of_reading(
    live: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """It stores nothing: SQL reads a copy of the index, which needs space."""
    live.create()

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(live.service.mirror, "state", fail)
    monkeypatch.setattr(live.service.db, "read", fail)
    for response in (
        live.http.post("/v1/query", json={"sql": "SELECT count(*) FROM trajectories"}),
        live.http.get("/v1/query/schema"),
        live.http.get("/v1/datasets"),
    ):
        problem = response.json()
        assert (response.status_code, problem["code"]) == (507, "storage_full")
        assert "could not be read" in problem["detail"] and "stored" not in problem["detail"]
        assert response.headers["retry-after"] == "5"
    monkeypatch.setattr(live.service.db, "write", fail)
    told = live.http.post("/v1/runs", json={"name": "r", "kind": "train"}).json()
    assert told["detail"].startswith("nothing of this request was stored")


def test_a_policy_that_does_not_fit_is_507_and_leaves_nothing(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.http.post("/v1/runs", json={"name": "r", "kind": "train"})

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("server.storage.store.os.fsync", fail)
    response = live.http.put(
        "/v1/runs/r/policies/1", content=b"x", headers={"content-type": "application/octet-stream"}
    )
    assert (response.status_code, response.json()["code"]) == (507, "storage_full")
    monkeypatch.undo()
    assert list((live.data / "tmp").iterdir()) == list((live.data / "policies").iterdir()) == []


def test_a_full_disk_does_not_keep_anybody_from_reading(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the use of a token notes is written later, by maintenance."""
    live = start(token="operator")
    bearer = {"authorization": "Bearer operator"}
    made = live.http.post("/v1/tokens", json={"name": "t", "scopes": ["read"]}, headers=bearer)
    reader = {"authorization": f"Bearer {made.json()['token']}"}
    monkeypatch.setattr(live.service.db, "write", refuse)
    assert live.http.get("/v1/datasets", headers=reader).status_code == 200


def test_only_the_disk_is_blamed_for_what_the_disk_did() -> None:
    for error, status in (
        (OSError(errno.ENOSPC, "no space"), 507),
        (OSError(errno.EIO, "i/o"), 503),
        (sqlite_error("disk I/O error"), 503),
        (sqlite_error("attempt to write a readonly database"), 503),
    ):
        problem = disk_problem(error, "x")
        assert problem is not None and problem.status == status
    for other in (OSError(errno.EMFILE, "files"), sqlite_error("no such table: x"), KeyError()):
        assert disk_problem(other, "x") is None


def test_no_request_data_gets_into_the_log(
    live: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither through the parameters of a statement that failed, nor through locals."""

    secret = "-".join(("s3cret", "note"))  # tracebacks show source lines, not this

    def fail(connection: Any, rows: list[dict[str, Any]]) -> None:
        connection.execute(sa.text("INSERT INTO nowhere VALUES (:x)"), {"x": secret})

    live.create()
    monkeypatch.setattr("server.ingest.commit.insert_rows", fail)
    body = encode([make_trajectory(SPEC, source=secret)], SPEC)
    assert live.send(body).status_code == 500
    log = capsys.readouterr().err
    assert "a post was not stored" in log and secret not in log


def test_traffic_leaks_neither_files_nor_much_memory(live: Any) -> None:
    live.create(capacity={"trajectories": 20})

    seeds = itertools.count(0, 10)

    def traffic(rounds: int) -> None:
        for _ in range(rounds):
            live.post(make(2, next(seeds)))
            live.http.get("/v1/datasets/d")
            live.flush()
            live.http.get("/v1/nowhere")

    traffic(10)
    before = len(os.listdir("/proc/self/fd"))
    traffic(20)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
