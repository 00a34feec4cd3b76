"""Posting: exactly once, all or nothing, and errors that name what was expected."""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa

from server.problems import ProblemError
from server.storage.store import Appender
from stepwell.codec import HEADER_KEY, encode, to_batch
from stepwell.schema import arrow_schema
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.specs import make_rich_spec

SPEC = make_spec(observation=3, action=2)


def make(count: int, **options: Any) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4 + i, seed=i, **options) for i in range(count)]


def test_what_is_posted_comes_back_with_its_digest_from_segment_and_from_shard(live: Any) -> None:
    """The same bytes, whatever carries them in between."""
    spec = make_rich_spec()
    live.create(spec=spec)
    sent = [make_trajectory(spec, length=3 + i, seed=i, tags=("x",)) for i in range(4)]
    assert live.post(sent, spec=spec) == [("stored", i) for i in (1, 2, 3, 4)]
    assert {live.info(t)["state"] for t in sent} == {"spooled"}
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
    assert live.flush() == {"sealed": 4, "shards": 1}
    assert {live.info(t)["state"] for t in sent} == {"sealed"}
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]


def test_an_id_is_stored_once_however_often_it_comes(live: Any) -> None:
    """In one body, in the next, after sealing: always `duplicate` with the first seq."""
    live.create()
    a, b = make(2)
    assert live.post([a, b, a]) == [("stored", 1), ("stored", 2), ("duplicate", 1)]
    assert live.post([b]) == [("duplicate", 2)]
    live.flush()
    assert live.post([a]) == [("duplicate", 1)]
    assert [item["id"] for item in live.listing()] == [a.id, b.id]


def test_an_id_with_other_content_is_a_conflict(live: Any) -> None:
    """Against the index and inside one body; the first stays, the rest of the body is stored."""
    live.create()
    first = make_trajectory(SPEC, length=4, seed=1)
    other = make_trajectory(SPEC, length=4, seed=2, id=first.id)
    assert [s for s, _ in live.post([first, other])] == ["stored", "conflict"]
    response = live.send(encode([other, make_trajectory(SPEC, seed=3)], SPEC)).json()
    assert [item["status"] for item in response["items"]] == ["conflict", "stored"]
    problem = response["items"][0]["problem"]
    assert problem["code"] == "conflict" and first.digest in problem["expected"]
    assert live.steps(first).digest == first.digest


def test_the_same_trajectory_in_another_dataset_is_a_conflict(live: Any) -> None:
    """Ids are unique in the whole service: /v1/trajectories/{id} must mean one thing."""
    live.create("d")
    live.create("e")
    sent = make(1)
    live.post(sent)
    item = live.send(encode(sent, SPEC), "e").json()["items"][0]
    assert item["status"] == "conflict"
    assert "another dataset" in item["problem"]["detail"]


