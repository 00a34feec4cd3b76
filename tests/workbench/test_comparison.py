"""The numbers of a comparison, from runs and evaluations as the service returns them."""

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from stepwell.messages import Alarm, Evaluation, Run
from workbench.analysis import comparison
from workbench.analysis.comparison import Comparison, Row, curves, recipe_rows
from workbench.analysis.confidence_intervals import (
    bootstrap_grouped_iqm,
    bootstrap_grouped_mean,
    bootstrap_mean,
    bootstrap_mean_curve,
    iqm,
)
from workbench.analysis.published_scores import CORL, published_scores
from workbench.analysis.reference_scores import normalised_score, reference_family
from workbench.compare import main as compare
from workbench.compare.pictures import curves_svg, intervals_svg
from workbench.compare.schedule import Chain, Recipe, given_settings, seconds_left


def run(
    recipe: str, seed: int, status: str = "finished", rate: float = 50.0, error: str = ""
) -> Run:
    return Run(
        name=f"c-{recipe}-{seed}", kind="train", status=status, seed=seed, error=error,
        config={"recipe": recipe, "dataset": "d"}, latest={comparison.RATE: rate},
        created_at=0.0, heartbeat_at=0.0,
    )  # fmt: skip


def evaluation(policy: str, returns: list[float]) -> Evaluation:
    interval = bootstrap_mean(returns)
    return Evaluation(
        id=policy, policy=policy, env="Hopper-v5", seeds=list(range(len(returns))), returns=returns,
        mean=interval.value, iqm=iqm(returns), ci_low=interval.low, ci_high=interval.high,
        created_at=0.0,
    )  # fmt: skip


def scored(name: str, runs: list[Run], returns: dict[str, list[float]]) -> Comparison:
    found = {policy: evaluation(policy, values) for policy, values in returns.items()}
    return Comparison(name, "d", runs, found)


# --- the interval ---------------------------------------------------------------------------------


def test_the_interval_resamples_seeds_and_then_their_episodes():
    """Against a plain loop of the definition, with its own random numbers."""
    groups = [[0.0, 10.0, 20.0], [100.0, 130.0, 90.0], [50.0, 40.0, 60.0, 55.0]]
    rng = np.random.default_rng(7)
    means = []
    for _ in range(5_000):
        picked = [groups[i] for i in rng.integers(0, 3, 3)]
        means.append(np.mean([np.mean(rng.choice(group, len(group))) for group in picked]))
    low, high = np.quantile(means, [0.025, 0.975])
    found = bootstrap_grouped_mean(groups)
    assert found.value == pytest.approx(np.mean([np.mean(group) for group in groups]))
    assert found.low == pytest.approx(low, abs=3.0) and found.high == pytest.approx(high, abs=3.0)
    assert found.n == 10
    assert bootstrap_grouped_mean(groups) == found  # seeded


def test_seeds_that_differ_widen_the_interval_of_pooled_episodes():
    groups = [[v + shift for v in (0.0, 1.0, 2.0, 3.0)] for shift in (0.0, 50.0, 100.0)]
    pooled = bootstrap_mean(np.concatenate(groups))
    found = bootstrap_grouped_mean(groups)
    assert found.high - found.low > 1.3 * (pooled.high - pooled.low)


def test_one_seed_has_the_interval_of_its_episodes():
    values = [1.0, 5.0, 9.0, 2.0, 8.0]
    one, plain = bootstrap_grouped_mean([values]), bootstrap_mean(values)
    assert one.value == plain.value
    assert (one.low, one.high) == pytest.approx((plain.low, plain.high), abs=0.3)


def test_one_episode_has_no_interval_in_the_table(capsys: pytest.CaptureFixture[str]):
    for returns, shown in (([7.0], False), ([7.0, 7.0], True)):
        interval = bootstrap_grouped_mean([returns])
        compare.print_rows([Row("bc", 1, 7.0, 7.0, interval, interval, None, len(returns))], None)
        assert ("7 … 7" in capsys.readouterr().out) == shown


