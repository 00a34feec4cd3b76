"""Settings derived from a dataset: the rule, its limits, and what overrides it."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch

from amago_model.agent import make_agent
from amago_model.config import BinaryFilterConfig, TransformerConfig
from collector.builtin.generate import Behaviour, generate
from collector.builtin.generate_cartpole import CartPolePositionNoisy
from collector.builtin.generate_random import GridworldRandom, RecallRandom
from collector.builtin.generate_tmaze import TMazePassiveCoin
from stepwell import Box, Discrete, EnvSpec, MultiDiscrete
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from trainer.config import TrainConfig
from trainer.data.snapshot import best_condition, sql_condition
from trainer.derive import dataset_profile
from trainer.derive.dataset_profile import DatasetProfile, read_profile, summarise
from trainer.derive.derived import Derived, apply_settings
from trainer.derive.rewards import SCALE
from trainer.derive.rules import derive_settings
from trainer.errors import SettingError
from trainer.main import main
from trainer.options import resolve
from trainer.recipes import RECIPES, own_settings, recipe
from trainer.recommend import main as recommend
from workbench.commands.imports import main as import_file

OFFLINE = recipe("offline").replace(dataset="made")
TINY = [
    *("--agent.timestep_encoder.d_hidden", "16", "--agent.timestep_encoder.d_output", "16"),
    *("--agent.trajectory_encoder.d_model", "16", "--agent.actor.d_hidden", "16"),
    *("--agent.critic.d_hidden", "16", "--data.batch", "8", "--device", "cpu"),
]
CONTINUOUS = EnvSpec.of(Box((3,)), Box((2,), low=-1.0, high=1.0), env="Made-v0")
DISCRETE = EnvSpec.of(Box((3,)), Discrete(2), env="Made-v0")


def make_profile(
    rewards: list[list[float]], terminated: bool = True, spec: EnvSpec = CONTINUOUS, **changes
) -> DatasetProfile:
    """The profile of trajectories with these rewards."""
    length = np.array([len(r) for r in rewards], dtype=np.float64)
    returns = np.array([sum(r) for r in rewards])
    reward = np.concatenate([np.array(r, dtype=np.float64) for r in rewards])
    profile = summarise(
        "made",
        spec,
        partially_observable=False,
        length=length,
        returns=returns,
        terminated=(ends := np.full(len(rewards), float(terminated))),
        best_tenth=-(-len(rewards) // 10),
        reward=reward,
        sampled_length=length,
        sampled_terminated=ends,
    )
    return dataclasses.replace(profile, **changes)


def derived(profile: DatasetProfile, **changes) -> dict[str, object]:
    config = OFFLINE.replace(**changes)
    return {d.key: d.value for d in derive_settings(profile, config)}


DENSE = [[float((i + t // 10) % 7) for t in range(100)] for i in range(60)]
WHOLE = [[float(i % 7)] * 100 for i in range(60)]
SPARSE = [[0.0] * 29 + [float(i % 7 == 0)] for i in range(60)]


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e4])
def test_the_scale_of_rewards_does_not_matter(factor: float) -> None:
    """Multiplied returns, their bounds and the discount are the same for any unit of reward."""
    found = derived(make_profile([[factor * x for x in r] for r in DENSE]))
    plain = derived(make_profile(DENSE))
    assert found["agent.losses.gamma"] == plain["agent.losses.gamma"] == 0.98
    for key in ("target_low", "target_high"):
        multiplied = found[f"agent.losses.{key}"] * found["agent.losses.reward_multiplier"]
        expected = plain[f"agent.losses.{key}"] * plain["agent.losses.reward_multiplier"]
        assert multiplied == pytest.approx(expected, rel=0.05, abs=0.05 * SCALE)
    returns = make_profile(DENSE).discounted(0.98)
    spread = returns.spread * plain["agent.losses.reward_multiplier"]
    assert SCALE / 2 <= spread <= SCALE * 2


def test_sparse_rewards_get_bounds_long_horizons_and_multi_step_returns() -> None:
    found = derived(make_profile(SPARSE, spec=DISCRETE))
    assert found["agent.losses.gamma"] == pytest.approx(1 - 1 / 30, abs=1e-3)
    assert found["agent.losses.n_step"] == 5 and found["data.window"] == 8
    assert (found["agent.losses.target_low"], found["agent.losses.target_high"]) == (-0.1, 1.1)
    assert derived(make_profile(DENSE, spec=DISCRETE))["agent.losses.n_step"] == 1
    assert derived(make_profile(SPARSE))["agent.losses.n_step"] == 10
    assert derived(make_profile(DENSE))["agent.losses.n_step"] == 1


def test_a_memory_of_dense_rewards_sees_differences_of_numbers() -> None:
    key = "agent.timestep_encoder.differences"
    assert derived(make_profile(DENSE), memory="gru")[key] is True
    of_bc = derive_settings(make_profile(DENSE), recipe("bc").replace(memory="gru", dataset="m"))
    assert key in {d.key for d in of_bc}
    states = EnvSpec.of(Discrete(5), Discrete(2), env="Made-v0")
    for without in (
        derived(make_profile(DENSE)),
        derived(make_profile(SPARSE), memory="transformer"),
        derived(make_profile(DENSE, spec=states), memory="gru"),
    ):
        assert key not in without


def test_rare_rewards_that_are_partly_luck_get_one_step_targets() -> None:
    """Not with memory, where what looks random may be hidden, nor where rewards are dense."""
    lucky = make_profile(SPARSE, spec=DISCRETE, random_outcomes=0.3)
    found = derived(lucky)
    assert (found["agent.losses.n_step"], found["data.window"]) == (1, 4)
    assert (found["agent.losses.tau"], found["optimizer.grad_clip"]) == (0.05, 10.0)
    for other in (
        derived(dataclasses.replace(lucky, random_outcomes=0.05)),
        derived(lucky, memory="transformer"),
        derived(make_profile(DENSE, spec=DISCRETE, random_outcomes=0.3)),
    ):
        assert not {"agent.losses.tau", "optimizer.grad_clip"} & other.keys()
    assert derived(lucky, memory="transformer")["agent.losses.n_step"] == 5
    given = derived_with(lucky, "--agent.losses.n-step=3")
    assert not {"agent.losses.tau", "optimizer.grad_clip"} & given.keys(), "they are for one step"


def test_random_outcomes_are_counted_where_states_occur_again(service) -> None:
    """On ice, two of three steps go elsewhere; without it, none does. Of vectors nothing is known,
    and a truncated trajectory's last outcome, here with the only reward, does not count."""
    rng = np.random.default_rng(0)

    def walk(kind: str) -> Trajectory:
        at, states, actions = 4, [4], []
        for _ in range(20):
            actions.append(int(rng.integers(2)))
            slip = int(rng.integers(3)) if kind in ("ice", "dense", "large") else 0
            at = (at + (1 if actions[-1] else -1) * (1, 2, 3)[slip]) % 10
            states.append(at)
        obs = np.array(states)
        if kind == "large":
            obs = np.tile(obs[:, None], 101).astype(np.float32)
        if kind == "vectors":
            obs = np.stack([states, rng.normal(size=21)], 1).astype(np.float32)
        if kind == "cut":
            obs[-1] = obs[-2]
        rewards = np.zeros(20, np.float32)
        rewards[-1] = 1.0
        return Trajectory(
            obs={"observation": obs},
            actions={"action": np.array(actions)},
            rewards=rewards if kind != "dense" else np.arange(20, dtype=np.float32),
            truncated=True,
            final_obs_valid=kind != "cut",
        )

    found = {}
    with service.client() as client:
        for kind in ("ice", "none", "vectors", "cut", "dense", "large"):
            states = {"vectors": Box((2,)), "large": Box((101,))}.get(kind, Discrete(10))
            client.create_dataset(f"walk-{kind}", EnvSpec.of(states, Discrete(2), env="Walk-v0"))
            client.post(f"walk-{kind}", [walk(kind) for _ in range(50)], wait_sealed=True)
            config = OFFLINE.replace(dataset=f"walk-{kind}")
            found[kind] = read_profile(client, config).random_outcomes
    assert found["ice"] == pytest.approx(2 / 3, abs=0.1)
    assert {share for kind, share in found.items() if kind != "ice"} == {0.0}


