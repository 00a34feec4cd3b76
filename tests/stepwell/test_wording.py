"""Numbers and their nouns."""

from __future__ import annotations

import pytest

from stepwell._wording import duration, pluralize


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (12_345, "12,345 steps")],
)
def test_only_one_is_in_the_singular(number: int, text: str) -> None:
    assert pluralize(number, "step") == text


def test_a_plural_may_be_irregular_and_a_verb_follows() -> None:
    assert pluralize(1, "trajectory is", "trajectories are") == "1 trajectory is"
    assert pluralize(2, "trajectory is", "trajectories are") == "2 trajectories are"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (90, "2 min"), (3700, "62 min"), (36_000, "10 h"), (400_000, "5 days")],
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
