"""Each rule of the outbox by itself: no thread sends, no clock runs, no network is there."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from stepwell import (
    BadRequest,
    Busy,
    Client,
    Conflict,
    InvalidData,
    NotFound,
    Outbox,
    OutboxError,
    OutboxInUse,
    ServiceUnreachable,
    TooLarge,
    _locks,
)
from stepwell import outbox as module
from stepwell._locks import held_by
from stepwell._outbox_folder import (
    Destination,
    Entry,
    entries,
    find_outboxes,
    lock,
    reason_of,
    summarise,
)
from stepwell.codec import END_OF_STREAM, decode
from stepwell.messages import IngestItem, IngestResult, Problem
from stepwell.outbox import reopen
from stepwell.testing import make_spec, make_trajectory, wait_until
from tests.specs import assert_same

SPEC = make_spec()
OTHER = make_spec(action=2)
SEND_ALL = Outbox._send_all


class Service:
    """Says of each trajectory what it is told to say; by default that it is stored."""

    url = "http://here"

    def __init__(self):
        self.says = {}
        self.raises = None
        self.posts = []

    def with_options(self, **_):
        return self

    def post_stream(self, dataset, stream, **options):
        spec, trajectories = decode(stream)
        return self.post(dataset, trajectories, spec=spec, **options)

    def post(self, dataset, trajectories, **options):
        self.posts.append((dataset, [t.id for t in trajectories], options))
        if self.raises is not None:
            raise self.raises
        items = [
            IngestItem(id=t.id, **self.says.get(t.id, {"status": "stored"})) for t in trajectories
        ]
        return IngestResult(dataset=dataset, partition="fifo", items=items)


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def box(tmp_path, service, monkeypatch):
    """An outbox whose thread does nothing: `send` does one of its turns."""
    monkeypatch.setattr(Outbox, "_send_all", lambda _: None)
    outbox = Outbox(tmp_path / "out", service, "d", SPEC)
    yield outbox
    outbox.close(0)


def again(box, **options):
    """Closed, and opened by the next process."""
    box.close(0)
    return Outbox(box.directory, box._client, box.dataset, SPEC, **options)


def put(box, count, spec=SPEC, **metadata):
    made = [make_trajectory(spec, seed=i, **metadata) for i in range(count)]
    for trajectory in made:
        box.put(trajectory)
    return made


def ids(box):
    return [e.id for e in box._waiting]


def on_disk(folder):
    return [e.id for e in entries(Path(folder))]


def problem(status, detail="because"):
    return Problem(title="no", status=status, code="bad", detail=detail)


# --- answers ------------------------------------------------------------------------------------

ANSWERS = {
    "in another order": (lambda said: said[::-1], [True, True, True]),
    "without the first": (lambda said: said[1:], [False, True, True]),
    "without the last": (lambda said: said[:-1], [True, True, False]),
    "with nothing": (lambda _: [], [False, False, False]),
    "with one more": (lambda said: [*said, {"id": "x", "status": "stored"}], [True] * 3),
    "for somebody else": (
        lambda said: [{**said[0], "id": "x"}, *said[1:]],
        [False, True, True],
    ),
    "for others only": (
        lambda said: [{**item, "id": f"x{i}"} for i, item in enumerate(said)],
        [False, False, False],
    ),
    "twice the same": (lambda said: [*said, said[1]], [True, True, True]),
    "twice, and not the same": (
        lambda said: [*said, {"id": said[1]["id"], "status": "refused"}],
        [True, False, True],
    ),
    "the first id thrice": (
        lambda said: [{"id": said[0]["id"], "status": "stored"}] * 3,
        [True, False, False],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_only_what_the_service_spoke_of_by_id_leaves(tmp_path, monkeypatch, name):
    """A service that answers in another order, for others, or not for all, over HTTP."""
    change, taken = ANSWERS[name]
    honest = []

    def answer(request):
        said = [{"id": t.id, "status": "stored"} for t in decode(request.read())[1]]
        items = said if honest else change(said)
        return httpx2.Response(200, json={"dataset": "d", "partition": "fifo", "items": items})

    monkeypatch.setattr(Outbox, "_send_all", lambda _: None)
    client = Client("http://here", transport=httpx2.MockTransport(answer))
    box = Outbox(tmp_path / "out", client, "d", SPEC)
    made = put(box, 3)
    left = [t.id for t, gone in zip(made, taken, strict=True) if not gone]
    if left:
        with pytest.raises(OutboxError, match=f"what became of {len(left)} of 3 .*http://here"):
            box._send_some("arrow")
    else:
        box._send_some("arrow")
    assert ids(box) == on_disk(box.directory) == left
    assert box.sent == 3 - len(left) and box.rejected == 0
    honest.append(True)
    box._send_some("arrow")
    assert ids(box) == on_disk(box.directory) == [] and box.sent == 3
    box.close(0)
    client.close()


@pytest.mark.parametrize("status", ["stored", "duplicate", "evicted"])
def test_what_is_taken_leaves(box, service, status):
    (one, two) = put(box, 2)
    service.says[one.id] = {"status": status}
    box._send_some("arrow")
    assert box.pending == 0 == box.pending_bytes and box.sent == 2
    assert service.posts == [("d", [one.id, two.id], {"spec": SPEC, "partition": "fifo"})]
    box._send_some("arrow")
    assert len(service.posts) == 1, "nothing waits, nobody is asked"


@pytest.mark.parametrize("status", [408, 429, 503, 507])
def test_what_is_only_put_off_waits_and_the_others_are_settled(box, service, status):
    one, two, three, four = put(box, 4)
    service.says[two.id] = {"status": "refused", "problem": problem(status, "no room")}
    service.says[three.id] = {"status": "refused", "problem": problem(422)}
    with pytest.raises(OutboxError, match="^not now: no room$"):
        box._send_some("arrow")
    assert ids(box) == on_disk(box.directory) == [two.id] and box.sent == 2
    assert on_disk(box.directory / "rejected") == [three.id]
    assert one.id != four.id


def test_the_first_of_several_reasons_to_wait_is_told(box, service):
    one, two = put(box, 2)
    service.says[one.id] = {"status": "refused", "problem": problem(503, "")}
    service.says[two.id] = {"status": "refused", "problem": problem(503, "later")}
    with pytest.raises(OutboxError, match="^not now: bad$"):
        box._send_some("arrow")
    assert box.pending == 2


@pytest.mark.parametrize("status", ["refused", "conflict"])
def test_what_is_refused_goes_aside_with_the_reason(box, service, status):
    one, two, three = put(box, 3)
    service.says[one.id] = {"status": status, "problem": problem(422, "too long")}
    service.says[three.id] = {"status": status}
    box._send_some("arrow")
    assert (box.sent, box.rejected, box.pending, box.pending_bytes) == (1, 2, 0, 0)
    rejected = box.directory / "rejected"
    assert on_disk(rejected) == [one.id, three.id] and two.id not in on_disk(rejected)
    first, second = (e.path.with_suffix(".json") for e in entries(rejected))
    assert json.loads(first.read_text())["detail"] == "too long"
    assert json.loads(second.read_text()) == {"code": status}
    assert (reason_of(first), reason_of(second)) == ("too long", status)
    assert box.undelivered() == (
        f"2 trajectories refused by the service (too long): see {rejected.absolute()}"
    )


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BadRequest({"status": 400, "code": "a", "detail": "x"}), "x"),
        (BadRequest({"status": 422, "code": "b"}), "b"),
        (TooLarge({"status": 413, "code": "c"}), "c"),
        (Conflict({"status": 409, "code": "d"}), "d"),
        (InvalidData("does not fit"), "does not fit"),
    ],
    ids=["400", "422", "413", "409", "locally"],
)
def test_a_body_refused_whole_is_sent_one_by_one(box, service, error, why):
    one, two = put(box, 2)
    service.raises = error
    box._send_some("arrow")
    assert [sent for _, sent, _ in service.posts] == [[one.id, two.id], [one.id], [two.id]]
    assert box.rejected == 2 and box.pending == 0 and box.sent == 0
    assert reason_of(entries(box.directory / "rejected")[0].path) == why


@pytest.mark.parametrize(
    "error",
    [
        BadRequest({"status": 405, "code": "a"}),
        NotFound({"status": 404, "code": "b"}),
        ServiceUnreachable("away"),
        Busy({"status": 503, "code": "c"}),
        OSError("disk"),
    ],
    ids=["405", "404", "away", "busy", "disk"],
)
def test_an_error_that_says_nothing_of_them_keeps_all(box, service, error):
    put(box, 2)
    service.raises = error
    with pytest.raises(type(error)):
        box._send_some("arrow")
    assert box.pending == 2 and box.rejected == 0 and len(service.posts) == 1
    assert box._asked is None


# --- groups -------------------------------------------------------------------------------------


def test_a_group_is_at_most_so_many(box):
    made = put(box, 18)
    group, schema = box._next_group("arrow")
    assert [e.id for e, _ in group] == [t.id for t in made[:16]]
    spec, (third,) = decode(b"".join([schema, group[3][1], END_OF_STREAM]))
    assert spec == SPEC
    assert_same(third, made[3])


def test_a_group_is_at_most_so_large_and_one_alone_may_be_larger(box, monkeypatch):
    put(box, 4)
    sizes = [e.size for e in box._waiting]
    for limit, count in (
        (sum(sizes[:3]), 3),
        (sum(sizes[:3]) - 1, 2),
        (sum(sizes), 4),
        (sizes[0], 1),
        (1, 1),
    ):
        monkeypatch.setattr(module, "GROUP_BYTES", limit)
        assert len(box._next_group("arrow")[0]) == count, limit


def test_a_group_has_one_spec_and_no_id_twice(box):
    one, two = put(box, 2)
    box.put(one)
    box.spec = OTHER
    (three,) = put(box, 1, OTHER)
    sent = []
    while box.pending:
        box._send_some("arrow")
        sent.append(box._client.posts[-1][1:])
    assert [(names, options["spec"]) for names, options in sent] == [
        ([one.id, two.id], SPEC),
        ([one.id], SPEC),
        ([three.id], OTHER),
    ]


def test_damaged_ones_are_put_aside_on_the_way(box):
    made = put(box, 4)
    found = entries(box.directory)
    found[0].path.write_bytes(b"")
    found[2].path.write_bytes(found[2].path.read_bytes()[:-1] + b"x")
    group, _ = box._next_group("arrow")
    assert [e.id for e, _ in group] == ids(box) == [made[1].id, made[3].id]
    assert box.pending_bytes == found[1].size + found[3].size
    assert on_disk(box.directory / "damaged") == [made[0].id, made[2].id]
    assert "2 trajectories could not be read back from this disk: see" in box.undelivered()
    assert str(box.directory / "damaged") in box.undelivered()


def test_a_file_under_the_name_of_another_is_damaged(box):
    """What is in it would be answered under its own id, and wait for ever."""
    (one,) = put(box, 1)
    stranger = make_trajectory(SPEC, seed=9).id
    (old,) = box._waiting
    path = old.path.with_name(old.path.name.replace(one.id, stranger))
    os.replace(old.path, path)
    assert box._read(Entry(1, stranger, old.crc, path, old.size)) is None
    assert on_disk(box.directory / "damaged") == [stranger]


@pytest.mark.parametrize("number", ["EMFILE", "ENFILE", "ENOMEM", "EINTR", "EAGAIN"])
def test_what_the_machine_cannot_do_now_is_no_damage(box, monkeypatch, number):
    put(box, 1)

    def refuse(_):
        raise OSError(getattr(errno, number), "not now")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(OutboxError, match="cannot read the outbox now"):
        box._next_group("arrow")
    assert box.pending == 1 and not on_disk(box.directory / "damaged")


def test_a_disk_that_cannot_read_it_is_damage(box, monkeypatch):
    put(box, 1)

    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert box._next_group("arrow") == ([], None) and box.pending == 0
    assert len(on_disk(box.directory / "damaged")) == 1


def test_items_wait_in_order_of_number(box, monkeypatch):
    """Whatever order threads finish writing in."""
    for numbers in itertools.permutations(range(4)):
        box._waiting.clear()
        for number in numbers:
            box._next = number
            box.put(make_trajectory(SPEC, seed=number))
        assert [e.number for e in box._waiting] == [0, 1, 2, 3]


# --- room ---------------------------------------------------------------------------------------


def test_room_is_counted_to_the_byte(box):
    put(box, 2)
    size = box.pending_bytes // 2
    assert box.pending_bytes == sum(e.size for e in entries(box.directory)) == 2 * size
    box.max_bytes = 3 * size
    put(box, 1)
    box.max_bytes = 4 * size - 1
    with pytest.raises(OutboxError, match=rf"is full: {3 * size} bytes wait in 3 .* {size} more"):
        put(box, 1)
    assert box.pending == 3 and box.pending_bytes == 3 * size


def test_a_full_outbox_names_the_last_error(box):
    box.max_bytes = 1
    with pytest.raises(OutboxError, match="last error: none"):
        put(box, 1)
    box._loop.last_error = "nobody there"
    with pytest.raises(OutboxError, match="last error: nobody there"):
        put(box, 1)


def test_to_block_is_to_wait_for_room_unless_there_can_be_none(box, monkeypatch):
    put(box, 1)
    size = box.pending_bytes
    box.when_full, box.max_bytes = "block", size
    waits = []

    def sent_meanwhile(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            box.pending_bytes = 0

    monkeypatch.setattr(box._changed, "wait", sent_meanwhile)
    put(box, 1)
    assert waits == [0.5] * 3
    box.pending_bytes, box.max_bytes = 0, size - 1
    with pytest.raises(OutboxError, match="is full"):
        put(box, 1)
    box.max_bytes = size
    box.pending_bytes = size
    monkeypatch.setattr(box._changed, "wait", lambda _: setattr(box, "_closing", True))
    with pytest.raises(OutboxError, match="is closed"):
        put(box, 1)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left"), OutboxError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["disk", "interrupt"],
)
def test_a_put_that_fails_takes_no_room(box, monkeypatch, error, raised):
    put(box, 1)
    size = box.pending_bytes

    def fail(*_):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(raised):
        put(box, 1)
    monkeypatch.undo()
    assert box.pending == 1 and box.pending_bytes == size
    assert not list(box.directory.glob(".*"))


def test_without_a_spec_it_only_sends(box, service):
    made = put(box, 2)
    box.close(0)
    reopened = reopen(box.directory, service)
    assert (reopened.dataset, reopened.partition, reopened.spec) == ("d", "fifo", None)
    with pytest.raises(OutboxError, match="without a spec"):
        reopened.put(make_trajectory(SPEC))
    reopened._send_some("arrow")
    assert reopened.sent == 2 and service.posts[0][1] == [t.id for t in made]
    reopened.close(0)
    with pytest.raises(OutboxError, match=r"is no outbox: it holds no outbox\.json"):
        reopen(box.directory.parent, service)


# --- the folder ---------------------------------------------------------------------------------


def test_files_are_numbered_on_from_the_last(box):
    assert put(box, 2) and [e.number for e in box._waiting] == [1, 2]
    box._forget([box._waiting[0]])
    entries(box.directory)[0].path.unlink()
    reopened = again(box)
    assert put(reopened, 1) and [e.number for e in reopened._waiting] == [2, 3]
    names = [e.path.name for e in reopened._waiting]
    assert names[1].startswith("000000000003-") and names == sorted(names)
    reopened.close(0)


def test_what_an_earlier_process_left_is_counted(box):
    made = put(box, 3)
    (box.directory / ".torn.arrow.00000000.part").write_bytes(b"half")
    (box.directory / "stranger.arrow").write_bytes(b"?")
    reopened = again(box)
    assert ids(reopened) == [t.id for t in made] and reopened.pending == 3
    assert reopened.pending_bytes == sum(e.size for e in entries(box.directory))
    assert not list(box.directory.glob(".*"))
    reopened.close(0)


def test_the_folder_says_where_it_goes(box, service):
    about = json.loads((box.directory / "outbox.json").read_text())
    assert about == {
        "dataset": "d",
        "partition": "fifo",
        "url": "http://here",
        "created_at": None,
        "run": "",
    }
    put(box, 1)
    box.close(0)
    for dataset, options in (("e", {}), ("d", {"partition": "protected"})):
        with pytest.raises(OutboxInUse, match="still holds .*'d', partition 'fifo' .*; wanted"):
            Outbox(box.directory, service, dataset, SPEC, **options)
    again(box).close(0)  # their locks are free
    entries(box.directory)[0].path.unlink()
    other = Outbox(box.directory, service, "e", SPEC, partition="protected", created_at=7.5)
    assert Destination.read(box.directory) == Destination("e", "protected", "http://here", 7.5)
    other.close(0)


def test_arrow_files_of_nobody_are_not_taken(tmp_path, service):
    (tmp_path / "data.arrow").write_bytes(b"")
    with pytest.raises(OutboxError, match="holds Arrow files that no outbox wrote"):
        Outbox(tmp_path, service, "d", SPEC)
    (tmp_path / "data.arrow").unlink()
    (tmp_path / "outbox.json").write_text("{")
    with pytest.raises(OutboxError, match="cannot be parsed; is this an outbox"):
        Outbox(tmp_path, service, "d", SPEC)
    with pytest.raises(OutboxError, match="cannot use the outbox"):
        Outbox(tmp_path / "outbox.json" / "x", service, "d", SPEC)
    assert held_by(tmp_path / "lock") is None


def test_one_process_holds_it(box, service):
    assert held_by(box.directory / "lock") == os.getpid()
    with pytest.raises(OutboxInUse, match=f"used by process {os.getpid()}$"):
        Outbox(box.directory, service, "d", SPEC)
    box.close(0)
    assert held_by(box.directory / "lock") is None
    again(box).close(0)


def test_whoever_only_looks_refuses_nobody(tmp_path, monkeypatch):
    """A lock that is held for an instant is waited for; one of a living process is not."""
    answers, naps = [False, False, True], []
    monkeypatch.setattr(_locks, "_locked", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(_locks.time, "sleep", naps.append)
    (tmp_path / "lock").write_text("4194305")  # nobody has this number
    lock(tmp_path).close()
    assert len(naps) == 2 and (tmp_path / "lock").read_text() == str(os.getpid())
    monkeypatch.setattr(_locks, "_locked", lambda *_, **__: False)
    with pytest.raises(OutboxInUse, match=f"process {os.getpid()}$"):
        lock(tmp_path)
    (tmp_path / "lock").write_text("?")
    clock = itertools.count()
    monkeypatch.setattr(_locks.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(OutboxInUse, match=r"process \?$"):
        lock(tmp_path)


def test_a_summary_says_what_lies_there(box, service):
    made = put(box, 3)
    service.says[made[0].id] = {"status": "refused", "problem": problem(422, "too long")}
    service.says[made[1].id] = {"status": "refused", "problem": problem(422, "too long")}
    box._send_some("arrow")
    put(box, 2)
    found = summarise(box.directory)
    assert found is not None and found.held_by == os.getpid()
    assert (found.waiting, found.rejected, found.reasons) == (2, 2, {"too long": 2})
    assert found.bytes == box.pending_bytes and found.damaged == 0
    oldest = min(e.path.stat().st_mtime for e in box._waiting)
    assert found.oldest == oldest and found.destination == box.destination
    entries(box.directory)[0].path.write_bytes(b"")
    box._next_group("arrow")
    box.close(0)
    found = summarise(box.directory)
    assert found is not None and (found.waiting, found.damaged, found.held_by) == (1, 1, None)
    assert summarise(box.directory.parent) is None
    for path in (box.directory / "rejected").glob("*.json"):
        path.unlink()
    found = summarise(box.directory)
    assert found is not None and found.reasons == {"no reason noted": 2}


def test_outboxes_are_found_below_a_folder(tmp_path):
    for name in ("a/0", "a/1", "b", ".hidden/0", "a/0/deeper", "1/2/3/4", "1/2/3/4/5"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "outbox.json").write_text("{}")
    found = [str(p.relative_to(tmp_path)) for p in find_outboxes(tmp_path)]
    assert found == ["1/2/3/4", "a/0", "a/1", "b"]
    assert list(find_outboxes(tmp_path / "b")) == [tmp_path / "b"]
    assert list(find_outboxes(tmp_path / "nowhere")) == []
    assert [p.name for p in find_outboxes(tmp_path, 1)] == ["b"]


def test_one_dataset_is_told_from_another_of_its_name():
    mine = Destination("d", "fifo", "http://a", 1.0)
    same = [
        Destination("d", "fifo", "http://a", 2.0),  # rebuilt
        Destination("d", "fifo", "http://b", 1.0),  # moved
        Destination("d", "fifo"),  # written by an older version
        Destination("d", "fifo", "http://a"),
    ]
    other = [
        Destination("d", "fifo", "http://b", 2.0),
        Destination("d", "fifo", "http://b"),
        Destination("e", "fifo", "http://a", 1.0),
        Destination("d", "protected", "http://a", 1.0),
    ]
    assert all(mine.is_the_same(o) and o.is_the_same(mine) for o in same)
    assert not any(mine.is_the_same(o) or o.is_the_same(mine) for o in other)
    assert not Destination("d", "fifo", "http://b").is_the_same(
        Destination("d", "fifo", "http://a")
    )
    assert str(mine) == "dataset 'd', partition 'fifo' at http://a"


# --- taking over --------------------------------------------------------------------------------


def left(tmp_path, service, name, count, **options):
    """An outbox of a process that is no more."""
    box = Outbox(tmp_path / name, service, "d", SPEC, **options)
    made = put(box, count)
    box.close(0)
    return box.directory, [t.id for t in made]


def test_adopting_moves_what_waits_behind_what_is_here(box, service, tmp_path):
    mine = [t.id for t in put(box, 1)]
    folder, theirs = left(tmp_path, service, "dead", 3)
    (folder / "stranger.arrow").write_bytes(b"?")
    assert box.adopt(folder) == 3
    assert ids(box) == on_disk(box.directory) == [*mine, *theirs] and on_disk(folder) == []
    assert [e.number for e in box._waiting] == [1, 2, 3, 4]
    assert box.pending_bytes == sum(e.size for e in entries(box.directory))
    assert (folder / "stranger.arrow").exists()
    assert box.adopt(folder) == 0 and held_by(folder / "lock") is None
    box._send_some("arrow")
    assert service.posts[-1][1] == [*mine, *theirs] and box.sent == 4


def test_adopting_leaves_what_others_hold_or_are_meant_for(box, service, tmp_path):
    folder, theirs = left(tmp_path, service, "dead", 1)
    held = lock(folder)
    with pytest.raises(OutboxInUse, match="used by process"):
        box.adopt(folder)
    held.close()
    Destination("d", "fifo", "http://there").write(folder)
    with pytest.raises(OutboxInUse, match="holds items for dataset 'd'.*http://there, not"):
        box.adopt(folder)
    (folder / "outbox.json").unlink()
    with pytest.raises(OutboxInUse, match="unknown destination"):
        box.adopt(folder)
    assert on_disk(folder) == theirs and held_by(folder / "lock") is None and box.pending == 0
    with pytest.raises(OutboxError, match="cannot take over the outbox"):
        box.adopt(tmp_path / "nowhere")


def test_adopting_half_way_keeps_count(box, service, tmp_path, monkeypatch):
    folder, theirs = left(tmp_path, service, "dead", 3)
    replace, moved = os.replace, []

    def once(a, b):
        if moved:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        moved.append(a)
        replace(a, b)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(OutboxError, match="cross-device"):
        box.adopt(folder)
    assert (
        ids(box) == theirs[:1]
        and on_disk(folder) == theirs[1:]
        and held_by(folder / "lock") is None
    )


def test_renames_are_durable_here_before_there(box, service, tmp_path, monkeypatch):
    """A power cut leaves a trajectory in both folders rather than in none."""
    folder, _ = left(tmp_path, service, "dead", 1)
    synced = []
    monkeypatch.setattr(module, "sync_folder", lambda f: synced.append(f))
    box.adopt(folder)
    assert synced == [box.directory, folder]


def test_rejected_ones_are_queued_again(box, service):
    made = put(box, 3)
    for t in made[:2]:
        service.says[t.id] = {"status": "refused", "problem": problem(422)}
    box._send_some("arrow")
    rejected = box.directory / "rejected"
    (rejected / "stranger.arrow").write_bytes(b"?")
    assert box.rejected == 2
    box = again(box)
    assert box.rejected == 3 and box.undelivered() == "", "whatever lies there, of earlier runs"
    (rejected / "stranger.arrow").unlink()
    assert box.retry_rejected() == 2 and box.rejected == 1 and box.pending == 2
    assert ids(box) == [t.id for t in made[:2]] and not list(rejected.iterdir())
    assert box.pending_bytes == sum(e.size for e in entries(box.directory))
    assert box.retry_rejected() == 0
    box.close(0)


# --- how a run ended ----------------------------------------------------------------------------


class Runs(Service):
    """A service that knows one run."""

    def __init__(self, status="running", heartbeat_at=0.0, error=None):
        super().__init__()
        self.told, self.error = [], error
        self.row = SimpleNamespace(name="r", status=status, heartbeat_at=heartbeat_at)

    def ready(self):
        return False

    def run(self, name):
        if self.error:
            raise self.error
        assert name == "r"
        return self.row

    def patch_run(self, name, **fields):
        self.told.append((name, fields))


@pytest.mark.parametrize(
    ("runs", "told", "kept"),
    [
        (Runs(), True, False),
        (Runs(heartbeat_at=1e12), False, False),
        (Runs(status="stopped"), False, False),
        (Runs(error=ServiceUnreachable("away")), False, True),
        (Runs(error=Busy({"status": 503, "code": "busy"})), False, True),
        (Runs(error=NotFound({"status": 404, "code": "not_found"})), False, False),
    ],
    ids=["silent", "goes on", "known", "away", "busy", "forgotten"],
)
def test_the_end_of_a_run_waits_until_the_service_takes_it(box, runs, told, kept):
    box._client = runs
    box.end_run("r", "failed", "why")
    assert [e.kind for e in box._waiting] == ["ending"] and runs.told == []
    with contextlib.suppress(ServiceUnreachable, Busy):
        box._send_some("ending")
    assert runs.told == ([("r", {"status": "failed", "error": "why"})] if told else [])
    assert (box.pending == 1) == kept


def test_a_service_that_is_there_is_told_at_once(box):
    box._client = runs = Runs()
    runs.ready = lambda: True
    box.end_run("r", "finished")
    assert runs.told == [("r", {"status": "finished", "error": ""})] and box.pending == 0


# --- what a trainer queues ----------------------------------------------------------------------


class Registry(Runs):
    """A service that keeps metrics, logs and policies of the run r."""

    def __init__(self):
        super().__init__()
        self.metrics, self.log, self.policies, self.lost = {}, "", {}, False

    def log_metrics(self, run, points):
        if any(point.key == "bad" for point in points):
            raise BadRequest({"status": 422, "code": "a"})
        self.metrics |= {(run, p.key, p.step): p.value for p in points}

    def run_log(self, run):
        return self.log

    def patch_run(self, run, *, log):
        self.log += log
        if self.lost:
            raise ServiceUnreachable("the answer was lost")

    def publish_policy(self, run, version, data, *, step, metadata):
        assert step == version
        if version == 2:
            raise Conflict({"status": 409, "code": "b", "detail": "exists"})
        self.policies[version] = (data, metadata)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setattr(Outbox, "_send_all", lambda _: None)
    outbox = Outbox(tmp_path / "run", Registry(), run="r", linger=1.0)
    yield outbox
    outbox.close(0)


def test_metrics_travel_together_and_only_the_culprit_stays_aside(queue):
    for step in range(100):
        key = "bad" if step in (17, 80) else "loss"
        queue.put_metrics("r", step, {key: step / 2, "nan": None})
    queue._send_some("metrics")
    registry = queue._client
    assert sorted(s for _, k, s in registry.metrics if k == "nan") == sorted(
        {*range(100)} - {17, 80}
    )
    assert registry.metrics["r", "loss", 3] == 1.5 and registry.metrics["r", "nan", 3] is None
    assert on_disk(queue.directory / "rejected") == ["17", "80"] and queue.pending == 0
    assert queue.undelivered().startswith("2 steps of metrics refused by the service (a): see")


def test_log_lines_whose_answer_was_lost_are_not_sent_twice(queue):
    registry = queue._client
    queue.put_log("r", "one\ntwo\n")
    registry.lost = True
    with pytest.raises(ServiceUnreachable):
        queue._send_some("log")
    registry.lost = False
    queue.put_log("r", "three\n")
    queue._send_some("log")
    assert registry.log == "one\ntwo\nthree\n" and queue.pending == 0
    queue.put_log("r", "three\n")
    queue._send_some("log")
    assert registry.log.endswith("three\nthree\n"), "said twice is not sent twice"


def test_policies_arrive_one_by_one_and_a_refused_one_is_aside(queue):
    registry = queue._client
    for version in (1, 2, 3):
        assert queue.put_policy("r", version, b"%d\n" % version, {"n": version}) == []
    assert queue.put_policy("r", 1, b"other", {}) == [], "a version never changes"
    while queue._send_some("policy"):
        pass
    assert registry.policies == {1: (b"1\n", {"n": 1}), 3: (b"3\n", {"n": 3})}
    assert on_disk(queue.directory / "rejected") == ["2"]
    assert "1 policy refused by the service (exists)" in queue.undelivered()


def test_policies_are_bounded_and_the_newest_stay(queue):
    queue.put_policy("r", 0, bytes(1000), {})
    size = queue.pending_bytes
    queue.max_bytes = 4 * size + size // 2
    dropped = [queue.put_policy("r", version, bytes(1000), {}) for version in range(1, 8)]
    assert [e.id for e in queue._waiting] == ["4", "5", "6", "7"]
    assert dropped == [[], [], [], [0], [1], [2], [3]]
    queue.put_metrics("r", 1, {"loss": 1.0})
    queue.put_log("r", "they are not bounded by it\n")


def test_a_policy_that_is_dropped_while_it_is_sent_is_no_damage(queue):
    queue.put_policy("r", 1, bytes(1000), {})
    queue.max_bytes = queue.pending_bytes
    (old,) = queue._waiting
    group, shared = queue._next_group("policy")
    assert queue.put_policy("r", 3, bytes(1000), {}) == [1]
    queue._send("policy", group, shared)
    assert queue._read(old) is None and not queue._damaged
    assert [e.id for e in queue._waiting] == ["3"]
    assert queue.pending_bytes == queue._waiting[0].size


def test_an_item_that_the_disk_changed_is_damaged(queue):
    queue.put_policy("r", 1, bytes(1000), {})
    queue.put_metrics("r", 1, {"loss": 1.0})
    for entry in queue._waiting:
        data = bytearray(entry.path.read_bytes())
        data[-7] ^= 4
        entry.path.write_bytes(data)
    for kind in ("metrics", "policy"):
        assert queue._next_group(kind) == ([], None)
    assert on_disk(queue.directory / "damaged") == ["1", "1"] and queue.pending == 0
    assert "1 step of metrics, 1 policy could not be read back" in queue.undelivered()


def test_a_kind_that_is_held_up_does_not_hold_up_the_others(queue, monkeypatch):
    monkeypatch.undo()
    registry = queue._client
    queue.put_metrics("r", 1, {"loss": 1.0})
    queue.put_policy("r", 7, b"7", {})

    def later(*_):
        raise Busy({"status": 503, "code": "busy"})

    registry.log_metrics = later
    with pytest.raises(Busy):
        queue._send_all()
    assert list(registry.policies) == [7]
    assert [e.kind for e in queue._waiting] == ["metrics"]


def test_a_run_s_queue_says_whose_it_is_and_is_sent_by_anybody(queue):
    queue.put_metrics("r", 1, {"loss": 1.0})
    queue.put_policy("r", 7, b"7", {})
    assert queue.undelivered() == (
        f"1 step of metrics, 1 policy of run r not delivered (there was no time to send them); they"
        f" wait in {queue.directory}: the next trainer of the run sends them, or: stepwell outbox "
        f"send {queue.directory}"
    )
    found = summarise(queue.directory)
    assert found is not None and found.kinds == {"metrics": 1, "policy": 1}
    assert (found.destination.name, found.destination.url) == ("run r", "http://here")
    with pytest.raises(OutboxError, match="without a spec"):
        queue.put(make_trajectory(SPEC))
    queue.close(0)
    reopened = reopen(queue.directory, queue._client)
    reopened._send_some("metrics")
    reopened._send_some("policy")
    assert reopened.pending == 0 and reopened.sent == 2
    reopened.close(0)


# --- words --------------------------------------------------------------------------------------


def test_it_says_what_is_not_delivered_and_why(box, monkeypatch):
    assert box.undelivered() == box.reason == ""
    put(box, 1)
    assert box.reason == "there was no time to send them"
    where = box.directory.absolute()
    assert box.undelivered() == (
        f"1 trajectory for dataset d not delivered (there was no time to send them); they wait in "
        f"{where}: the next collector of the dataset that keeps its outbox beside it sends them, "
        f"or: stepwell outbox send {where}"
    )
    put(box, 1)
    monkeypatch.setattr(module.time, "monotonic", lambda: 112.4)
    box._asked = 100.0
    assert box.reason == "http://here has not answered for 12 s"
    box._loop.stop()  # it would forget the error after its next turn
    box._loop.last_error = "nobody there"
    assert box.reason == "nobody there"
    assert box.undelivered().startswith("2 trajectories for dataset d not delivered (nobody there)")


def test_who_was_asked_and_has_not_answered_is_known_while_it_hangs(box, service, monkeypatch):
    put(box, 1)
    post, seen = service.post, []

    def hanging(*args, **options):
        seen.append(box.reason)
        return post(*args, **options)

    monkeypatch.setattr(service, "post", hanging)
    box._send_some("arrow")
    assert seen == ["http://here has not answered for 0 s"] and box._asked is None


def test_counters_are_floats_of_what_there_is(box, service):
    one, _, _ = put(box, 3)
    service.says[one.id] = {"status": "refused"}
    box._send_some("arrow")
    put(box, 1)
    assert box.counters() == {
        "outbox": 1.0,
        "outbox_bytes": float(box.pending_bytes),
        "outbox_sent": 2.0,
        "outbox_rejected": 1.0,
    }


def test_an_outage_is_logged_in_a_line_and_once(box, caplog, monkeypatch, service):
    put(box, 1)
    service.raises = ServiceUnreachable("away")
    monkeypatch.undo()
    box = again(box)
    wait_until(lambda: box._loop.failures > 2)
    assert [(r.levelname, r.exc_info) for r in caplog.records] == [("WARNING", None)]
    assert "not delivered yet: 1 trajectory (away)" in caplog.text
    service.raises = None
    assert box.close(60)


def test_flush_waits_until_its_timeout_and_no_longer(box):
    assert box.flush(60) is True, "nothing waits"
    put(box, 1)
    assert box.flush(0.0) is False and box.flush(0.05) is False
    threading.Timer(0.05, lambda: box._forget([box._waiting[0]])).start()
    assert box.flush(60) is True


def test_draining_goes_on_for_as_long_as_something_is_taken(box, monkeypatch):
    put(box, 3)
    asked = []

    def flush(timeout):
        asked.append(timeout)
        if len(asked) < 3:
            box._forget([box._waiting[0]])
        return box._delivered

    monkeypatch.setattr(box, "flush", flush)
    assert box.drain(0.1) is False and asked == [0.1] * 3, "the third time nothing was taken"
    asked.clear()
    assert box.drain(0.1) is True and asked == [0.1]


def test_a_service_that_is_there_again_is_not_said_to_be_away(box, service, monkeypatch):
    """A long queue is sent in one turn, in which the error of the last turn would stand."""
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    put(box, 2)
    service.raises = ServiceUnreachable("away")
    with pytest.raises(ServiceUnreachable) as caught:
        SEND_ALL(box)
    box._loop._note(caught.value)
    assert box.last_error == box.reason == "away"
    service.raises, said, post = None, [], service.post
    monkeypatch.setattr(
        service, "post", lambda *a, **o: said.append(box.last_error) or post(*a, **o)
    )
    SEND_ALL(box)
    assert said == ["away", ""] and box.pending == 0


def test_flush_and_close_are_true_only_if_all_was_accepted(box, service):
    """One of three was refused: it waits no more, and it did not arrive. Its file is named."""
    one, two, three = put(box, 3)
    service.says[two.id] = {"status": "refused", "problem": problem(413, "too long")}
    box._send_some("arrow")
    assert box.pending == 0 and box.flush(60) is False
    (kept,) = entries(box.directory / "rejected")
    assert kept.id == two.id and box.undelivered() == (
        f"1 trajectory refused by the service (too long): see {kept.path.absolute()}"
    )
    assert box.retry_rejected() == 1 and box.flush(0.0) is False
    service.says[two.id] = {"status": "refused", "problem": problem(413, "still")}
    box._send_some("arrow")
    (kept,) = entries(box.directory / "rejected")
    assert box.undelivered().endswith(f"(still): see {kept.path.absolute()}")
    service.says.clear()
    assert box.retry_rejected() == 1
    box._send_some("arrow")
    assert box.flush(60) is True and box.undelivered() == ""
    (damaged,) = put(box, 1)
    entries(box.directory)[0].path.write_bytes(b"?")
    assert box._send_some("arrow") is False
    assert box.flush(60) is False and "could not be read back" in box.undelivered()
    assert box.close(0) is box.close(5.0) is False
    assert {one.id, three.id, damaged.id}.isdisjoint(on_disk(box.directory / "rejected"))


# --- the end ------------------------------------------------------------------------------------


def test_closing_says_whether_all_went_and_is_final(box, service):
    put(box, 1)
    assert box.close(0) is False
    assert box._closing and box._released
    with pytest.raises(OutboxError, match="is closed"):
        put(box, 1)
    reopened = again(box)
    reopened._send_some("arrow")
    assert reopened.close(0) is True
    reopened = again(box)
    assert reopened.close(5.0) is True


def test_closing_flushes_for_its_timeout(box, monkeypatch):
    asked = []
    monkeypatch.setattr(box, "flush", lambda timeout: asked.append(timeout) or True)
    put(box, 1)
    assert box.close() is True and asked == [10.0]
    assert box.close(-1.0) is False and asked == [10.0]


def test_an_answer_that_comes_after_the_end_touches_nothing(box, service, monkeypatch):
    """By then the folder may belong to another process."""
    put(box, 1)
    group, spec = box._next_group("arrow")
    post = service.post

    def late(*args, **options):
        box.close(0)
        return post(*args, **options)

    monkeypatch.setattr(service, "post", late)
    box._send("arrow", group, spec)
    assert len(on_disk(box.directory)) == 1 and box.sent == 0


def test_a_with_block_says_what_it_leaves(box, caplog, monkeypatch):
    monkeypatch.setattr(box, "flush", lambda _: False)
    with box:
        put(box, 1)
    assert "1 trajectory for dataset d not delivered" in caplog.text
    caplog.clear()
    with again(box) as reopened:
        reopened._send_some("arrow")
    assert not caplog.records


def test_an_outbox_that_nobody_closed_says_so_at_exit(box, capsys, monkeypatch):
    box._at_exit()
    assert capsys.readouterr().err == ""
    put(box, 1)
    box._at_exit()
    printed = capsys.readouterr()
    assert printed.err == f"stepwell: {box.undelivered()}\n" and printed.out == ""
    monkeypatch.setattr(box, "_process", os.getpid() + 1)
    box._at_exit()
    assert capsys.readouterr().err == "", "the child of a fork has not opened it"


def test_exit_is_watched_until_it_is_closed(box, monkeypatch):
    watched = []
    box.close(0)
    monkeypatch.setattr(atexit, "register", watched.append)
    monkeypatch.setattr(atexit, "unregister", lambda f: f in watched and watched.remove(f))
    reopened = Outbox(box.directory, box._client, "d", SPEC)
    assert watched == [reopened._at_exit]
    reopened.close(0)
    assert watched == []