@pytest.mark.parametrize("groups", [[], [[]], [[1.0], []]])
def test_a_mean_of_nothing_is_an_error(groups):
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_grouped_mean(groups)


# --- the table ------------------------------------------------------------------------------------


def test_a_row_is_the_last_policy_of_every_seed():
    """Versions are numbers: 1000 comes after 200. Earlier policies are in the curves only."""
    rng = np.random.default_rng(0)
    last = {seed: rng.normal(size=4).tolist() for seed in (0, 1)}
    returns = {f"c-bc-{seed}/1000": values for seed, values in last.items()}
    returns |= {f"c-bc-{seed}/200": [-99.0] * 4 for seed in (0, 1)}
    found = scored("c", [run("bc", 0, rate=100.0), run("bc", 1, rate=50.0)], returns)
    (row,) = recipe_rows(found)
    assert (row.recipe, row.seeds, row.episodes, row.updates) == ("bc", 2, 8, 1000)
    assert row.mean == pytest.approx(np.mean([np.mean(v) for v in last.values()]))
    assert row.iqm == pytest.approx(iqm(last[0] + last[1]))
    assert row.by_seed == {seed: pytest.approx(np.mean(v)) for seed, v in last.items()}
    assert row.interval == bootstrap_grouped_mean(list(last.values()))
    assert row.iqm_interval == bootstrap_grouped_iqm(list(last.values()))
    assert row.seconds == pytest.approx((1000 / 100 + 1000 / 50) / 2)
    assert row.normalised == pytest.approx(normalised_score("Hopper-v5", row.mean))
    points = {(p.recipe, p.updates): p for p in curves(found)}
    assert points["bc", 200].interval.value == -99.0 and points["bc", 200].seeds == 2
    assert points["bc", 1000].interval == row.interval


def test_the_interval_of_an_iqm_covers_it_and_ignores_outliers():
    """Its width is that of the seeds' difference; one wild episode in each seed changes little."""
    rng = np.random.default_rng(0)
    groups = [rng.normal(center, 0.1, 40) for center in (0.0, 1.0, 2.0)]
    found = bootstrap_grouped_iqm(groups)
    assert found == bootstrap_grouped_iqm(groups) and found.n == 120
    assert found.value == pytest.approx(iqm(np.concatenate(groups)))
    assert found.low < found.value < found.high and 0.5 < found.high - found.low < 2.1
    wild = [np.append(group, -1e6) for group in groups]
    assert bootstrap_grouped_iqm(wild).low == pytest.approx(found.low, abs=0.2)
    alone = bootstrap_grouped_iqm([[3.0]])
    assert (alone.value, alone.low, alone.high) == (3.0, 3.0, 3.0)
    for empty in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="at least one"):
            bootstrap_grouped_iqm(empty)


def test_the_interval_of_an_iqm_is_that_of_plain_resampling():
    """Groups of unequal sizes, drawn one resample after another."""
    rng = np.random.default_rng(1)
    groups = [rng.normal(center, 1.0, 3 + 2 * center) for center in range(7)]
    plain = []
    for _ in range(500):
        drawn = [groups[i] for i in rng.integers(0, 7, 7)]
        plain.append(iqm(np.concatenate([g[rng.integers(0, g.size, g.size)] for g in drawn])))
    low, high = np.quantile(plain, [0.025, 0.975])
    found = bootstrap_grouped_iqm(groups)
    # 3.2 wide; five repetitions of either were within 0.2.
    assert (found.low, found.high) == (pytest.approx(low, abs=0.5), pytest.approx(high, abs=0.5))


def test_what_failed_is_named_and_is_not_in_the_numbers():
    runs = [
        run("bc", 0),
        run("bc", 1, "failed", error="NaN"),
        run("bc", 2),
        run("awac", 0, "running"),
    ]
    returns = {"c-bc-0/5": [1.0, 3.0], "c-bc-1/5": [99.0, 99.0], "random": [0.0, 1.0]}
    runs[0].alarms = [Alarm(key="td_error", message="…", update=3, value=1.0)]
    bc, awac, random = recipe_rows(scored("c", runs, returns), {"c-awac-0": "killed by SIGKILL"})
    assert (bc.seeds, bc.mean) == (1, 2.0)
    assert bc.alarms == ["seed 0: td_error"]
    assert bc.problems == ["seed 1: failed: NaN", "seed 2: not evaluated"]
    assert awac.mean is None and awac.problems == ["seed 0: killed by SIGKILL"]
    assert random.recipe == "random" and random.mean == 0.5 and not random.problems


