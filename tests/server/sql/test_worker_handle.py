"""One worker process, as the pool holds it: deadlines, memory, priority, and children that lie."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from server.problems import ProblemError
from server.sql import worker_handle
from server.sql.worker_handle import DeadlineExceeded, MemoryExceeded, WorkerProcess
from stepwell.testing import wait_until

SHARE = 192 << 20
SLACK = 16 << 20
LONG = 60.0
ENDLESS = "select count(*) from range(100000000000) a, range(1000000) b"
BOMBS = [
    "select list(i) from range(10000000000) t(i)",
    "select string_agg(i::varchar, '') from range(10000000000) t(i)",
    "select i, random() from range(10000000000) t(i) order by 2",
    "select count(distinct hash(i)) from range(10000000000) t(i)",
    "select length(repeat('x', 4000000000))",
    "select repeat('x', 1000000) from range(1000000)",
    "select list_transform(range(100000000), lambda x: x::varchar)",
    "select levenshtein(repeat('a', 300000000), repeat('b', 300000000))",
    "select regexp_replace(repeat('ab', 50000000), 'a', 'bbbbb', 'g')",
    "select lpad('a', 2000000000, 'b')",
]


def request(sql: str, **fields: Any) -> dict[str, Any]:
    values = {"params": None, "limit": 10_000_000, "max_bytes": 1 << 30, "seconds": LONG}
    return {"sql": sql, "form": "json", "dataset": None, "only": None, **values, **fields}


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def any_size(_size: int) -> None:
    pass


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Start the worker program, or another one in its place."""
    started: list[WorkerProcess] = []

    def run(program: str | None = None, share: int = SHARE, **options: Any) -> WorkerProcess:
        with pytest.MonkeyPatch.context() as patch:
            if program is not None:
                patch.setattr(worker_handle, "_PROGRAM", ("-c", program))
            worker = WorkerProcess(tmp_path, share, **options)
        started.append(worker)
        if program is None:
            worker.wait_ready()
        return worker

    yield run
    for worker in started:
        worker.kill()
        worker.wait(LONG)


def peak(worker: WorkerProcess) -> int:
    """The most that was ever resident, as the kernel counted it."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def test_no_query_makes_a_worker_hold_more_than_its_share_nor_keep_it(
    start: Callable[..., WorkerProcess],
) -> None:
    """The kernel's own high-water mark, whatever the speed of this machine: nothing is sampled."""
    worker = start()
    before = worker.resident()
    assert 32 << 20 < before < SHARE
    for number, sql in enumerate(BOMBS):
        form = ("json", "arrow")[number % 2]
        header, _ = worker.ask(request(sql, form=form, seconds=600.0), soon(600.0), any_size)
        assert header["ok"] or header["code"] == "sql_error", (sql, header)
        assert peak(worker) <= SHARE + SLACK, sql
    header, payload = worker.ask(request("select 1"), soon(), any_size)
    assert header["ok"] and payload == b"[[1]]"
    assert wait_until(lambda: worker.resident() < before + (48 << 20), what="memory given back")
    assert worker.reusable()


def test_what_fits_is_answered_and_what_is_too_large_is_cut(
    start: Callable[..., WorkerProcess],
) -> None:
    worker = start()
    sql = "select repeat('x', 1000) from range(1000000)"
    for form in ("json", "arrow"):
        header, payload = worker.ask(request(sql, form=form), soon(), any_size)
        assert header["ok"] and header["truncated"], header
        assert 16 << 20 < len(payload) < SHARE // 2
        assert peak(worker) <= SHARE + SLACK
        header, payload = worker.ask(request(sql, form=form, max_bytes=50_000), soon(), any_size)
        assert header["truncated"] and len(payload) <= 50_000 + 1000


