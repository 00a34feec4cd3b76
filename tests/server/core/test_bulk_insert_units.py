"""An import's way to the index, in process: nothing is seen before the commit, all of it after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.tables import datasets, shards, trajectories
from server.ingest import bulk_insert as module
from server.ingest import seal
from server.ingest.bulk_insert import (
    FOLDER,
    SUFFIX,
    BulkInsert,
    BulkResult,
    check_room,
    sweep_pending,
)
from server.ingest.dataset_registry import RegisteredDataset
from server.ingest.validate import ValidTrajectory, read_body
from server.problems import ProblemError
from server.storage.shards import write_shard
from stepwell.codec import encode
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=3, action=2)


def items(count: int = 4, *, length: int = 6, seed: int = 0) -> list[ValidTrajectory]:
    return [
        ValidTrajectory(t, t.digest)
        for t in (make_trajectory(SPEC, length=length, seed=seed + i) for i in range(count))
    ]


def bulk(live: Any, count: int = 4, name: str = "d", *, partition: str = "fifo") -> BulkInsert:
    service = live.service
    dataset = service.ingest.registry.get(name)
    return BulkInsert(service.settings, service.db, service.store, dataset, partition, count)


def files(live: Any) -> list[str]:
    return sorted(path.name for path in live.data.glob("shards/*/*.parquet"))


def marks(live: Any) -> list[str]:
    return sorted(path.name for path in (live.data / FOLDER).iterdir())


def test_all_becomes_visible_at_once_in_order(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: files and marks, nothing in the index. After: rows, totals, numbers, no marks."""
    # A shard for every two of them.
    live = start(shard_bytes=2 * items(1)[0].trajectory.nbytes)
    live.create()
    sent = items(5)
    seen: list[tuple[str, int, int]] = []

    def passed(name: str) -> None:
        seen.append((name, len(live.listing()), len(marks(live))))

    monkeypatch.setattr(module, "failpoint", passed)
    began = time.time()
    one = bulk(live, 7)
    one.add(sent[:3])
    assert len(files(live)) == 1 and live.listing() == []
    assert [name.removesuffix(SUFFIX) for name in marks(live)] == [
        name.removesuffix(".parquet") for name in files(live)
    ]
    one.add(sent[3:])
    assert one.commit(None) == BulkResult(stored=5, steps=30, duplicates=0, evicted=0)
    # Inside the transaction others see nothing; after it, all of it, and the marks go last.
    assert seen == [("import.before_commit", 0, 3), ("import.after_commit", 5, 3)]
    assert marks(live) == [] and len(files(live)) == 3
    rows = live.listing()
    assert [(row["id"], row["seq"]) for row in rows] == [
        (item.trajectory.id, number) for number, item in enumerate(sent, 1)
    ]
    assert {row["state"] for row in rows} == {"sealed"}
    assert {row["env"] for row in rows} == {SPEC.env}
    for item in sent:
        assert live.steps(item.trajectory).digest == item.digest
    fifo = live.dataset()["fifo"]
    assert (fifo["trajectories"], fifo["steps"]) == (5, 30)
    assert fifo["bytes"] == sum(item.trajectory.nbytes for item in sent)
    with live.service.db.read() as connection:
        known = connection.execute(sa.select(shards).order_by(shards.c.seq_min)).all()
        created = connection.execute(sa.select(trajectories.c.created_at)).scalars().all()
        after = connection.execute(sa.select(datasets.c.next_seq)).scalar_one()
    assert [(s.seq_min, s.seq_max, s.trajectories, s.rows) for s in known] == [
        (1, 2, 2, 14), (3, 4, 2, 14), (5, 5, 1, 7)
    ]  # fmt: skip
    for shard in known:
        path = live.data / "shards" / "fifo" / f"{shard.id}.parquet"
        assert (shard.state, shard.partition, shard.bytes) == ("live", "fifo", path.stat().st_size)
        assert began <= shard.verified_at <= time.time()
        assert began <= shard.created_at <= time.time()
        assert live.service.integrity.verify_shard(shard.pk)
    assert all(began <= at <= time.time() for at in created)
    assert after == 8, "numbers were set aside for as many as could come"


