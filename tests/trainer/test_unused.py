"""What a recipe set, and nothing would read, falls away; what a person set so is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from amago_model import TrajectoryEncoderConfig, UnusedError, register, registry
from amago_model.policy_file import load_policy
from amago_model.trajectory_encoders import IdentityTrajectoryEncoder
from stepwell import Box, Discrete, EnvSpec
from trainer.config import TrainConfig, flatten, to_json
from trainer.data.fields import spaces_of
from trainer.loop import RunInfo, train
from trainer.options import resolve
from trainer.unused import for_spaces

LOSSES, ACTOR, ROWS = "agent.losses", "agent.actor", "agent.timestep_encoder"
CLONING = [f"--{LOSSES}.fake-filter", f"--{LOSSES}.online-weight", "0"]


@pytest.mark.parametrize(
    ("words", "dropped"),
    [
        (["offline", *CLONING], [f"{LOSSES}.tau", f"{LOSSES}.reward_multiplier"]),
        (["multitask", *CLONING], ["agent.algorithm", "agent.critic.kind"]),
        (
            ["lunarlander_continuous", f"--{ACTOR}.continuous", "beta"],
            [f"{ACTOR}.std_low", f"{ACTOR}.std_high"],
        ),
        (["lunarlander_continuous", f"--{LOSSES}.td-lambda", "0.9"], [f"{LOSSES}.n_step"]),
        (["ablation_lambda_returns", f"--{LOSSES}.n-step", "3"], [f"{LOSSES}.td_lambda"]),
        (["published_v3", f"--{LOSSES}.fake-filter"], [f"{LOSSES}.filter_advantage"]),
        (["published_v3", f"--{LOSSES}.offline-weight", "0"], [f"{LOSSES}.filter_advantage"]),
        (["ablation_no_filter", f"--{LOSSES}.offline-weight", "0"], [f"{LOSSES}.fake_filter"]),
        (["offline", f"--{ROWS}.hide-reward"], [f"{ROWS}.hide_previous"]),
        (["pixels", f"--{ROWS}.hide-reward"], [f"{ROWS}.hide_previous"]),
    ],
)
def test_one_flag_does_though_the_recipe_set_what_it_leaves_no_use_for(
    words: list[str], dropped: list[str]
) -> None:
    """The rest of the recipe stays, and the origins tell."""
    plain, base, resolved = TrainConfig(), resolve(words[:1]), resolve(words)
    before, now, default = (flatten(to_json(x)) for x in (base.config, resolved.config, plain))
    for key in dropped:
        assert before[key] != default[key], "nothing to drop: the recipe has changed"
        assert now[key] == default[key]
        assert resolved.origins[key] == "default"
    asked = {key for key, origin in resolved.origins.items() if origin == "command line"}
    differ = {key for key in now if now[key] != before[key]} - asked
    assert differ >= set(dropped)
    assert all(now[key] == default[key] for key in differ)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["offline", *CLONING, f"--{LOSSES}.tau", "0.5"], "LossConfig.tau: set, but behaviour"),
        (
            ["lunarlander_continuous", f"--{LOSSES}.td-lambda", "0.9", f"--{LOSSES}.n-step", "5"],
            "td_lambda=0.9 beside n_step=5",
        ),
        (["offline", f"--{LOSSES}.filter-beta", "2"], "filter_beta: set, but filter='binary'"),
        (["offline", f"--{LOSSES}.extra-gammas", "0.9", "0.99"], "0.99 more than once"),
        (["offline", f"--{LOSSES}.extra-gammas", "0.9", "0.9"], "0.9 more than once"),
    ],
)
def test_what_a_person_set_is_refused_though_a_recipe_may_have_set_it(
    words: list[str], message: str
) -> None:
    with pytest.raises(UnusedError, match=message):
        resolve(words)


def test_the_default_discounts_make_room_for_the_one_that_is_wanted() -> None:
    resolved = resolve(["default", f"--{LOSSES}.gamma", "0.99"])
    assert resolved.config.agent.losses.gammas == (0.1, 0.9, 0.95, 0.97, 0.995, 0.99)
    assert "without" in resolved.origins[f"{LOSSES}.extra_gammas"]


# --- the data decide, too ---------------------------------------------------------------------

ACTIONS = {"continuous": Box((1,), low=-1.0, high=1.0), "discrete": Discrete(4)}
SPECS = {kind: EnvSpec.of(Box((3,)), action) for kind, action in ACTIONS.items()}


@pytest.mark.parametrize(
    ("recipe", "kind", "dropped"),
    [
        ("published_v3", "continuous", {"agent.critic.soften_data_actions"}),
        ("published_v3", "discrete", set()),
        ("multitask", "continuous", {"agent.algorithm"}),
        ("multitask", "discrete", set()),
        ("lunarlander_continuous", "discrete", {f"{ACTOR}.std_low", f"{ACTOR}.std_high"}),
    ],
)
def test_what_a_recipe_set_for_other_actions_falls_away(
    recipe: str, kind: str, dropped: set[str]
) -> None:
    resolved = resolve([recipe])
    before, origins = flatten(to_json(resolved.config)), dict(resolved.origins)
    now = flatten(to_json(for_spaces(resolved.config, origins, spaces_of(SPECS[kind]))))
    assert {key for key in now if now[key] != before[key]} == dropped
    assert all(origins[key] == "default" for key in dropped)


def test_what_a_person_set_for_other_actions_is_refused() -> None:
    resolved = resolve(["lunarlander_continuous", f"--{ACTOR}.std-low", "0.2"])
    with pytest.raises(UnusedError, match="ActorConfig.std_low: set, but agents of discrete"):
        for_spaces(resolved.config, resolved.origins, spaces_of(SPECS["discrete"]))


def test_a_part_of_one_s_own_takes_the_place_of_what_the_recipe_set(monkeypatch) -> None:
    """... but what a person set of that place is refused."""
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("trajectory_encoder", "mine")(lambda _, d_input: IdentityTrajectoryEncoder(d_input))
    words = ["offline", "--agent.custom.trajectory-encoder", "mine"]
    resolved, spaces = resolve(words), spaces_of(SPECS["continuous"])
    assert resolved.config.agent.trajectory_encoder.kind == "feedforward"
    config = for_spaces(resolved.config, resolved.origins, spaces)
    assert config.agent.trajectory_encoder == TrajectoryEncoderConfig()
    assert config.agent.losses == resolved.config.agent.losses
    set_so = resolve([*words, "--agent.trajectory-encoder.feedforward.d-model", "7"])
    with pytest.raises(UnusedError, match="TrajectoryEncoderConfig.feedforward: set, but custom"):
        for_spaces(set_so.config, set_so.origins, spaces)


def test_a_run_records_the_agent_that_it_trained(fake: Callable, tmp_path: Path) -> None:
    """In its row, its checkpoint and its policies; resumed it finds nothing changed."""
    service = fake(SPECS["continuous"], lengths=[[5, 6], [7]])
    small = ["--agent.trajectory-encoder.kind", "identity", "--agent.timestep-encoder.d-hidden=8"]
    words = [*small, "--data.batch=2", "--data.window=4", "--device=cpu", "--dataset=fake"]
    words += [f"--output={tmp_path}", f"--data.cache={tmp_path / 'cache'}", "--run=taught"]
    said: list[str] = []
    resolved = resolve(["multitask", *words, "--updates=1", "--schedule.farewell=0.1"])
    train(resolved.config, service, RunInfo(origins=resolved.origins), said.append)
    assert "agent.algorithm was 'multitask', is 'agent'" in "\n".join(said)
    row = service.runs["taught"]["config"]
    assert (row["agent"]["algorithm"], row["origins"]["agent.algorithm"]) == ("agent", "default")
    assert row["agent"]["losses"]["n_policy_actions"] == 3
    assert load_policy(service.policies[1]).config.algorithm == "agent"
    (state,) = (tmp_path / "taught" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["config"]["agent"]["algorithm"] == "agent"
    again = resolve(["multitask", *words, "--updates=2", "--schedule.farewell=0.1"])
    said.clear()
    train(again.config, service, RunInfo(origins=again.origins), said.append)
    assert [line for line in said if "warning" in line] == [
        "warning: updates was 1, is 2 from here on"
    ]
