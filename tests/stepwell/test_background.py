"""Threads that outlive their errors: whatever is thrown at one, it says so and goes on."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from stepwell._background import BackgroundLoop
from stepwell.errors import ServiceUnreachable
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


def test_errors_come_less_and_less_often_and_a_wake_does_not_wait():
    """0.2, 0.4, … seconds between them, up to the longest wait; somebody in a hurry wakes it."""
    calls, enough = [], threading.Event()

    def work() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            enough.set()
        raise ValueError("odd")

    loop = BackgroundLoop("errand", work, every=0.0, longest_wait=600.0).start()
    assert enough.wait(20.0)
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
    assert done.wait(20.0)
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
