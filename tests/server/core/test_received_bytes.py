"""Bytes that were received and checked are stored as they came; what was not checked is not."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from server.ingest.segments import SegmentFile, encode_record, read_spooled
from server.ingest.validate import ValidTrajectory, read_body
from server.storage.checksums import Source
from server.storage.store import Appender
from stepwell.codec import HEADER_KEY, decode, encode, from_batch, to_batch
from stepwell.schema import arrow_schema
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory

SPEC = EnvSpec.of(
    {"camera": Box((2, 3), "uint8"), "state": Box((3,)), "flag": Box((), "bool", low=0, high=1)},
    {"move": Box((2,), low=-1.0, high=1.0), "grip": Discrete(4), "lamps": MultiBinary(3)},
    infos={"height": Box(())},
    action_known=True,
)
PLAIN = make_spec(observation=3, action=2)


def stream(batch: pa.RecordBatch, metadata: dict[bytes, bytes], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue())


def header_of(trajectory: Trajectory) -> dict[bytes, bytes]:
    return {HEADER_KEY: json.dumps(trajectory.header()).encode()}


def record_of(live: Any, trajectory: Trajectory) -> tuple[bytes, Trajectory]:
    """(the stored message, what it reads as)."""
    (path,) = (live.data / "segments").iterdir()
    for record in SegmentFile(path).scan():
        if record.head.get("entry", {}).get("header", {}).get("id") == trajectory.id:
            spec = live.service.ingest.registry.get(record.dataset).spec
            entry, batch = read_spooled(Source(path), record.offset, spec)
            header = {HEADER_KEY: json.dumps(entry.header).encode()}
            return bytes(record.body), from_batch(batch, header, spec)
    raise AssertionError("not in the segment")


@pytest.mark.parametrize("spec", [SPEC, PLAIN], ids=["all kinds", "plain"])
def test_what_our_client_sends_is_stored_as_it_came(live: Any, spec: EnvSpec) -> None:
    live.create("d", spec)
    sent = [make_trajectory(spec, length=n, seed=n) for n in (1, 7, 300)]
    body = encode(sent, spec)
    assert all(status == "stored" for status, _ in live.post(sent, spec=spec))
    for one in sent:
        stored, read = record_of(live, one)
        message = stored.rstrip(b"\0")
        assert message in body, "not made anew"
        assert read.digest == one.digest
    live.flush()
    for one in sent:
        assert live.steps(one).digest == one.digest


def test_no_copy_is_made_of_a_large_body() -> None:
    """What waits for the disk is a view of what was received, its parts not joined."""
    one = make_trajectory(PLAIN, length=5000)
    body = memoryview(encode([one], PLAIN))
    dataset: Any = type("Dataset", (), {"name": "d", "spec": PLAIN, "spec_digest": PLAIN.digest})
    (found,) = read_body(body, dataset)
    assert isinstance(found, ValidTrajectory) and found.message is not None
    record = encode_record({"entry": {}}, found.message)
    assert np.shares_memory(np.frombuffer(record.body, np.uint8), np.frombuffer(body, np.uint8))


def test_a_write_that_comes_up_short_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """writev may take any number of bytes, and at most 1024 parts."""
    rng = random.Random(0)
    parts = [rng.randbytes(rng.choice((0, 1, 3, 50))) for _ in range(3000)]
    calls = 0

    def grudging(fd: int, views: list[Any]) -> int:
        nonlocal calls
        calls += 1
        assert 0 < len(views) <= 1024 and all(len(view) for view in views)
        data = b"".join(views)[: rng.randrange(1, 9000)]
        return write(fd, data)

    import os

    write = os.write
    monkeypatch.setattr("server.storage.store.os.writev", grudging)
    file = Appender(tmp_path / "f")
    file.append(*parts)
    file.close()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert file.size == sum(map(len, parts)) and calls > 3


SECRET = b"smuggled bytes that nobody looked at"


def with_action_in_the_last_row(one: Trajectory) -> bytes:
    schema = arrow_schema(PLAIN)
    batch = to_batch(one, PLAIN, schema)
    place = schema.get_field_index("action")
    values = np.frombuffer(SECRET.ljust((len(one) + 1) * 8, b"!"), np.float32)
    values = np.concatenate([one.actions["action"].ravel(), values[:2]])
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), type=schema.field(place).type)
    return stream(batch.set_column(place, schema.field(place), column), header_of(one), schema)


def with_more_metadata(one: Trajectory) -> bytes:
    schema = arrow_schema(PLAIN)
    metadata = {**header_of(one), b"more": SECRET}
    return stream(to_batch(one, PLAIN, schema), metadata, schema)


def with_room_between(one: Trajectory) -> bytes:
    """A body part of the message a megabyte longer than its buffers, filled with the secret."""
    data = encode([one], PLAIN)
    reader = pa.ipc.MessageReader.open_stream(source := pa.BufferReader(data))
    reader.read_next_message()
    start = source.tell()
    message = reader.read_next_message()
    head = bytearray(data[start : start + 8 + message.metadata.size])
    filler = (SECRET * (1 << 20))[: 1 << 20]
    old = struct.pack("<q", message.body.size)
    assert head.count(old) >= 1
    at = head.find(old)
    head[at : at + 8] = struct.pack("<q", message.body.size + len(filler))
    end = start + len(head) + message.body.size
    return data[:start] + bytes(head) + data[start + len(head) : end] + filler + data[end:]


@pytest.mark.parametrize(
    "made", [with_action_in_the_last_row, with_more_metadata, with_room_between]
)
def test_what_was_not_looked_at_is_not_stored(live: Any, made: Any) -> None:
    """Sound, and taken, but rebuilt: only what was checked reaches the disk."""
    live.create("d", PLAIN)
    one = make_trajectory(PLAIN, length=60)
    body = made(one)
    answer = live.send(body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["items"][0]["status"] == "stored"
    (path,) = (live.data / "segments").iterdir()
    assert SECRET[:8] not in path.read_bytes()
    _, read = record_of(live, one)
    assert read.digest == one.digest
    live.flush()
    assert live.steps(one).digest == one.digest
    assert live.post([one]) == [("duplicate", 1)]


def test_a_layout_that_must_be_rebuilt_pays_for_the_copy(live: Any) -> None:
    from server.memory_budget import Reservation

    live.create("d", PLAIN)
    one = make_trajectory(PLAIN, length=6000)
    body = with_more_metadata(one)
    budget = live.service.body_memory
    others = Reservation(budget)
    others.add(budget.total - len(body) - one.nbytes)
    assert live.send(body).json()["code"] == "too_busy"
    others.release()
    assert live.send(body).status_code == 200
    assert budget.held == 0


def test_numbers_in_another_byte_order_are_refused(live: Any) -> None:
    """Arrow would turn them round while it reads: what is checked would not be what is stored."""
    live.create("d", PLAIN)
    one = make_trajectory(PLAIN, length=5)
    answer = live.send(in_another_order(encode([one], PLAIN))).json()
    assert answer["code"] == "invalid_stream" and "big-endian" in answer["detail"], answer
    assert live.listing() == []


def in_another_order(data: bytes) -> bytes:
    """The stream with a field 0, `endianness`, in its Schema table (Schema.fbs).

    Our writer leaves the field out. A vtable may stand anywhere: a copy of the table's is put at
    the end, with the slot of field 0 pointing at two bytes of the table that are not 0.
    """
    size = struct.unpack_from("<i", data, 4)[0]
    meta = bytearray(data[8 : 8 + size])
    message = struct.unpack_from("<I", meta, 0)[0]
    vtable = message - struct.unpack_from("<i", meta, message)[0]
    place = message + struct.unpack_from("<H", meta, vtable + 4 + 2 * 2)[0]
    schema = place + struct.unpack_from("<I", meta, place)[0]
    vtable = schema - struct.unpack_from("<i", meta, schema)[0]
    length = struct.unpack_from("<H", meta, vtable)[0]
    copy = bytearray(meta[vtable : vtable + length])
    assert struct.unpack_from("<H", copy, 4)[0] == 0, "left out"
    struct.pack_into("<H", copy, 4, 2)  # the upper half of the distance to the vtable: 0xffff
    struct.pack_into("<i", meta, schema, schema - len(meta))
    meta += copy.ljust(-(-length // 8) * 8, b"\0")
    return data[:4] + struct.pack("<i", len(meta)) + bytes(meta) + data[8 + size :]


def test_whatever_is_stored_reads_as_what_was_checked(live: Any) -> None:
    """A thousand bodies with some bytes changed: each is refused, or what is on the disk has the
    digest that was answered for."""
    live.create("d", SPEC)
    rng = random.Random(7)
    stored = 0
    for number in range(1000):
        one = make_trajectory(SPEC, length=rng.choice((1, 3, 20)), seed=number % 10)
        body = bytearray(encode([one], SPEC))
        for _ in range(rng.choice((1, 1, 2, 8))):
            body[rng.randrange(len(body))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        answer = live.send(bytes(body))
        assert answer.status_code in (200, 422), answer.text
        if answer.status_code == 200:
            stored += answer.json()["items"][0]["status"] == "stored"
    assert 100 < stored < 1000
    (path,) = (live.data / "segments").iterdir()
    seen = 0
    for record in SegmentFile(path).scan():
        if "entry" in record.head:
            entry, batch = read_spooled(Source(path), record.offset, SPEC)
            header = {HEADER_KEY: json.dumps(entry.header).encode()}
            assert from_batch(batch, header, SPEC).digest == entry.digest
            seen += 1
    assert seen == stored
    assert live.flush()["sealed"] == stored
    for info in live.listing(limit=1000):
        assert info["state"] == "sealed"
    for info in live.listing(limit=1000)[::10]:
        steps = live.http.get(f"/v1/trajectories/{info['id']}/steps")
        (read,) = decode(steps.content)[1]
        assert read.digest == info["digest"]
