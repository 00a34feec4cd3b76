"""Every check rings where learning is broken, once, and keeps silent where it is not."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from stepwell import Box, Discrete, EnvSpec, Trajectory
from trainer.checkpoint import newest
from trainer.data.returns import DataReturns
from trainer.health import CHECKS, WINDOW, Health
from trainer.loop import RunInfo, train
from trainer.options import resolve

RETURNS = DataReturns(low=0.0, high=1.0, std=0.3, at_extremes=0.2, usual=(0.0, 0.8))
HEALTHY = {
    "value/q_min": 0.1,
    "value/q_max": 0.9,
    "value/td_error": 0.05,
    "value/target_at_bound": 0.1,
    "popart/sigma": 0.3,
    "loss/critic": 0.1,
    "validation/loss/critic": 0.15,
    "policy/filter_acceptance": 0.4,
    "policy/saturation": 0.3,
    "policy/saturation_of_data": 0.2,
    "dormant/actor": 0.3,
    "dormant/critic": 0.1,
    "optimizer/gradient_norm": 2.0,
    "progress/skipped": 0.0,
    "progress/updates": 3600.0,
    "progress/total": 6000.0,
}
BROKEN = {
    "q_above_data": ({"value/q_max": 17.0}, ["reached 17;", "exceeds 1:", "target_high=1 "]),
    "q_below_data": ({"value/q_min": -4.0}, ["fallen to -4;", "below 0:", "target_low=0 "]),
    "targets_at_bound": ({"value/target_at_bound": 0.99}, ["99%", "20%"]),
    "td_error": ({"value/td_error": 0.9}, ["by 0.9 ", "by 0.3:", "tau"]),
    "values_flat": (
        {"value/q_min": 0.48, "value/q_max": 0.5},
        ["between 0.48 and 0.5 ", "vary by 0.3:", "recipe bc"],
    ),
    "rewards_too_small": ({"popart/sigma": 6.0}, ["by 0.3,", "scale of 6.", "multiplier=30 "]),
    "rewards_too_large": ({"popart/sigma": 0.02}, ["multiplier=30 "]),
    "critic_overfits": ({"validation/loss/critic": 0.7}, ["is 0.7,", "data 0.1:"]),
    "filter_rejects": ({"policy/filter_acceptance": 0.004}, ["0.4%"]),
    "actions_saturated": (
        {"policy/saturation": 0.99, "policy/saturation_of_data": 0.01},
        ["99%", "1%", "bc_weight"],
    ),
    "dormant_actor": ({"dormant/actor": 0.9}, ["90% of the actor's"]),
    "dormant_critic": ({"dormant/critic": 0.9}, ["90% of the critic's"]),
    "skipped_updates": ({"progress/skipped": 3.0}, ["3 updates"]),
}


def config_of(*words: str):
    return resolve(["pendulum_stitch", "--updates=1000", "--optimizer.warmup=0", *words]).config


def ring(health: Health, values, first: int, logs: int = WINDOW, returns=RETURNS):
    """(update, key) of the alarms that begin and end while the same values are logged."""
    begun, ended = [], []
    for update in range(first, first + logs):
        new, over = health.check(update, values, returns)
        begun += [(update, alarm.key) for alarm in new]
        ended += [(update, alarm.key) for alarm in over]
    return begun, ended


def test_healthy_numbers_raise_nothing():
    assert ring(Health(config_of()), HEALTHY, 101, 20) == ([], [])


@pytest.mark.parametrize("key", BROKEN)
def test_each_check_rings_once_says_numbers_and_ends(key):
    # The multiplier at which PopArt's scale of 0.02 is at its limit.
    words = ["--agent.losses.reward-multiplier=5e5"] if key == "rewards_too_large" else []
    health, (wrong, said) = Health(config_of(*words)), BROKEN[key]
    assert ring(health, HEALTHY, 101) == ([], [])
    # The median of five changes with the third.
    assert ring(health, HEALTHY | wrong, 106, 20) == ([(108, key)], [])
    alarm = health.standing[key]
    assert alarm.update == 108 and all(part in alarm.message for part in said), alarm.message
    assert ". Try" in alarm.message and "Try" not in alarm.summary
    assert alarm.to_json() == {
        "key": key, "message": alarm.message, "update": 108, "value": alarm.value
    }  # fmt: skip
    assert ring(health, HEALTHY, 126, 20) == ([], [(128, key)]) and not health.standing


def test_every_check_is_tried_here():
    of_settings = {"bounds_too_narrow", "targets_follow"}
    assert {check.key for check in CHECKS} == BROKEN.keys() | {"gradient_norm"} | of_settings


def test_bounds_that_leave_out_most_returns_are_named():
    """The usual returns are 0 to 0.8."""
    narrow = Health(config_of("--agent.losses.target-low=0.1", "--agent.losses.target-high=0.3"))
    assert [key for _, key in ring(narrow, HEALTHY, 101)[0]] == ["bounds_too_narrow"]
    message = narrow.standing["bounds_too_narrow"].message
    assert "(agent.losses: target_low=0.1, target_high=0.3) leave out 75% of" in message
    assert "returns, 0 … 0.8 without" in message and narrow.standing["bounds_too_narrow"].summary
    assert ring(Health(config_of("--agent.losses.target-high=0.5")), HEALTHY, 101) == ([], [])
    equal = DataReturns(low=0.0, high=1.0, std=0.3, at_extremes=0.9, usual=(0.0, 0.0))
    sparse = Health(config_of("--agent.losses.target-high=-1"))
    ring(sparse, HEALTHY, 101, returns=equal)
    assert "bounds_too_narrow" not in sparse.standing


@pytest.mark.parametrize(
    ("bound", "value", "wrong", "advice"),
    [
        ("target_low", 50, {"value/q_max": 60.0}, "target_low=50 is above all of them: lower it"),
        ("target_high", -50, {"value/q_min": -60.0}, "=-50 is below all of them: raise it"),
    ],
)
def test_a_bound_outside_the_data_is_named(bound, value, wrong, advice):
    """The other bound would contradict it, so setting that is no advice."""
    health = Health(config_of(f"--agent.losses.{bound.replace('_', '-')}={value}"))
    ring(health, HEALTHY | wrong, 101)
    assert any(alarm.message.endswith(advice) for alarm in health.standing.values())


def test_a_wrong_bound_is_not_blamed_on_rewards_and_only_given_bounds_are_named():
    wrong = {"value/target_at_bound": 1.0, "popart/sigma": 6.0}
    health = Health(config_of("--agent.losses.target-high=-5"))
    ring(health, HEALTHY | wrong, 101)
    message = health.standing["targets_at_bound"].message
    assert "targets are at target_high=-5; only" in message
    assert message.endswith("apart. agent.losses.target_high=-5 is below all of them: raise it")
    assert "rewards_too_small" not in health.standing
    ring(inside := Health(config_of("--agent.losses.target-high=0.5")), HEALTHY | wrong, 101)
    assert {"targets_at_bound", "rewards_too_small"} <= inside.standing.keys()


def test_a_filter_that_rejects_is_told_what_its_kind_has():
    rejected = HEALTHY | BROKEN["filter_rejects"][0]
    for kind, advice in (("binary", "Try agent.losses.filter.kind=exp, a lower threshold,"),
                         ("exp", "Try a lower agent.losses.filter.beta (now 1),")):  # fmt: skip
        health = Health(config_of(f"--agent.losses.filter.kind={kind}"))
        ring(health, rejected, 101)
        assert advice in health.standing["filter_rejects"].message


def test_a_run_too_short_for_its_checks_says_so():
    health = Health(config_of("--schedule.log-every=20"))
    ring(health, HEALTHY, 101, WINDOW - 1)
    assert health.unchecked == (
        "fewer than 5 logs after the warm-up of 100 updates (schedule.log_every=20)"
    )
    assert not Health(config_of(), first={"loss/bc": 1.0}).unchecked  # resumed
    ring(health, HEALTHY, 105, 1)
    assert not health.unchecked


def test_a_gradient_is_compared_with_that_after_the_warm_up():
    health = Health(config_of())
    assert ring(health, HEALTHY, 101) == ([], [])
    begun, _ = ring(health, HEALTHY | {"optimizer/gradient_norm": 500.0}, 106)
    assert begun == [(108, "gradient_norm")]
    assert "is 500, 250 times" in health.standing["gradient_norm"].message


def test_targets_that_chase_themselves_are_named_by_the_setting():
    health = Health(config_of("--agent.losses.tau=1"))
    assert [key for _, key in ring(health, HEALTHY, 101)[0]] == ["targets_follow"]
    assert "tau=1)" in health.standing["targets_follow"].message


def test_warm_up_and_outliers_raise_nothing():
    health, wrong = Health(config_of()), HEALTHY | {"value/q_max": 17.0}
    assert ring(health, wrong, 1, 100) == ([], [])  # a tenth of the updates
    assert ring(health, HEALTHY, 101) == ([], [])
    for start in range(106, 130, 5):  # two of five logs
        assert ring(health, wrong, start, 2) == ring(health, HEALTHY, start + 2, 3) == ([], [])
    patient = Health(config_of("--optimizer.warmup=300"))
    assert ring(patient, wrong, 101, 200) == ([], [])
    assert ring(patient, wrong, 301) == ([(305, "q_above_data")], [])


def test_an_alarm_neither_flickers_nor_goes_stale():
    """Between its two limits it stays as it is; getting worse, it shows the newer numbers."""
    health = Health(config_of())
    ring(health, HEALTHY | {"value/q_max": 1.6}, 101)
    assert ring(health, HEALTHY | {"value/q_max": 1.4}, 106, 10) == ([], [])
    ring(health, HEALTHY | {"value/q_max": 17.0}, 116)
    alarm = health.standing["q_above_data"]
    assert alarm.update == 105 and alarm.value == 16.0 and "reached 17;" in alarm.message
    quiet = Health(config_of())
    ring(quiet, HEALTHY | {"value/q_max": 1.4}, 101)
    assert not quiet.standing


def test_values_that_still_grow_are_not_too_large_rewards():
    """A small scale says nothing before it is at PopArt's limit: tau makes values grow slowly."""
    assert ring(Health(config_of()), HEALTHY | {"popart/sigma": 0.02}, 101) == ([], [])


