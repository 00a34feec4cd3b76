"""Deadlines are kept, callers have shares, memory has one bound; the others do not notice."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import psutil
import pytest

from server.problems import ProblemError
from server.settings import Settings
from server.sql import pool as module
from server.sql.memory import BASE_MEMORY, OWN, Memory
from server.sql.pool import SqlPool
from stepwell.testing import wait_until

ENDLESS = "select count(*) from range(100000000000) a, range(1000000) b"
# Stays in one vector function for a minute: the interrupt is not looked at, only SIGKILL helps.
DEAF = "select levenshtein(repeat('a', 200000), repeat('b', 200000))"
BOMB = "select list(i) from range(10000000000) t(i)"
PROMISE = 0.5
"""Seconds after its deadline by which a query is answered; tests give it five times as long."""
LONG = 60.0


def failed(world: Any, sql: str, **options: Any) -> ProblemError:
    with pytest.raises(ProblemError) as caught:
        world.rows(sql, **options)
    return caught.value


@pytest.fixture(scope="module")
def single(make_world: Callable[..., Any]) -> Any:
    """With one worker for callers."""
    return make_world(sql_workers=1)


def idle(world: Any) -> Any:
    """Wait until a worker is idle, so that a short deadline is the query's alone."""
    return wait_until(lambda: world.service.sql._callers._idle, what="an idle worker")


class Caller(threading.Thread):
    """Asks once, in a thread: `code` says what came."""

    def __init__(self, world: Any, sql: str, **options: Any):
        super().__init__(daemon=True)
        self.world, self.sql, self.options = world, sql, options
        self.code, self.took = "", 0.0
        self.error: ProblemError | None = None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.world.rows(self.sql, **self.options)
            self.code = "ok"
        except ProblemError as error:
            self.code, self.error = error.code, error
        self.took = time.monotonic() - began

    def answer(self) -> str:
        self.join(LONG)
        return self.code


@contextmanager
def running(world: Any, user: str, **options: Any) -> Iterator[Caller]:
    """An endless query of `user` that has a worker; that worker is killed in the end."""
    sql = world.service.sql
    take = sql._take
    workers: dict[threading.Thread, Any] = {}

    def note(*arguments: Any) -> Any:
        worker = workers[threading.current_thread()] = take(*arguments)
        return worker

    with mock.patch.object(sql, "_take", note):
        caller = Caller(world, ENDLESS, user=user, **{"timeout": LONG, **options})
        wait_until(lambda: caller in workers, what="a running query")
    try:
        yield caller
    finally:
        workers[caller].kill()
        caller.join(LONG)


# --- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sql", [ENDLESS, DEAF], ids=["endless", "deaf"])
def test_a_query_ends_at_its_deadline(world: Any, sql: str) -> None:
    idle(world)
    began = time.monotonic()
    error = failed(world, sql, timeout=0.3)
    assert (error.status, error.code) == (422, "query_timeout")
    assert 0.3 <= time.monotonic() - began < 0.3 + 5 * PROMISE
    assert world.rows("select 1") == [[1]]


def test_a_stopped_worker_does_not_hold_the_answer(single: Any) -> None:
    world, worker = single, idle(single)[0]
    os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert failed(world, "select 1", timeout=0.3).code == "query_timeout"
    assert time.monotonic() - began < 0.3 + 5 * PROMISE
    assert world.rows("select 1") == [[1]]
    assert not worker.alive()


def test_waiting_counts(single: Any) -> None:
    idle(single)
    with running(single, "somebody"):
        began = time.monotonic()
        error = failed(single, "select 1", user="me", timeout=0.3)
        assert (error.status, error.code) == (429, "too_many_queries")
        assert int(error.headers["Retry-After"]) >= 1
        assert 0.3 <= time.monotonic() - began < 0.3 + 5 * PROMISE


