"""Each rule of the outbox by itself: no thread sends, no clock runs, no network is there."""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import os
import threading
from collections import deque
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
)
from stepwell import outbox as module
from stepwell._outbox_folder import (
    Destination,
    Entry,
    entries,
    find_outboxes,
    held_by,
    note_ending,
    reason_of,
    summarise,
    take_lock,
    tell_ending,
)
from stepwell.codec import decode
from stepwell.messages import IngestItem, IngestResult, Problem
from stepwell.outbox import read_outbox, reopen
from stepwell.testing import assert_same, make_spec, make_trajectory

SPEC = make_spec()
OTHER = make_spec(action=2)


class Service:
    """Says of each trajectory what it is told to say; by default that it is stored."""

    url = "http://here"

    def __init__(self):
        self.says = {}
        self.raises = None
        self.posts = []

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
    monkeypatch.setattr(Outbox, "_run", lambda _: None)
    outbox = Outbox(tmp_path / "out", service, "d", SPEC)
    outbox._thread.join()
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

    monkeypatch.setattr(Outbox, "_run", lambda _: None)
    client = Client("http://here", transport=httpx2.MockTransport(answer))
    box = Outbox(tmp_path / "out", client, "d", SPEC)
    made = put(box, 3)
    left = [t.id for t, gone in zip(made, taken, strict=True) if not gone]
    if left:
        with pytest.raises(OutboxError, match=f"what became of {len(left)} of 3 .*http://here"):
            box._send_some()
    else:
        box._send_some()
    assert ids(box) == on_disk(box.directory) == left
    assert box.sent == 3 - len(left) and box.rejected == 0
    honest.append(True)
    box._send_some()
    assert ids(box) == on_disk(box.directory) == [] and box.sent == 3
    box.close(0)
    client.close()


@pytest.mark.parametrize("status", ["stored", "duplicate", "evicted"])
def test_what_is_taken_leaves(box, service, status):
    (one, two) = put(box, 2)
    service.says[one.id] = {"status": status}
    box._send_some()
    assert box.pending == 0 == box.pending_bytes and box.sent == 2
    assert service.posts == [
        ("d", [one.id, two.id], {"spec": SPEC, "partition": "fifo", "retry": False})
    ]
    box._send_some()
    assert len(service.posts) == 1, "nothing waits, nobody is asked"


@pytest.mark.parametrize("status", [408, 429, 503, 507])
def test_what_is_only_put_off_waits_and_the_others_are_settled(box, service, status):
    one, two, three, four = put(box, 4)
    service.says[two.id] = {"status": "refused", "problem": problem(status, "no room")}
    service.says[three.id] = {"status": "refused", "problem": problem(422)}
    with pytest.raises(OutboxError, match="^not now: no room$"):
        box._send_some()
    assert ids(box) == on_disk(box.directory) == [two.id] and box.sent == 2
    assert on_disk(box.directory / "rejected") == [three.id]
    assert one.id != four.id


def test_the_first_of_several_reasons_to_wait_is_told(box, service):
    one, two = put(box, 2)
    service.says[one.id] = {"status": "refused", "problem": problem(503, "")}
    service.says[two.id] = {"status": "refused", "problem": problem(503, "later")}
    with pytest.raises(OutboxError, match="^not now: bad$"):
        box._send_some()
    assert box.pending == 2


@pytest.mark.parametrize("status", ["refused", "conflict"])
def test_what_is_refused_goes_aside_with_the_reason(box, service, status):
    one, two, three = put(box, 3)
    service.says[one.id] = {"status": status, "problem": problem(422, "too long")}
    service.says[three.id] = {"status": status}
    box._send_some()
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
    box._send_some()
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
        box._send_some()
    assert box.pending == 2 and box.rejected == 0 and len(service.posts) == 1
    assert box._asked is None


# --- groups -------------------------------------------------------------------------------------


