"""Whose query is next: shares of the queue and of the workers, in fair order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from server.problems import ProblemError
from server.sql.fair_queue import FairQueue
from stepwell.testing import wait_until

LONG = 60.0


def make(
    workers: int = 2, *, running: int = 1, waiting: int = 8, per_caller: int = 4
) -> FairQueue[str]:
    queue = FairQueue[str](running=running, waiting=waiting, per_caller=per_caller)
    for number in range(workers):
        queue.put(f"w{number}")
    return queue


def take(queue: FairQueue[str], caller: str, seconds: float = LONG) -> str:
    return queue.take(caller, time.monotonic() + seconds)


def refused(queue: FairQueue[str], caller: str) -> bool:
    try:
        queue.admit(caller)
    except ProblemError as error:
        assert (error.status, error.code) == (429, "too_many_queries")
        assert int(error.headers["Retry-After"]) >= 1
        return True
    return False


class Asking:
    """Callers that wait in threads; the order in which their turn came."""

    def __init__(self, queue: FairQueue[str]):
        self.queue = queue
        self.order: list[str] = []
        self._threads: list[threading.Thread] = []

    def wait(self, caller: str, *, admit: bool = True) -> None:
        if admit:
            self.queue.admit(caller)
        before = len(self.queue._places)
        thread = threading.Thread(target=self._take, args=(caller,), daemon=True)
        thread.start()
        self._threads.append(thread)
        wait_until(lambda: len(self.queue._places) > before or not thread.is_alive())

    def _take(self, caller: str) -> None:
        with contextlib.suppress(ProblemError):  # when the test has failed already
            take(self.queue, caller)
            self.order.append(caller)

    def served(self, count: int) -> list[str]:
        return wait_until(lambda: self.order if len(self.order) == count else None) or []


def end(queue: FairQueue[str], caller: str, worker: str | None = "w") -> None:
    queue.give(caller, worker)
    queue.leave(caller)


def test_an_idle_worker_is_given_at_once() -> None:
    queue = make(workers=1)
    queue.admit("a")
    assert take(queue, "a") == "w0"


def test_one_caller_leaves_a_worker_to_the_others() -> None:
    queue = make(workers=2, running=1)
    queue.admit("greedy")
    queue.admit("greedy")
    take(queue, "greedy")
    with pytest.raises(ProblemError) as caught:
        take(queue, "greedy", 0.05)
    assert (caught.value.status, caught.value.code) == (429, "too_many_queries")
    assert int(caught.value.headers["Retry-After"]) >= 1
    queue.admit("modest")
    assert take(queue, "modest")


def test_a_caller_may_run_as_many_as_its_share_and_no_more() -> None:
    queue = make(workers=3, running=2)
    for _ in range(3):
        queue.admit("a")
    take(queue, "a")
    second = take(queue, "a")
    asking = Asking(queue)
    asking.wait("a", admit=False)
    assert asking.order == []
    queue.give("a", second)
    assert asking.served(1) == ["a"]


def test_a_caller_has_so_many_queries_here_and_no_more() -> None:
    queue = make(workers=0, waiting=100, per_caller=3)
    assert [refused(queue, "a") for _ in range(5)] == [False, False, False, True, True]
    queue.leave("a")
    assert [refused(queue, "a") for _ in range(2)] == [False, True]


def test_those_who_wait_already_get_only_half_of_the_queue() -> None:
    """One caller, or several, cannot keep a new one out."""
    queue = make(workers=0, waiting=8, per_caller=100)
    assert [refused(queue, "flood") for _ in range(6)] == [False] * 4 + [True] * 2
    assert not refused(queue, "first")
    assert refused(queue, "flood") and refused(queue, "first")
    assert [refused(queue, f"new {n}") for n in range(5)] == [False] * 3 + [True] * 2


def test_running_queries_do_not_count_as_waiting() -> None:
    queue = make(workers=2, running=2, waiting=2)
    for caller in ("a", "a"):
        queue.admit(caller)
        take(queue, caller)
    assert [refused(queue, "a"), refused(queue, "b"), refused(queue, "c")] == [False, False, True]


def test_a_free_worker_is_no_wait() -> None:
    """With room for one waiting query, two workers still take two at once."""
    queue = make(workers=2, running=2, waiting=1)
    assert [refused(queue, caller) for caller in "aab"] == [False, False, True]
    # Free, but not for a caller that runs its share.
    queue = make(workers=2, running=1, waiting=1)
    queue.admit("a")
    take(queue, "a")
    assert [refused(queue, caller) for caller in "aab"] == [True, True, False]


def test_turns_go_round_whatever_each_has_queued() -> None:
    queue = make(workers=1, waiting=100)
    queue.admit("a")
    take(queue, "a")
    asking = Asking(queue)
    for caller in ("a", "a", "b", "c", "b"):
        asking.wait(caller)
    running = "a"
    for number in range(5):
        end(queue, running)
        running = asking.served(number + 1)[-1]
    assert asking.order == ["b", "c", "a", "b", "a"]


def test_who_runs_nothing_goes_before_who_runs_something() -> None:
    queue = make(workers=2, running=2)
    for caller in ("a", "b"):
        queue.admit(caller)
        take(queue, caller)
    asking = Asking(queue)
    asking.wait("a")
    asking.wait("c")
    end(queue, "b")
    assert asking.served(1) == ["c"]


def test_a_place_ends_at_its_deadline_and_takes_nothing_with_it() -> None:
    queue = make(workers=0)
    queue.admit("a")
    with pytest.raises(ProblemError):
        take(queue, "a", 0.01)
    queue.leave("a")
    queue.put("w")
    queue.admit("b")
    assert take(queue, "b") == "w", "nobody waits in the place of who has gone"


def test_a_worker_that_does_not_come_back_frees_its_share() -> None:
    queue = make(workers=1)
    queue.admit("a")
    take(queue, "a")
    end(queue, "a", None)
    queue.admit("a")
    asking = Asking(queue)
    asking.wait("a", admit=False)
    queue.put("another")
    assert asking.served(1) == ["a"]


def test_nothing_is_kept_of_callers_that_have_gone() -> None:
    queue = make(workers=1)
    for number in range(50):
        queue.admit(f"caller {number}")
        end(queue, f"caller {number}", take(queue, f"caller {number}"))
    assert not queue._present and not queue._running and not queue._served and not queue._places
    assert queue._idle == ["w0"]


def test_closing_sends_everybody_away() -> None:
    queue = make(workers=0)
    queue.admit("a")
    caught: list[Any] = []

    def wait() -> None:
        try:
            take(queue, "a")
        except ProblemError as error:
            caught.append((error.status, error.code))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: queue._places)
    queue.close()
    thread.join(LONG)
    assert caught == [(503, "shutting_down")]
    with pytest.raises(ProblemError) as later:
        take(queue, "a")
    assert later.value.status == 503


def test_many_callers_at_once_each_get_their_turn() -> None:
    """Twenty threads over three workers: everybody is served, never more than the share at once."""
    queue = make(workers=3, running=2, waiting=100, per_caller=100)
    lock, running, most = threading.Lock(), dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0)
    total: list[int] = []

    def run(caller: str) -> None:
        for _ in range(20):
            queue.admit(caller)
            worker = take(queue, caller)
            with lock:
                running[caller] += 1
                most[caller] = max(most[caller], running[caller])
                total.append(sum(running.values()))
            with lock:
                running[caller] -= 1
            end(queue, caller, worker)

    work: list[Callable[[], None]] = [lambda c=c: run(c) for c in "abcd" * 5]  # type: ignore[misc]
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(total) == 400
    assert max(total) <= 3 and max(most.values()) <= 2
    assert sorted(queue._idle) == ["w0", "w1", "w2"]


def test_the_queue_says_how_many_workers_it_could_use() -> None:
    """All of one moment count, and of one caller no more than may run: none waits for a worker that
    nobody starts."""
    asked: list[int] = []
    queue = FairQueue[str](running=1, waiting=8, per_caller=4, on_demand=asked.append)
    callers = Asking(queue)
    for caller in ("a", "a", "b"):
        callers.wait(caller)
    assert asked == [1, 1, 2]
    queue.put("w0")
    callers.served(1)
    callers.wait("c")
    assert asked[-1] == 3, "one runs, two could"
    queue.put("w1")
    queue.put("w2")
    callers.served(3)
    end(queue, "a")
    assert callers.served(4)[-1] == "a"
    queue.admit("d")
    queue.put("w3")
    assert take(queue, "d") and len(asked) == 4, "with an idle worker nothing is missing"
