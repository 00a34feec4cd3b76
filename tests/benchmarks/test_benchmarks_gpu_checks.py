"""Checks on a GPU: every part accepts their words, and a target may be a metric or a bound."""

from __future__ import annotations

import pytest

from benchmarks.gpu_checks import CHECKS
from benchmarks.learn_checks import Check
from tests.run_words import settings


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.key)
def test_every_part_accepts_the_words_of_a_check(check: Check) -> None:
    args, config = settings(*check.words, *check.common, "--train.compile=graphs")
    assert config.compile == "graphs" and config.updates == check.updates
    assert config.agent.trajectory_encoder.context >= config.data.window > 1


def test_a_target_may_be_a_metric_or_an_upper_bound() -> None:
    by_key = {check.key: check for check in CHECKS}
    error, success = by_key["g6"], by_key["g4"]
    assert error.has_target({"mean": -900.0, "velocity_error": 0.3})
    assert not error.has_target({"mean": 900.0, "velocity_error": 0.5})
    assert success.metrics == ("success_9", "success_0")
    assert success.has_target({"mean": 1.0, "success_0": 0.2, "success_9": 0.8})
    assert not success.has_target({"mean": 9.0, "success_0": 0.8, "success_9": 0.9})