def test_a_group_is_at_most_so_many(box):
    made = put(box, 18)
    group, spec = box._next_group()
    assert [e.id for e, _ in group] == [t.id for t in made[:16]] and spec == SPEC
    assert_same(group[3][1], made[3])


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
        assert len(box._next_group()[0]) == count, limit


def test_a_group_has_one_spec_and_no_id_twice(box):
    one, two = put(box, 2)
    box.put(one)
    box.spec = OTHER
    (three,) = put(box, 1, OTHER)
    sent = []
    while box.pending:
        box._send_some()
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
    group, _ = box._next_group()
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
        box._next_group()
    assert box.pending == 1 and not on_disk(box.directory / "damaged")


def test_a_disk_that_cannot_read_it_is_damage(box, monkeypatch):
    put(box, 1)

    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert box._next_group() == ([], None) and box.pending == 0
    assert len(on_disk(box.directory / "damaged")) == 1


def test_waiting_ones_stand_in_order_of_number():
    """Whatever order threads finish writing in."""
    for order in itertools.permutations(range(4)):
        waiting = deque()
        for number in order:
            module._insert(waiting, Entry(number, str(number), 0, Path(), 1))
        assert [e.number for e in waiting] == [0, 1, 2, 3]


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
    box.last_error = "nobody there"
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
            box._bytes = 0

    monkeypatch.setattr(box._changed, "wait", sent_meanwhile)
    put(box, 1)
    assert waits == [0.5] * 3
    box._bytes, box.max_bytes = 0, size - 1
    with pytest.raises(OutboxError, match="is full"):
        put(box, 1)
    box.max_bytes = size
    box._bytes = size
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
    with pytest.raises(OutboxError, match="to send what is there"):
        reopened.put(make_trajectory(SPEC))
    reopened._send_some()
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
    metadata = json.loads((box.directory / "outbox.json").read_text())
    assert metadata == {
        "dataset": "d",
        "partition": "fifo",
        "url": "http://here",
        "created_at": None,
    }
    put(box, 1)
    box.close(0)
    for dataset, options in (("e", {}), ("d", {"partition": "protected"})):
        with pytest.raises(OutboxInUse, match="still holds .*'d', partition 'fifo'; wanted"):
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
    with pytest.raises(OutboxError, match="does not read; is this an outbox"):
        Outbox(tmp_path, service, "d", SPEC)
    with pytest.raises(OutboxError, match="cannot use the outbox"):
        Outbox(tmp_path / "outbox.json" / "x", service, "d", SPEC)
    assert held_by(tmp_path) is None


def test_one_process_holds_it(box, service):
    assert held_by(box.directory) == os.getpid()
    with pytest.raises(OutboxInUse, match=f"used by process {os.getpid()}; give every"):
        Outbox(box.directory, service, "d", SPEC)
    box.close(0)
    assert held_by(box.directory) is None
    again(box).close(0)


