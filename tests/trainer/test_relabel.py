"""A relabeled episode is what the environment would have recorded, had it set those goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import Box, Discrete, EnvSpec, Trajectory
from trainer.data.relabel import Episode, Hindsight, Instructions, MazeRunnerGoals, make_relabelers
from trainer.data.snapshot import DataError

SLOTS, KINDS = 3, 4
"""Slots for goals; the cells 0 … KINDS-1 squared that a walk visits."""


@dataclass(frozen=True)
class Rule:
    """How an environment shows goals and when it ends; the marks of a relabeler."""

    completed: float
    steps_after: int

    def play(self, achieved: Sequence[Sequence[Sequence[int]]], plan: Sequence[Sequence[int]]):
        """Step by step: what is shown, paid, and where it ends, along what was achieved."""
        shown, paid, left, ends_at = [], [], len(plan), None
        slots = [[-1, -1]] * (SLOTS - len(plan)) + [list(goal) for goal in plan]
        shown.append([list(s) for s in slots])
        for here in achieved[1:]:
            hit = left > 0 and slots[SLOTS - left] in [list(goal) for goal in here]
            if hit:
                slots[SLOTS - left] = [self.completed] * 2
                left -= 1
            shown.append([list(s) for s in slots])
            paid.append(1.0 if hit else 0.0)
            if left == 0 and ends_at is None:
                ends_at = len(paid) + self.steps_after
            if ends_at == len(paid):
                break
        done = left == 0 and plan != ()
        return np.array(shown), np.array(paid, np.float32), bool(done)


MAZE, CRAFTER = Rule(-1.0, 0), Rule(-3.0, 2)
RULES = {"mazerunner": MAZE, "instructions": CRAFTER, "crafter": CRAFTER}


def spec_of(name: str) -> EnvSpec:
    """One achieved cell as in a maze, or sets of up to two, as floats."""
    dtype, shape = ("int16", (2,)) if name == "mazerunner" else ("float32", (2, 2))
    return EnvSpec.of(
        {
            "achieved": Box(shape, dtype, -9.0, 99.0),
            "goals": Box((SLOTS, 2), dtype, -9.0, 99.0),
            "state": Box((1,)),
        },
        Discrete(5),
        roles={"achieved": "relabel"},
        env="Goals-v0",
    )


def record(name: str, seed: int, steps: int, goals: int) -> Trajectory:
    """A random walk with random goals, as its environment would record it. Goals may be the start
    cell, and may come twice."""
    rng, rule, spec = np.random.default_rng([seed, steps]), RULES[name], spec_of(name)
    cells = np.clip(np.cumsum(rng.integers(-1, 2, (steps + 1, 2)), axis=0), 0, KINDS - 1)
    sets = [[cell.tolist()] for cell in cells]
    if name != "mazerunner":  # a set: nothing, one or two things
        extra = rng.integers(0, KINDS, (steps + 1, 2)).tolist()
        sets = [[*one, two][: int(rng.integers(3))] for one, two in zip(sets, extra, strict=True)]
    plan = [cells[0].tolist(), *rng.integers(0, KINDS, (goals, 2)).tolist()][seed % 2 :][:goals]
    shown, paid, done = rule.play(sets, plan)
    length = len(paid)
    padded = [(s + [[-1, -1]] * 2)[:2] if name != "mazerunner" else s[0] for s in sets]
    return Trajectory.from_arrays(
        obs={
            "achieved": np.array(padded[: length + 1]),
            "goals": shown,
            "state": np.arange(length + 1, dtype=np.float32)[:, None],
        },
        actions=rng.integers(0, 5, length),
        # Something else pays too, and must stay.
        rewards=paid + np.float32(0.25) * (np.arange(length) % 3 == 0),
        terminated=done,
        truncated=not done,
        spec=spec,
        env="Goals-v0",
        episode_id=f"e{seed}",
    )


def episode_of(t: Trajectory) -> Episode:
    arrays = {**t.obs, "action": t.actions["action"], "reward": t.rewards}
    for array in arrays.values():
        array.setflags(write=False)
    return Episode(
        obs=dict(t.obs),
        action=t.actions["action"],
        reward=t.rewards,
        terminated=t.terminated,
        truncated=t.truncated,
        final_obs_valid=t.final_obs_valid,
        first_step=t.metadata.first_step,
        id=t.id,
    )


def replayed(t: Trajectory, new: Episode, name: str) -> None:
    """Assert that `new` is what the environment records along t with new's goals."""
    sets = [
        [g for g in np.reshape(row, (-1, 2)).tolist() if g != [-1, -1]] for row in t.obs["achieved"]
    ]
    first = new.obs["goals"][0].tolist()
    shown, paid, done = RULES[name].play(sets, [g for g in first if g != [-1, -1]])
    n = len(new)
    assert np.array_equal(new.obs["goals"], shown[: n + 1]) and len(shown) == n + 1
    other = np.float32(0.25) * (np.arange(n) % 3 == 0)
    assert np.array_equal(new.reward, paid + other)
    assert (new.terminated, new.truncated) == (done, not done)
    for key in ("achieved", "state"):
        assert np.array_equal(new.obs[key], t.obs[key][: n + 1])
    assert np.array_equal(new.action, t.actions["action"][:n])


