"""The outbox: down means it grows, up means it drains, and no crash loses or doubles anything."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from stepwell import (
    BadRequest,
    Busy,
    Client,
    InvalidTrajectory,
    NotFound,
    Outbox,
    OutboxError,
    ServiceUnreachable,
    TooLarge,
)
from stepwell.codec import decode, encode
from stepwell.messages import IngestItem, IngestResult, Problem
from stepwell.testing import make_spec, make_trajectory, wait_until
from tests.specs import assert_same

SPEC = make_spec()


class FakeService:
    """What `client.post` does, as a small honest object: stores by id, or raises `down`."""

    def __init__(self):
        self.stored = {}
        self.groups: list[list[str]] = []
        self.down: Exception | None = None
        self.refuse = {}
        self.attempts = 0

    def with_options(self, *, retry_for):
        assert retry_for == 0.0, "the outbox tries again by itself"
        return self

    def post_stream(self, dataset, stream, *, partition):
        spec, trajectories = decode(stream)
        return self.post(dataset, trajectories, spec=spec, partition=partition)

    def post(self, dataset, trajectories, *, spec, partition):
        self.attempts += 1
        if self.down is not None:
            raise self.down
        assert (dataset, partition) == ("d", "fifo")
        items = [self._one(t, spec) for t in trajectories]
        self.groups.append([t.id for t in trajectories])
        return IngestResult(dataset=dataset, partition="fifo", items=items)

    def _one(self, trajectory, spec):
        trajectory.check(spec)
        if (status := self.refuse.get(trajectory.id)) is not None:
            problem = Problem(title="no", status=status, code="bad", detail="because")
            kind = "conflict" if status == 409 else "refused"
            return IngestItem(id=trajectory.id, status=kind, problem=problem)
        status = "duplicate" if trajectory.id in self.stored else "stored"
        self.stored[trajectory.id] = trajectory
        return IngestItem(id=trajectory.id, status=status)


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def outboxes(tmp_path, service):
    """A function that opens the outbox of this test; all are closed at its end."""
    opened = []

    def open_one(**options):
        outbox = Outbox(tmp_path / "out", service, "d", SPEC, **options)
        opened.append(outbox)
        return outbox

    yield open_one
    for outbox in opened:
        outbox.close(timeout=0)


def files(tmp_path, folder=""):
    return sorted(p.name for p in (tmp_path / "out" / folder).glob("*.arrow"))


def test_what_is_put_arrives_in_order_and_leaves_the_disk(outboxes, service, tmp_path):
    outbox = outboxes()
    sent = [make_trajectory(SPEC, seed=i) for i in range(40)]
    for trajectory in sent:
        outbox.put(trajectory)
    assert outbox.flush(60)
    assert list(service.stored) == [t.id for t in sent]
    for trajectory in sent:
        assert_same(service.stored[trajectory.id], trajectory)
    assert max(map(len, service.groups)) <= 16
    assert files(tmp_path) == [] and outbox.pending == outbox.pending_bytes == 0
    assert outbox.counters()["outbox_sent"] == 40


def test_down_it_grows_up_it_drains(outboxes, service, tmp_path):
    service.down = ServiceUnreachable("not there")
    outbox = outboxes()
    sent = [make_trajectory(SPEC) for _ in range(20)]
    for trajectory in sent:
        outbox.put(trajectory)
    assert not outbox.flush(0.5)
    assert outbox.pending == len(files(tmp_path)) == 20
    assert outbox.last_error == "not there"
    assert outbox.pending_bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.arrow"))
    service.down = None
    assert outbox.flush(60)
    assert list(service.stored) == [t.id for t in sent]
    assert outbox.last_error == "" and outbox.pending == 0


def test_it_drains_by_itself_once_the_service_is_back(outboxes, service):
    service.down = Busy({"status": 503, "code": "busy"}, retry_after=0.1)
    outbox = outboxes()
    outbox.put(make_trajectory(SPEC))
    wait_until(lambda: service.attempts)
    service.down = None
    wait_until(lambda: not outbox.pending)
    assert len(service.stored) == 1


@pytest.mark.parametrize(
    "error",
    [
        NotFound({"status": 404, "code": "not_found"}),
        BadRequest({"status": 405, "code": "unexpected_answer"}),
        RuntimeError("a defect"),
    ],
    ids=repr,
)
def test_an_error_that_says_nothing_of_the_trajectory_keeps_it(outboxes, service, tmp_path, error):
    """The dataset may be made later, another server may have been asked: nothing is thrown away."""
    service.down = error
    outbox = outboxes()
    outbox.put(make_trajectory(SPEC))
    assert not outbox.flush(0.4)
    assert len(files(tmp_path)) == 1 and outbox.rejected == 0
    service.down = None
    assert outbox.flush(60)


def test_a_put_is_on_disk_before_it_returns(outboxes, service, tmp_path, monkeypatch):
    """fsync of the file, rename, fsync of the folder, in this order."""
    done = []
    fsync, replace = os.fsync, os.replace
    outbox = outboxes()

    def noted_fsync(descriptor):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def noted_replace(a, b):
        done.append("rename")
        replace(a, b)

    service.down = ServiceUnreachable("not there")
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    outbox.put(make_trajectory(SPEC))
    assert done == ["file", "rename", "folder"]


def test_a_new_process_takes_up_what_the_old_one_left(outboxes, service, tmp_path):
    service.down = ServiceUnreachable("not there")
    first = outboxes()
    sent = [make_trajectory(SPEC, seed=i) for i in range(3)]
    for trajectory in sent[:2]:
        first.put(trajectory)
    assert not first.close(timeout=0.1)
    (tmp_path / "out" / f".torn.arrow.{'0' * 8}.part").write_bytes(b"half a file")
    second = outboxes()
    assert second.pending == 2 and second.pending_bytes > 0
    assert not list((tmp_path / "out").glob(".*.part"))
    second.put(sent[2])
    service.down = None
    assert second.flush(60)
    assert list(service.stored) == [t.id for t in sent]


def test_a_damaged_file_is_put_aside_and_holds_up_nobody(outboxes, service, tmp_path):
    service.down = ServiceUnreachable("not there")
    outbox = outboxes()
    good = make_trajectory(SPEC)
    for trajectory in (make_trajectory(SPEC), make_trajectory(SPEC), good):
        outbox.put(trajectory)
    outbox.close(timeout=0)
    names = files(tmp_path)
    flipped = bytearray((tmp_path / "out" / names[0]).read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (tmp_path / "out" / names[0]).write_bytes(flipped)
    (tmp_path / "out" / names[1]).write_bytes(b"")
    service.down = None
    outbox = outboxes()
    assert not outbox.flush(60) and outbox.pending == 0
    assert list(service.stored) == [good.id]
    assert files(tmp_path, "damaged") == names[:2]


def test_what_cannot_be_opened_just_now_is_not_taken_for_damaged(
    outboxes, service, tmp_path, monkeypatch
):
    """Too many open files says nothing of the trajectory: it waits, and is sent later."""
    service.down = ServiceUnreachable("wait")
    outbox = outboxes()
    one = make_trajectory(SPEC)
    outbox.put(one)
    outbox.close(timeout=0)
    read, fails = Path.read_bytes, [True]

    def refuse(path):
        if path.suffix == ".arrow" and fails:
            fails.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    service.down = None
    outbox = outboxes()
    assert outbox.flush(60)
    assert not fails and list(service.stored) == [one.id]
    assert files(tmp_path, "damaged") == []


def test_refused_ones_go_aside_with_the_reason_and_the_rest_goes_on(outboxes, service, tmp_path):
    sent = [make_trajectory(SPEC) for _ in range(4)]
    service.refuse = {sent[1].id: 422, sent[2].id: 409}
    service.down = ServiceUnreachable("wait until all are queued")
    outbox = outboxes()
    for trajectory in sent:
        outbox.put(trajectory)
    service.down = None
    assert not outbox.flush(60), "not all was accepted"
    assert list(service.stored) == [sent[0].id, sent[3].id] and outbox.pending == 0
    assert outbox.rejected == 2 and outbox.sent == 2
    rejected = files(tmp_path, "rejected")
    assert [name[13:49] for name in rejected] == [sent[1].id, sent[2].id]
    reason = json.loads((tmp_path / "out/rejected" / rejected[0]).with_suffix(".json").read_text())
    assert (reason["status"], reason["detail"]) == (422, "because")

    service.refuse = {}
    assert outbox.retry_rejected() == 2
    assert outbox.flush(60) and outbox.rejected == 0 and outbox.undelivered() == ""
    assert set(service.stored) == {t.id for t in sent}
    assert not list((tmp_path / "out/rejected").iterdir())


def test_a_refused_item_that_only_means_later_is_kept(outboxes, service, tmp_path):
    trajectory = make_trajectory(SPEC)
    service.refuse = {trajectory.id: 507}
    outbox = outboxes()
    outbox.put(trajectory)
    assert not outbox.flush(0.4) and outbox.rejected == 0
    service.refuse = {}
    assert outbox.flush(60) and trajectory.id in service.stored


@pytest.mark.parametrize(
    "error",
    [
        BadRequest({"status": 422, "code": "schema_mismatch"}),
        TooLarge({"status": 413, "code": "x"}),
    ],
    ids=repr,
)
def test_a_body_refused_whole_is_taken_apart_to_find_the_culprit(outboxes, service, error):
    sent = [make_trajectory(SPEC) for _ in range(5)]
    service.down = ServiceUnreachable("wait until all are queued")
    outbox = outboxes()
    for trajectory in sent:
        outbox.put(trajectory)
    post, service.down = service.post, None

    def picky(dataset, trajectories, **options):
        if any(t.id == sent[2].id for t in trajectories):
            raise error
        return post(dataset, trajectories, **options)

    service.post = picky
    assert not outbox.flush(60) and outbox.pending == 0
    assert list(service.stored) == [t.id for i, t in enumerate(sent) if i != 2]
    assert outbox.rejected == 1


def test_an_old_layout_still_goes_under_its_own(outboxes, service, tmp_path):
    """After the spec changed, what waits is sent as what it is, apart from the new."""
    service.down = ServiceUnreachable("not there")
    old = outboxes()
    old.put(make_trajectory(SPEC))
    old.close(timeout=0)
    other = make_spec(action=2)
    with Outbox(tmp_path / "out", service, "d", other) as outbox:
        outbox.put(make_trajectory(other))
        service.down = None
        assert outbox.flush(60)
    assert [len(g) for g in service.groups] == [1, 1]


def test_a_full_outbox_says_so_and_keeps_what_it_has(outboxes, service):
    service.down = ServiceUnreachable("not there")
    outbox = outboxes(max_bytes=6000)  # two trajectories of this spec
    outbox.put(make_trajectory(SPEC))
    with pytest.raises(OutboxError, match="is full"):
        for _ in range(10):
            outbox.put(make_trajectory(SPEC))
    waiting = outbox.pending
    service.down = None
    assert outbox.flush(60) and len(service.stored) == waiting
    outbox.put(make_trajectory(SPEC))


def test_a_full_outbox_can_wait_for_room(outboxes, service):
    service.down = ServiceUnreachable("not there")
    outbox = outboxes(max_bytes=6000, when_full="block")
    sent = [make_trajectory(SPEC, length=10, seed=seed) for seed in range(10)]
    sizes = np.cumsum([len(encode([trajectory], SPEC)) for trajectory in sent])
    fits = int((sizes <= 6000).sum())
    assert 1 < fits < 6
    done = []

    def act():
        for i, trajectory in enumerate(sent):
            outbox.put(trajectory)
            done.append(i)

    actor = threading.Thread(target=act)
    actor.start()
    wait_until(lambda: len(done) >= fits and service.attempts)
    assert actor.is_alive() and len(done) == outbox.pending == fits
    service.down = None
    actor.join(60)
    assert len(done) == 10 and outbox.flush(60) and len(service.stored) == 10
    with pytest.raises(OutboxError, match="full"):
        outbox.put(make_trajectory(SPEC, length=5000))


def test_what_does_not_fit_never_enters(outboxes, tmp_path):
    outbox = outboxes()
    with pytest.raises(InvalidTrajectory):
        outbox.put(make_trajectory(make_spec(action=2)))
    assert outbox.pending == 0 and files(tmp_path) == [] and outbox.pending_bytes == 0


def test_a_disk_that_refuses_is_an_error_of_ours(outboxes, service, monkeypatch):
    outbox = outboxes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutboxError, match="No space left"):
        outbox.put(make_trajectory(SPEC))
    monkeypatch.undo()
    assert outbox.pending == 0 and outbox.pending_bytes == 0
    outbox.put(make_trajectory(SPEC))
    assert outbox.flush(60)


def test_two_processes_never_share_a_directory(outboxes, service, tmp_path):
    outbox = outboxes()
    with pytest.raises(OutboxError, match=f"used by process {os.getpid()}"):
        Outbox(tmp_path / "out", service, "d", SPEC)
    outbox.close(timeout=0)
    outboxes()


def test_a_directory_of_another_dataset_is_refused_while_it_holds_something(
    outboxes, service, tmp_path
):
    service.down = ServiceUnreachable("not there")
    outbox = outboxes()
    outbox.put(make_trajectory(SPEC))
    outbox.close(timeout=0)
    with pytest.raises(OutboxError, match="still holds items for .*'d'"):
        Outbox(tmp_path / "out", service, "e", SPEC)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutboxError, match="cannot use"):
        Outbox(tmp_path / "file", service, "d", SPEC)


def test_putting_from_many_threads_loses_nothing(outboxes, service):
    outbox = outboxes()
    sent = [[make_trajectory(SPEC, seed=i) for i in range(20)] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda mine=mine: [outbox.put(t) for t in mine]) for mine in sent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outbox.flush(60)
    order = {name: i for i, name in enumerate(service.stored)}
    assert len(order) == 80
    for mine in sent:
        places = [order[t.id] for t in mine]
        assert places == sorted(places), "each thread's own order is kept"


def test_closing_is_quick_and_final(outboxes, service):
    service.down = ServiceUnreachable("not there")
    outbox = outboxes()
    outbox.put(make_trajectory(SPEC))
    start = time.monotonic()
    assert outbox.close(timeout=0.3) is False
    assert time.monotonic() - start < 5 * (0.3 + 1.0), "its timeout, and a second for the thread"
    with pytest.raises(OutboxError, match="closed"):
        outbox.put(make_trajectory(SPEC))


# --- kill -9 ----------------------------------------------------------------------------------

CHILD = """
import sys
from stepwell import Client, Outbox
from stepwell.testing import make_spec, make_trajectory