def test_a_worker_that_keeps_memory_is_not_used_again(start: Callable[..., WorkerProcess]) -> None:
    program = (
        "import sys, json, struct, os\n"
        "def say(h):\n"
        "    raw = json.dumps({'bytes': 0, **h}).encode()\n"
        "    os.write(1, struct.pack('>I', len(raw)) + raw)\n"
        "say({'confined': {}})\n"
        "kept = []\n"
        "while size := sys.stdin.buffer.read(4):\n"
        "    sys.stdin.buffer.read(struct.unpack('>I', size)[0])\n"
        "    kept.append(bytearray(40 << 20))\n"
        "    say({'ok': True})\n"
    )
    worker = start(program, share=128 << 20)
    worker.wait_ready()
    usable = []
    for _ in range(3):
        worker.ask(request("x"), soon(), any_size)
        usable.append(worker.reusable())
    assert usable == [True, False, False]


def test_a_worker_past_its_share_is_reported(start: Callable[..., WorkerProcess]) -> None:
    """Where the kernel's limit does not hold, the parent's eyes do."""
    program = (
        "import json, os, struct, time\n"
        "raw = json.dumps({'bytes': 0, 'confined': {}}).encode()\n"
        "os.write(1, struct.pack('>I', len(raw)) + raw)\n"
        "kept = bytearray(b'x') * (96 << 20)\n"
        "time.sleep(600)\n"
    )
    worker = start(program, share=32 << 20)
    worker.wait_ready()
    with pytest.raises(MemoryExceeded):
        worker.ask(request("x"), soon(), any_size)
    roomy = start(program, share=128 << 20)
    roomy.wait_ready()
    with pytest.raises(DeadlineExceeded):
        roomy.ask(request("x"), soon(1.0), any_size)


@pytest.mark.parametrize("size", [100, 4 << 20])
def test_a_stopped_worker_costs_no_more_than_the_deadline(
    start: Callable[..., WorkerProcess], size: int
) -> None:
    """Also when the question is longer than a pipe holds, and is never taken."""
    worker = start()
    os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        worker.ask(request("select '" + "x" * size + "'"), soon(0.3), any_size)
    assert 0.3 <= time.monotonic() - began < 0.3 + 2.5
    worker.kill()
    worker.wait(LONG)
    assert not worker.alive()