def test_observations_in_small_units_or_far_from_0_are_seen() -> None:
    """For baselines too, unless a flag says otherwise; usual ones keep the defaults."""
    prefix = "agent.timestep_encoder.input_norm."
    small = make_profile(DENSE, smallest_std=3e-5)
    expected = {f"{prefix}min_std": 3e-6, f"{prefix}init_nu": 0.0}
    assert expected.items() <= derived(small).items()
    far = derived(make_profile(DENSE, smallest_std=0.5, farthest=1e3))
    assert far[f"{prefix}init_nu"] == 0.0 and f"{prefix}min_std" not in far
    of_bc = derive_settings(small, recipe("bc").replace(dataset="made"))
    assert expected.items() <= {d.key: d.value for d in of_bc}.items()
    for other in (
        derived(make_profile(DENSE, smallest_std=0.02, farthest=90.0)),
        derived(make_profile(DENSE)),
        derived_with(small, "--agent.timestep_encoder.no-input-norm"),
    ):
        assert not any(key.startswith(prefix) for key in other)


def test_rare_extreme_values_are_compressed() -> None:
    """For baselines too. Not beside a number far from 0, whose changes that would hide."""
    key = "agent.timestep_encoder.symlog"
    heavy = make_profile(DENSE, heaviest_tail=6.0)
    assert derived(heavy)[key] is True
    of_bc = derive_settings(heavy, recipe("bc").replace(dataset="made"))
    assert {d.key: d.value for d in of_bc}[key] is True
    for other in (
        make_profile(DENSE, heaviest_tail=4.0),
        dataclasses.replace(heavy, farthest=1e3),
    ):
        assert key not in derived(other)


def test_the_smallest_deviation_is_of_numbers_that_change_often(service, monkeypatch) -> None:
    """Not of categories, of what is nearly always the same, nor of a constant; a number without
    axes counts, and any name of an observation is a column."""
    rng = np.random.default_rng(0)
    rare = np.zeros(101)
    rare[::25] = 1e-4
    spaces = {
        "half/gear": Box((3,)),
        "current": Box(()),
        "kind": Discrete(3),
        "image": Box((2, 2), low=0, high=255, dtype="uint8"),
    }
    steps = np.stack([rng.normal(0.0, 0.5, 101), np.full(101, 7.0), rare], 1)

    def found(current: float, sentinel: float | None = None) -> DatasetProfile:
        name = f"deviations-{uuid.uuid4().hex[:8]}"
        trajectory = Trajectory(
            obs={
                "half/gear": steps.astype(np.float32),
                "current": np.where(
                    np.arange(101) == (-1 if sentinel is None else 40),
                    np.float32(sentinel or 0.0),
                    rng.normal(5.0, current, 101).astype(np.float32),
                ),
                "kind": rng.integers(3, size=101),
                "image": rng.integers(2, size=(101, 2, 2)).astype(np.uint8),
            },
            actions={"action": rng.integers(2, size=100)},
            rewards=np.arange(100, dtype=np.float32),
            terminated=True,
        )
        client.create_dataset(name, EnvSpec.of(spaces, Discrete(2), env="Units-v0"))
        client.post(name, [trajectory], wait_sealed=True)
        return read_profile(client, OFFLINE.replace(dataset=name))

    with service.client() as client:
        small = found(1e-3)
        assert small.smallest_std == pytest.approx(1e-3, rel=0.3)
        assert small.farthest == pytest.approx(5.0 / 1e-3, rel=0.3)
        usual = found(3.0)
        assert usual.smallest_std == pytest.approx(0.5, rel=0.3)
        assert usual.farthest == pytest.approx(5.0 / 3.0, rel=0.5)
        assert 0.2 < usual.heaviest_tail < 0.5
        extreme = found(3.0, sentinel=-1e6)
        assert extreme.heaviest_tail == pytest.approx(1e5 / 9.9, rel=0.5)
        assert extreme.smallest_std == pytest.approx(0.5, rel=0.3)
        monkeypatch.setattr(dataset_profile, "OBSERVED_STEPS", 50)  # every second step
        assert found(1e-3).smallest_std == pytest.approx(1e-3, rel=0.4)