def test_whoever_only_looks_refuses_nobody(tmp_path, monkeypatch):
    """A lock that is held for an instant is waited for; one of a living process is not."""
    from stepwell import _outbox_folder as folder

    answers, naps = [False, False, True], []
    monkeypatch.setattr(folder, "_locked", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(folder.time, "sleep", naps.append)
    (tmp_path / "lock").write_text("4194305")  # nobody has this number
    take_lock(tmp_path).close()
    assert len(naps) == 2 and (tmp_path / "lock").read_text() == str(os.getpid())
    monkeypatch.setattr(folder, "_locked", lambda *_, **__: False)
    with pytest.raises(OutboxInUse, match=f"process {os.getpid()};"):
        take_lock(tmp_path)
    (tmp_path / "lock").write_text("?")
    clock = itertools.count()
    monkeypatch.setattr(folder.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(OutboxInUse, match=r"process \?;"):
        take_lock(tmp_path)


def test_a_summary_says_what_lies_there(box, service):
    made = put(box, 3)
    service.says[made[0].id] = {"status": "refused", "problem": problem(422, "too long")}
    service.says[made[1].id] = {"status": "refused", "problem": problem(422, "too long")}
    box._send_some()
    put(box, 2)
    found = summarise(box.directory)
    assert found is not None and found.held_by == os.getpid()
    assert (found.waiting, found.rejected, found.reasons) == (2, 2, {"too long": 2})
    assert found.bytes == box.pending_bytes and found.damaged == 0
    oldest = min(e.path.stat().st_mtime for e in box._waiting)
    assert found.oldest == oldest and found.destination == box.destination
    entries(box.directory)[0].path.write_bytes(b"")
    box._next_group()
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
    assert box.adopt(folder) == 0 and held_by(folder) is None
    box._send_some()
    assert service.posts[-1][1] == [*mine, *theirs] and box.sent == 4


def test_adopting_leaves_what_others_hold_or_are_meant_for(box, service, tmp_path):
    folder, theirs = left(tmp_path, service, "dead", 1)
    lock = take_lock(folder)
    with pytest.raises(OutboxInUse, match="used by process"):
        box.adopt(folder)
    lock.close()
    Destination("d", "fifo", "http://there").write(folder)
    with pytest.raises(OutboxInUse, match="holds trajectories for dataset 'd'.*http://there, not"):
        box.adopt(folder)
    (folder / "outbox.json").unlink()
    with pytest.raises(OutboxInUse, match="nobody knows what"):
        box.adopt(folder)
    assert on_disk(folder) == theirs and held_by(folder) is None and box.pending == 0
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
    assert ids(box) == theirs[:1] and on_disk(folder) == theirs[1:] and held_by(folder) is None


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
    box._send_some()
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


class Runs:
    """A service that knows one run."""

    def __init__(self, status="running", heartbeat_at=0.0, error=None):
        self.told, self.error = [], error
        self.row = SimpleNamespace(name="r", status=status, heartbeat_at=heartbeat_at)

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
def test_an_ending_is_told_once_somebody_hears_it(tmp_path, runs, told, kept):
    note_ending(tmp_path, "r", "failed", "why")
    tell_ending(tmp_path, runs)
    assert runs.told == ([("r", {"status": "failed", "error": "why"})] if told else [])
    assert (tmp_path / "ending.json").exists() == kept
    (tmp_path / "ending.json").write_text("{")
    tell_ending(tmp_path, runs)
    assert not (tmp_path / "ending.json").exists()
    tell_ending(tmp_path, runs)


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
    box.last_error = "nobody there"
    assert box.reason == "nobody there"
    assert box.undelivered().startswith("2 trajectories for dataset d not delivered (nobody there)")
    box._death = "it died"
    assert box.reason == "it died"


def test_who_was_asked_and_has_not_answered_is_known_while_it_hangs(box, service, monkeypatch):
    put(box, 1)
    post, seen = service.post, []

    def hanging(*args, **options):
        seen.append(box.reason)
        return post(*args, **options)

    monkeypatch.setattr(service, "post", hanging)
    box._send_some()
    assert seen == ["http://here has not answered for 0 s"] and box._asked is None


def test_counters_are_floats_of_what_there_is(box, service):
    one, _, _ = put(box, 3)
    service.says[one.id] = {"status": "refused"}
    box._send_some()
    put(box, 1)
    assert box.counters() == {
        "outbox": 1.0,
        "outbox_bytes": float(box.pending_bytes),
        "outbox_sent": 2.0,
        "outbox_rejected": 1.0,
    }


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [(None, 0), (0.0, 0), (2.5, 2.5), (299.0, 299), (300.0, 300), (301.0, 300), (-1.0, 0)]
    + [(float("nan"), 0), (float("inf"), 0)],
)
def test_patience_that_a_service_asks_for_has_bounds(asked, seconds):
    assert module._asked(Busy({"status": 503, "code": "busy"}, retry_after=asked)) == seconds
    error = NotFound({"status": 404, "code": "x"}, retry_after=asked)
    assert module._asked(error) == 0.0


# --- the thread ---------------------------------------------------------------------------------


@pytest.fixture
def turns(tmp_path, service, monkeypatch):
    """Runs the sender's own loop in this thread until it has paused so often: the pauses."""
    monkeypatch.setattr(module.random, "uniform", lambda _, high: high)
    run = Outbox._run
    monkeypatch.setattr(Outbox, "_run", lambda _: None)
    box = Outbox(tmp_path / "out", service, "d", SPEC)

    def turns(count, before=lambda _: None):
        pauses = []

        def pause(seconds):
            pauses.append(round(seconds, 6))
            before(len(pauses))
            box._closing = len(pauses) == count

        monkeypatch.setattr(box, "_pause", pause)
        box._closing = False
        run(box)
        return pauses

    yield box, turns
    box.close(0)


def test_while_the_service_is_down_it_is_asked_ever_less_often(turns, service):
    box, run = turns
    put(box, 1)
    service.raises = ServiceUnreachable("away")
    assert run(10) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert box.last_error == "away" and len(service.posts) == 10


def test_after_a_success_it_asks_soon_again(turns, service):
    box, run = turns
    put(box, 1)
    service.raises = ServiceUnreachable("away")

    def change(count):
        service.raises = None if count == 3 else ServiceUnreachable("again")
        if count == 3:
            box._settle = lambda *_: setattr(service, "raises", ServiceUnreachable("again"))

    assert run(5, change) == [0.2, 0.4, 0.8, 0.2, 0.4]


def test_it_waits_as_long_as_it_is_asked_to(turns, service):
    box, run = turns
    put(box, 1)
    service.raises = Busy({"status": 429, "code": "busy"}, retry_after=5.0)
    assert run(7) == [5.0, 5.0, 5.0, 5.0, 5.0, 6.4, 12.8]


def test_jitter_is_half_of_the_pause(turns, service, monkeypatch):
    box, run = turns
    put(box, 1)
    service.raises = ServiceUnreachable("away")
    monkeypatch.setattr(
        module.random, "uniform", lambda low, high: (low, high) == (0.5, 1.0) and 0.5
    )
    assert run(2) == [0.1, 0.2]


def test_the_error_is_forgotten_with_the_next_success(turns, service):
    box, run = turns
    one, _ = put(box, 2)
    service.raises = RuntimeError()

    def back(_):
        service.raises = None
        service.says[one.id] = {"status": "refused", "problem": problem(503)}

    assert run(2, back) == [0.2, 0.4]
    assert box.last_error == "not now: because"
    service.says.clear()
    box._send_some()
    box._note(RuntimeError())
    assert box.last_error == "RuntimeError", "an error without words has its kind"


def test_a_defect_is_logged_once_with_its_place_and_an_outage_in_a_line(box, caplog):
    for error in (ServiceUnreachable("away"), ServiceUnreachable("away"), ServiceUnreachable("b")):
        box._note(error)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    caplog.clear()
    for text in ("one", "one", "two"):
        box._note(ValueError(text))
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]
    assert all(r.exc_info for r in caplog.records)
    caplog.clear()
    box.last_error = ""
    box._note(OSError("disk full"))
    assert [(r.levelname, r.exc_info) for r in caplog.records] == [("WARNING", None)]
    caplog.clear()
    box._closing, box.last_error = True, ""
    box._note(ValueError("the client is closed"))
    assert not caplog.records and box.last_error == "the client is closed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_says_so(tmp_path, service, monkeypatch):
    """Only what is no ordinary error ends it; whoever flushes does not wait for the dead."""

    class Fatal(BaseException):
        pass

    def fatal(*_, **__):
        raise Fatal("out of the world")

    monkeypatch.setattr(service, "post", fatal)
    box = Outbox(tmp_path / "out", service, "d", SPEC)
    put(box, 1)
    box._thread.join(60)
    assert not box._thread.is_alive()
    assert box.reason == "the thread that sends has died: out of the world"
    assert box.flush(3600) is False and box.close(3600) is False
    assert "has died" in box.undelivered()