def test_a_dataset_s_own_reference_comes_before_the_environment_s():
    comparison = scored("c", [], {"random": [1.0, 2.0]})
    assert comparison.reference == "Hopper-v5"
    maze = Comparison("c", "maze2d-medium-v1", [], comparison.evaluations)
    assert maze.reference == "maze2d-medium-v1"
    assert Comparison("c", "mine", [], {}).reference is None


def test_published_scores_are_those_of_exact_names():
    assert published_scores("hopper-medium-replay-v2")["IQL"] == 97.43
    assert published_scores("halfcheetah-medium-expert-v2")["DT"] == 91.55
    assert published_scores("pen-cloned-v1")["TD3+BC"] == 5.1
    for name in ("hopper", "Hopper-v5", "hopper-medium-v1", "dataset", ""):
        assert published_scores(name) == {}
    names = [line.split()[0] for line in CORL.strip().splitlines()[1:]]
    assert len(names) == len(set(names)) == 30
    assert all(reference_family(name) for name in names)
    locomotion = [published_scores(name) for name in names[:9]]
    averages = {key: np.mean([scores[key] for scores in locomotion]) for key in locomotion[0]}
    assert averages["IQL"] == pytest.approx(81.63, abs=0.01)  # CORL's own average
    assert averages["ReBRAC"] == pytest.approx(89.74, abs=0.01)


# --- progress and settings ------------------------------------------------------------------------


def chains() -> list[Chain]:
    fast, slow = (Recipe(name, [], 1000, 250, {}) for name in ("fast", "slow"))
    return [
        Chain(fast, 0, "c-fast-0", trained=1000, rate=100.0, done=True),
        Chain(fast, 1, "c-fast-1", trained=500, rate=100.0),
        Chain(slow, 0, "c-slow-0"),
    ]


def test_the_time_left_counts_updates_and_evaluations_over_all_jobs():
    # 500 updates of the fast one and 1000 of one whose rate is not known, at 0.01 s each.
    assert seconds_left(chains(), 1) == pytest.approx(15.0)
    assert seconds_left(chains(), 2) == pytest.approx(7.5)
    assert seconds_left(chains(), 8) == pytest.approx(7.5)  # two are open
    assert seconds_left(chains(), 1, evaluation=3.0) == pytest.approx(15.0 + 2 * 3.0)
    assert seconds_left(chains(), 1, 3.0, every_policy=True) == pytest.approx(15.0 + 2 * 4 * 3.0)
    assert seconds_left(chains()[2:], 1) is None


def test_before_a_recipe_is_seen_its_typical_time_counts():
    some = chains()
    fast, slow = some[0].recipe, some[2].recipe
    slow.typical_rate = 20.0
    assert seconds_left(some[2:], 1) == pytest.approx(50.0)
    assert seconds_left(some, 1) == pytest.approx(5.0 + 50.0)
    fast.typical_rate = 200.0  # this machine takes twice the time
    assert seconds_left(some, 1) == pytest.approx(5.0 + 100.0)