WALKS = {
    "seed": st.integers(0, 10**6),
    "steps": st.integers(1, 40),
    "goals": st.integers(1, SLOTS),
    "k": st.integers(0, 2**40),
}
FEW = settings(max_examples=80, deadline=None, derandomize=True)


@FEW
@given(**WALKS, name=st.sampled_from(sorted(RULES)))
@pytest.mark.parametrize("options", ["", "strategy=all", "distinct=false", "rarity=both"])
def test_a_relabeled_episode_is_one_that_the_environment_would_have_recorded(
    options, seed, steps, goals, k, name
):
    """Rewards, goals shown and the end; never empty; what was recorded is not edited."""
    t = record(name, seed, steps, goals)
    digest = t.digest
    (relabeler,) = make_relabelers([f"{name}:{options}"])
    new = relabeler.fit([episode_of(t)])(episode_of(t), np.random.default_rng(k))
    assert t.digest == digest
    assert 1 <= len(new) <= len(t)
    replayed(t, new, name)
    old_plan, new_plan = (x.obs["goals"][0].tolist() for x in (t, new))
    before, after = (int((x.obs["goals"][-1] != x.obs["goals"][0]).any(-1).sum()) for x in (t, new))
    assert after >= before + new.goals_replaced
    if not new.goals_replaced:
        assert new_plan == old_plan and len(new) == len(t)
    elif "false" not in options and len({*map(tuple, old_plan)}) == len(old_plan):
        plan = [tuple(g) for g in new_plan if g != [-1, -1]]
        assert len(set(plan)) == len(plan)
    if "all" in options and after < goals:  # nothing was left to choose
        seen = {tuple(g) for g in t.obs["achieved"][1:].reshape(-1, 2).tolist()} - {(-1, -1)}
        assert len(seen) < goals + (name != "mazerunner") * len(t)


@FEW
@given(
    **WALKS,
    strategy=st.sampled_from(["final", "future"]),
    terminates=st.booleans(),
)
def test_hindsight_swaps_one_goal_for_a_later_one(seed, steps, goals, k, strategy, terminates):
    """Every arrival pays, the start does not, and the first one ends the task where it should."""
    t = record("mazerunner", seed, steps, goals)
    rows = np.arange(len(t) + 1)[:, None]
    obs = {"achieved": t.obs["achieved"], "goal": np.tile(np.int16([9, 9]), (len(rows), 1))}
    episode = replace(episode_of(t), obs=obs, terminated=False, truncated=True)
    relabeler = Hindsight(
        strategy=strategy,
        terminates=terminates,
        probability=1.0,
        step_reward=-1.0,
        success_reward=0.0,
    )
    new = relabeler(episode, np.random.default_rng(k))
    goal = new.obs["goal"][0].tolist()
    assert (new.obs["goal"] == goal).all() and new.obs["goal"].dtype == np.int16
    arrivals = [x.tolist() == goal for x in t.obs["achieved"][1:]]
    assert any(arrivals)
    if strategy == "final":
        assert goal == t.obs["achieved"][-1].tolist()
    length = arrivals.index(True) + 1 if terminates else len(t)
    assert new.reward.tolist() == [0.0 if hit else -1.0 for hit in arrivals[:length]]
    assert (len(new), new.terminated, new.truncated) == (length, terminates, not terminates)
    assert (obs["goal"] == 9).all()


# ------------------------------------------------------------------------------------- the edges


def walk(cells: Sequence[Sequence[int]], plan: Sequence[Sequence[int]], **changes) -> Episode:
    """An episode of the maze's rule along these cells; it must not reach its last goal early."""
    sets = [[list(cell)] for cell in cells]
    shown, paid, done = MAZE.play(sets, plan)
    assert len(paid) == len(cells) - 1
    episode = Episode(
        obs={"goals": shown.astype(np.int16), "achieved": np.array(cells, np.int16)},
        action=np.zeros(len(paid), np.int64),
        reward=paid,
        terminated=done,
        truncated=not done,
    )
    return replace(episode, **changes)


FAR = (9, 9)


def test_a_new_goal_on_the_start_cell_counts_on_return_and_never_before():
    """The start achieves nothing: reward -1 would be the last step's, and no transition be left."""
    cells = [(1, 1), (1, 2), (1, 1), (1, 1)]
    seen = set()
    for seed in range(40):
        new = MazeRunnerGoals(strategy="all")(walk(cells, [FAR]), np.random.default_rng(seed))
        goal = tuple(new.obs["goals"][0, -1].tolist())
        length = {(1, 2): 1, (1, 1): 2}[goal]
        assert (len(new), new.reward.tolist()) == (length, [0.0] * (length - 1) + [1.0])
        assert new.terminated and not new.truncated
        seen.add(goal)
    assert len(seen) == 2


def test_only_staying_at_the_start_can_be_relabeled_too():
    """One transition is the least there is."""
    new = MazeRunnerGoals(strategy="all")(walk([(1, 1)] * 5, [FAR]), np.random.default_rng(0))
    assert (len(new), new.reward.tolist(), new.terminated) == (1, [1.0], True)


