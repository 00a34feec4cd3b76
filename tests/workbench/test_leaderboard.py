"""Rows of a leaderboard: which runs are one experiment, which version counts, and by how much."""

import itertools

import numpy as np
import pytest

from stepwell.messages import Evaluation
from workbench.analysis.confidence_intervals import Interval
from workbench.analysis.leaderboard import (
    improvement,
    leaderboard,
    normalised,
    reference_rows,
    score_table,
)


def evaluated(policy, returns, when=1.0):
    return Evaluation(
        id=f"{policy}@{when}", created_at=when, policy=policy, run=None, env="E-v0",
        seeds=list(range(len(returns))), returns=returns, mean=float(np.mean(returns)),
        iqm=float(np.mean(returns)), ci_low=0.0, ci_high=0.0,
    )  # fmt: skip


def test_seeds_of_one_config_are_one_row():
    found = [
        evaluated("a-0/9", [1.0, 3.0]),
        evaluated("a-1/9", [5.0, 7.0]),
        evaluated("b-0/9", [3.0, 3.0]),
        evaluated("random", [0.0, 0.0]),
    ]
    configs = {
        "a-0": {"lr": 1, "seed": 0, "run": "a-0", "claim": "x"},
        "a-1": {
            "lr": 1,
            "seed": 1,
            "run": "a-1",
            "claim": "y",
            "origins": {"seed": "command line"},
        },
        "b-0": {"lr": 2, "seed": 0, "run": "b-0"},
    }
    rows = leaderboard(found, configs)
    assert [(row.name, row.mean.value) for row in rows] == [
        ("a", 4.0), ("b-0/9", 3.0), ("random", 0.0)
    ]  # fmt: skip
    assert rows[0].policies == ["a-0/9", "a-1/9"]
    assert rows[0].mean.low < 3.0 and rows[0].mean.high > 5.0, "seeds vary, too"
    assert [row.reference for row in rows] == [False, False, True]
    assert len(leaderboard(found, {})) == 4
    assert len(leaderboard(found, dict.fromkeys(configs, {"seed": 0}))) == 4


def test_experiments_of_one_sweep_have_names_of_their_own():
    """What their runs' names have in common is the same; rows of one name would be one bar."""
    found = [evaluated(f"sweep-{n}/9", [float(n)]) for n in range(6)]
    found += [
        evaluated("sweep", [9.0]),
        evaluated("other-0/9", [7.0]),
        evaluated("other-1/9", [7.0]),
    ]
    configs = {f"sweep-{n}": {"lr": n % 2, "seed": n} for n in range(6)}
    configs |= {f"other-{n}": {"lr": 7, "seed": n} for n in range(2)}
    rows = {row.name: row.policies for row in leaderboard(found, configs)}
    assert rows == {
        "sweep": ["sweep"],
        "other": ["other-0/9", "other-1/9"],
        "sweep-0": ["sweep-0/9", "sweep-2/9", "sweep-4/9"],
        "sweep-1": ["sweep-1/9", "sweep-3/9", "sweep-5/9"],
    }


def test_the_newest_version_counts_or_the_best():
    found = [evaluated("a/1", [9.0], when=1.0), evaluated("a/2", [5.0], when=2.0)]
    assert leaderboard(found, {})[0].policies == ["a/2"]
    assert leaderboard(found[::-1], {}, pick="best")[0].policies == ["a/1"]


def test_references_are_those_of_d4rl():
    random, expert = reference_rows("Hopper-v5")
    assert (random.normalised("Hopper-v5"), expert.normalised("Hopper-v5")) == (0.0, 100.0)
    assert random.mean.low == random.mean.high and random.reference
    assert reference_rows("Toy-v0") == []


def test_the_probability_of_improvement_counts_all_pairs():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, 31).astype(float), rng.integers(1, 6, 17).astype(float)
    ours, others = leaderboard([evaluated("a/1", list(a)), evaluated("b/1", list(b))], {})
    if ours.name != "a/1":
        ours, others = others, ours
    pairs = [(x > y) + 0.5 * (x == y) for x, y in itertools.product(a, b)]
    found = improvement(ours, others)
    assert found.value == pytest.approx(np.mean(pairs))
    assert found.low < found.value < found.high
    assert found.value + improvement(others, ours).value == pytest.approx(1.0)
    with pytest.raises(ValueError, match="episodes of both"):
        improvement(ours, reference_rows("Hopper-v5")[0])


def in_env(env, policy, returns):
    return evaluated(policy, returns).model_copy(update={"env": env})