class Clock:
    """A condition whose waits take no time, but let the clock go on."""

    def __init__(self, monkeypatch):
        self.now, self.waits, self.each = 0.0, [], lambda _: None
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def notify_all(self):
        pass

    def wait(self, seconds=None):
        assert seconds is not None and seconds > 0
        self.waits.append(round(seconds, 6))
        self.now += seconds
        self.each(len(self.waits))


@pytest.fixture
def clock(box, monkeypatch):
    box._changed = Clock(monkeypatch)
    yield box._changed
    box._changed = threading.Condition()


def test_a_pause_lasts_as_long_as_it_says(box, clock):
    box._pause(5.0)
    assert clock.waits == [5.0]
    box._pause(0.0)
    box._pause(-1.0)
    assert clock.waits == [5.0]


def test_a_pause_ends_early_for_whoever_closes(box, clock):
    clock.each = lambda count: setattr(box, "_closing", count == 1)
    clock.now = 0.0
    box._pause(1e9)
    assert len(clock.waits) == 1
    box._pause(5.0)
    assert len(clock.waits) == 1, "closed before it began"


def test_a_pause_is_short_for_whoever_flushes(box, clock):
    box._hurry = True
    box._pause(5.0)
    assert clock.waits == [0.2]
    clock.waits.clear()
    box._pause(0.1)
    assert clock.waits == [0.1]