def test_values_may_be_equal_while_they_begin():
    flat = HEALTHY | BROKEN["values_flat"][0]
    for now, total in ((2400.0, 6000.0), (1900.0, 2000.0)):
        early = flat | {"progress/updates": now, "progress/total": total}
        assert ring(Health(config_of()), early, 101, 20) == ([], [])
    constant = DataReturns(low=0.0, high=1.0, std=0.0, at_extremes=1.0, usual=(0.0, 1.0))
    assert ring(Health(config_of()), flat, 101, 20, returns=constant) == ([], [])


def test_the_best_trajectories_have_a_lower_loss_than_those_held_back():
    """With data.best_share it is overfitting only if the validation loss rises."""
    wrong = HEALTHY | {"validation/loss/critic": 0.7}
    health = Health(config_of("--data.best-share=0.5", "--dataset=made"))
    assert ring(health, wrong, 101, 20) == ([], [])
    assert ring(health, wrong | {"validation/loss/critic": 0.8}, 121) == ([], [])  # chance
    resumed = Health(config_of("--data.best-share=0.5", "--dataset=made"), first=health.first)
    for each in (health, resumed):
        worse = ring(each, wrong | {"validation/loss/critic": 0.9}, 141)
        assert [key for _, key in worse[0]] == ["critic_overfits"]
    assert ring(Health(config_of()), wrong, 101)[0] == [(105, "critic_overfits")]


