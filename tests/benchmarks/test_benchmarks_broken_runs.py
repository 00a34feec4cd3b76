"""The cases of healthy and broken runs name recipes and alarms that exist."""

from benchmarks.broken_runs import CASES
from trainer.health import CHECKS
from trainer.recipes import RECIPES


def test_cases_name_what_exists() -> None:
    assert {case.words.split()[0] for case in CASES} <= set(RECIPES)
    expected = {key for case in CASES for key in case.expected}
    assert expected <= {check.key for check in CHECKS}
    assert any(not case.expected for case in CASES)
