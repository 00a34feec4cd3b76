"""Helpers for tests: what waits for another thread waits for the event, not for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from stepwell import EnvSpec, MultiDiscrete
from stepwell.testing import make_trajectory, wait_until


def test_the_first_true_answer_comes_back() -> None:
    answers = iter([None, 0, "here"])
    assert wait_until(lambda: next(answers), pause=0.0) == "here"


def test_it_hears_of_another_thread() -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.wait()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.set()
    assert wait_until(done.is_set)
    thread.join()


def test_what_never_happens_is_named_with_its_last_answer() -> None:
    with pytest.raises(AssertionError, match=r"the queue: not within 0 s, the last answer is ''"):
        wait_until(lambda: "", 0.0, what="the queue")


def test_it_is_asked_once_more_when_the_time_is_over() -> None:
    """A machine that slept through the whole time must not fail what has happened meanwhile."""
    answers = iter([False, True])
    assert wait_until(lambda: next(answers), 0.05, pause=0.2)


def test_an_error_of_the_condition_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 // 0)


def test_a_failpoint_that_is_not_reached_says_so() -> None:
    """A mistyped name would otherwise look like a program that survives."""
    env = {**os.environ, "STEPWELL_FAILPOINT": "outbox.after_putt"}
    program = "from stepwell.failpoints import failpoint; failpoint('outbox.after_put')"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "outbox.after_putt: not reached" in done.stderr


def test_random_choices_begin_at_their_own_numbers():
    spec = EnvSpec.of(MultiDiscrete((2, 3), (-9, 5)), MultiDiscrete((4, 2), 7))
    make_trajectory(spec, length=50).check(spec)