spec = make_spec()
outbox = Outbox(sys.argv[1], Client(sys.argv[2], retry_for=0.2), "d", spec)
print("ready", flush=True)
while True:
    trajectory = make_trajectory(spec)
    outbox.put(trajectory)
    print(trajectory.id, trajectory.digest, flush=True)
"""


class Ledger(ThreadingHTTPServer):
    """A service of one route that keeps id → digest, counts changes, and drops answers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.stored: dict[str, str] = {}
        self.changed = 0
        self.requests = 0
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Ledger

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        items = []
        with self.server.lock:
            self.server.requests += 1
            drop = self.server.requests % 5 == 0
            for t in decode(body)[1]:
                known = self.server.stored.get(t.id)
                self.server.changed += known is not None and known != t.digest
                self.server.stored[t.id] = t.digest
                items.append({"id": t.id, "status": "stored" if known is None else "duplicate"})
        if drop:  # stored, but the answer is lost: what a crash between the two looks like
            self.close_connection = True
            return
        answer = json.dumps({"dataset": "d", "partition": "fifo", "items": items}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_kill_minus_9_loses_nothing_and_doubles_nothing(tmp_path):
    """Whatever `put` returned for is at the service in the end, once, bit by bit."""
    ledger = Ledger()
    server = threading.Thread(target=ledger.serve_forever, daemon=True)
    server.start()
    acknowledged: dict[str, str] = {}
    rng = np.random.default_rng(0)
    try:
        for _ in range(4):
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(tmp_path / "out"), ledger.url],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            lines = [child.stdout.readline() for _ in range(rng.integers(6, 40))]
            time.sleep(float(rng.uniform(0.0, 0.02)))  # a moment: anywhere within a put or a send
            child.kill()
            for line in [*lines, *child.stdout]:
                name, _, digest = line.strip().partition(" ")
                if len(digest) == 64:  # the last line may be torn
                    acknowledged[name] = digest
            child.stdout.close()
            assert child.wait() == -signal.SIGKILL
        with (
            Client(ledger.url) as client,
            Outbox(tmp_path / "out", client, "d", SPEC) as outbox,
        ):
            assert outbox.flush(60)
            assert outbox.rejected == 0
    finally:
        ledger.shutdown()
        ledger.server_close()
        server.join()
    assert len(acknowledged) > 20
    assert {k: ledger.stored.get(k) for k in acknowledged} == acknowledged
    assert ledger.changed == 0
    assert not list((tmp_path / "out" / "damaged").iterdir())