def test_settings_given_for_a_run_are_told_from_a_recipe_s():
    config = {"updates": 5, "seed": 3, "agent": {"losses": {"gamma": 0.9, "tau": 0.1}}}
    origins = {
        "updates": "command line",
        "seed": "command line",
        "agent.losses.gamma": "file x.toml",
        "agent.losses.tau": "recipe bc",
    }
    assert given_settings(config, origins) == {"updates": 5, "agent.losses.gamma": 0.9}


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0-2", [0, 1, 2]), ("3", [3]), ("0,3,7", [0, 3, 7]), ("0-1,1-2", [0, 1, 2])],
)
def test_seeds_are_numbers_and_ranges(text, seeds):
    assert compare.seeds_of(text) == seeds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "2-0"], "--seeds"),
        (["--seeds", "a"], "--seeds"),
        (["--seeds", "0-3,0-100000000"], "at most 1000 training seeds"),
        (["--recipes", ","], "--recipes"),
        (["--name", "a/b"], "--name"),
        (["--jobs", "0"], "--jobs"),
        (["--config", "nowhere.toml"], "no such file"),
        (["--set", "iql.updates=3"], "--set: expected RECIPE.KEY=VALUE of offline, bc, bc10"),
        (["--set", "bc.updates"], "--set"),
        (["--set", "bc.seed=3"], "run, seed, dataset, tags, output of its runs"),
        (["--set", "bc.dataset=other"], "run, seed, dataset, tags, output of its runs"),
        (["--first-seed", "-1"], "--first-seed: expected at least 0, got -1"),
    ],
)
def test_a_wrong_command_line_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        compare.main(["data", "--env", "E", *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


# --- pictures -------------------------------------------------------------------------------------


def test_pictures_show_every_recipe_at_its_place():
    returns = {f"c-a&b-0/{v}": [v / 10.0, v / 5.0] for v in (10, 20)} | {"c-bc-0/20": [1.0, 2.0]}
    found = scored("c", [run("a&b", 0), run("bc", 0)], returns | {"random": [0.0, 0.5]})
    rows = [*recipe_rows(found), Row("data", mean=1.0)]
    svg = "{http://www.w3.org/2000/svg}"
    drawn = ET.fromstring(intervals_svg(rows, "d in <E>"))
    texts = [element.text for element in drawn.iter(f"{svg}text")]
    assert {"a&b (1)", "bc (1)", "data", "random", "d in <E>"} <= set(texts)
    better, worse = (float(dot.get("cx", "")) for dot in drawn.iter(f"{svg}circle"))
    assert better > worse  # 3.0 is to the right of 1.5
    curve = ET.fromstring(curves_svg(curves(found), rows, "d"))
    assert len(list(curve.iter(f"{svg}polyline"))) == 2
    first, last = [c for c in curve.iter(f"{svg}circle")][:2]
    assert float(first.get("cx", "")) < float(last.get("cx", ""))
    assert float(first.get("cy", "")) > float(last.get("cy", ""))  # it rises


def test_a_picture_of_nothing_is_a_picture():
    ET.fromstring(intervals_svg([Row("bc", problems=["seed 0: failed"])], "d"))
    ET.fromstring(curves_svg([], [], "d"))


def test_the_documented_query_is_the_one_that_the_dashboard_shows():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "sql.md").read_text()
    assert comparison.TABLE_SQL.replace("NAME", "compare-hopper", 1) in text


def test_the_interval_of_a_mean_curve_is_over_whole_curves() -> None:
    curves = np.array(
        [[0.0, 1.0, 5.0, np.nan], [2.0, 3.0, np.nan, np.nan], [4.0, 5.0, 7.0, np.nan]]
    )
    mean, low, high = bootstrap_mean_curve(curves)
    assert mean[:3] == pytest.approx([2.0, 3.0, 6.0])
    # The same seeds are drawn at each point, so two points that differ by 1 do so in all three.
    assert (low[1], high[1]) == pytest.approx((low[0] + 1, high[0] + 1))
    assert low[0] < mean[0] < high[0] and low[2] >= 5.0 and high[2] <= 7.0
    assert np.isnan([mean[3], low[3], high[3]]).all()
    again = bootstrap_mean_curve(curves)
    assert np.array_equal(again[1], low, equal_nan=True)
    one = bootstrap_mean_curve(curves[:1])
    assert one[0][:3] == pytest.approx([0, 1, 5]) and np.array_equal(one[1][:3], one[2][:3])
    alone = bootstrap_mean(curves[:, 0])
    assert (low[0], high[0]) == pytest.approx((alone.low, alone.high), abs=0.3)