def test_an_experiment_in_several_environments_is_one_row():
    """Its runs learned from other data there. Two datasets of one environment are two rows."""
    found = [
        in_env("Hopper-v5", "bc-hop-0/9", [100.0]),
        in_env("Hopper-v5", "bc-hop-1/9", [300.0]),
        in_env("E-v0", "bc-e-0/9", [1.0]),
        in_env("Hopper-v5", "dpg-m/9", [900.0]),
        in_env("Hopper-v5", "dpg-x/9", [950.0]),
        in_env("E-v0", "random", [0.0]),
        in_env("Hopper-v5", "random", [2.0]),
        in_env("E-v0", "both/1", [3.0]),
        in_env("Hopper-v5", "both/2", [4.0]),
    ]
    configs = {
        "bc-hop-0": {"recipe": "bc", "dataset": "hop", "seed": 0},
        "bc-hop-1": {"recipe": "bc", "dataset": "hop", "seed": 1},
        "bc-e-0": {"recipe": "bc", "dataset": "e", "seed": 0},
        "dpg-m": {"recipe": "dpg", "dataset": "hop"},
        "dpg-x": {"recipe": "dpg", "dataset": "hop-expert"},
    }
    rows = {row.name: row for row in score_table(found, configs)}
    assert rows["bc"].cells["Hopper-v5"].policies == ["bc-hop-0/9", "bc-hop-1/9"]
    assert rows["bc"].cells["E-v0"].mean.value == 1.0
    assert rows["bc"].runs == ["bc-e-0", "bc-hop-0", "bc-hop-1"]
    assert {name for name in rows if name.startswith("dpg")} == {"dpg-m/9", "dpg-x/9"}
    assert set(rows["both"].cells) == {"E-v0", "Hopper-v5"}, "called after its run"
    assert rows["random"].reference and set(rows["random"].cells) == {"E-v0", "Hopper-v5"}
    expert = rows["D4RL's expert"].cells
    assert set(expert) == {"Hopper-v5"} and expert["Hopper-v5"].mean.value == 3234.3
    more = [*found, in_env("Walker2d-v5", "both/1", [1.0])]
    (expert,) = [row for row in score_table(more, configs) if row.name == "D4RL's expert"]
    assert set(expert.cells) == {"Hopper-v5", "Walker2d-v5"}, "one row"


def test_what_is_derived_from_the_data_does_not_part_a_recipe():
    """What somebody set does, and so does another configuration in the same environment."""

    def config(dataset, gamma, chosen="derived: rewards are sparse", **changed):
        losses = {"gamma": gamma} | changed
        origins = {"agent.losses.gamma": chosen, "dataset": "command line"}
        origins |= dict.fromkeys((f"agent.losses.{key}" for key in changed), "derived: as n_step")
        return {
            "recipe": "offline", "dataset": dataset, "agent": {"losses": losses},
            "origins": origins,
        }  # fmt: skip

    configs = {
        "a-0": config("a", 0.9),
        "b-0": config("b", 0.99, n_step=5),
        "c-0": config("c", 0.5, "command line"),
        "d-0": config("d", 0.5, "command line"),
        "d-1": config("d", 0.5, "command line", n_step=3),
    }
    found = [in_env(f"{run[0].upper()}-v0", f"{run}/1", [1.0]) for run in configs]
    rows = {row.name: sorted(row.cells) for row in score_table(found, configs)}
    assert rows == {
        "offline": ["A-v0", "B-v0"],
        "c-0/1": ["C-v0"],
        "d-0/1": ["D-v0"],
        "d-1/1": ["D-v0"],
    }


def test_rows_of_a_score_table_stand_by_their_rank_and_references_last():
    envs = ("E-v0", "Z-v0", "Y-v0")
    scores = {"good/1": (3, 30, None), "fair/1": (2, 20, 1), "bad/1": (1, 10, 0)}
    found = [
        in_env(env, policy, [float(value)])
        for policy, values in scores.items()
        for env, value in zip(envs, values, strict=True)
        if value is not None
    ]
    found += [in_env("E-v0", "random", [100.0]), in_env("E-v0", "scripted", [99.0])]
    names = [row.name for row in score_table(found, {})]
    assert names == ["good/1", "fair/1", "bad/1", "random", "scripted"]


def test_an_interval_is_put_on_d4rls_scale_with_its_statistic():
    found = Interval(value=3234.3, low=-20.272305, high=3234.3, n=4)
    scaled = normalised("Hopper-v5", found)
    assert (scaled.value, scaled.low, scaled.high, scaled.n) == (100.0, 0.0, 100.0, 4)
    assert normalised("E-v0", found) is None
