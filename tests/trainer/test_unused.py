"""What a recipe set, and nothing would read, falls away; what a person set so is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from amago_model import (
    TrajectoryEncoderConfig,
    UnusedError,
    published_v3,
    register,
    registry,
)
from amago_model import checked as amago_checked
from amago_model.encoders.trajectory import IdentityTrajectoryEncoder
from amago_model.policy_file import load_policy
from stepwell import Box, Discrete, EnvSpec, MultiBinary
from trainer import checkpoint
from trainer.config import TrainConfig, flatten, to_json
from trainer.data.fields import spaces_of
from trainer.loop import RunInfo, train
from trainer.options import resolve
from trainer.unused import for_spaces

LOSSES, ACTOR, ROWS = "agent.losses", "agent.actor", "agent.timestep_encoder"
CRITIC = "agent.critic"
CLONING = [f"--{LOSSES}.behavior-cloning", f"--{LOSSES}.dpg-weight", "0"]


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
        (["published_v3", f"--{LOSSES}.behavior-cloning"], [f"{LOSSES}.filter_advantage"]),
        (["published_v3", f"--{LOSSES}.bc-weight", "0"], [f"{LOSSES}.filter_advantage"]),
        (["published_v3", f"--{CRITIC}.n-critics-target", "1"], [f"{CRITIC}.subset_replacement"]),
        (["ablation_no_filter", f"--{LOSSES}.bc-weight", "0"], [f"{LOSSES}.behavior_cloning"]),
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
        (
            ["published_v3", f"--{CRITIC}.n-critics-target=1", f"--{CRITIC}.subset-replacement"],
            "subset_replacement: set, but n_critics_target=1",
        ),
    ],
)
def test_what_a_person_set_is_refused_though_a_recipe_may_have_set_it(
    words: list[str], message: str
) -> None:
    with pytest.raises(UnusedError, match=message):
        resolve(words)


@pytest.mark.parametrize(
    ("words", "gammas"),
    [
        (["default", f"--{LOSSES}.gamma", "0.99"], (0.1, 0.9, 0.95, 0.97, 0.995, 0.99)),
        (["ablation_many_discounts", f"--{LOSSES}.gamma", "0.9"], (0.1, 0.95, 0.9)),
        (["offline", f"--{LOSSES}.auxiliary-gammas", "0.9", "0.99"], (0.9, 0.99)),
    ],
)
def test_discounts_make_room_for_the_one_that_acts(words: list[str], gammas: tuple) -> None:
    assert resolve(words).config.agent.losses.gammas == gammas


# --- the data decide, too ---------------------------------------------------------------------

ACTIONS = {"continuous": Box((1,), low=-1.0, high=1.0), "discrete": Discrete(4)}
SPECS = {kind: EnvSpec.of(Box((3,)), action) for kind, action in ACTIONS.items()} | {
    "an image": EnvSpec.of({"eye": Box((16, 16, 3), "uint8", 0, 255)}, Discrete(4)),
    "categories and switches": EnvSpec.of({"room": Discrete(4)}, MultiBinary(2)),
}
IMAGE, NUMBERS, NEAREST = f"{ROWS}.kind", f"{ROWS}.raw_numbers", f"{ROWS}.tokens.nearest"
SOFTENED = f"{CRITIC}.soften_data_actions"
FLOOR, SWITCHES = f"{ACTOR}.prob_low_gradient", f"{ACTOR}.mean_log_prob"
FLAT = f"{ACTOR}.bound_gradient"


@pytest.mark.parametrize(
    ("recipe", "kind", "dropped"),
    [
        ("published_v3", "continuous", {IMAGE, NUMBERS, NEAREST, SOFTENED, FLOOR, SWITCHES}),
        ("published_v3", "discrete", {IMAGE, NUMBERS, NEAREST, SWITCHES, FLAT}),
        ("published_v3", "an image", {NUMBERS, NEAREST, SWITCHES, FLAT}),
        ("published_v3", "categories and switches", {IMAGE, NEAREST, SOFTENED, FLOOR, FLAT}),
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


def test_what_a_recipe_would_set_is_there_if_a_flag_makes_use_of_it() -> None:
    """So published_v3 with another filter, critic or with augmentation is as published, too."""
    words = [f"--{LOSSES}.filter=exp", f"--{CRITIC}.kind=hlgauss"]
    words += [f"--{ROWS}.images.augment", "0.75"]
    config = resolve(["published_v3", *words]).config.agent
    assert (config.losses.filter_min, config.losses.filter_max) == (1e-7, 1e30)
    assert config.critic.bins.renormalize and config.timestep_encoder.images.augment_exact
    assert not resolve(["default", words[1]]).config.agent.critic.bins.renormalize
    plain = resolve(["published_v3"]).config.agent
    assert plain == published_v3(), "and else it falls away"


@pytest.mark.parametrize("kind", SPECS)
def test_published_v3_learns_from_any_data_and_is_taken_up_again(
    fake: Callable, tmp_path: Path, kind: str
) -> None:
    """With all its deviations: the policy file keeps them, a second life goes on as the first."""
    service = fake(SPECS[kind], lengths=[[5, 6], [7]])
    words = ["--agent.trajectory-encoder.kind", "gru", f"--{LOSSES}.filter=exp"]
    words += ["--data.batch=2", "--data.window=4", "--device=cpu", "--dataset=fake"]
    words += [f"--output={tmp_path}", f"--data.cache={tmp_path / 'cache'}"]
    words += ["--schedule.drain-timeout=0.1"]
    if kind == "an image":
        words += [f"--{ROWS}.images.augment=0.75", f"--{ROWS}.images.kind=impala"]
    states = []
    for run, lives in (("once", (3,)), ("twice", (2, 3))):
        for updates in lives:
            resolved = resolve(["published_v3", *words, f"--run={run}", f"--updates={updates}"])
            train(resolved.config, service, RunInfo(origins=resolved.origins), lambda _: None)
        found = checkpoint.newest(tmp_path / run / "checkpoints")
        assert found is not None and found.state["update"] == 3
        states.append(found.agent)
    once, twice = states
    assert any(name.startswith("lagged_critic.") for name in once)
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
    kept = load_policy(service.published[3]).config
    assert kept.losses.lagged_critics and kept.losses.filter_min == 1e-7
    assert (kept.timestep_encoder.kind == "image") == (kind == "an image")
    assert kept.timestep_encoder.raw_numbers == (kind == "categories and switches")


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


def test_what_a_plugin_says_it_reads_may_be_set(monkeypatch, tmp_path: Path) -> None:
    """The module that a command line names is asked before anything is refused."""
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    monkeypatch.setattr(amago_checked, "_declared", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reading_losses.py").write_text(
        "from amago_model import register\n\n"
        "@register('loss', 'warm', reads=['losses.filter_beta'])\n"
        "def warm(agent, seen):\n"
        "    return agent.config.losses.filter_beta * seen.advantage.mean()\n"
    )
    words = ["offline", f"--{LOSSES}.filter-beta", "3", "--plugin", "reading_losses"]
    resolved = resolve([*words, "--agent.custom.losses", "warm"])
    assert resolved.config.agent.losses.filter_beta == 3.0
    with pytest.raises(UnusedError, match="filter_beta: set, but filter='binary'"):
        resolve(words)


def test_a_run_records_the_agent_that_it_trained(fake: Callable, tmp_path: Path) -> None:
    """In its row, its checkpoint and its policies; resumed it finds nothing changed."""
    service = fake(SPECS["continuous"], lengths=[[5, 6], [7]])
    small = ["--agent.trajectory-encoder.kind", "identity", "--agent.timestep-encoder.d-hidden=8"]
    words = [*small, "--data.batch=2", "--data.window=4", "--device=cpu", "--dataset=fake"]
    words += [f"--output={tmp_path}", f"--data.cache={tmp_path / 'cache'}", "--run=taught"]
    said: list[str] = []
    resolved = resolve(["multitask", *words, "--updates=1", "--schedule.drain-timeout=0.1"])
    train(resolved.config, service, RunInfo(origins=resolved.origins), said.append)
    assert "agent.algorithm was 'multitask', is 'agent'" in "\n".join(said)
    row = service.runs["taught"]["config"]
    assert (row["agent"]["algorithm"], row["origins"]["agent.algorithm"]) == ("agent", "default")
    assert row["agent"]["losses"]["n_actions_in_actor_loss"] == 3
    assert load_policy(service.published[1]).config.algorithm == "agent"
    (state,) = (tmp_path / "taught" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["config"]["agent"]["algorithm"] == "agent"
    again = resolve(["multitask", *words, "--updates=2", "--schedule.drain-timeout=0.1"])
    said.clear()
    train(again.config, service, RunInfo(origins=again.origins), said.append)
    assert [line for line in said if "warning" in line] == [
        "warning: updates was 1, is 2 from here on"
    ]
