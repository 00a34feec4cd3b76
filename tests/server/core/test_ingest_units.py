"""The write path piece by piece, in process: rows, answers, groups, segments, and their order."""

from __future__ import annotations

import dataclasses
import errno
import json
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
import sqlalchemy as sa

from server.index.tables import partition_stats, segments, tombstones, trajectories
from server.ingest import commit, pipeline, seal, validate
from server.ingest import segments as segment_files
from server.ingest.commit import Submission, answer_known, conflict, exceeds_capacity
from server.ingest.crash_recovery import recover_segments
from server.ingest.index_rows import (
    KnownTrajectory,
    bucket_of,
    chunks,
    find_known,
    reserve_seqs,
    row_of,
)
from server.ingest.segments import (
    MAGIC,
    Encoded,
    SegmentDamaged,
    SegmentFile,
    Spool,
    encode_entry,
    encode_record,
    open_segment,
    read_spooled,
)
from server.problems import ProblemError
from server.storage import store as storage
from server.storage.checksums import Source
from server.storage.shards import Entry
from server.storage.store import Store
from stepwell.codec import HEADER_KEY, encode, from_batch, to_batch
from stepwell.messages import IngestItem
from stepwell.schema import arrow_schema
from stepwell.spaces import Box, EnvSpec
from stepwell.testing import make_spec, make_trajectory, wait_until
from stepwell.trajectory import Trajectory, TrajectoryMetadata

SPEC = make_spec(observation=3, action=2)


def rotated(committer: Any) -> Any:
    """The current segment, closed and taken; None if it holds nothing."""
    with committer.lock:
        return next(iter(committer.take_closed(force=True)), None)


def make(count: int, first: int = 0) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4 + i, seed=first + i) for i in range(count)]


def entry_of(trajectory: Trajectory, seq: int = 1, partition: str = "fifo") -> Entry:
    return Entry(
        header=trajectory.header(),
        digest=trajectory.digest,
        seq=seq,
        partition=partition,
        total_reward=trajectory.total_reward,
        bytes=trajectory.nbytes,
        created_at=5.0,
    )


# --- rows ---------------------------------------------------------------------------------------


def test_a_row_says_all_of_its_trajectory() -> None:
    """Every field of TrajectoryMetadata has its column, by its own name."""
    sent = make_trajectory(
        SPEC, length=4, seed=1, truncated=True, env="E-v0", episode_id="ep",
        first_step=7, policy="p@1", collector="c", run="r",
        purpose="eval", success=True, tags=("a", "b"), source="file", metrics={"m": 0.5},
        started_at=12.5,
    )  # fmt: skip
    sent = dataclasses.replace(sent, metadata=dataclasses.replace(sent.metadata, seed=3))
    assert row_of(entry_of(sent), 4, 9, 11, "Other-v0") == {
        "id": sent.id, "dataset_pk": 4, "seq": 9, "partition": "fifo", "env": "E-v0", "length": 4,
        "return": sent.total_reward, "terminated": False, "truncated": True,
        "final_obs_valid": True, "success": True, "purpose": "eval", "policy": "p@1", "run": "r",
        "collector": "c", "seed": 3, "episode_id": "ep", "first_step": 7, "tags": '["a","b"]',
        "source": "file", "metrics": '{"m":0.5}', "digest": sent.digest, "bytes": sent.nbytes,
        "started_at": 12.5, "created_at": 5.0, "change_id": 11,
    }  # fmt: skip


def test_what_a_trajectory_does_not_say_has_a_default() -> None:
    sent = dataclasses.replace(make(1)[0], metadata=TrajectoryMetadata())
    for header in (sent.header(), {k: v for k, v in sent.header().items() if k != "about"}):
        row = row_of(
            dataclasses.replace(entry_of(sent, partition="protected"), header=header),
            1,
            1,
            1,
            "Default-v0",
        )
        found = {name: row[name] for name in ABSENT}
        assert found == ABSENT


ABSENT = {
    "env": "Default-v0", "success": None, "purpose": "train", "policy": "", "run": "",
    "collector": "", "seed": None, "episode_id": "", "first_step": 0, "tags": "[]", "source": "",
    "metrics": "{}", "started_at": None, "partition": "protected",
}  # fmt: skip


def test_evaluation_counts_apart_from_both_partitions() -> None:
    assert [bucket_of(p, "train") for p in ("fifo", "protected")] == ["fifo", "protected"]
    assert {bucket_of(p, "eval") for p in ("fifo", "protected")} == {"eval"}


def test_totals_are_sums_of_what_was_inserted(live: Any) -> None:
    live.create()
    sent = make(3)
    live.post(sent[:2])
    live.post(sent[2:])
    with live.service.db.read() as connection:
        (row,) = connection.execute(sa.select(partition_stats)).mappings()
    assert row["bucket"] == "fifo"
    assert (row["trajectories"], row["steps"]) == (3, 4 + 5 + 6)
    assert row["bytes"] == sum(t.nbytes for t in sent)
    assert row["return_sum"] == pytest.approx(sum(t.total_reward for t in sent))