def test_a_success_beside_a_cost_of_each_step_is_sparse() -> None:
    """As if there were no cost. A crash, a dense reward or a trajectory in another unit is not."""
    rng = np.random.default_rng(0)
    cost = -rng.uniform(0, 0.1, (60, 200))
    success, crash = cost.copy(), cost.copy()
    success[::2, -1], crash[::2, -1] = 100.0, -100.0
    unit = cost.copy()
    unit[7] *= -1e4
    profile = make_profile(success.tolist())
    assert profile.sparse and profile.informative == pytest.approx(1 / 400)
    assert derived(profile)["agent.losses.n_step"] == 10
    for other in (cost, crash, unit):
        assert not make_profile(other.tolist()).sparse


@pytest.mark.parametrize("name", ["offline", "iql", "td3bc"])
def test_values_begin_at_the_returns_of_the_data(name: str) -> None:
    """All values of an untrained agent are near the mean of the returns. With the settings of
    before they differed from it by a standard deviation and more."""
    profile = make_profile([[100.0 + i] * 100 for i in range(60)])
    derived = derive_settings(profile, recipe(name))
    config, _ = apply_settings(recipe(name), {}, own_settings(name), derived)
    returns = profile.discounted(config.agent.losses.gamma)
    torch.manual_seed(0)
    critics = make_agent(config.agent, profile.spaces).requires_grad_(False).critics
    state, action = torch.randn(500, critics.online.d_state), torch.rand(1, 500, 1, 2) * 2 - 1
    outputs = [critics.online.values(critics.online.project_state(state), action)]
    if name == "iql":
        outputs.append(critics.value(state))
    for x in outputs:
        values = critics.popart.to_return(x) / config.agent.losses.reward_multiplier
        error = (values - returns.mean).abs().max() / returns.variance**0.5
        assert float(error) < 0.5  # networks of usual size: 1.3 to 2.2


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_returns_of_any_size_make_an_agent(factor: float) -> None:
    """A baseline does not multiply rewards, and float32 has no square of such returns."""
    profile = make_profile([[factor * x for x in r] for r in DENSE])
    for name in ("offline", "iql"):
        settings = derive_settings(profile, recipe(name))
        config, _ = apply_settings(recipe(name), {}, own_settings(name), settings)
        make_agent(config.agent, profile.spaces)


@pytest.mark.parametrize(
    ("length", "final", "said"),
    [
        (5, 2.0, "at least 10 and at most 100 steps, is the horizon; long episodes have 5 steps"),
        (500, 2.0, "at least 10 and at most 100 steps, is the horizon; long episodes have 500"),
        (1000, 0.0, "at least 20 and at most 200 steps; long episodes have 1,000 steps"),
    ],
)
def test_the_reason_of_a_discount_names_its_limits(length: int, final: float, said: str) -> None:
    rewards = [[final * (t % 3) for t in range(length - 1)] + [float(i)] for i in range(60)]
    found = {d.key: d for d in derive_settings(make_profile(rewards), OFFLINE)}
    assert said in found["agent.losses.gamma"].reason


def test_what_a_flag_sets_is_the_basis_of_what_depends_on_it() -> None:
    flags = ["--agent.losses.gamma", "0.5", "--agent.losses.reward_multiplier", "3"]
    resolved = resolve(["offline", "--dataset=made", *flags])
    profile = make_profile(DENSE)
    settings = derive_settings(profile, resolved.config, resolved.origins)
    found = {d.key: d.value for d in settings}
    returns = profile.discounted(0.5)
    margin = 0.1 * (returns.high - returns.low)
    assert found["agent.losses.target_high"] == pytest.approx(returns.high + margin, rel=0.05)
    assert found["agent.critic.popart.init_mean"] == pytest.approx(3 * returns.mean, rel=0.01)
    assert found["agent.critic.popart.init_nu"] == pytest.approx(9 * returns.variance, rel=0.01)


def derived_with(profile: DatasetProfile, *flags: str) -> dict[str, Derived]:
    """By key, what the recipe offline derives beside these flags."""
    resolved = resolve(["offline", "--dataset=made", *flags])
    own = own_settings("offline")
    found = derive_settings(profile, resolved.config, resolved.origins, own)
    _, used = apply_settings(resolved.config, resolved.origins, own, found)
    return {d.key: d for d in used}


def test_a_kind_of_memory_by_flag_gets_what_a_memory_needs() -> None:
    tagged = make_profile(DENSE, partially_observable=True)
    with_memory = derived_with(make_profile(DENSE), "--agent.trajectory_encoder.kind=transformer")
    assert with_memory["data.window"].value == 100
    assert not with_memory["agent.timestep_encoder.hide_previous"].value
    assert with_memory["agent.trajectory_encoder.context"].value == 101
    without = derived_with(tagged, "--agent.trajectory_encoder.kind=feed_forward")
    assert without["data.window"].value == 4
    assert without["agent.timestep_encoder.hide_previous"].value


@pytest.mark.parametrize(
    ("memory", "kind"), [("transformer", "gru"), ("none", "gru"), ("gru", "feed_forward")]
)
def test_memory_and_a_kind_that_contradict_each_other_are_refused(memory: str, kind: str) -> None:
    flags = [f"--memory={memory}", f"--agent.trajectory_encoder.kind={kind}"]
    with pytest.raises(SettingError, match=f"memory={memory} and .*kind={kind} contradict"):
        derived_with(make_profile(DENSE), *flags)
    derived_with(make_profile(DENSE), "--memory=gru", "--agent.trajectory_encoder.kind=gru")
    derived_with(make_profile(DENSE), "--memory=none", "--agent.trajectory_encoder.kind=identity")


def test_windows_batches_and_lengths_follow_each_other_and_their_reasons_are_true() -> None:
    assert derived_with(make_profile(DENSE), "--agent.losses.n_step=10")["data.window"].value == 16
    wide = derived_with(make_profile(DENSE, steps=100_000), "--data.window=64")
    assert wide["data.batch"].value == 8 and "512 transitions" in wide["data.batch"].reason
    assert wide["updates"].value == 3000
    assert "each sampled about 15.4 times" in wide["updates"].reason
    short = derived_with(make_profile(SPARSE), "--data.window=2")
    assert short["agent.losses.filter.n_step"].value == 2
    assert derived_with(make_profile(DENSE), "--updates=50")["schedule.publish_every"].value == 10
    sparse = make_profile(SPARSE, steps=60_000)
    assert "each sampled about 34.1 times" in derived_with(sparse)["updates"].reason


