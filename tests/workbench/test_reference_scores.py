"""Normalised scores: D4RL's numbers to the last digit, and nothing where D4RL has none."""

import pytest

from workbench.analysis.reference_scores import REFERENCE_SCORES, normalised_score, reference_family


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("halfcheetah-medium-v2", -280.178953, 12135.0),
        ("hopper-medium-replay-v2", -20.272305, 3234.3),
        ("walker2d-full-replay-v1", 1.629008, 4592.3),
        ("ant-random-v0", -325.6, 3879.7),
        ("antmaze-large-diverse-v2", 0.0, 1.0),
        ("antmaze-umaze-v0", 0.0, 1.0),
        ("kitchen-partial-v0", 0.0, 4.0),
        ("pen-cloned-v1", 96.262799, 3076.8331017826877),
        ("hammer-human-v1", -274.856578, 12794.134825156867),
        ("relocate-expert-v0", -6.425911, 4233.877797728884),
        ("door-human-v0", -56.512833, 2880.5693087298737),
        ("minigrid-fourrooms-random-v0", 0.01442, 2.89685),
        ("maze2d-open-v0", 0.01, 20.66),
        ("maze2d-open-dense-v0", 11.17817, 27.166538620695782),
        ("maze2d-umaze-v0", 0.94, 62.6),
        ("maze2d-umaze-v1", 23.85, 161.86),
        ("maze2d-medium-v1", 13.13, 277.39),
        ("maze2d-large-dense-v1", 30.569041, 303.4857382709002),
        ("maze2d-eval-medium-v1", 13.07, 204.93),
        ("bullet-walker2d-medium-v0", 16.523877, 1623.6476303317536),
        ("flow-merge-controller-v0", 118.67993, 330.03179),
        ("HalfCheetah-v5", -280.178953, 12135.0),
        ("Walker2d-v4", 1.629008, 4592.3),
    ],
)
def test_random_is_exactly_0_and_the_expert_exactly_100(
    name: str, lowest: float, highest: float
) -> None:
    """The published minimum maps to 0.0, the maximum to 100.0, without rounding."""
    assert normalised_score(name, lowest) == 0.0
    assert normalised_score(name, highest) == 100.0
    family = reference_family(name)
    assert family is not None
    assert REFERENCE_SCORES[family] == (lowest, highest)


def test_the_scale_is_linear_and_not_clipped() -> None:
    """Halfway is 50, double the way is 200, worse than random is negative."""
    assert normalised_score("antmaze-umaze-v2", 0.5) == 50.0
    assert normalised_score("kitchen-mixed-v0", 8.0) == 200.0
    assert normalised_score("kitchen-mixed-v0", -1.0) == -25.0
    assert normalised_score("halfcheetah-medium-v2", 4804.0) == pytest.approx(40.9513, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "Pendulum-v1",
        "LunarLanderContinuous-v3",
        "pendulum-stitch-v0",
        "maze2d-medium-selfmade",
        "maze2d-medium-v2",
        "halfcheetah-replay-ars",
        "hopper-medium-v9",
        "my-halfcheetah-medium-v2",
        "halfcheetah-medium-v2\n",
        "HalfCheetahVel-v0",
        "stepwell/Recall-v0",
        "",
    ],
)
def test_what_d4rl_never_scored_gets_no_score(name: str) -> None:
    """A name that only resembles one of D4RL's is not scored by D4RL's numbers."""
    assert normalised_score(name, 100.0) is None