def test_what_is_there_is_counted_and_not_written_again(live: Any) -> None:
    live.create(capacity={"trajectories": 3})
    sent = items(4)
    first = bulk(live)
    first.add(sent[:2])
    assert first.commit(None) == BulkResult(2, 12, 0, 0)
    second = bulk(live)
    second.add(sent)  # 0 and 1 are known; with 2 and 3 the capacity is exceeded by one
    assert second.commit(None) == BulkResult(stored=2, steps=12, duplicates=2, evicted=0)
    assert [row["id"] for row in live.listing()] == [i.trajectory.id for i in sent[1:]]
    assert live.dataset()["evicted"] == 1
    third = bulk(live)
    third.add(sent)
    assert third.commit(None) == BulkResult(stored=0, steps=0, duplicates=3, evicted=1)
    assert len(files(live)) == 2 and marks(live) == []


def test_marks_of_the_index_tell_followers_of_an_import(live: Any) -> None:
    """Rows of one commit share a `change_id`; later ones have a larger one."""
    live.create()
    for seed in (0, 10):
        one = bulk(live)
        one.add(items(2, seed=seed))
        one.commit(None)
    with live.service.db.read() as connection:
        found = connection.execute(
            sa.select(trajectories.c.change_id).order_by(trajectories.c.seq)
        ).scalars()
        a, b, c, d = found
    assert a == b < c == d


def test_other_content_under_a_known_id_stops_the_import(live: Any) -> None:
    live.create()
    (sent,) = items(1)
    live.post([sent.trajectory])
    with pytest.raises(ProblemError) as failed:
        bulk(live).add([ValidTrajectory(sent.trajectory, "0" * 64)])
    problem = failed.value
    assert (problem.status, problem.code) == (409, "conflict")
    assert problem.expected == f"content of sha256 {sent.digest}"
    assert problem.got == "0" * 64
    assert "with other options (as env, action, keep_last_step)" in problem.detail


def test_an_abandoned_import_leaves_nothing(start: Callable[..., Any]) -> None:
    live = start(shard_bytes=1)
    live.create()
    one = bulk(live)
    one.add(items(3))
    assert len(files(live)) == 3 == len(marks(live))
    one.abandon()
    assert files(live) == [] == marks(live)
    one.abandon()
    assert live.listing() == []


def test_abandoning_after_the_commit_takes_nothing_back(live: Any) -> None:
    live.create()
    one = bulk(live)
    one.add(items(2))
    one.commit(None)
    one.abandon()
    assert len(files(live)) == 1 and len(live.listing()) == 2


def test_the_same_file_twice_at_the_same_time_is_stored_once(live: Any) -> None:
    live.create()
    sent = items(2)
    first, second = bulk(live), bulk(live)
    first.add(sent)
    second.add(sent)
    first.commit(None)
    with pytest.raises(ProblemError) as failed:
        second.commit(None)
    assert (failed.value.status, failed.value.code) == (409, "conflict")
    assert "imported at the same time" in failed.value.detail
    second.abandon()
    assert len(files(live)) == 1 and marks(live) == []
    assert [live.steps(item.trajectory).digest for item in sent] == [i.digest for i in sent]


def new_dataset(live: Any, name: str) -> RegisteredDataset:
    like = live.service.ingest.registry.get("d")
    return RegisteredDataset(0, name, like.spec, like.spec_digest, like.schema)


def creator(name: str, spec_digest: str) -> Callable[[Connection], int]:
    def create(connection: Connection) -> int:
        like = connection.execute(sa.select(datasets).where(datasets.c.name == "d")).one()
        values = {**like._mapping, "name": name, "spec_digest": spec_digest, "next_seq": 1}
        del values["pk"]
        made = connection.execute(sa.insert(datasets).values(values).returning(datasets.c.pk))
        return int(made.scalar_one())

    return create