def test_many_short_episodes_do_not_hide_the_long_ones() -> None:
    """Most steps are in the long ones, and batches are drawn by steps."""
    rng = np.random.default_rng(0)
    lengths = [*[2] * 600, *[400] * 25]
    found = derived(make_profile([rng.normal(size=n).tolist() for n in lengths]))
    assert found["agent.losses.gamma"] == 0.99 and found["data.window"] == 4
    one_long = make_profile([[-1e-3]] * 300 + [[-1.0] * 5000])
    found = derived(one_long)
    assert found["agent.losses.gamma"] >= 0.99
    assert found["agent.losses.dpg_weight"] > 0.0, "not all trajectories are alike"


def test_what_hardly_any_trajectories_share_is_not_compared() -> None:
    """One block of ten steps, in one trajectory, is equal to itself."""
    short = [[float(x) for x in np.random.default_rng(i).permutation(6)] for i in range(99)]
    for also in ([], [[1.0] * 10 + [5.0 / 2] * 2]):
        assert make_profile([*short, *also]).difference == np.inf


def test_what_is_embedded_or_hidden_from_the_policy_makes_no_wide_network() -> None:
    spec = EnvSpec.of(Discrete(500), Discrete(6), env="Made-v0")
    assert make_profile(DENSE, spec=spec).observation_width == 32


@pytest.mark.parametrize(
    ("returns", "best"),
    [
        (list(range(100)), 10),
        ([0] * 92 + [1] * 8, 8),  # rare successes, not all ties of the 90th percentile
        ([0] * 40 + [1] * 60, 60),
        ([1] * 100, 100),
        ([-300] * 5 + [0] * 90 + [1] * 5, 5),
    ],
)
def test_the_best_tenth_are_the_best_where_many_returns_are_equal(returns, best) -> None:
    with duckdb.connect() as db:
        db.execute('create table trajectories (dataset text, purpose text, "return" double)')
        rows = [("made", "train", float(x)) for x in returns]
        db.executemany("insert into trajectories values (?, ?, ?)", rows)
        bc10 = recipe("bc10").where.replace("{dataset}", "made")
        for condition in (best_condition("dataset = 'made'", 0.1), bc10):
            found = db.execute(f"select count(*) from trajectories where {condition}").fetchone()
            assert found == (best,)


@pytest.mark.parametrize("flag", ["kind=binary", "threshold=0"])
def test_discrete_actions_get_a_soft_filter_unless_a_flag_chooses_another(flag: str) -> None:
    keys = {"agent.losses.filter.kind", "agent.losses.filter.beta"}
    assert not keys & derived(make_profile(DENSE)).keys()
    found = derived(make_profile(DENSE, spec=DISCRETE))
    assert [found[key] for key in sorted(keys)] == [3.0, "exp"]
    assert "agent.losses.filter.batch_norm" not in found
    resolved = resolve(["offline", "--dataset=made", f"--agent.losses.filter.{flag}"])
    profile = make_profile(DENSE, spec=DISCRETE)
    settings = derive_settings(profile, resolved.config, resolved.origins)
    config, used = apply_settings(
        resolved.config, resolved.origins, own_settings("offline"), settings
    )
    assert config.agent.losses.filter == BinaryFilterConfig() and not keys & {d.key for d in used}


def test_consistent_trajectories_are_imitated_more_than_mixed_ones() -> None:
    """Trajectories of one quality each: all variance lies between them. With qualities that change
    every ten steps, the same three in each trajectory, all of it lies within them."""
    between = make_profile([[float(i % 5)] * 40 for i in range(60)])
    parts = [[0.0] * 10, [1.0] * 10, [2.0] * 9]
    within = make_profile([sum(parts[i % 3 :] + parts[: i % 3], [i / 1e3]) for i in range(60)])
    noise = make_profile(np.random.default_rng(0).normal(size=(4000, 20)).tolist())
    assert noise.consistency == pytest.approx(0.0, abs=0.1)
    assert between.consistency == pytest.approx(1.0)
    assert within.consistency == pytest.approx(0.0, abs=0.01)
    assert derived(between)["data.best_share"] == 0.8
    assert derived(within)["data.best_share"] == 0.5
    for none in ([[1.0] * 40] * 60, [[float(i)] * 19 for i in range(60)]):
        assert make_profile(none).consistency == 0.0


def test_equally_good_and_few_trajectories_are_cloned() -> None:
    """Equally good in total and in each part, at any scale of reward. Rare successes are not, nor
    trajectories whose quality changes at other times."""
    rng = np.random.default_rng(0)
    noisy = [[float(10 + t + e) for t, e in enumerate(rng.normal(size=40))] for _ in range(60)]
    switching = [list(np.repeat(rng.permutation([0.0, 0.0, 4.0, 4.0]), 10)) for _ in range(60)]
    rare = [[-1.0] * 200 for _ in range(59)] + [[-1.0] * 100]
    assert make_profile(noisy).difference == pytest.approx(0.1**0.5 / 29.5, rel=0.1)
    assert make_profile(switching).difference == pytest.approx(1.0, rel=0.1)
    for factor in (1e-3, 1.0, -1e4):
        found = derived(make_profile([[factor * x for x in r] for r in noisy]))
        assert found["agent.losses.filter.kind"] == "behavior_cloning"
        assert found["agent.losses.dpg_weight"] == 0.0 < found["agent.losses.critic_weight"] < 0.1
        assert found["data.best_share"] == 0.8
    wide = make_profile(noisy, steps=1_000_000)
    assert derived(wide)["updates"] == 12_000
    assert derived(dataclasses.replace(wide, best_return=1e6))["updates"] == 20_000
    for flag in ("filter.kind=exp", "dpg_weight=0.1"):
        resolved = resolve(["offline", "--dataset=made", f"--agent.losses.{flag}"])
        found = derive_settings(make_profile(noisy), resolved.config, resolved.origins)
        assert "agent.losses.critic_weight" not in {d.key for d in found}
    bandits = [[float(i)] for i in range(60)], [[10.0 + i / 60] for i in range(60)]
    for other in (switching, rare, SPARSE, DENSE, *bandits):
        found = derived(make_profile(other))
        assert found["agent.losses.dpg_weight"] == 0.05
        assert found.get("agent.losses.filter.kind") in (None, "exp")
    for few in (noisy[:5], switching[:5], DENSE[:5], SPARSE[:19]):
        found = derived(make_profile(few))
        assert found["agent.losses.dpg_weight"] == 0.0 and "data.best_share" not in found
        assert found["agent.losses.filter.kind"] == "behavior_cloning"
    for enough in (switching[:20], [10 * 1000 * [0.0, 1.0]]):
        assert derived(make_profile(enough))["agent.losses.dpg_weight"] == 0.05
    equal = make_profile([[0.0] * 20] * 60)
    assert equal.difference == 0.0 and derived(equal)["agent.losses.dpg_weight"] == 0.0