def test_a_diverged_value_is_a_number_that_json_has():
    health = Health(config_of())
    ring(health, HEALTHY | {"value/q_max": float("inf")}, 101)
    assert health.standing["q_above_data"].value == 1e300


def test_cloning_does_not_care_about_values():
    wrong = HEALTHY | BROKEN["q_above_data"][0] | BROKEN["rewards_too_small"][0]
    words = ["--agent.losses.filter.kind=behavior_cloning", "--agent.losses.tau=1"]
    assert ring(Health(config_of(*words, "--agent.losses.dpg-weight=0")), wrong, 101)[0] == []
    assert len(ring(Health(config_of(*words)), wrong, 101)[0]) == 3  # with DPG


def test_a_resumed_run_goes_on_with_its_alarms():
    health = Health(config_of())
    ring(health, HEALTHY | {"value/q_max": 17.0}, 101)
    again = Health(config_of(), [alarm.to_json() for alarm in health.standing.values()])
    assert again.standing == health.standing
    assert ring(again, HEALTHY | {"value/q_max": 17.0}, 106) == ([], [])
    assert ring(again, HEALTHY, 111) == ([], [(113, "q_above_data")])


def test_unknown_returns_and_missing_metrics_leave_checks_out():
    wrong = {name: 1e6 for name in HEALTHY if name.startswith("value/")}
    assert ring(Health(config_of()), HEALTHY | wrong, 101, returns=None) == ([], [])
    assert ring(Health(config_of()), {"loss/bc": 1e6}, 101) == ([], [])


def test_advice_does_not_repeat_what_is_set():
    health = Health(config_of("--agent.losses.target-high=2"))
    ring(health, HEALTHY | {"value/q_max": 17.0}, 101)
    assert "Try a lower agent.losses.gamma" in health.standing["q_above_data"].message


# --- real runs ------------------------------------------------------------------------------------


