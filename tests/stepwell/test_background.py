"""Threads that outlive their errors: whatever is thrown at one, it says so and goes on."""

from __future__ import annotations

import logging
import random
import threading
import time

import pytest

from stepwell import Client
from stepwell import _background as module
from stepwell._background import BackgroundLoop
from stepwell.errors import Busy, ServiceUnreachable
from stepwell.testing import wait_until

UNEXPECTED = [
    *(ValueError("odd"), KeyError("gone"), MemoryError(), RecursionError("deep"), SystemExit(3)),
    *(KeyboardInterrupt(), AssertionError(), OSError(28, "no space"), GeneratorExit()),
]


@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
def test_no_error_ends_it_and_each_is_shown(error, caplog):
    """Logged with its traceback, counted, in `trouble` until a call succeeds."""
    fail, calls = threading.Event(), []

    def work() -> None:
        calls.append(1)
        if fail.is_set():
            raise error

    fail.set()
    loop = BackgroundLoop("errand", work, every=0.01).start()
    wait_until(lambda: loop.failures >= 2)
    assert loop.alive and type(error).__name__ in loop.trouble and "errand" in loop.trouble
    told = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == 1 and told[0].exc_info[1] is error
    fail.clear()
    wait_until(lambda: not loop.trouble)
    count = len(calls)
    wait_until(lambda: len(calls) > count + 2)
    assert loop.stop(20.0) and not loop.alive and not loop.trouble


def test_what_is_expected_is_shown_and_not_logged_as_a_defect(caplog):
    told = []

    def work() -> None:
        raise ServiceUnreachable("away")

    loop = BackgroundLoop(
        "errand", work, every=0.01, expected=(ServiceUnreachable,), report=lambda *x: told.append(x)
    ).start()
    wait_until(lambda: loop.failures >= 2)
    assert loop.trouble == "errand: away" and not told and not caplog.records
    assert loop.stop(20.0)


@pytest.fixture
def pauses(monkeypatch):
    """Runs a loop's own thread here until it has paused so often: how long it would have."""
    monkeypatch.setattr(module._jitter, "uniform", lambda _, high: high)

    def run(work, count):
        loop, found = BackgroundLoop("errand", work, every=1.0), []

        def pause(seconds):
            found.append(round(seconds, 6))
            if len(found) == count:
                loop.stop()

        monkeypatch.setattr(loop, "_pause", pause)
        loop._run()
        return found

    return run


def test_a_call_that_fails_is_repeated_less_and_less_often(pauses):
    """And soon again after one that succeeded."""
    calls = []

    def work():
        calls.append(1)
        if len(calls) != 11:
            raise ServiceUnreachable("away")

    waits = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert pauses(work, 13) == [*waits, 1.0, 0.2, 0.4]


def test_jitter_is_half_of_the_pause(pauses, monkeypatch):
    def work():
        raise ServiceUnreachable("away")

    monkeypatch.setattr(
        module._jitter, "uniform", lambda low, high: (low, high) == (0.5, 1.0) and 0.5
    )
    assert pauses(work, 2) == [0.1, 0.2]


def test_pauses_leave_the_random_numbers_of_the_program_alone():
    """Of a loop and of a request that is repeated; the program may have seeded them."""
    random.seed(7)
    before = random.getstate()

    def work():
        raise ServiceUnreachable("away")

    loop = BackgroundLoop("errand", work, every=0.01).start()
    wait_until(lambda: loop.failures >= 2)
    assert loop.stop(20.0)
    with pytest.raises(ServiceUnreachable):
        Client("http://127.0.0.1:9", retry_for=0.3).datasets()
    assert random.getstate() == before


def test_it_waits_as_long_as_it_is_asked_to(pauses):
    def work():
        raise Busy({"status": 429, "code": "busy"}, retry_after=5.0)

    assert pauses(work, 7) == [5.0, 5.0, 5.0, 5.0, 5.0, 6.4, 12.8]


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [(None, 0), (0.0, 0), (2.5, 2.5), (299.0, 299), (300.0, 300), (301.0, 300), (-1.0, 0)]
    + [(float("nan"), 0), (float("inf"), 0)],
)
def test_patience_that_a_service_asks_for_has_bounds(asked, seconds):
    error = Busy({"status": 503, "code": "busy"}, retry_after=asked)
    assert module.retry_after(error) == seconds


def test_a_wake_does_not_wait(monkeypatch):
    """0.2, 0.4, … seconds between errors, up to the longest wait; a hurry wakes it."""
    monkeypatch.setattr(module._jitter, "uniform", lambda _, high: high)
    calls, enough = [], threading.Event()

    def work() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            enough.set()
        raise ValueError("odd")

    loop = BackgroundLoop("errand", work, every=0.0, longest_wait=600.0).start()
    assert enough.wait(240)
    first, second, third = calls[:3]
    assert second - first >= 0.2 and third - second >= 0.4
    for number in range(12):  # by itself that would take an hour
        loop.wake()
        wait_until(lambda number=number: len(calls) > 3 + number)
    assert loop.stop(20.0)


def test_a_report_that_fails_does_not_end_it():
    """The log's disk is full, say."""
    calls = []

    def report(name: str, error: BaseException) -> None:
        raise OSError(28, "no space")

    def work() -> None:
        calls.append(1)
        raise ValueError("odd")

    loop = BackgroundLoop("errand", work, every=0.0, longest_wait=0.01, report=report).start()
    wait_until(lambda: len(calls) > 3)
    assert "odd" in loop.trouble and loop.stop(20.0)


def test_it_begins_after_its_pause_and_stops_from_inside():
    done = threading.Event()

    def work() -> None:
        assert loop.stop()
        done.set()

    loop = BackgroundLoop("errand", work, every=600.0, at_once=False).start()
    assert not done.is_set() and loop.alive
    loop.wake()
    assert done.wait(240)
    wait_until(lambda: not loop.alive)


def test_a_thread_that_is_gone_is_trouble():
    """As in the child of a fork, which has no thread but the one that forked."""
    loop = BackgroundLoop("errand", lambda: None, every=600.0)
    assert not loop.trouble and loop.stop()
    loop = BackgroundLoop("errand", lambda: None, every=600.0)
    loop._thread = threading.Thread(target=lambda: None)
    loop.start()
    loop._thread.join(20.0)
    assert loop.trouble == "errand: its thread is gone"