def test_the_better_actions_of_few_trajectories_are_imitated_more() -> None:
    """By values of the data's actions only. Not where too little can be compared, nor with memory,
    nor of discrete actions without goals: these are cloned."""
    few, filters = DENSE[:8], ("agent.losses.filter.kind", "agent.losses.filter.batch_norm")
    found = derived(make_profile(few, terminated=False))
    assert [found[key] for key in filters] == ["exp", True]
    assert found["agent.losses.value_expectile"] == 0.7 and found["agent.losses.dpg_weight"] == 0.0
    assert "agent.losses.critic_weight" not in found and "data.best_share" not in found
    whole = [10 * [float(i)] * 12 for i in range(10)]
    assert derived(make_profile(whole, terminated=False))["data.best_share"] == 0.95
    assert "data.best_share" not in derived(make_profile(whole[:9], terminated=False))
    for other in (
        derived(make_profile(few)),
        derived(make_profile([2 * r for r in few[:4]], terminated=False)),
        derived(make_profile([r[:99] for r in few], terminated=False)),
        derived(make_profile(few, terminated=False, spec=DISCRETE)),
        derived(make_profile(few, terminated=False), memory="gru"),
    ):
        assert other["agent.losses.filter.kind"] == "behavior_cloning"
        assert "agent.losses.value_expectile" not in other
    given = derived_with(make_profile(few, terminated=False), "--agent.losses.filter.kind=binary")
    assert "agent.losses.value_expectile" not in given