def name(number: int) -> str:
    """The same ids in every run of the tests: they decide the order of the samples."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, str(number)))


def sparse(spec: EnvSpec, count: int) -> list[Trajectory]:
    """Random walks on nine cells; one in six ends at the goal with the only reward."""
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        cells, actions = [0], []
        for _ in range(12):
            actions.append(int(rng.integers(2)))
            cells.append(min(max(cells[-1] + 2 * actions[-1] - 1, 0), 8))
            if cells[-1] == 5:
                break
        rewards = np.zeros(len(actions), np.float32)
        rewards[-1] = done = cells[-1] == 5
        obs = np.array(cells, np.float32)[:, None] / 8
        ends = {"terminated": bool(done), "truncated": not done, "id": name(number)}
        found.append(
            Trajectory.from_arrays(
                obs=obs, actions=np.array(actions), rewards=rewards, spec=spec, **ends
            )
        )
    return found


def shaped(spec: EnvSpec, count: int) -> list[Trajectory]:
    """Random actions in [-1, 1]; the reward is the action's closeness to the observation."""
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        obs = rng.uniform(-0.7, 0.7, (9, 1)).astype(np.float32)
        actions = rng.uniform(-1, 1, (8, 1)).astype(np.float32)
        rewards = -np.abs(obs[:-1] - actions)[:, 0]
        found.append(
            Trajectory.from_arrays(
                obs=obs,
                actions=actions,
                rewards=rewards,
                terminated=True,
                spec=spec,
                id=name(number),
            )
        )
    return found


def trained(fake, folder, spec: EnvSpec, trajectories, *words: str) -> tuple[list[str], set[str]]:
    """The lines on the screen of a run of 120 small updates, and the keys of its alarms."""
    service, said = fake(spec), []
    service.add_shard(trajectories)
    config = resolve(
        [
            *("pendulum_stitch", "--dataset=fake", "--run=tried", "--updates=120", "--device=cpu"),
            *("--data.batch=16", "--data.window=12", "--schedule.log-every=5"),
            *(
                "--schedule.drain-timeout=5",
                "--agent.actor.d-hidden=32",
                "--agent.critic.d-hidden=32",
            ),
            *("--agent.losses.reward-multiplier=10", "--optimizer.warmup=20"),
            *(f"--output={folder}", f"--data.cache={folder / 'cache'}", *words),
        ]
    ).config
    assert train(config, service, RunInfo(), said.append) == "finished"
    begun = [line.split()[1] for line in said if " at update " in line and "warning" in line]
    assert all(f"warning: {key} at update" in service.logs["tried"] for key in begun)
    standing: set[str] = set()
    for line in said:  # an alarm may begin again after it was over
        if " at update " in line and "warning" in line:
            standing.add(line.split()[1])
        elif "the alarm of update" in line:
            standing.discard(line.split(":")[0])
    row = service.runs["tried"]["alarms"]
    assert {alarm["key"] for alarm in row} == standing
    assert all(set(alarm) == {"key", "message", "update", "value"} for alarm in row)
    return said, set(begun)


GRID = EnvSpec.of(Box((1,)), Discrete(2), env="Grid-v0")
LINE = EnvSpec.of(Box((1,)), Box((1,), low=-1.0, high=1.0), env="Line-v0")


@pytest.mark.parametrize("kind", ["sparse", "shaped"])
def test_healthy_runs_are_silent_and_end_with_the_command_that_evaluates(fake, tmp_path, kind):
    spec, make = (GRID, sparse) if kind == "sparse" else (LINE, shaped)
    bounds = ["--agent.losses.target-low=0", "--agent.losses.target-high=1"]
    words = ["--agent.losses.gamma=0.9", *(bounds if kind == "sparse" else ())]
    said, begun = trained(fake, tmp_path, spec, make(spec, 100), *words)
    assert begun == set()
    assert said[-3:] == [
        "run tried finished",
        f"evaluate: stepwell evaluate --policy tried --env {spec.env}",
        "without the environment: stepwell estimate tried",
    ]
    assert any("updates/s" in line and line.endswith(" left") for line in said)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        pytest.param(
            "sparse",
            ["--agent.losses.gamma=0.999", "--agent.losses.reward-multiplier=0.1"],
            {"q_below_data", "rewards_too_small"},
            id="unbounded Q, wrong reward scale",
        ),
        pytest.param("shaped", ["--agent.losses.tau=1"], {"targets_follow"}, id="tau 1"),
        pytest.param(
            "shaped",
            ["--agent.losses.reward-multiplier=1e6", "--agent.losses.gamma=0.5"],
            {"rewards_too_large"},
            id="rewards beyond PopArt's range",
        ),
        pytest.param(
            "shaped",
            ["--agent.losses.target-low=-0.01", "--agent.losses.target-high=0.01"],
            {"targets_at_bound"},
            id="bounds of another scale",
        ),
        pytest.param(
            "shaped",
            ["--agent.losses.filter.threshold=20"],
            {"filter_rejects"},
            id="a filter that accepts nothing",
        ),
    ],
)
def test_broken_runs_say_so_in_their_last_lines(fake, tmp_path, kind, words, expected):
    spec, make = (GRID, sparse) if kind == "sparse" else (LINE, shaped)
    said, begun = trained(fake, tmp_path, spec, make(spec, 100), *words)
    assert begun >= expected, begun
    status, warning, evaluate, _ = said[-4:]
    assert status == "run tried finished" and evaluate.startswith("evaluate: ")
    assert warning.startswith("warning: ") and " alarm" in warning