def test_chunks_lose_nothing() -> None:
    assert [list(c) for c in chunks(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [len(c) for c in chunks(range(1001))] == [500, 500, 1]
    assert list(chunks([])) == []


def test_what_the_index_remembers_of_ids(live: Any) -> None:
    """Alive, evicted but not yet sealed, gone but for the tombstone, never seen."""
    live.create(capacity={"trajectories": 1})
    first, second, third, never = make(4)
    live.post([first])
    live.post([second])
    live.flush()
    live.post([third])
    with live.service.db.read() as connection:
        found = find_known(connection, [t.id for t in (first, second, third, never)])
        dead = connection.execute(sa.select(tombstones.c.id)).scalars().all()
        pk = connection.execute(sa.select(trajectories.c.dataset_pk).limit(1)).scalar()
    assert dead == [first.id]
    assert found == {
        first.id: KnownTrajectory(pk, 1, first.digest, True),
        second.id: KnownTrajectory(pk, 2, second.digest, True),
        third.id: KnownTrajectory(pk, 3, third.digest, False),
    }


def test_numbers_of_a_dataset_that_is_gone_are_none(live: Any) -> None:
    live.create()
    with live.service.db.write() as connection:
        assert reserve_seqs(connection, 1, 3, 50.0) == 1
        assert reserve_seqs(connection, 1, 2, 60.0) == 4
        assert reserve_seqs(connection, 2, 1, 70.0) is None
    assert live.dataset()["last_ingest_at"] == 60.0


# --- answers ------------------------------------------------------------------------------------


def test_what_is_said_of_a_known_id() -> None:
    entry = entry_of(make(1)[0])
    item = IngestItem(id=entry.id, status="stored")
    answer_known(item, entry, 1, KnownTrajectory(1, 8, entry.digest, False))
    assert (item.status, item.seq, item.problem) == ("duplicate", 8, None)
    answer_known(item, entry, 1, KnownTrajectory(1, 9, entry.digest, True))
    assert (item.status, item.seq) == ("evicted", 9)
    item = IngestItem(id=entry.id, status="stored")
    answer_known(item, entry, 1, KnownTrajectory(1, 8, "other", False))
    assert (item.status, item.seq) == ("conflict", None)
    assert item.problem is not None and "ids are never reused" in item.problem.detail
    assert item.problem.expected == "content of sha256 other"
    assert item.problem.got == entry.digest
    item = IngestItem(id=entry.id, status="stored")
    answer_known(item, entry, 1, KnownTrajectory(2, 8, entry.digest, False))
    assert item.status == "conflict"
    assert item.problem is not None
    assert item.problem.detail == "the same trajectory is already in another dataset"


def test_a_conflict_is_a_problem_like_any_other() -> None:
    item = IngestItem(id="x", status="stored")
    conflict(item, "a", "b")
    assert item.problem is not None
    assert (item.problem.status, item.problem.code, item.problem.title) == (
        409, "conflict", "Conflict"
    )  # fmt: skip


def test_only_what_exceeds_a_limit_of_fifo_is_too_large() -> None:
    sent = make_trajectory(SPEC, length=6, seed=1)
    size = sent.nbytes
    fits: list[tuple[int | None, int | None]] = [(None, None), (6, size), (6, None), (None, size)]
    assert [exceeds_capacity(entry_of(sent), limits) for limits in fits] == [None] * 4
    assert exceeds_capacity(entry_of(sent, partition="protected"), (1, 1)) is None
    steps, nbytes = (
        exceeds_capacity(entry_of(sent), (5, size)),
        exceeds_capacity(entry_of(sent), (6, size - 1)),
    )
    assert steps is not None and nbytes is not None
    assert (steps.status, steps.code) == (422, "exceeds_capacity")
    assert (steps.expected, steps.got) == ("at most 5 steps", 6)
    assert (nbytes.expected, nbytes.got) == (f"at most {size - 1} bytes", size)


# --- segments -----------------------------------------------------------------------------------


def joined(record: Encoded) -> bytes:
    return record.head + bytes(record.body) + record.padding


def test_a_record_is_laid_out_as_written_down() -> None:
    """length u32 | crc32 u32 | head length u32 | 0 u32 | head, padded to 8 | body, padded to 8"""
    record = encode_record({"a": 1}, b"12345")
    raw = joined(record)
    length, crc, head, zero = struct.unpack("<IIII", raw[:16])
    assert raw[16 : 16 + head] == b'{"a":1} ' and raw[16 + head :] == b"12345\0\0\0"
    assert (length, zero, head) == (len(raw) - 8, 0, 8)
    assert crc == zlib.crc32(raw[8:])
    assert record.size == len(raw) == 32


@pytest.fixture
def segment(tmp_path: Path) -> tuple[SegmentFile, list[Trajectory], list[int]]:
    """A file of three trajectories, and where each begins."""
    store = Store(tmp_path)
    writer, sent = Spool(store), make(3)
    schema = arrow_schema(SPEC)
    records = [
        encode_entry("d", entry_of(t, i), to_batch(t, SPEC, schema).serialize())
        for i, t in enumerate(sent, 1)
    ]
    offsets = writer.append([("d", SPEC, records[:2])])
    offsets += writer.append([("d", SPEC, records[2:])])
    made = writer.rotate()
    assert made is not None
    assert made.records == 3 and made.described == {"d"}
    return open_segment(store, made.name), sent, offsets


def test_a_segment_gives_back_what_was_written(
    segment: tuple[SegmentFile, list[Trajectory], list[int]],
) -> None:
    file, sent, offsets = segment
    found = list(file.scan())
    assert found[0].head == {"dataset": "d", "spec": SPEC.to_json()} and found[0].offset == len(
        MAGIC
    )
    assert [record.offset for record in found[1:]] == offsets
    assert [record.end for record in found] == [*offsets, file.size]
    for offset, trajectory, record in zip(offsets, sent, found[1:], strict=True):
        again = file.record(offset)
        assert (again.dataset, again.entry) == ("d", record.entry)
        assert again.entry.digest == trajectory.digest
        entry, batch = read_spooled(Source(file.path), offset, SPEC)
        assert entry == again.entry and batch.equals(again.batch(arrow_schema(SPEC)))
        header = {HEADER_KEY: json.dumps(entry.header).encode()}
        assert from_batch(batch, header, SPEC).digest == trajectory.digest


@pytest.mark.parametrize("where", ["length", "crc", "head", "body", "last"])
def test_a_flipped_bit_anywhere_in_a_record_is_damage(
    segment: tuple[SegmentFile, list[Trajectory], list[int]], where: str
) -> None:
    file, _, (first, second, third) = segment
    at = (
        second + {"length": 0, "crc": 4, "head": 20, "body": 600, "last": third - second - 1}[where]
    )
    raw = bytearray(file.path.read_bytes())
    raw[at] ^= 1
    file.path.write_bytes(raw)
    again = SegmentFile(file.path)
    with pytest.raises(SegmentDamaged, match=f"{file.path.name}: the record at byte {second} is"):
        again.record(second)
    with pytest.raises(SegmentDamaged, match=f"the record at byte {second} is damaged"):
        read_spooled(Source(file.path), second, SPEC)
    assert [record.offset for record in again.scan()] == [len(MAGIC), first]
    assert again.next_record(second) == third
    assert again.next_record(third) == third and again.next_record(third + 8) is None
    assert again.record(third).entry.seq == 3


def test_a_flipped_bit_in_the_first_bytes_of_a_segment_loses_nothing(still: Any) -> None:
    """Its records are whole: they are recovered, sealed and read as if nothing had happened."""
    live, sent = still.live, make(2)
    still.committer._handle([submission(live, sent)])
    segment = rotated(still.committer)
    path = live.data / "segments" / segment.name
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    assert [one.name for one in recover_segments(live.service.db, live.service.store)] == [
        segment.name
    ]
    live.service.ingest.sealer.add(segment)
    live.flush()
    assert [live.info(t)["state"] for t in sent] == ["sealed"] * 2
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
    assert not path.exists() and not live.service.ingest.sealer.damaged
    raw[len(MAGIC) + 20] ^= 1  # nor does the first record say that this is a segment
    path.write_bytes(raw)
    with pytest.raises(SegmentDamaged, match="does not start with the magic bytes"):
        SegmentFile(path)


def test_what_was_cut_off_is_missing(
    segment: tuple[SegmentFile, list[Trajectory], list[int]],
) -> None:
    file, _, (_, second, third) = segment
    raw = file.path.read_bytes()
    for size in (third, third + 15, third + 16, third + 100, len(raw) - 1):
        file.path.write_bytes(raw[:size])
        again = SegmentFile(file.path)
        assert [record.offset for record in again.scan(second)] == [second]
        with pytest.raises(SegmentDamaged):
            again.record(third)
        with pytest.raises(SegmentDamaged, match="missing" if size < third + 16 else "damaged"):
            read_spooled(Source(file.path), third, SPEC)


def test_what_is_no_segment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.seg"
    path.write_bytes(b"?" * 100)
    with pytest.raises(SegmentDamaged, match="x.seg does not start with the magic bytes"):
        SegmentFile(path)
    path.write_bytes(MAGIC[:-1])  # torn at its birth, so it holds nothing
    assert list(SegmentFile(path).scan()) == []


def test_records_of_a_refused_write_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    writer = Spool(store)
    (offset,) = writer.append([("d", SPEC, [encode_record({"entry": 1})])])
    assert writer.current is not None and writer.current.file is not None
    file = writer.current.file
    size = file.size
    monkeypatch.setattr(type(file), "sync", lambda self: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        writer.append([("d", SPEC, [encode_record({"entry": 2})])])
    assert store.size("segments", writer.current.name) == size
    assert writer.current.records == 1
    done = writer.rotate()
    assert done is not None and writer.current is None and writer.rotate() is None
    assert open_segment(store, done.name).record(offset).head == {"entry": 1}


def test_a_spec_is_written_once_per_dataset_and_segment(tmp_path: Path) -> None:
    store = Store(tmp_path)
    writer = Spool(store)
    one = encode_record({"entry": 0})
    writer.append([("a", SPEC, [one]), ("b", SPEC, [one, one]), ("a", SPEC, [one])])
    writer.append([("b", SPEC, [one]), ("c", SPEC, [one])])
    first = writer.rotate()
    writer.append([("a", SPEC, [one])])
    second = writer.rotate()
    assert first is not None and second is not None and first.name != second.name
    heads = [record.head for record in open_segment(store, first.name).scan()]
    assert [head["dataset"] for head in heads if "spec" in head] == ["a", "b", "c"]
    assert first.records == 6 and second.records == 1
    heads = [record.head for record in open_segment(store, second.name).scan()]
    assert len(heads) == 2


def test_a_segment_that_cannot_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the folder nor open, whether it is a first write or a look at the disk."""
    store = Store(tmp_path)
    writer = Spool(store)

    def full(self: Any, *parts: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(storage.Appender, "append", full)
    for attempt in (writer.open, lambda: writer.append([("d", SPEC, [encode_record({})])])):
        with pytest.raises(OSError, match="full"):
            attempt()
        assert store.names("segments") == [] and writer.current is None


def test_times_of_a_segment_count_from_its_first_and_latest_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(segment_files, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    writer = Spool(Store(tmp_path))
    one = encode_record({"entry": 0})
    for clock[0] in (100.0, 103.0, 107.0):
        writer.append([("d", SPEC, [one])])
    assert writer.current is not None
    assert (writer.current.first_at, writer.current.last_at) == (100.0, 107.0)


# --- groups -------------------------------------------------------------------------------------


def test_everybody_passes_the_places_where_it_can_die_in_this_order(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is true there: the record is durable before its row, the row before the answer."""
    live = start()
    live.create()
    passed: list[str] = []
    for module in (commit, segment_files, seal, storage):
        monkeypatch.setattr(module, "failpoint", lambda name: passed.append(name))
    live.post(make(1))
    assert passed == [
        "segment.after_create", "append.before_write", "append.after_write", "append.after_fsync",
        "index.before_commit", "index.after_commit",
    ]  # fmt: skip
    passed.clear()
    live.flush()
    assert passed == [
        "seal.before_tmp", "seal.after_tmp_fsync", "seal.after_rename", "seal.before_commit",
        "seal.after_commit", "seal.after_unlink",
    ]  # fmt: skip


def submission(live: Any, sent: list[Trajectory], name: str = "d") -> Submission:
    dataset = live.service.ingest.registry.get(name)
    items = []
    for trajectory in sent:
        entry = entry_of(trajectory, seq=0)
        message = to_batch(trajectory, dataset.spec, dataset.schema).serialize()
        items.append((entry, encode_entry(name, entry, message)))
    return Submission(dataset, "fifo", items)


@pytest.fixture
def still(live: Any) -> Any:
    """The committer without its thread: rounds are made by hand."""
    live.create()
    committer = live.service.ingest.committer
    committer.close()
    return SimpleNamespace(live=live, committer=committer, settings=live.service.settings)


def test_what_waits_becomes_one_group_up_to_a_size(
    still: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = still.committer
    waiting = [submission(still.live, [t]) for t in make(4)]
    monkeypatch.setattr(commit, "GROUP_BYTES", waiting[0].size + waiting[1].size)
    for one in waiting:
        committer.submit(one)
    queued = still.live.service.telemetry.queued_bytes
    assert queued._value.get() == sum(one.size for one in waiting)
    group, last = committer._collect(committer._queue.get_nowait())
    assert (group, last) == (waiting[:2], False)
    committer._queue.put(None)
    monkeypatch.undo()
    group, last = committer._collect(committer._queue.get_nowait())
    assert (group, last) == (waiting[2:], True)
    with pytest.raises(queue.Empty):
        committer._queue.get_nowait()


def test_a_round_answers_all_of_its_group_and_counts_what_left_the_queue(still: Any) -> None:
    committer, sent = still.committer, make(3)
    waiting = [submission(still.live, sent[:2]), submission(still.live, [sent[2], sent[0]])]
    for one in waiting:
        committer.submit(one)
    committer._round()
    assert still.live.service.telemetry.queued_bytes._value.get() == 0
    answers = [[(i.id, i.status, i.seq) for i in one.answer.result(0)] for one in waiting]
    assert answers == [
        [(sent[0].id, "stored", 1), (sent[1].id, "stored", 2)],
        [(sent[2].id, "stored", 3), (sent[0].id, "duplicate", 1)],
    ]
    assert len(still.live.listing()) == 3


def test_one_id_twice_in_a_group_with_other_content_is_a_conflict(still: Any) -> None:
    committer, (sent, other) = still.committer, make(2)
    twin = dataclasses.replace(other, id=sent.id)
    one = submission(still.live, [sent, twin])
    committer._handle([one])
    first, second = one.answer.result(0)
    assert (first.status, second.status, second.seq) == ("stored", "conflict", None)
    assert (second.problem.expected, second.problem.got) == (
        f"content of sha256 {sent.digest}", twin.digest
    )  # fmt: skip


def test_a_defect_of_one_post_does_not_hurt_the_others(
    still: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    still.live.service.ingest.sealer.close()  # or it would remove segments while they are recovered
    committer, sent = still.committer, make(3)
    waiting = [submission(still.live, [t]) for t in sent]
    real = commit.insert_rows

    def poisoned(connection: Any, rows: Any) -> None:
        if any(row["id"] == sent[1].id for row in rows):
            raise KeyError("odd")
        real(connection, rows)

    monkeypatch.setattr(commit, "insert_rows", poisoned)
    committer._handle(waiting)
    assert [waiting[i].answer.result(0)[0].status for i in (0, 2)] == ["stored", "stored"]
    error = waiting[1].answer.exception(0)
    assert isinstance(error, ProblemError)
    assert (error.status, error.code) == (500, "internal_error")
    assert error.detail == "nothing of this request was stored"
    assert sorted(row["id"] for row in still.live.listing()) == sorted([sent[0].id, sent[2].id])
    # What was written for the poisoned one is not believed at the next start, either.
    found = recover_segments(still.live.service.db, still.live.service.store)
    assert len(still.live.listing()) == 2 and found


def test_a_post_to_a_dataset_that_is_gone_is_the_only_one_to_fail(still: Any) -> None:
    live = still.live
    live.create("other")
    sent = make(2)
    gone, kept = submission(live, [sent[0]], "other"), submission(live, [sent[1]])
    with live.service.db.write() as connection:
        connection.exec_driver_sql("DELETE FROM datasets WHERE name = 'other'")
    still.committer._handle([gone, kept])
    error = gone.answer.exception(0)
    assert isinstance(error, ProblemError) and (error.status, error.code) == (404, "not_found")
    assert kept.answer.result(0)[0].seq == 1


def test_a_full_segment_is_handed_to_the_sealer(still: Any) -> None:
    still.live.service.ingest.sealer.close()  # or it would take the segment before we look
    committer, sent = still.committer, make(3)
    size = submission(still.live, sent[:1]).size
    committer._settings = still.settings.model_copy(update={"seal_bytes": size + 900})
    committer._handle([submission(still.live, sent[:1])])
    assert committer._spool.closed == [] and committer._spool.current is not None
    name = committer._spool.current.name
    committer._handle([submission(still.live, sent[1:])])
    assert [one.name for one in committer._spool.closed] == [name]
    assert committer._spool.current is None and committer._spool.closed[0].pk is not None


def test_a_segment_is_due_when_idle_or_old_and_never_when_empty(still: Any) -> None:
    committer = still.committer
    committer._settings = still.settings.model_copy(update={"seal_idle": 2.0, "seal_age": 10.0})
    assert not committer.due(1e9)
    current = SimpleNamespace(records=0, first_at=100.0, last_at=100.0)
    committer._spool.current = current
    assert not committer.due(1e9)
    current.records = 1
    assert [committer.due(at) for at in (101.9, 102.0)] == [False, True]
    current.last_at = 109.0
    assert [committer.due(at) for at in (109.9, 110.0)] == [False, True]
    committer._spool.current = None


def test_read_only_is_told_once_and_ends_by_a_probe(
    still: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer, store = still.committer, still.live.service.store
    least = still.settings.min_free
    writable = still.live.service.telemetry.writable
    monkeypatch.setattr(store, "free", lambda: least - 1)
    with pytest.raises(ProblemError) as failed:
        committer.check_disk()
    problem = failed.value
    assert (problem.status, problem.code) == (507, "storage_full")
    assert problem.detail == commit.READ_ONLY and problem.headers == {"Retry-After": "5"}
    assert problem.expected == "free disk space"
    assert problem.got == f"{least - 1} bytes free of at least {least}"
    assert committer.trouble is not problem and writable._value.get() == 0
    monkeypatch.setattr(store, "free", lambda: least)
    probes: list[float] = []
    monkeypatch.setattr(committer._spool, "open", lambda: probes.append(1))
    with pytest.raises(ProblemError):
        committer.check_disk()  # not long ago: the disk is left alone
    assert probes == []
    committer._probed = time.monotonic() - commit.PROBE_EVERY
    committer.check_disk()
    assert probes == [1] and committer.trouble is None and writable._value.get() == 1
    committer.check_disk()
    assert probes == [1]


def test_a_probe_that_fails_stays_read_only(still: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    committer = still.committer
    before = ProblemError(503, "read_only", "before")

    for number, code in ((errno.ENOSPC, "storage_full"), (errno.EIO, "read_only")):
        monkeypatch.setattr(committer._spool, "open", Mock(side_effect=OSError(number, "odd")))
        committer.trouble, committer._probed = before, 0.0
        with pytest.raises(ProblemError) as failed:
            committer.check_disk()
        assert failed.value.code == code and committer.trouble is not None
        assert time.monotonic() - committer._probed < 60


def test_rotation_takes_only_what_holds_something(still: Any) -> None:
    committer = still.committer
    assert rotated(committer) is None
    committer._handle([submission(still.live, make(1))])
    segment = rotated(committer)
    assert segment is not None and segment.records == 1 and rotated(committer) is None


# --- sealing ------------------------------------------------------------------------------------


def test_a_flush_counts_what_it_moved_by_dataset(live: Any) -> None:
    live.create()
    live.create("other")
    live.post(make(2))
    live.post(make(1, 5), partition="protected")
    live.post(make(3, 9), "other")
    first, second = (live.service.ingest.registry.get(name).pk for name in ("d", "other"))
    assert live.service.ingest.sealer.flush() == [(first, 2), (first, 1), (second, 3)]
    assert live.service.ingest.sealer.flush() == []
    assert live.service.store.names("segments") == []
    with live.service.db.read() as connection:
        assert connection.execute(sa.select(segments)).all() == []


def test_a_flush_that_waits_too_long_says_that_nothing_is_lost(live: Any) -> None:
    live.create()
    live.post(make(1))
    sealer = live.service.ingest.sealer
    with sealer.lock, pytest.raises(ProblemError) as failed:
        sealer.flush(timeout=0.01)
    problem = failed.value
    assert (problem.status, problem.code) == (503, "not_sealed")
    assert problem.headers == {"Retry-After": "5"} and "durable" in problem.detail
    live.flush()
    assert [row["state"] for row in live.listing()] == ["sealed"]


@pytest.mark.parametrize(
    ("error", "status", "code", "got"),
    [
        (OSError(28, "No space left"), 507, "storage_full", "No space left"),
        (KeyError("odd"), 500, "internal_error", None),
    ],
    ids=repr,
)
def test_a_seal_that_fails_is_told_kept_and_tried_again(
    live: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str, got: Any
) -> None:
    monkeypatch.setattr(seal, "RETRY", 0.01)
    live.create()
    live.post(make(1))
    sealer = live.service.ingest.sealer
    real, on = sealer._seal, [True]

    def failing(segment: Any) -> Any:
        if on[0]:
            raise error
        return real(segment)

    monkeypatch.setattr(sealer, "_seal", failing)
    with pytest.raises(ProblemError) as failed:
        sealer.flush()
    assert (failed.value.status, failed.value.code, failed.value.got) == (status, code, got)
    assert failed.value.headers == ({"Retry-After": "5"} if status == 507 else {})
    name = live.service.store.names("segments")[0]
    assert sealer.failure == f"{name}: {error}"
    on[0] = False
    wait_until(lambda: live.listing()[0]["state"] == "sealed")
    wait_until(lambda: not sealer.failure)
    assert live.service.store.names("segments") == []


def test_what_was_never_acknowledged_is_removed_and_not_believed(live: Any) -> None:
    """A segment without a row in the index: its commit failed. A later commit takes its place."""
    live.create()
    store, sealer = live.service.store, live.service.ingest.sealer
    before = change_id_of(live)
    store.append_to("segments", "sg_x.seg").close()
    assert sealer._seal(segment_files.Segment("sg_x.seg")) == []
    assert store.names("segments") == [] and change_id_of(live) == before + 1


def change_id_of(live: Any) -> int:
    with live.service.db.read() as connection:
        query = "SELECT value FROM counters WHERE name = 'change_id'"
        return int(connection.exec_driver_sql(query).scalar_one())


def test_a_segment_that_cannot_be_read_is_named_and_hinders_nobody(live: Any) -> None:
    live.create()
    lost, kept = make(2)
    live.post([lost])
    sealer = live.service.ingest.sealer
    segment = rotated(live.service.ingest.committer)
    path = live.data / "segments" / segment.name
    path.write_bytes(b"?" * path.stat().st_size)
    sealer.add(segment)
    assert live.post([kept]) == [("stored", 2)]
    live.flush()
    assert live.info(kept)["state"] == "sealed" and live.info(lost)["state"] == "spooled"
    assert sealer.damaged == {f"segments/{segment.name}"} and path.exists()
    with live.service.db.read() as connection:
        states = connection.execute(sa.select(segments.c.name, segments.c.state)).all()
    assert states == [(segment.name, "damaged")]


def test_what_was_evicted_before_it_was_sealed_leaves_only_its_id(live: Any) -> None:
    live.create(capacity={"trajectories": 2})
    sent = make(4)
    live.post(sent)
    live.flush()
    with live.service.db.read() as connection:
        rows = connection.execute(sa.select(tombstones).order_by(tombstones.c.seq)).all()
        left = connection.execute(
            sa.select(trajectories.c.id).order_by(trajectories.c.seq)
        ).scalars()
        assert left.all() == [t.id for t in sent[2:]]
    now = live.service.db.uptime()
    assert [(r.id, r.seq, r.digest) for r in rows] == [
        (t.id, seq, t.digest) for seq, t in enumerate(sent[:2], 1)
    ]
    assert all(0 <= now - r.evicted_uptime < 60 and r.change_id == change_id_of(live) for r in rows)


# --- requests -----------------------------------------------------------------------------------


def test_items_are_answered_in_the_order_they_came(live: Any) -> None:
    """What is refused stands between the others, where it was; what follows it is stored."""
    live.create()
    good = make(3)
    bad = make_trajectory(SPEC, length=3, seed=8)
    nan = pa.array([1.0, float("nan"), 1.0, None], pa.float32())
    schema = arrow_schema(SPEC)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for trajectory in (good[0], bad, *good[1:]):
            batch = to_batch(trajectory, SPEC, schema)
            if trajectory is bad:
                column = schema.get_field_index("reward")
                batch = batch.set_column(column, schema.field(column), nan)
            header = json.dumps(trajectory.header()).encode()
            writer.write_batch(batch, custom_metadata={HEADER_KEY: header})
    response = live.send(bytes(sink.getvalue()))
    answers = [(i["id"], i["status"], i["seq"]) for i in response.json()["items"]]
    assert answers == [
        (good[0].id, "stored", 1), (bad.id, "refused", None),
        (good[1].id, "stored", 2), (good[2].id, "stored", 3),
    ]  # fmt: skip


def test_a_disk_that_takes_too_long_is_told_and_the_memory_stays_counted(
    still: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "ANSWER_WITHIN", 0.01)
    live, (sent,) = still.live, make(1)
    response = live.send(encode([sent], SPEC))
    assert (response.status_code, response.json()["code"]) == (503, "too_slow")
    assert response.headers["retry-after"] == "5"
    assert "stored only once" in response.json()["detail"]
    held = live.service.body_memory
    assert held.held > 0
    still.committer._round()
    wait_until(lambda: held.held == 0)
    assert len(live.listing()) == 1


def test_flags_that_come_as_bits_are_counted_as_they_will_lie_in_memory() -> None:
    """A row of 9 numbers of 4 bytes and one bit: of 72.25 bytes two rows, two flags of a byte."""
    numbers = make_spec(observation=5, action=3)
    assert pipeline.decoded_bytes(7225, numbers) == 0
    flag = dataclasses.replace(numbers, action_known=True)
    assert pipeline.decoded_bytes(36125, flag) == 1000
    named = EnvSpec.of(
        {"o": Box((5,)), "flag": Box((), "bool", 0.0, 1.0)},
        {"a": Box((3,)), "press": Box((), "bool", 0.0, 1.0)},
    )
    assert pipeline.decoded_bytes(36250, named) == 2000


def test_threads_that_submit_at_once_all_get_their_own_answer(live: Any) -> None:
    live.create()
    sent = make(12)
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda t=t: found.update({t.id: live.post([t])})) for t in sent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer[0][0] for answer in found.values()} == {"stored"}
    assert {row["id"]: row["seq"] for row in live.listing()} == {
        key: answer[0][1] for key, answer in found.items()
    }


def test_an_arrow_message_is_the_body() -> None:
    """Of its own bytes no copy is made."""
    (sent,) = make(1)
    message = to_batch(sent, SPEC, arrow_schema(SPEC)).serialize()
    record = encode_entry("d", entry_of(sent), message)
    assert bytes(record.body) == bytes(message)
    assert pa.py_buffer(record.body).address == message.address


def test_a_disk_error_that_nobody_thought_of_is_read_only_too(
    still: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any OSError while a group is written: 503, nothing is stored, the segment is given up."""
    live, (sent,) = still.live, make(1)
    monkeypatch.setattr(commit, "insert_rows", Mock(side_effect=OSError(errno.EPERM, "not yours")))
    one = submission(live, [sent])
    still.committer._handle([one])
    error = one.answer.exception(0)
    assert isinstance(error, ProblemError)
    assert (error.status, error.code, error.got) == (503, "read_only", "not yours")
    assert error.detail == commit.READ_ONLY
    assert still.committer._spool.current is None and len(still.committer._spool.closed) == 1
    assert live.service.telemetry.writable._value.get() == 0


def test_a_body_of_too_many_is_refused_whole(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "MAX_ITEMS", 2)
    live.create()
    response = live.send(encode(make(3), SPEC))
    assert response.status_code == 422
    problem = response.json()
    assert (problem["code"], problem["expected"]) == ("invalid_stream", "≤ 2")
    assert "too many trajectories in one body" in problem["detail"]
    assert live.listing() == []
    assert len(live.post(make(2))) == 2


def test_a_bad_stream_says_what_came(live: Any) -> None:
    live.create()
    (sent,) = make(1)
    problem = live.send(b"?" * 64).json()
    assert problem["code"] == "invalid_stream" and problem["expected"]
    body = encode([sent], SPEC)
    cut = live.send(body[: len(body) // 2]).json()
    assert (cut["code"], live.listing()) == ("invalid_stream", [])


# --- what a start finds -------------------------------------------------------------------------


def states(live: Any) -> dict[str, str]:
    with live.service.db.read() as connection:
        rows = connection.execute(sa.select(segments.c.name, segments.c.state)).all()
    return {row.name: row.state for row in rows}


@pytest.mark.parametrize("known_there", [True, False])
@pytest.mark.parametrize("found", ["torn at birth", "no segment", "gone"])
def test_a_segment_that_cannot_be_is_named_if_the_index_knows_it(
    still: Any, found: str, known_there: bool
) -> None:
    """Others are recovered beside it."""
    live = still.live
    kept, lost = make(2)
    still.committer._handle([submission(live, [lost])])
    segment = rotated(still.committer)
    assert segment is not None and segment.pk is not None
    still.committer._handle([submission(live, [kept])])
    other = rotated(still.committer)
    assert other is not None
    if not known_there:
        with live.service.db.write() as connection:
            connection.exec_driver_sql(f"DELETE FROM trajectories WHERE segment_pk = {segment.pk}")
            connection.execute(sa.delete(segments).where(segments.c.pk == segment.pk))
    path = live.data / "segments" / segment.name
    path.unlink()
    if found != "gone":
        path.write_bytes(MAGIC if found == "torn at birth" else b"?" * 500)
    left = recover_segments(live.service.db, live.service.store)
    assert [(one.name, one.pk, one.records) for one in left] == [(other.name, other.pk, 1)]
    assert states(live) == {other.name: "open"} | ({segment.name: "damaged"} if known_there else {})
    aside = live.service.store.quarantined("segments")
    kept_there = path.exists() if known_there else aside == [segment.name]
    assert kept_there == (found == "no segment"), "what cannot be read is kept"


def test_what_was_consumed_is_removed(still: Any) -> None:
    live = still.live
    still.committer._handle([submission(live, make(1))])
    segment = rotated(still.committer)
    assert segment is not None
    with live.service.db.write() as connection:
        connection.exec_driver_sql("DELETE FROM trajectories")
        connection.exec_driver_sql("UPDATE segments SET state = 'consumed'")
    assert recover_segments(live.service.db, live.service.store) == []
    assert states(live) == {} and live.service.store.names("segments") == []


def test_whole_records_without_rows_are_indexed_under_the_same_rules(still: Any) -> None:
    """In order, once each, within the capacity, each change with its change_id."""
    live = still.live
    live.create("small", capacity={"trajectories": 2})
    sent = make(3)
    spool = still.committer._spool
    dataset = live.service.ingest.registry.get("small")
    late = [dataclasses.replace(entry_of(t, 0), created_at=time.time()) for t in sent]
    items = [
        encode_entry("small", entry, to_batch(t, dataset.spec, dataset.schema).serialize())
        for entry, t in zip(late, sent, strict=True)
    ]
    spool.append([("small", dataset.spec, [items[0], items[0], *items[1:]])])
    segment = rotated(still.committer)
    assert segment is not None
    before = change_id_of(live)
    (left,) = recover_segments(live.service.db, live.service.store)
    with live.service.db.read() as connection:
        t = trajectories.c
        rows = connection.execute(
            sa.select(t.id, t.seq, t.state, t.change_id, t.env, t.segment_pk).order_by(t.seq)
        ).all()
    assert [(r.id, r.seq, r.state) for r in rows] == [
        (sent[0].id, 1, "evicted"), (sent[1].id, 2, "spooled"), (sent[2].id, 3, "spooled")
    ]  # fmt: skip
    assert {r.change_id for r in rows} == {before + 1} and {r.env for r in rows} == {SPEC.env}
    assert {r.segment_pk for r in rows} == {left.pk} and left.name == segment.name
    assert live.dataset("small")["evicted"] == 1
    assert recover_segments(live.service.db, live.service.store)[0].pk == left.pk
    assert change_id_of(live) == before + 1, "nothing was left to do"


def test_records_for_a_dataset_that_is_gone_or_younger_are_left_out(still: Any) -> None:
    """It was deleted; or deleted and made again, and the record is the earlier one's."""
    live = still.live
    sent = make(2)
    spool = still.committer._spool
    dataset = live.service.ingest.registry.get("d")
    records = [
        encode_entry(name, entry_of(t), to_batch(t, dataset.spec, dataset.schema).serialize())
        for name, t in zip(("d", "nobody"), sent, strict=True)
    ]
    spool.append([("d", dataset.spec, records[:1]), ("nobody", dataset.spec, records[1:])])
    assert rotated(still.committer) is not None
    assert recover_segments(live.service.db, live.service.store) == []
    assert live.listing() == [] and live.service.store.names("segments") == []


def test_registered_datasets_are_remembered_each_under_its_name(live: Any) -> None:
    live.create()
    live.create("other", spec=make_spec(observation=5))
    registry = live.service.ingest.registry
    first, other = registry.get("d"), registry.get("other")
    assert registry.get("d") is first and registry.get("other") is other
    assert (first.name, other.name) == ("d", "other") and first.pk != other.pk
    assert first.spec.digest == first.spec_digest == SPEC.digest
    assert first.schema.equals(arrow_schema(SPEC))
    registry.forget("d")
    registry.forget("never")
    assert registry.get("d") is not first and registry.get("other") is other