def test_of_few_trajectories_with_goals_and_discrete_actions_short_ones_count_more() -> None:
    """Where goals end trajectories, a reward of -1 per step tells enough. Not where mistakes end
    them (the longest are best), where nothing does, or of continuous actions."""
    lengths = [100, 140, 200, 90, 300, 130]
    costs = [[-1.0] * length for length in lengths]
    assert make_profile(costs).length_correlation == pytest.approx(-1.0)
    found = derived(make_profile(costs, spec=DISCRETE))
    chosen = {"kind": "exp", "beta": 3.0, "batch_norm": None}
    assert {key: found.get(f"agent.losses.filter.{key}") for key in chosen} == chosen
    assert found["agent.losses.dpg_weight"] == 0.0 and "agent.losses.critic_weight" not in found
    whole = [[-1.0 - i] * (50 * (i + 2)) for i in range(10)]
    assert make_profile(whole, spec=DISCRETE).consistency > 0.25
    assert "data.best_share" not in derived(make_profile(whole, spec=DISCRETE))
    for other in (
        make_profile([[1.0] * length for length in lengths], spec=DISCRETE),
        make_profile(costs, terminated=False, spec=DISCRETE),
        make_profile(costs[:4], spec=DISCRETE),
        make_profile(costs),
    ):
        assert derived(other)["agent.losses.filter.kind"] == "behavior_cloning"
    same = [[-1.0] * 100] * 8, [[-float(200 // n)] * n for n in (50, 100, 200) * 3]
    assert [make_profile(rewards).length_correlation for rewards in same] == [0.0, 0.0]


def test_sparse_rewards_compare_the_outcomes_of_several_actions() -> None:
    """Of continuous ones; none longer than the trajectories, in windows that hold most of them."""
    found = derived(make_profile(SPARSE))
    assert found["agent.losses.filter.n_step"] == 10 and found["data.window"] == 16
    assert found["data.batch"] == 32
    assert found["agent.losses.value_expectile"] == 0.9 and "data.best_share" not in found
    short = derived(make_profile([[0.0] * 5 + [float(i == 0)] for i in range(60)]))
    assert short["agent.losses.filter.n_step"] == 6 == short["data.window"]
    choices = EnvSpec.of(Box((3,)), MultiDiscrete((2, 3)), env="Made-v0")
    others = [make_profile(SPARSE, spec=spec) for spec in (DISCRETE, choices)]
    for other in (make_profile(DENSE), *others):
        found = derived(other)
        assert "agent.losses.value_expectile" not in found and "data.best_share" in found
        assert found.get("agent.losses.filter.n_step") is None


def test_where_mistakes_show_late_the_outcomes_of_several_actions_are_compared() -> None:
    """If the actions that follow are of the same quality, and end the trajectory sooner or later.
    A gait, which all have, hides nothing."""
    keys = ("agent.losses.n_step", "agent.losses.filter.n_step", "data.best_share")
    gait = np.sin(np.arange(100) / 3) * 20
    walking = [list(np.array(r) + gait) for r in WHOLE]
    for rewards in (WHOLE, walking):
        found = derived(make_profile(rewards))
        assert [found[key] for key in keys] == [10, 10, 0.8]
        assert found["agent.losses.value_expectile"] == 0.9
    goes_on = make_profile(WHOLE, terminated=False)
    choices = make_profile(WHOLE, spec=DISCRETE)
    for other, share in ((goes_on, 0.8), (choices, 0.8), (make_profile(DENSE), 0.5)):
        found = derived(other)
        assert found["agent.losses.n_step"] == 1 and found["data.best_share"] == share
        assert "agent.losses.filter.n_step" not in found


def test_returns_of_truncated_trajectories_go_on() -> None:
    """A reward of 1 for 50 steps is worth 1 / (1 - gamma) if the task had not ended, else less."""
    rewards = [[1.0] * 50, [1.0] * 50]
    high = make_profile(rewards, terminated=False).discounted(0.9).high
    assert high == pytest.approx(10.0)
    assert make_profile(rewards, terminated=True).discounted(0.9).high == pytest.approx(
        10.0 * (1 - 0.9**50)
    )


def test_episodes_of_one_step_equal_returns_and_few_trajectories_break_nothing() -> None:
    bandit = derived(make_profile([[float(i % 3)] for i in range(100)]))
    assert bandit["agent.losses.gamma"] == 0.0 and bandit["data.window"] == 1
    constant = derived(make_profile([[1.0] * 3000] * 4, terminated=False))
    assert constant["agent.losses.reward_multiplier"] == 1.0
    assert "agent.losses.target_low" not in constant and "data.best_share" not in constant
    few = derived(make_profile(DENSE[:5]))
    assert "data.best_share" not in few and "data.validation" not in few
    for profile in (make_profile(SPARSE), make_profile(DENSE[:5]), make_profile([[0.5]] * 60)):
        config, used = apply_settings(
            OFFLINE, {}, own_settings("offline"), derive_settings(profile, OFFLINE)
        )
        assert config == TrainConfig.from_dict(config.to_dict()) and used


def test_reasons_of_one_trajectory_and_one_step_are_in_the_singular() -> None:
    profiles = [
        make_profile([[1.0]]),
        make_profile([[0.0] * 3]),
        make_profile([[0.0]] * 190 + [[1.0]] * 10),  # sparse, compares the outcome of one action
        make_profile([[7.0 + i % 2] * 10 for i in range(60)], best_tenth=1),
    ]
    reasons = [d.reason for p in profiles for d in derive_settings(p, OFFLINE)]
    assert any("(1 trajectory, 1 step)" in reason for reason in reasons)
    assert any("the 1 best trajectory" in reason for reason in reasons)
    assert any("of 1 action of the data" in reason for reason in reasons)
    assert not [
        reason for reason in reasons if re.search(r"\b1 (trajectorie|step|action)s", reason)
    ]


def warnings(rewards: list[list[float]], *flags: str, **changes: Any) -> list[str]:
    """The warnings of settings derived from trajectories with these rewards."""
    said: list[str] = []
    resolved = resolve(["offline", "--dataset=made", *flags])
    profile, own = make_profile(rewards, **changes), own_settings("offline")
    derive_settings(profile, resolved.config, resolved.origins, own, said.append)
    return said


VARIED = [[i % 5 + 0.01 * (t % 7) for t in range(100)] for i in range(100)]
HUGE = [-1e5] * 100


def test_a_few_extreme_returns_that_set_the_scale_of_rewards_are_told() -> None:
    """With how many they are, and a condition and a multiplier that suit the others."""
    (said,) = warnings([*VARIED[1:], HUGE])
    assert "because of 1 trajectory of 100: it sets agent.losses.reward_multiplier=1e-05" in said
    assert """--where '"return" > -5000000'""" in said
    usual = derived(make_profile(VARIED[1:]))["agent.losses.reward_multiplier"]
    assert said.endswith(f"set --agent.losses.reward_multiplier={usual:g}")
    (said,) = warnings([*VARIED[1:], HUGE], "--where", "length > 5", trajectories=4000)
    assert """--where '(length > 5) and "return" > -5000000'""" in said
    assert "1 trajectory of 100 sampled ones" in said
    crash = [*VARIED[0][:-1], -1e5]
    assert "because of 2 trajectories of 100" in warnings([*VARIED[2:], crash, crash])[0]
    other_unit = [[1000.0 * x for x in rewards] for rewards in VARIED[-2:]]
    (said,) = warnings([*VARIED[1:-2], HUGE, *other_unit])
    assert """--where '"return" > -5000000 and "return" < 150000'""" in said
    (said,) = warnings([*VARIED[1:], [1e5] * 50 + [-1e5] * 49 + [200 - 1e5]])
    assert "--where" not in said and "; set --agent" in said, "its return is like the others'"


def test_successes_and_usual_returns_are_no_extreme_ones() -> None:
    success = [[*rewards[:-1], 1e5] for rewards in VARIED[:3]]
    crashes = [[*rewards[:-1], -1e5] for rewards in VARIED[:20]]
    flat = [[1.0] * 500] * 97 + [[1.0] * 20] * 3
    quiet = [VARIED, DENSE, SPARSE, [[0.0] * 99 + [float(i == 3)] for i in range(300)], flat]
    for rewards in [*quiet, [*VARIED[3:], *success], [*VARIED[20:], *crashes]]:
        assert warnings(rewards) == [] == warnings(rewards, terminated=False)
    # Where the range sets no scale that critics learn with, it does not matter.
    assert warnings([*VARIED[1:], HUGE], "--agent.losses.reward_multiplier=1") == []
    assert warnings([*VARIED[1:5], HUGE]) == [], "too few for critics"


def test_memory_is_asked_for_never_guessed() -> None:
    key = "agent.trajectory_encoder.kind"
    long = make_profile(DENSE)
    tagged = dataclasses.replace(long, partially_observable=True)
    assert derived(long)[key] == derived(tagged, memory="none")[key] == "feed_forward"
    for kind, found in (
        ("gru", derived(tagged)),
        ("transformer", derived(long, memory="transformer")),
        ("gru", derived(long, memory="gru")),
    ):
        assert found[key] == kind and found["data.window"] == 100
        assert found["agent.timestep_encoder.hide_previous"] is False
    sparse = dataclasses.replace(make_profile(SPARSE), partially_observable=True)
    assert derived(sparse)[key] == "transformer"


def test_a_transformer_attends_to_a_whole_window() -> None:
    tagged = dataclasses.replace(make_profile(SPARSE), partially_observable=True)
    config, _ = apply_settings(
        OFFLINE, {}, own_settings("offline"), derive_settings(tagged, OFFLINE)
    )
    memory = config.agent.trajectory_encoder
    assert isinstance(memory, TransformerConfig)
    assert memory.context == config.data.window + 1  # one more observation than transitions
    assert (memory.d_model, memory.d_ff, memory.n_heads, memory.n_layers) == (64, 256, 4, 2)


def test_with_memory_and_sparse_rewards_the_best_trajectories_are_imitated() -> None:
    """Not so without memory, with dense rewards, or where a user decides what to follow."""
    sparse = dataclasses.replace(make_profile(SPARSE, spec=DISCRETE), partially_observable=True)
    dense = dataclasses.replace(make_profile(DENSE, spec=DISCRETE), partially_observable=True)
    key = "agent.losses.filter.kind"
    found = derived(sparse)
    assert found[key] == "behavior_cloning" and found["data.best_share"] == 0.8
    assert found["agent.losses.dpg_weight"] == 0.0
    assert found["agent.losses.critic_weight"] == 0.01
    assert derived(dense)[key] == derived(sparse, memory="none")[key] == "exp"
    chosen = derive_settings(sparse, OFFLINE, {"agent.losses.dpg_weight": "command line"})
    assert {d.key: d.value for d in chosen}[key] == "exp"


def test_with_memory_the_filter_of_continuous_actions_stays_that_of_the_recipe() -> None:
    """Differences show velocities, so critics are exact enough for a binary one."""
    tagged = dataclasses.replace(make_profile(DENSE), partially_observable=True)
    assert derived(tagged)["agent.timestep_encoder.differences"] is True
    assert not any(key.startswith("agent.losses.filter") for key in derived(tagged))


def test_memory_without_derived_settings_is_refused() -> None:
    with pytest.raises(Exception, match="memory: 'gru' has no effect without derive"):
        resolve(["pendulum_stitch", "--memory", "gru"])


def test_actions_decide_the_distribution() -> None:
    key = "agent.actor.continuous.kind"
    assert derived(make_profile(DENSE))[key] == "gaussian"
    discrete = EnvSpec.of(Box((3,)), Discrete(4), env="Made-v0")
    assert key not in derived(make_profile(DENSE, spec=discrete))


def test_flags_files_and_the_recipe_itself_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[data]\nwindow = 11\n[agent.trajectory_encoder]\nkind = 'gru'\n")
    resolved = resolve(
        ["offline", "--dataset=made", "--config", str(file), "--agent.losses.gamma", "0.5"]
    )
    settings = derive_settings(make_profile(DENSE), resolved.config)
    config, used = apply_settings(
        resolved.config, resolved.origins, own_settings("offline"), settings
    )
    assert (config.data.window, config.agent.losses.gamma) == (11, 0.5)
    assert config.agent.trajectory_encoder.kind == "gru"  # so d_model does not exist
    keys = {d.key for d in used}
    assert not keys & {"data.window", "agent.losses.gamma", "agent.trajectory_encoder.d_model"}
    assert config.schedule.log_every == OFFLINE.schedule.log_every
    wide = Derived("schedule.log_every", 9, "not possible: the recipe sets it itself")
    assert apply_settings(OFFLINE, {}, own_settings("offline"), [wide]) == (OFFLINE, [])


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (["--data.epochs"], {"data.best_share", "data.draw"}),
        (["--agent.losses.td_lambda", "0.9"], {"agent.losses.n_step"}),
        (["--agent.losses.target_low", "500"], {"agent.losses.target_high"}),
        (["--processes", "3"], {"data.batch"}),
    ],
)
def test_what_contradicts_a_flag_is_left_out(words: list[str], left_out: set[str]) -> None:
    words = ["offline", "--dataset=made", "--data.batch=24", *words]
    resolved = resolve(words if "--processes" in words else [w for w in words if "batch" not in w])
    settings = derive_settings(make_profile(SPARSE, spec=DISCRETE), resolved.config)
    origins = {key: o for key, o in resolved.origins.items() if key != "data.batch"}
    config, used = apply_settings(resolved.config, origins, own_settings("offline"), settings)
    assert not {d.key for d in used} & left_out and "data.window" in {d.key for d in used}
    assert left_out <= {d.key for d in settings}


def test_baselines_get_the_shape_but_keep_their_losses() -> None:
    """The same sampling and networks as `offline`; discounts and scales are the papers'."""
    profile = make_profile(DENSE)
    ours = derived(profile)
    for name in (n for n in RECIPES if recipe(n).derive == "shape" and n != "dt"):
        settings = derive_settings(profile, recipe(name))
        config, used = apply_settings(recipe(name), {}, own_settings(name), settings)
        own = ("agent.critic.popart", "agent.losses")
        assert all(ours[d.key] == d.value for d in used if not d.key.startswith(own))
        assert config.agent.losses == recipe(name).agent.losses
        assert config.data.window == ours["data.window"] and not config.data.best_share
    assert recipe("rebrac").derive == "shape"
    assert "agent.actor.continuous.kind" in own_settings("rebrac")  # of its base, td3bc


@pytest.fixture(scope="module")
def dataset(service) -> str:
    spec = make_spec(env="Tiny-v0")
    with service.client() as client:
        client.create_dataset("derived-tiny", spec)
        found = [make_trajectory(spec, length=5 + i % 20, seed=i) for i in range(60)]
        client.post("derived-tiny", found, wait_sealed=True)
    return "derived-tiny"


def test_the_best_trajectories_are_a_source_of_their_own(service, dataset) -> None:
    """A profile and a snapshot of a real service, with a condition, without evaluation."""
    words = ["offline", "--dataset", dataset, "--where", "length > 5"]
    config = resolve([*words, "--data.best-share", "0.5"]).config
    with service.client() as client:
        profile = read_profile(client, config)
        where = sql_condition(config)
        rows = client.sql(f'select length, "return" from trajectories where {where}').rows
        assert (profile.trajectories, profile.steps) == (len(rows), sum(r[0] for r in rows))
        assert profile.best_return == max(r[1] for r in rows)
        assert profile.returns[1] == pytest.approx(np.mean([r[1] for r in rows]), rel=1e-6)
        assert profile.reward.sum() == pytest.approx(sum(r[1] for r in rows), rel=1e-5)
        with pytest.raises(Exception, match="no trajectory to learn from.*length > 1000"):
            read_profile(client, config.replace(where="length > 1000"))


def test_recommend_prints_reasons_json_and_a_file_for_training(
    service, dataset, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    assert recommend([dataset]) == 0
    assert "half an episode" in capsys.readouterr().out
    assert recommend([dataset, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data.window"]["value"] == 4 and found["data.window"]["reason"]
    assert recommend([dataset, "--toml"]) == 0
    file = tmp_path / "derived.toml"
    file.write_text(capsys.readouterr().out)
    config = resolve(["offline", "--dataset", dataset, "--config", str(file)]).config
    assert config.agent.losses.gamma == found["agent.losses.gamma"]["value"]
    assert recommend([dataset, "--where", "length > 6", "--memory", "gru"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(f"--dataset {dataset} --where 'length > 6' --memory gru --run NAME")
    assert recommend([dataset, "--where", "length > 6", "--toml"]) == 0
    file.write_text(capsys.readouterr().out)
    words = ["offline", "--dataset", dataset, "--config", str(file)]
    assert resolve(words).config.where == "length > 6"
    assert recommend(["nothing-here"]) == 1
    assert "nothing-here" in capsys.readouterr().err


def test_recommend_and_train_warn_of_an_extreme_return(
    service, tmp_path, monkeypatch, capsys
) -> None:
    """On stderr, so that the file of --toml has only settings; in the run's log."""
    monkeypatch.setenv("STEPWELL_URL", service.url)
    spec = make_spec(env="Tiny-v0")
    found = [make_trajectory(spec, length=20, seed=i) for i in range(60)]
    found[7] = dataclasses.replace(found[7], rewards=np.full(20, -1e4, np.float32))
    with service.client() as client:
        client.create_dataset("extreme", spec)
        client.post("extreme", found, wait_sealed=True)
    assert recommend(["extreme", "--toml"]) == 0
    shown = capsys.readouterr()
    warning = "warning: 90% of the discounted returns are within"
    assert f"stepwell: {warning}" in shown.err and "1 trajectory of 60" in shown.err
    assert warning not in shown.out
    words = ["offline", "--dataset", "extreme", *TINY, "--updates", "1", "--output", str(tmp_path)]
    words += ["--data.cache", str(tmp_path / "cache"), "--run"]
    assert main([*words, "extreme"]) == 0
    assert warning in capsys.readouterr().out
    assert warning in (tmp_path / "extreme" / "run.log").read_text()
    where = ["--where", '"return" > -1e5']
    assert recommend(["extreme", *where]) == 0
    assert warning not in capsys.readouterr().err


def test_an_imported_file_declares_that_memory_is_needed(
    service, capsys, tmp_path, monkeypatch
) -> None:
    """By its metadata, also of a modified environment, or by a flag; otherwise there is none."""
    monkeypatch.setenv("STEPWELL_URL", service.url)

    def memory(kind: type[Behaviour], *words: str, **changes: float) -> dict[str, str]:
        file, name = tmp_path / "made.hdf5", f"declared-{uuid.uuid4().hex[:8]}"
        generate(kind, file, episodes=3, **changes)
        assert import_file([str(file), "--dataset", name, *words]) == 0
        capsys.readouterr()
        assert recommend([name, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["agent.trajectory_encoder.kind"]

    for kind in (TMazePassiveCoin, CartPolePositionNoisy):
        found = memory(kind)
        assert found["value"] != "feed_forward"
        assert "environment or file declared" in found["reason"]
    assert memory(RecallRandom, reward_scale=2.0)["value"] != "feed_forward"
    assert memory(GridworldRandom)["value"] == "feed_forward"
    assert memory(GridworldRandom, "--partially-observable")["value"] != "feed_forward"


def test_a_resumed_run_keeps_its_numbers_although_the_data_changed(
    service, dataset, tmp_path, monkeypatch, capsys
) -> None:
    """Nor does it follow settings that its data or numbers would have to change for."""
    monkeypatch.setenv("STEPWELL_URL", service.url)
    words = ["offline", "--dataset", dataset, "--run", "grown", *TINY]
    words += ["--output", str(tmp_path), "--data.cache", str(tmp_path / "cache")]
    assert main([*words, "--updates", "5"]) == 0
    with service.client() as client:
        before = client.run("grown").config
        spec = client.spec(dataset)
        client.post(dataset, [make_trajectory(spec, length=300, seed=i) for i in range(20)])
        client.flush(dataset)
        assert main([*words, "--updates", "7"]) == 0
        after = client.run("grown").config
    assert after["agent"]["losses"] == before["agent"]["losses"]
    assert after["origins"]["agent.losses.gamma"].startswith("derived: half an episode")
    for key, value in (("memory", "gru"), ("where", "length > 6")):
        assert main([*words, "--updates", "9", f"--{key}", value]) == 2
        said = capsys.readouterr().err
        assert f"{key}: run grown began with" in said and "train under another --run" in said


def test_what_is_counted_and_data_without_known_actions(
    service, tmp_path, monkeypatch, capsys
) -> None:
    """Trajectories that are preferred are counted once. Without a known action nothing is learned,
    and the run says so instead of beginning."""
    monkeypatch.setenv("STEPWELL_URL", service.url)
    spec = make_spec(action_known=True)
    with service.client() as client:
        for name, known in (("some-known", None), ("none-known", False)):
            client.create_dataset(name, spec)
            found = [make_trajectory(spec, length=12, seed=i) for i in range(60)]
            if known is not None:
                blank = np.zeros(12, bool)
                found = [dataclasses.replace(t, action_known=blank) for t in found]
            client.post(name, found, wait_sealed=True)
    words = ["offline", *TINY, "--updates", "2", "--output", str(tmp_path), "--data.best-share=0.5"]
    words += ["--data.cache", str(tmp_path / "cache"), "--data.validation", "0"]
    assert main([*words, "--dataset", "some-known", "--run", "some-known"]) == 0
    assert "60 trajectories, 720 steps" in capsys.readouterr().out
    with service.client() as client:
        keys = ["data/trajectories", "data/steps"]
        metrics = client.metrics("some-known", keys)
    assert [metrics[key].values for key in keys] == [[60], [720]]
    assert main([*words, "--dataset", "none-known", "--run", "none-known"]) == 1
    assert "no step of the selected trajectories has a known action" in capsys.readouterr().err