def test_new_goals_do_not_repeat_completed_ones_nor_stay_behind_them():
    """The missed goal (2, 2) was visited too early; chosen now, it does not come a second time."""
    cells = [(1, 1), (2, 2), (1, 1), (3, 3), (2, 3)]
    plans = set()
    for seed in range(60):
        old = walk(cells, [(3, 3), FAR, (2, 2)])
        new = MazeRunnerGoals()(old, np.random.default_rng(seed))
        plans.add(tuple(map(tuple, new.obs["goals"][0].tolist())))
    assert ((2, 2), (3, 3), FAR) in plans and ((3, 3), FAR, (2, 2)) in plans
    assert all(len(set(plan)) == 3 and (3, 3) in plan for plan in plans)


def test_completed_goals_keep_their_place_in_time():
    """Arrival at row t+1 is paid at t: an alternative between two completions goes between them."""
    cells = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
    old = walk(cells, [(0, 1), (0, 3), FAR])
    plans = set()
    for seed in range(40):
        new = MazeRunnerGoals(strategy="all")(old, np.random.default_rng(seed))
        plans.add(tuple(c for _, c in new.obs["goals"][0].tolist()))
    assert plans == {(1, 2, 3), (1, 3, 4)}


@pytest.mark.parametrize("changes", [{"first_step": 3}, {"final_obs_valid": False}])
@pytest.mark.parametrize("relabeler", [MazeRunnerGoals(strategy="all"), Hindsight(goal="goals")])
def test_what_is_not_a_whole_known_episode_stays(changes, relabeler):
    old = walk([(1, 1), (1, 2)], [FAR], **changes)
    assert all(relabeler(old, np.random.default_rng(s)) is old for s in range(5))


def test_what_is_not_a_number_becomes_no_goal():
    """It is never achieved again: else the task would end after its first step, unpaid."""
    cells = np.float32([[0, 0], [0, 1], [0, 2], [np.nan, 2]])
    goal = np.full((4, 2), 9, np.float32)
    old = replace(walk([(0, 0)] * 4, [FAR]), obs={"achieved": cells, "goal": goal})
    for seed in range(10):
        last = Hindsight(strategy="final", probability=1.0)(old, np.random.default_rng(seed))
        any_row = Hindsight(probability=1.0)(old, np.random.default_rng(seed))
        assert last is old
        assert any_row is old or any_row.reward.tolist()[-1] == 1.0


def test_an_episode_that_met_all_its_goals_stays():
    old = walk([(1, 1), (1, 2)], [(1, 2)])
    assert MazeRunnerGoals(strategy="all")(old, np.random.default_rng(0)) is old


def test_all_or_nothing_is_all_in_its_share_of_samples():
    relabeler = MazeRunnerGoals(strategy="all_or_nothing", probability=0.75)
    old = walk([(1, 1), (1, 2), (1, 3), (1, 4)], [FAR, (8, 8)])
    swapped = [relabeler(old, np.random.default_rng(s)).goals_replaced for s in range(400)]
    assert set(swapped) == {0, 2}
    assert np.mean(np.array(swapped) == 2) == pytest.approx(0.75, abs=0.06)


def test_a_hidden_plan_shows_the_active_goal_alone():
    """Also of episodes that are not relabeled: the agent must not see two forms."""
    old = walk([(1, 1), (1, 2), (1, 3)], [(1, 2), FAR])
    new = MazeRunnerGoals(strategy="none", hide_plan=True)(old, np.random.default_rng(0))
    none = [-1, -1]
    assert new.obs["goals"].tolist() == [[none, none, [1, 2]], *[[none, none, list(FAR)]] * 2]
    assert new.reward.tolist() == old.reward.tolist() and not new.terminated


def test_goals_that_the_rule_does_not_show_so_are_refused_by_name():
    """A wrong mark would else become wrong rewards without a word."""
    old = walk([(1, 1), (1, 2), (1, 3)], [(1, 2), FAR], id="tr-7")
    with pytest.raises(DataError, match=r"tr-7 shows .* in row 1 of 'goals'"):
        Instructions(strategy="some")(old, np.random.default_rng(0))


def test_rare_goals_are_preferred_and_counted_over_the_snapshot(monkeypatch):
    """(5, 5) is achieved once in 50 rows; uniform rows choose it as often as that."""
    common = [(1, 1 + i % 2) for i in range(49)]
    old = walk([*common, (5, 5)], [FAR])
    share = {}
    monkeypatch.setattr("trainer.data.relabel.rarity.CHANCES", (0.0, 0.3, 0.1, 0.6))
    for rarity in ("none", "rows", "episodes"):
        ready = MazeRunnerGoals(strategy="all", rarity=rarity).fit(
            [old, *[walk(common, [FAR])] * 9]
        )
        plans = [ready(old, np.random.default_rng(s)).obs["goals"][0, -1] for s in range(200)]
        share[rarity] = np.mean([plan.tolist() == [5, 5] for plan in plans])
    assert share["none"] < 0.1
    assert share["rows"] > 0.9 and share["episodes"] > 0.9
