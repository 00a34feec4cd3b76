"""Deadlines are kept, fat queries die, the others do not notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from server.problems import ProblemError
from server.sql.pool import GRACE

ENDLESS = "select count(*) from range(100000000000) a, range(1000000) b"
# Stays in one vector function for a minute: the interrupt is not looked at, only SIGKILL helps.
DEAF = "select levenshtein(repeat('a', 200000), repeat('b', 200000))"


def test_an_endless_query_ends_at_its_deadline(world: Any) -> None:
    began = time.monotonic()
    with pytest.raises(ProblemError) as caught:
        world.rows(ENDLESS, timeout=0.3)
    assert caught.value.code == "query_timeout"
    assert time.monotonic() - began < 0.3 + 5 * GRACE


def test_a_query_deaf_to_interrupts_is_killed_and_its_worker_replaced(world: Any) -> None:
    began = time.monotonic()
    with pytest.raises(ProblemError) as caught:
        world.rows(DEAF, timeout=0.3)
    assert caught.value.code == "query_timeout"
    assert time.monotonic() - began < 0.3 + 5 * GRACE
    assert world.rows("select 1") == [[1]]


def test_no_deadline_beyond_the_services_own(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1, sql_max_timeout=0.3)
    with pytest.raises(ProblemError) as caught:
        world.rows(ENDLESS, timeout=60)
    assert caught.value.code == "query_timeout"


def test_a_memory_bomb_gets_an_error_and_the_parent_stays_thin(world: Any) -> None:
    me = psutil.Process()
    before = me.memory_info().rss
    with pytest.raises(ProblemError) as caught:
        world.rows("select list(i) from range(10000000000) t(i)", timeout=10)
    assert caught.value.code == "sql_error"
    assert me.memory_info().rss - before < 64 << 20


def test_a_killed_worker_is_an_error_and_not_the_end(world: Any) -> None:
    """What a crash inside DuckDB looks like from outside."""
    outcome: list[Any] = []

    def ask() -> None:
        try:
            world.rows(ENDLESS, timeout=20)
        except ProblemError as error:
            outcome.append(error.code)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    for worker in list(world.service.sql._all):
        worker._process.kill()  # the busy one and an idle one
        worker._process.wait(10)  # a signal is not yet a death
    thread.join(10)
    assert outcome == ["sql_error"]
    assert world.rows("select 42") == [[42]]


def test_too_many_at_once_is_429_and_says_when_to_come_back(world: Any) -> None:
    results: list[str] = []

    def ask() -> None:
        try:
            world.rows(ENDLESS, timeout=0.5, user="greedy")
        except ProblemError as error:
            results.append(f"{error.status} {error.code} {error.headers.get('retry-after', '')}")

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert world.rows("select 1", user="modest", timeout=10) == [[1]]
    for thread in threads:
        thread.join()
    assert results.count("429 too_many_queries 1") == 2
    assert results.count("422 query_timeout ") == 4


def test_a_result_too_large_is_cut_and_says_so(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1, sql_max_bytes=1 << 20)
    for form in ("json", "arrow"):
        result = world.service.sql.query(
            "select repeat('x', 1000) from range(100000)", limit=100_000, timeout=20, form=form
        )
        assert result.truncated
        assert 0 < len(result.payload) <= 2 << 20


def test_workers_are_confined(world: Any) -> None:
    world.rows("select 1")
    assert world.service.sql.confinement["limits"] is True


def test_closing_ends_every_worker(make_world: Callable[..., Any]) -> None:
    world = make_world()
    world.rows("select 1")
    pool = world.service.sql
    pids = [worker._process.pid for worker in pool._all]
    assert pids
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