def test_a_resumed_run_still_has_its_alarms(fake, tmp_path):
    """Its last lines and its row have them, although it logs too little to raise them again. What
    it compares with stays, too."""
    service = fake(LINE)
    service.add_shard(shaped(LINE, 30))
    kept, first = [], []
    for updates, starts in ((60, True), (62, False)):
        said: list[str] = []
        config = resolve(
            [
                *("pendulum_stitch", "--dataset=fake", "--run=again", f"--updates={updates}"),
                *("--device=cpu", "--data.batch=8", "--data.window=4", "--schedule.log-every=5"),
                *("--optimizer.warmup=20", "--schedule.drain-timeout=5", "--agent.losses.tau=1"),
                *(f"--output={tmp_path}", f"--data.cache={tmp_path / 'cache'}"),
            ]
        ).config
        train(config, service, RunInfo(), said.append)
        assert any("targets_follow at update" in line for line in said) == starts
        kept.append((said[-3], service.runs["again"].pop("alarms")))
        saved = newest(tmp_path / "again" / "checkpoints")
        assert saved is not None
        first.append(saved.state["first_medians"])
    assert first[0] == first[1] and first[0]["optimizer/gradient_norm"] > 0
    assert kept[0] == kept[1] and kept[0][0].startswith("warning: ")
    assert "targets_follow" in {alarm["key"] for alarm in kept[0][1]}


def test_a_short_run_ends_with_why_it_was_not_checked(fake, tmp_path):
    words = ["--updates=40", "--schedule.log-every=10", "--agent.losses.tau=1"]
    said, begun = trained(fake, tmp_path, LINE, shaped(LINE, 30), *words)
    assert begun == set() and said[-4:-1] == [
        "run tried finished",
        "its health was not checked: fewer than 5 logs after the warm-up of 20 updates "
        "(schedule.log_every=10)",
        "evaluate: stepwell evaluate --policy tried --env Line-v0",
    ]


def test_actions_that_leave_the_data_ring(fake, tmp_path):
    """Only DPG, on rewards that grow with the action: the policy goes to the bounds."""
    found = []
    for t in shaped(LINE, 100):
        actions = t.actions["action"]
        found.append(
            Trajectory.from_arrays(
                obs=t.obs["observation"], actions=0.3 * actions, rewards=100 * actions[:, 0],
                terminated=True, spec=LINE, id=t.id,
            )
        )  # fmt: skip
    words = ["--agent.losses.bc-weight=0", "--agent.losses.dpg-weight=10", "--updates=250"]
    _, begun = trained(fake, tmp_path, LINE, found, *words, "--agent.losses.gamma=0.1")
    assert "actions_saturated" in begun


def test_critics_that_learn_noise_by_heart_ring(fake, tmp_path):
    """Rewards without a reason: only those of the trajectories trained on can be predicted."""
    rng, found = np.random.default_rng(0), []
    wide = EnvSpec.of(Box((16,)), Box((1,), low=-1.0, high=1.0))
    for number in range(24):
        found.append(
            Trajectory.from_arrays(
                obs=rng.normal(size=(4, 16)).astype(np.float32),
                actions=rng.uniform(-1, 1, (3, 1)).astype(np.float32),
                rewards=rng.normal(size=3).astype(np.float32),
                terminated=True,
                spec=wide,
                id=name(number),
            )
        )
    words = ["--data.validation=0.4", "--agent.losses.gamma=0", "--agent.critic.d-hidden=64"]
    words += ["--optimizer.learning-rate=3e-3", "--data.window=3"]
    _, begun = trained(fake, tmp_path, wide, found, *words)
    assert "critic_overfits" in begun