def test_concurrent_posts_of_one_id_store_it_once(live: Any) -> None:
    """Eight clients, the same trajectories, at the same time: one `stored` per id."""
    live.create()
    sent = make(5)
    answers: list[list[tuple[str, int | None]]] = []
    threads = [threading.Thread(target=lambda: answers.append(live.post(sent))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for column in zip(*answers, strict=True):
        statuses = [status for status, _ in column]
        assert statuses.count("stored") == 1 and statuses.count("duplicate") == 7
        assert len({seq for _, seq in column}) == 1
    assert len(live.listing()) == 5


def test_sequence_numbers_are_dense_per_dataset_under_concurrency(live: Any) -> None:
    """The service's order has no holes and no doubles, and datasets do not disturb each other."""
    live.create("d")
    live.create("e")

    def post(name: str, first: int) -> None:
        for i in range(5):
            live.post([make_trajectory(SPEC, length=2, seed=first + i)], name)

    threads = [
        threading.Thread(target=post, args=(name, 100 * n)) for n in range(3) for name in "de"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "de":
        assert [item["seq"] for item in live.listing(name)] == list(range(1, 16))


def body_with(spec: Any, trajectory: Trajectory, **columns: Any) -> bytes:
    """A body whose one batch is changed behind the codec's back."""
    schema = arrow_schema(spec)
    batch = to_batch(trajectory, spec, schema)
    for name, values in columns.items():
        index = schema.get_field_index(name)
        batch = batch.set_column(index, schema.field(index), values)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        header = json.dumps(trajectory.header()).encode()
        writer.write_batch(batch, custom_metadata={HEADER_KEY: header})
    return bytes(sink.getvalue())


def test_one_bad_trajectory_is_refused_and_the_others_are_stored(live: Any) -> None:
    """NaN rewards: the item says which array, what was expected and what came."""
    live.create()
    bad = make_trajectory(SPEC, length=3)
    nan = pa.array([1.0, float("nan"), 1.0, None], pa.float32())
    answer = live.send(body_with(SPEC, bad, reward=nan)).json()["items"][0]
    assert (answer["id"], answer["status"], answer["seq"]) == (bad.id, "refused", None)
    problem = answer["problem"]
    assert (problem["code"], problem["status"]) == ("invalid_trajectory", 422)
    assert "rewards" in problem["detail"] and "finite" in problem["expected"]
    assert live.dataset()["fifo"]["trajectories"] == 0
    assert live.post([bad]) == [("stored", 1)]  # the honest one, under the same id


def test_actions_outside_their_space_are_refused(live: Any) -> None:
    live.create()
    wide = make_spec(observation=3, action=2)
    trajectory = make_trajectory(wide, length=3)
    actions = np.full((4, 2), 7.0, np.float32)
    column = pa.FixedSizeListArray.from_arrays(
        pa.array(actions.reshape(-1)),
        type=arrow_schema(SPEC).field("action").type,
        mask=pa.array([False, False, False, True]),
    )
    item = live.send(body_with(SPEC, trajectory, action=column)).json()["items"][0]
    assert item["status"] == "refused"
    assert "actions[action]" in item["problem"]["detail"]


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (make_spec(observation=4, action=2), "observations[observation]"),
        (make_spec(observation=3, action=1), "actions[action]"),
        (make_spec(observation=3, discrete=4), "actions[action]"),
        (make_spec(observation=3, action=2, image=(2, 2, 3)), "observations"),
        (make_spec(observation=3, action=2, infos=True), "infos"),
    ],
)
def test_another_layout_is_refused_as_a_whole_and_the_key_is_named(
    live: Any, spec: Any, where: str
) -> None:
    live.create()
    response = live.send(encode([make_trajectory(spec, length=3)], spec))
    assert response.status_code == 422
    problem = response.json()
    assert problem["code"] == "schema_mismatch"
    assert problem["detail"].startswith(where)
    assert problem["expected"] != problem["got"]
    assert live.dataset()["fifo"]["trajectories"] == 0


GOOD = encode(make(3), SPEC)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        pickle.dumps({"obs": [1, 2, 3]}),
        b'{"obs": []}',
        GOOD[:-8],
        GOOD[: len(GOOD) // 2],
        GOOD[:-8] + b"\0" * 8,
        GOOD[: len(GOOD) // 3] + b"\xff\xff\xff\xff\0\0\0\0",
        bytes(b ^ 0x55 for b in GOOD),
    ],
    ids=["empty", "text", "pickle", "json", "no-end", "half", "zeros", "cut-batch", "noise"],
)
def test_a_body_that_is_no_sound_stream_is_refused_and_nothing_is_stored(
    live: Any, body: bytes
) -> None:
    live.create()
    response = live.send(body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["code"] == "invalid_stream"
    assert live.listing() == []


def test_a_compressed_body_is_refused_before_it_is_inflated(live: Any) -> None:
    """A hundred kilobytes of zeros may claim gigabytes."""
    live.create()
    trajectory = make_trajectory(SPEC, length=50_000)
    schema = arrow_schema(SPEC)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(to_batch(trajectory, SPEC, schema))
    response = live.send(bytes(sink.getvalue()))
    assert (response.status_code, response.json()["code"]) == (422, "invalid_stream")


def test_bodies_and_names_that_cannot_be_have_their_own_errors(start: Callable[..., Any]) -> None:
    """Too long (also when it only claims to be), of the wrong kind, for no dataset."""
    live = start(max_body=20_000)
    live.create()
    long = encode([make_trajectory(SPEC, length=3000)], SPEC)
    assert len(long) > 20_000
    response = live.send(long)
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert "20000" in response.json()["expected"]
    chunks = (long[i : i + 1000] for i in range(0, len(long), 1000))  # chunked: no length to check
    assert live.send(chunks).status_code == 413
    response = live.http.post(
        "/v1/datasets/d/trajectories", content=GOOD, headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")
    response = live.send(GOOD, "nobody")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert live.send(GOOD, partition="shelf").status_code == 422
    assert live.listing() == []


def test_waiting_for_sealed_means_sealed(live: Any) -> None:
    live.create()
    sent = make(2)
    answer = live.send(encode(sent, SPEC), wait="sealed").json()
    assert answer["sealed"] is True
    assert live.info(sent[0])["state"] == "sealed"


def test_a_disk_that_refuses_stores_nothing_and_writing_comes_back_by_itself(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """507, not 200; read-only but readable; and no restart needed when there is room again."""
    live.create()
    before, later = make(2)
    live.post([before])
    full = [True]
    write = os.writev

    def refuse(fd: int, parts: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, parts)

    monkeypatch.setattr("server.storage.store.os.writev", refuse)
    response = live.send(encode([later], SPEC))
    assert (response.status_code, response.json()["code"]) == (507, "storage_full")
    assert response.headers["retry-after"]
    assert live.http.get("/readyz").status_code == 503
    assert live.steps(before).digest == before.digest
    full[0] = False
    monkeypatch.setattr("server.ingest.commit.PROBE_EVERY", 0.0)
    assert live.post([later]) == [("stored", 2)]
    assert live.http.get("/readyz").status_code == 200
    assert len(live.listing()) == 2
    live.flush()
    assert {live.info(t)["state"] for t in (before, later)} == {"sealed"}


def test_a_failed_fsync_is_not_tried_again(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped the pages: the segment is given up, the data refused."""
    live.create()
    first, second = make(2)
    live.post([first])
    calls: list[str] = []

    def fail(self: Appender) -> None:
        calls.append(self.path.name)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Appender, "sync", fail)
    response = live.send(encode([second], SPEC))
    assert (response.status_code, response.json()["code"]) == (503, "read_only")
    assert len(calls) == 1
    monkeypatch.undo()
    monkeypatch.setattr("server.ingest.commit.PROBE_EVERY", 0.0)
    assert live.post([second]) == [("stored", 2)]
    assert [live.steps(t).digest for t in (first, second)] == [first.digest, second.digest]
    live.flush()
    assert [live.steps(t).digest for t in (first, second)] == [first.digest, second.digest]


def test_an_index_that_cannot_commit_stores_nothing(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is durable by then; it must not come back as if it had been acknowledged."""
    live.create()
    (only,) = make(1)

    def fail(*_: Any) -> None:
        raise sa.exc.OperationalError("COMMIT", {}, Exception("database or disk is full"))

    monkeypatch.setattr("server.ingest.commit.insert_rows", fail)
    assert live.send(encode([only], SPEC)).status_code == 507
    monkeypatch.undo()
    monkeypatch.setattr("server.ingest.commit.PROBE_EVERY", 0.0)
    assert live.listing() == []
    assert live.post([only]) == [("stored", 1)]


def test_an_unknown_dataset_is_a_typed_error_in_process(live: Any) -> None:
    with pytest.raises(ProblemError) as caught:
        live.service.ingest.flush("nobody")
    assert caught.value.status == 404