def test_a_dataset_is_made_in_the_same_transaction(live: Any) -> None:
    live.create()
    dataset = new_dataset(live, "new")
    service = live.service
    one = BulkInsert(service.settings, service.db, service.store, dataset, "protected", 3)
    sent = items(3)
    one.add(sent)
    assert live.http.get("/v1/datasets/new").status_code == 404
    assert one.commit(creator("new", dataset.spec_digest)).stored == 3
    assert [row["seq"] for row in live.listing("new")] == [1, 2, 3]
    assert {row["partition"] for row in live.listing("new")} == {"protected"}
    assert [path.parent.name for path in live.data.glob("shards/*/*.parquet")] == ["protected"]
    # What comes next goes on after the numbers of the import.
    assert live.post([make_trajectory(SPEC, seed=99)], "new") == [("stored", 4)]


@pytest.mark.parametrize("create", [True, False])
def test_a_dataset_of_that_name_that_came_meanwhile_is_left_alone(live: Any, create: bool) -> None:
    live.create()
    dataset = new_dataset(live, "new")
    service = live.service
    one = BulkInsert(service.settings, service.db, service.store, dataset, "fifo", 3)
    one.add(items(2))
    if create:
        live.create("new")
    with pytest.raises(ProblemError, match="'new' was created or deleted") as failed:
        one.commit(creator("new", dataset.spec_digest) if create else None)
    assert (failed.value.status, failed.value.code) == (409, "conflict")
    one.abandon()
    assert files(live) == [] == marks(live)


def test_a_dataset_that_went_meanwhile_is_told(live: Any) -> None:
    """Deleted; or deleted and made again, under the same name; before the first byte or after."""
    live.create()
    gone, again = bulk(live), bulk(live)
    gone.add(items(1))
    again.add(items(1, seed=5))
    before = live.service.ingest.registry.get("d")
    assert live.http.delete("/v1/datasets/d").status_code == 204
    with pytest.raises(ProblemError, match="'d' was created or deleted"):
        gone.commit(None)
    with pytest.raises(ProblemError, match="'d' was created or deleted"):
        service = live.service
        BulkInsert(service.settings, service.db, service.store, before, "fifo", 1)
    live.create()
    with pytest.raises(ProblemError, match="'d' was created or deleted"):
        again.commit(None)
    gone.abandon()
    again.abandon()
    assert files(live) == [] == marks(live) and live.listing() == []