def test_a_worker_interrupts_itself_at_the_deadline(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    for form in ("json", "arrow"):
        header, _ = worker.ask(request(ENDLESS, seconds=0.2, form=form), soon(), any_size)
        assert header["code"] == "query_timeout"
    stream = "select i from range(100000000000) t(i) where hash(i) = 1"
    header, _ = worker.ask(request(stream, seconds=0.2, form="arrow"), soon(), any_size)
    assert header["code"] == "query_timeout"
    assert worker.alive()


def test_an_orphan_ends_by_itself(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """Deaf to interrupts, and nobody left to kill it: its own alarm does."""
    worker = start()
    deaf = "select levenshtein(repeat('a', 100000), repeat('b', 100000))"
    with pytest.raises((EOFError, OSError)):
        worker.ask(request(deaf, seconds=0.1), soon(), any_size)
    worker.wait(LONG)
    assert not worker.alive()
    assert worker._process.returncode == -signal.SIGALRM


def test_a_killed_worker_is_an_end_of_file(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    worker.kill()
    worker.wait(LONG)
    with pytest.raises((EOFError, OSError)):
        worker.ask(request("select 1"), soon(), any_size)
    assert not worker.alive() and worker.resident() == 0 and worker.cpu_seconds() == 0


def test_what_room_refuses_leaves_the_worker_usable(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    told: list[int] = []

    def refuse(size: int) -> None:
        told.append(size)
        raise ProblemError(429, "too_many_queries", "no room")

    with pytest.raises(ProblemError):
        worker.ask(request("select repeat('x', 3000000)"), soon(), refuse)
    assert 3_000_000 < told[0] < 3_000_100
    header, payload = worker.ask(request("select 2"), soon(), told.append)
    assert header["ok"] and payload == b"[[2]]" and told[1] == len(payload)


def test_priorities(start: Callable[..., WorkerProcess]) -> None:
    """Started as everybody, niced when ready, niced more for a query that goes on."""
    worker = start()
    process = psutil.Process(worker.pid)
    mine = psutil.Process().nice()
    assert process.nice() == max(worker_handle.NICE, mine)
    assert {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()} == {
        max(worker_handle.NICE, mine)
    }
    header, _ = worker.ask(request("select 1"), soon(), any_size)
    assert header["ok"] and not worker._spent and process.nice() == max(worker_handle.NICE, mine)
    before = worker.cpu_seconds()
    with pytest.raises(DeadlineExceeded):
        # Until it has used its time, on a machine of any speed.
        worker.ask(request(ENDLESS, seconds=600.0), _when_spent(worker), any_size)
    assert worker._spent and process.nice() == worker_handle.NICER
    assert {os.sched_getscheduler(thread.id) for thread in process.threads()} == {os.SCHED_IDLE}
    assert worker.cpu_seconds() > before + worker_handle.PATIENCE
    # Only root can take a nice value back.
    assert worker.reusable() == (os.geteuid() == 0)
    if os.geteuid() == 0:
        assert process.nice() == worker_handle.NICE
        assert {os.sched_getscheduler(t.id) for t in process.threads()} == {os.SCHED_OTHER}


class _when_spent(float):
    """A deadline that is over when the worker was niced for good."""

    def __new__(cls, _worker: WorkerProcess) -> _when_spent:
        return super().__new__(cls, soon(600.0))

    def __init__(self, worker: WorkerProcess):
        self._worker = worker

    def __sub__(self, other: float) -> float:
        return 0.0 if self._worker._spent else float(self) - other


def test_a_replacement_is_niced_from_the_start(start: Callable[..., WorkerProcess]) -> None:
    worker = start("import time; time.sleep(600)", nice=True)
    assert psutil.Process(worker.pid).nice() == max(worker_handle.NICE, psutil.Process().nice())
    first = start("import time; time.sleep(600)")
    assert psutil.Process(first.pid).nice() == psutil.Process().nice()


def test_workers_share_our_session_and_not_our_ctrl_c(start: Callable[..., WorkerProcess]) -> None:
    """A session of its own would be a scheduling group of its own (autogroup): nice means nothing
    there. Its own process group keeps the terminal's Ctrl-C away."""
    worker = start("import time; time.sleep(600)")
    assert os.getsid(worker.pid) == os.getsid(0)
    assert os.getpgid(worker.pid) == worker.pid


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">I", 1 << 31) + b"x",  # a header that would fill the memory
        struct.pack(">I", 5) + b"{bad}",
        struct.pack(">I", 100) + b"{",  # ends inside
        b"",
    ],
    ids=["huge", "no JSON", "cut off", "nothing"],
)
def test_a_worker_that_does_not_speak_as_one_is_an_error(
    start: Callable[..., WorkerProcess], frame: bytes
) -> None:
    worker = start(f"import os; os.write(1, {frame!r})")
    with pytest.raises((EOFError, OSError, orjson.JSONDecodeError)):
        worker.wait_ready()


def test_a_worker_that_does_not_start_says_why(start: Callable[..., WorkerProcess]) -> None:
    with pytest.raises(EOFError, match="died: ModuleNotFoundError: No module named 'absent_one'$"):
        start("import absent_one").wait_ready()
    with pytest.raises(EOFError, match="the process died$"):
        start("pass").wait_ready()
    open_files = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(OSError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_handle.sys, "executable", "/absent")
            start("pass")
    assert psutil.Process().num_fds() == open_files, "the pool tries again for ever"


def test_what_a_worker_says_blocks_nothing(start: Callable[..., WorkerProcess]) -> None:
    """Nobody reads what it says, neither while it starts nor later."""
    program = """
import os, struct, sys
def say():
    try:
        for _ in range(100):
            os.write(2, b"x" * 65536)
    except OSError:
        pass
def frame():
    head = b'{"bytes": 0, "ok": true, "confined": {}}'
    os.write(1, struct.pack(">I", len(head)) + head)
say()
frame()
os.read(0, 1 << 16)
say()
frame()
os.read(0, 1 << 16)
"""
    worker = start(program)
    worker.wait_ready()
    header, _ = worker.ask(request("select 1"), soon(), any_size)
    assert header["ok"]