def test_flush_waits_until_its_timeout_and_no_longer(box, clock):
    clock_waits = []
    put(box, 1)
    box._thread = SimpleNamespace(is_alive=lambda: True, join=lambda _: None)
    clock.each = lambda _: clock_waits.append(box._hurry)
    assert box.flush(1.2) is False
    assert clock.waits == [0.5, 0.5, 0.2] and clock_waits == [True] * 3 and not box._hurry
    clock.waits.clear()
    assert box.flush(0.0) is False and clock.waits == []
    clock.each = lambda count: box._forget([box._waiting[0]]) if count == 2 else None
    assert box.flush(9.0) is True and clock.waits == [0.5, 0.5] and not box._hurry
    assert box.flush(9.0) is True and len(clock.waits) == 2


def test_it_waits_for_work_or_the_end(box, clock):
    clock.wait = lambda: put(box, 1)
    assert box._wait_for_work() is True and box.pending == 1
    box._closing = True
    assert box._wait_for_work() is False
    box._forget([box._waiting[0]])
    assert box._wait_for_work() is False


# --- the end ------------------------------------------------------------------------------------


def test_closing_says_whether_all_went_and_is_final(box, service):
    put(box, 1)
    assert box.close(0) is False
    assert box._closing and box._released
    with pytest.raises(OutboxError, match="is closed"):
        put(box, 1)
    reopened = again(box)
    reopened._send_some()
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
    group, spec = box._next_group()
    post = service.post

    def late(*args, **options):
        box.close(0)
        return post(*args, **options)

    monkeypatch.setattr(service, "post", late)
    box._send(group, spec)
    assert len(on_disk(box.directory)) == 1 and box.sent == 0


def test_a_with_block_says_what_it_leaves(box, caplog):
    with box:
        put(box, 1)
    assert "1 trajectory for dataset d not delivered" in caplog.text
    caplog.clear()
    with again(box) as reopened:
        reopened._send_some()
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


def test_what_lies_in_it_can_be_read(box, service):
    made = put(box, 3)
    service.says[made[0].id] = {"status": "refused"}
    service.says[made[1].id] = {"status": "refused", "problem": problem(503)}
    with pytest.raises(OutboxError):
        box._send_some()
    found = list(read_outbox(str(box.directory)))
    assert [t.id for _, t in found] == [made[1].id, made[0].id]
    assert [p.parent.name for p, _ in found] == ["out", "rejected"]
    assert_same(found[0][1], made[1])