def test_time_before_the_pool_was_asked_counts(world: Any) -> None:
    """The route says when the request came: threads may have been short."""
    idle(world)
    error = failed(world, "select 1", timeout=5.0, received=time.monotonic() - 6.0)
    assert error.code in ("query_timeout", "too_many_queries")


def test_tables_that_are_not_ready_do_not_hold_the_answer(
    single: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first look at a million trajectories takes ten seconds."""
    world = single
    idle(world)
    ready = threading.Event()
    state = world.service.mirror.state

    def slow(sql: str | None = None) -> Any:
        ready.wait(LONG)
        return state(sql)

    monkeypatch.setattr(world.service.mirror, "state", slow)
    began = time.monotonic()
    error = failed(world, "select count(*) from trajectories", timeout=0.3)
    assert (error.status, error.code) == (422, "query_timeout")
    assert time.monotonic() - began < 0.3 + 5 * PROMISE
    ready.set()
    assert world.rows("select count(*) from trajectories") == [[0]]


def test_no_deadline_beyond_the_services_own(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1, sql_max_timeout=0.3)
    idle(world)
    began = time.monotonic()
    error = failed(world, ENDLESS, timeout=60)
    assert error.code == "query_timeout" and "0.3 s" in error.detail
    assert time.monotonic() - began < 0.3 + 5 * PROMISE


def test_a_query_may_come_before_the_first_worker_is_ready(make_world: Callable[..., Any]) -> None:
    """Its deadline counts from then: after a restart, nobody is turned away."""
    world = make_world(sql_workers=1)
    assert world.rows("select 1", timeout=LONG) == [[1]]


# --- memory ---------------------------------------------------------------------------------------


def test_the_parts_of_the_memory_sum_to_no_more_than_the_whole() -> None:
    for workers in (1, 2, 5):
        for total in (1 << 30, (1 << 30) + 12345, 8 << 30):
            memory = Memory.of(total, workers)
            whole = workers * memory.caller + memory.own + memory.answers
            assert total - 16 < whole <= total
            assert memory.caller - BASE_MEMORY >= 16 << 20
            assert memory.own - BASE_MEMORY == 2 * (memory.caller - BASE_MEMORY)
            assert memory.answers == total // 8


def test_too_little_memory_is_refused_and_says_how_much_is_needed() -> None:
    with pytest.raises(ValueError, match=r"STEPWELL_SQL_MEMORY=\d+ is too little") as caught:
        Memory.of(400 << 20, 2)
    least = int(str(caught.value).partition("at least ")[2].split()[0])
    assert Memory.of(least << 20, 2).caller - BASE_MEMORY >= 16 << 20
    with pytest.raises(ValueError, match="too little"):
        Memory.of((least - 2) << 20, 2)
    Memory.of(1 << 20, 0)  # no workers, no memory


def test_memory_bombs_stay_within_the_bound_and_harm_nobody(
    make_world: Callable[..., Any],
) -> None:
    """Of two callers at once, and a third one asks meanwhile. No sampling, no clock: the kernel's
    own high-water marks of all workers that there ever were."""
    world = make_world(sql_workers=2)
    pool: SqlPool = world.service.sql
    assert world.rows("select 1", timeout=LONG) == [[1]]
    me, answered = psutil.Process(), 0
    before = me.memory_info().rss
    marks: dict[int, int] = {}
    for _ in range(2):
        bombs = [Caller(world, BOMB, user=user, timeout=LONG) for user in ("a", "b")]
        while any(bomb.is_alive() for bomb in bombs):
            answered += world.rows("select 7", user="c", timeout=LONG) == [[7]]
        assert {bomb.answer() for bomb in bombs} == {"sql_error"}
        for worker in list(pool._all):
            marks[worker.pid] = max(marks.get(worker.pid, 0), _peak(worker.pid))
    assert answered
    assert marks and max(marks.values()) <= pool.memory.caller + (16 << 20)
    assert sum(sorted(marks.values())[-2:]) <= Settings.model_fields["sql_memory"].default
    assert me.memory_info().rss - before < 64 << 20


def _peak(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        line = next((line for line in file if line.startswith("VmHWM:")), "VmHWM: 0")
    return int(line.split()[1]) << 10


def test_answers_count_until_they_are_delivered(single: Any) -> None:
    pool: SqlPool = single.service.sql
    sql = "select repeat('x', 10000000)"
    result = pool.query(sql, user="me", timeout=LONG)
    assert pool.answers.held == {"me": len(result.payload)}
    del result
    gc.collect()
    assert not pool.answers.held
    assert failed(single, "select nope", user="me").code == "sql_error"
    assert not pool.answers.held


def test_nobody_fills_the_room_for_answers(world: Any) -> None:
    """A caller has half of it, all callers three quarters: the rest is the service's own."""
    settings = world.service.settings.model_copy(update={"sql_workers": 0, "sql_memory": 8 << 20})
    pool = SqlPool(settings, world.service.mirror)
    most = pool.memory.answers
    assert most == 1 << 20

    def fits(user: str, size: int) -> bool:
        try:
            pool.answers.hold(user, size)
        except ProblemError as error:
            assert (error.status, error.code) == (429, "too_many_queries")
            assert int(error.headers["Retry-After"]) >= 1
            return False
        return True

    assert not fits("a", most // 2 + 1)
    assert fits("a", most // 2) and not fits("a", 1)
    assert not fits("b", most // 4 + 1)
    assert fits("b", most // 4) and not fits("c", 1)
    assert not fits(OWN, most // 4 + 1)
    assert fits(OWN, most // 4) and not fits(OWN, 1)
    pool.answers.release("a", most // 2)
    assert fits("c", most // 2) and not fits("a", 1)
    pool.answers.release(OWN, most // 4)
    pool.answers.release("b", most // 4)
    pool.answers.release("c", most // 2)
    assert not pool.answers.held
    assert fits(OWN, most) and not fits("a", 1)
    pool.close()


def test_an_answer_without_room_is_429_and_the_worker_goes_on(single: Any) -> None:
    world, pool = single, single.service.sql
    worker = idle(world)[0]
    pool.answers.hold("other", pool.memory.answers // 2)
    pool.answers.hold("me", pool.memory.answers // 4)
    error = failed(world, "select repeat('x', 1000000)", user="me", timeout=LONG)
    assert (error.status, error.code) == (429, "too_many_queries")
    pool.answers.release("me", pool.memory.answers // 4)
    pool.answers.release("other", pool.memory.answers // 2)
    assert world.rows("select length(repeat('x', 1000000))", user="me") == [[1000000]]
    assert idle(world) == [worker]


def test_a_result_too_large_is_cut_and_says_so(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1, sql_max_bytes=1 << 20)
    for form in ("json", "arrow"):
        result = world.service.sql.query(
            "select repeat('x', 1000) from range(100000)", limit=100_000, timeout=LONG, form=form
        )
        assert result.truncated
        assert 0 < len(result.payload) <= 2 << 20


# --- shares ---------------------------------------------------------------------------------------


def test_one_caller_floods_and_another_is_answered(world: Any) -> None:
    """Sixteen runaway queries of one: at most four are here, one runs, the others have a worker."""
    idle(world)
    flood = [Caller(world, ENDLESS, user="greedy", timeout=3.0) for _ in range(16)]
    wait_until(lambda: world.service.sql._callers._running["greedy"])
    for number in range(10):
        assert world.rows(f"select {number}", user="modest", timeout=LONG) == [[number]]
        assert world.service.sql._callers._running["greedy"] <= 1
    codes = [one.answer() for one in flood]
    assert codes.count("query_timeout") >= 1 and "ok" not in codes
    refused = [one for one in flood if one.code == "too_many_queries"]
    # Three wait; one whose turn comes at the end of its time is stopped, not refused.
    assert len(refused) + codes.count("query_timeout") == 16 and 12 <= len(refused) <= 15
    assert all(one.error is not None and one.error.status == 429 for one in refused)
    assert all(int(one.error.headers["Retry-After"]) >= 1 for one in refused if one.error)
    at_once = [one for one in refused if one.took < 3.0]
    assert len(at_once) >= 12, "what is beyond its share does not wait"


def test_whoever_waits_for_long_queries_is_answered_short_ones(
    make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a person who runs a query of a minute, and of another person meanwhile."""
    monkeypatch.setattr(module, "SHORT", 50.0)  # a busy machine is no defect
    world = make_world(sql_workers=3)
    pool: SqlPool = world.service.sql
    idle(world)
    with running(world, "me", timeout=LONG):
        assert len(pool._all) == 2, "the third worker is not there before it is needed"
        waits = Caller(world, "select 1", user="me", timeout=LONG)
        wait_until(lambda: pool._callers._present["me (long)"] == 2)
        for number in range(3):
            assert world.rows(f"select {number}", user="me", timeout=50.0) == [[number]]
        with running(world, "me", timeout=50.0):
            assert world.rows("select 7", user="other", timeout=50.0) == [[7]]
            assert waits.is_alive() and len(pool._all) == 3
    assert waits.answer() == "ok"


def test_snapshots_do_not_wait_for_callers(make_world: Callable[..., Any]) -> None:
    """Every worker for callers is busy for a minute: the service's own is not."""
    world = make_world(sql_workers=1)
    idle(world)
    assert len(world.service.sql._all) == 1, "the own one is started when first needed"
    with running(world, "somebody"):
        assert world.service.sql.select_rows("select id from trajectories").rows.size == 0
        assert len(world.service.sql._all) == 2


def test_without_workers_there_are_none(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=0)
    world.service.sql._state("select 1", None, time.monotonic() + 60.0)  # the tables are there
    assert failed(world, "select 1", timeout=1.0).status == 429
    with pytest.raises(ProblemError):
        world.service.sql.select_rows("select id from trajectories", timeout=0.1)
    assert not world.service.sql._all


# --- what dies ------------------------------------------------------------------------------------


def test_a_killed_worker_is_an_error_and_not_the_end(world: Any) -> None:
    """What a crash inside DuckDB looks like from outside."""
    idle(world)
    with running(world, "me") as caller:
        for worker in list(world.service.sql._all):
            worker._process.kill()  # the busy one and an idle one
            worker._process.wait(LONG)  # a signal is not yet a death
    assert caller.answer() == "sql_error"
    assert world.rows("select 42") == [[42]]


def test_a_worker_that_does_not_start_is_tried_again(
    make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [EOFError("dead on arrival"), MemoryError("odd"), SystemExit("odd")]

    class Broken(module.WorkerProcess):
        def wait_ready(self) -> None:
            if errors:
                raise errors.pop()
            super().wait_ready()

    monkeypatch.setattr(module, "WorkerProcess", Broken)
    world = make_world(sql_workers=1)
    assert world.rows("select 1", timeout=LONG) == [[1]]
    assert not errors and len(world.service.sql._all) == 1


def test_workers_are_confined(world: Any) -> None:
    world.rows("select 1")
    assert all(worker.layers["limits"] for worker in world.service.sql._all)


def test_closing_ends_every_worker_and_whoever_waits(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1)
    pool: SqlPool = world.service.sql
    idle(world)
    pids = [worker.pid for worker in pool._all]
    busy = Caller(world, ENDLESS, user="a", timeout=LONG)
    wait_until(lambda: pool._callers._running)
    waiting = Caller(world, "select 1", user="b", timeout=LONG)
    wait_until(lambda: pool._callers._places)
    pool.close()
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)
    assert busy.answer() == "sql_error" and waiting.answer() == "shutting_down"
    assert failed(world, "select 1", timeout=1.0).status == 503
    assert not pool._all