def test_no_shard_is_begun_on_a_disk_that_is_nearly_full(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.create()
    settings = live.service.settings
    check_room(settings, SimpleNamespace(free=lambda: settings.min_free))  # type: ignore[arg-type]
    monkeypatch.setattr(live.service.store, "free", lambda: settings.min_free - 1)
    one = bulk(live)
    one.add(items(2))
    with pytest.raises(ProblemError) as failed:
        one.commit(None)
    problem = failed.value
    assert (problem.status, problem.code) == (507, "storage_full")
    assert problem.expected == f"at least {settings.min_free} bytes free"
    assert problem.got == settings.min_free - 1
    assert files(live) == [] == marks(live)


def test_a_start_sweeps_what_was_never_committed_and_keeps_what_was(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.create()
    kept, lost = bulk(live), bulk(live, partition="protected")
    kept.add(items(2))
    monkeypatch.setattr(BulkInsert, "_forget_marks", lambda self: None)  # it died just before
    kept.commit(None)
    lost.add(items(2, seed=7))
    lost._write()
    live.service.store.put(FOLDER, "upload.bin", b"no mark")
    assert len(files(live)) == 2 and len(marks(live)) == 3
    assert sweep_pending(live.service.db, live.service.store) == 1
    assert files(live) == [f"{kept._shards[0]['id']}.parquet"]
    assert marks(live) == ["upload.bin"]
    assert sweep_pending(live.service.db, live.service.store) == 0


def test_shards_are_cut_where_the_settings_say(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bytes: exactly where the sum reaches them. Groups of rows inside: by rows, too."""
    import pyarrow.parquet as pq

    size = items(1)[0].trajectory.nbytes
    live = start(shard_bytes=2 * size + 1)
    monkeypatch.setattr(seal, "write_shard", partial(write_shard, group_rows=7))
    live.create()
    one = bulk(live)
    one.add(items(4))
    one.commit(None)
    found = [pq.ParquetFile(path).metadata for path in live.data.glob("shards/*/*.parquet")]
    assert sorted(meta.num_rows for meta in found) == [7, 21]
    assert all(meta.num_row_groups * 7 == meta.num_rows for meta in found)


def test_what_the_service_checked_is_what_bulk_takes(live: Any) -> None:
    """`read_body` and `BulkInsert` agree: the digests of a posted body are those stored."""
    live.create()
    sent = [item.trajectory for item in items(2)]
    checked = list(read_body(encode(sent, SPEC), live.service.ingest.registry.get("d")))
    one = bulk(live)
    one.add([item for item in checked if isinstance(item, ValidTrajectory)])
    assert one.commit(None).stored == 2
    assert live.post(sent) == [("duplicate", 1), ("duplicate", 2)]


def test_posts_beside_an_import_take_other_numbers(live: Any) -> None:
    """An import sets its numbers aside when it begins; a post in between goes on after them."""
    live.create()
    one = bulk(live, 10)
    one.add(items(2))
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.extend(live.post([make_trajectory(SPEC, seed=50)]))
    )
    thread.start()
    thread.join()
    one.commit(None)
    assert answers == [("stored", 11)]
    assert sorted(row["seq"] for row in live.listing()) == [1, 2, 11]


def test_rows_wait_in_a_file_and_not_in_memory(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an import holds does not grow with the number of its trajectories."""
    live = start(shard_bytes=2 * items(1)[0].trajectory.nbytes)
    live.create()
    inserted: list[int] = []
    insert = module.insert_rows

    def seen(connection: Connection, rows: list[dict[str, Any]]) -> None:
        inserted.append(len(rows))
        insert(connection, rows)

    monkeypatch.setattr(module, "insert_rows", seen)
    one = bulk(live, 9)
    one.add(items(9))
    (staged,) = (live.data / "tmp").iterdir()
    assert staged.name.endswith("-rows") and staged.stat().st_size > 8 * 200
    assert all("entries" not in shard and len(shard["checksums"]) == 4 for shard in one._shards)
    one.commit(None)
    assert inserted == [2, 2, 2, 2, 1]
    assert not list((live.data / "tmp").iterdir())
    other = bulk(live, 4)
    other.add(items(4, seed=50))
    other.abandon()
    assert not list((live.data / "tmp").iterdir()) and len(live.listing()) == 9
    assert (one._result.stored, one._result.steps) == (9, 54)


def test_a_shard_has_a_bounded_number_of_trajectories(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones take more memory as objects than they have bytes."""
    monkeypatch.setattr(module, "MOST_IN_SHARD", 3)
    live.create()
    one = bulk(live, 8)
    one.add(items(8))
    assert [shard["trajectories"] for shard in one._shards] == [3, 3]
    one.commit(None)
    assert [shard["trajectories"] for shard in one._shards] == [3, 3, 2]
    assert len(live.listing()) == 8


def test_received_rows_are_written_as_they_came(live: Any) -> None:
    """Where they are as our own writer makes them; others are made anew."""
    live.create()
    sent = [make_trajectory(SPEC, seed=s, terminated=s % 2 == 0) for s in range(6)]
    dataset = live.service.ingest.registry.get("d")
    found = list(read_body(encode(sent, SPEC), dataset))
    assert all(isinstance(one, ValidTrajectory) and one.message is not None for one in found)
    one = bulk(live, 6)
    one.add(found)
    one.commit(None)
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
