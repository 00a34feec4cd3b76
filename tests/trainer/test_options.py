"""Recipes, files and flags: complete configs, later wins, typos are named."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from amago_model import (
    AugmentConfig,
    ConfigError,
    GRUConfig,
    LossConfig,
    PlainImageConfig,
    ResidualActorConfig,
    TwoHotCriticConfig,
    make_agent,
)
from amago_model.config import (
    MambaConfig,
    Spaces,
    TransformerConfig,
)
from amago_model.registry import registered
from stepwell import Box, Discrete, EnvSpec
from stepwell._plugins import import_plugins
from stepwell._settings import flatten, override
from trainer.config import TrainConfig
from trainer.errors import SettingError
from trainer.learner import make_accelerator
from trainer.main import main
from trainer.options import CRITIC_SETTINGS, resolve, without_effect
from trainer.recipes import RECIPES, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_an_agent(name):
    """A complete config, which survives JSON, for continuous and for discrete actions."""
    config = recipe(name)
    assert config.recipe == name
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    # A recipe that says how images or lists are read is for data that has some.
    rows = config.agent.timestep_encoder
    extra = (
        {"image": Box((16, 16, 3), "uint8", 0, 255)} if rows.images != PlainImageConfig() else {}
    )
    extra |= {key: Box((3, 2), "int16", -1, 10) for key in (*rows.vector_keys, *rows.tokens.keys)}
    for action in (Box((1,), low=-1.0, high=1.0), Discrete(4)):
        spec = EnvSpec.of({"observation": Box((3,))} | extra, action)
        spaces = Spaces.of_spec(spec.to_json())
        if action == Discrete(4) and config.agent.actor.continuous.kind == "deterministic":
            with pytest.raises(ConfigError, match="use recipe iql, awac or crr"):
                make_agent(config.agent, spaces)
            continue
        agent = make_agent(config.agent, spaces)
        assert agent.trainable_parameters()
        # Nor is there anything to advise.
        assert not [line for line in agent.policy.timestep_encoder.describe() if "name it" in line]


def test_print_config_shows_the_settings_and_trains_nothing(tmp_path, capsys):
    words = ["bc", "--dataset", "d", "--updates", "7", "--output", str(tmp_path / "runs")]
    assert main([*words, "--print-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    resolved = resolve(words)
    assert TrainConfig.from_dict(shown["config"]) == resolved.config
    assert shown["origins"]["updates"] == "command line"
    assert shown["origins"]["agent.losses.dpg_weight"] == "recipe bc"
    assert not (tmp_path / "runs").exists()
    assert main(["bcc", "--print-config"]) == 2
    assert "the nearest known one is 'bc'" in capsys.readouterr().err


def test_an_unknown_setting_names_the_nearest_with_the_same_ending():
    """Of many with the same last word, the one whose section was meant."""
    with pytest.raises(SettingError, match=r"nearest known one is 'agent\.losses\.filter\.kind'"):
        resolve(["offline", "--dataset", "d", "--losses.filter.kind", "exp"])


def test_later_wins_and_every_value_says_where_it_came_from(tmp_path):
    """Recipe, two files, a flag: each overrides the one before."""
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("updates = 5\nseed = 3\n[agent.losses]\ngamma = 0.5\ntau = 0.1\n")
    second.write_text("seed = 4\n[agent.losses]\ngamma = 0.6\n")
    words = ["pendulum_stitch", "--config", str(first), f"--config={second}"]
    resolved = resolve([*words, "--agent.losses.tau", "0.2", "--dataset", "d"])
    config, origins = resolved.config, resolved.origins
    assert (config.updates, config.seed, config.dataset) == (5, 4, "d")
    assert (config.agent.losses.gamma, config.agent.losses.tau) == (0.6, 0.2)
    assert origins["updates"] == f"file {first}"
    assert origins["seed"] == origins["agent.losses.gamma"] == f"file {second}"
    assert origins["agent.losses.tau"] == origins["dataset"] == "command line"
    assert origins["data.batch"] == "recipe pendulum_stitch"
    assert origins["optimizer.grad_clip"] == "default"
    assert origins.keys() == flatten(config.to_dict()).keys()
    assert any("agent.losses.gamma = 0.6" in line for line in resolved.lines())


def test_another_kind_starts_from_its_defaults(tmp_path):
    """By flag or by file; what all kinds have stays, what a file set of the old kind is named."""
    tmaze = recipe("tmaze").agent
    assert tmaze.trajectory_encoder != TransformerConfig()
    for words in (
        ["--agent.trajectory-encoder.kind", "mamba"],
        ["--agent.trajectory_encoder.kind=mamba"],
    ):
        resolved = resolve(["tmaze", *words, "--agent.trajectory-encoder.d-state", "8"])
        assert resolved.config.agent.trajectory_encoder == MambaConfig(d_state=8)
        assert resolved.config.agent.losses == tmaze.losses
        origins = {key.split(".")[-1]: o for key, o in resolved.origins.items() if MEMORY in key}
        assert origins["kind"] == origins["d_state"] == "command line"
        assert origins["d_model"] == "default"
    residual = resolve(["mazerunner", "--agent.actor.kind", "residual"]).config.agent.actor
    assert residual == ResidualActorConfig()
    critic = resolve(["offline", "--agent.critic.kind", "twohot"])
    assert critic.config.agent.critic == TwoHotCriticConfig(n_critics=2, d_hidden=128)
    assert critic.origins["agent.critic.n_critics"] == "recipe offline"

    gru = tmp_path / "gru.toml"
    gru.write_text('[agent.trajectory-encoder]\nkind = "gru"\n')
    config = resolve(["offline", "--config", str(gru)]).config
    assert config.agent.trajectory_encoder == GRUConfig()
    context = tmp_path / "context.toml"
    context.write_text("[agent.trajectory_encoder]\ncontext = 7\n")
    with pytest.raises(SettingError, match="context: the chosen kind has no such.*'transformer'"):
        resolve(["tmaze", "--config", str(context), "--config", str(gru)])


MEMORY = "agent.trajectory_encoder."


def test_a_section_is_switched_off_and_on(tmp_path):
    """By a flag, by a file, and by any of its settings; both at once contradict each other."""
    off = resolve(["offline", "--agent.critic.no-popart"])
    assert off.config.agent.critic.popart is None
    assert off.origins["agent.critic.popart"] == "command line"
    file = tmp_path / "off.toml"
    file.write_text("agent.critic.popart = false\n")
    assert resolve(["offline", "--config", str(file)]).config == off.config
    augment = "--agent.timestep-encoder.images.augment"
    for words in ([augment], [f"{augment}.share", "0.75"]):
        images = resolve(["offline", *words]).config.agent.timestep_encoder.images
        assert images.augment == AugmentConfig()
    with pytest.raises(SettingError, match="popart.beta: set, but agent.critic.popart is"):
        resolve(["offline", "--agent.critic.no-popart", "--agent.critic.popart.beta", "0.1"])


def test_published_v3_is_published_whatever_kind_is_chosen():
    """And what a person says otherwise is done."""
    kinds = ["--agent.critic.kind", "hlgauss", "--agent.actor.continuous.kind", "beta"]
    resolved = resolve(["published_v3", *kinds, "--agent.critic.no-soften-data-actions"])
    agent = resolved.config.agent
    assert agent.critic.renormalize and not agent.actor.continuous.bound_gradient
    assert agent.critic.subset_replacement and not agent.critic.soften_data_actions
    assert resolved.origins["agent.critic.renormalize"] == "recipe published_v3"
    assert resolved.origins["agent.critic.soften_data_actions"] == "command line"


@pytest.mark.parametrize("word", ["true", "false"])
def test_a_switch_may_have_a_value(word):
    """As a word of its own or after =, like any other setting."""
    flag = "--agent.timestep-encoder.hide-previous"
    for words in ([flag, word], [f"{flag}={word}"]):
        config = resolve(["offline", *words, "--updates", "7"]).config
        assert config.agent.timestep_encoder.hide_previous == (word == "true")
        assert config.updates == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--updates", "abc"], "--updates: expected a valid integer, got 'abc'"),
        (["--agent.losses.filter.kind", "binry"], "--agent.losses.filter.kind: .*'exp'.*'binry'"),
        (["--agent.losses.gamma", "1.5"], "agent.losses.gamma: expected less than 1, got 1.5"),
        (["--data.cache-gb"], "--data.cache-gb: expected a value after it"),
        (["stray"], "unexpected word 'stray'"),
        (["--data.epochs=perhaps"], "--data.epochs: expected a valid boolean, got 'perhaps'"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(words, message, capsys):
    assert main(["offline", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"stepwell train: .*{message}", line)


def test_a_mixture_comes_from_a_file(tmp_path):
    """Sources with shares; shares that do not sum to 1 are refused."""
    file = tmp_path / "mix.toml"
    text = '[[sources]]\nselect = "SELECT id FROM trajectories"\nshare = {}\n'
    file.write_text(text.format(0.25) + text.format(0.75))
    config = resolve(["offline", "--config", str(file)]).config
    assert [source.share for source in config.sources] == [0.25, 0.75]
    file.write_text(text.format(0.5))
    with pytest.raises(SettingError, match=r"sum to 0\.5"):
        resolve(["offline", "--config", str(file)])


SOURCE = '[[sources]]\nselect = "SELECT id FROM trajectories"\n'


def test_a_mixture_that_moves_comes_from_a_file_and_back_from_json(tmp_path):
    """Its length may then be changed by a flag."""
    file = tmp_path / "ramp.toml"
    file.write_text(
        f"data.ramp_updates = 10\n{SOURCE}share = 1\nshare_end = 0.25\n"
        f"{SOURCE}share = 0\nshare_end = 0.75\n"
    )
    config = resolve(["offline", "--config", str(file), "--data.ramp-updates", "20"]).config
    assert config.data.ramp_updates == 20
    assert [(s.share, s.share_end) for s in config.sources] == [(1.0, 0.25), (0.0, 0.75)]
    assert TrainConfig.from_dict(config.to_dict()).sources == config.sources


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data.ramp_updates = 9", "data.ramp_updates: 9 updates, but no source has a share_end"),
        (f"data.ramp_updates = 9\n{SOURCE}share_end = 1.0", "no source has a share_end that"),
        (
            f"{SOURCE}share = 1.0\nshare_end = 1.0",
            "sources: share_end has no effect with data.ramp",
        ),
        (f"data.ramp_updates = 9\n{SOURCE}share_end = 0.5", r"sum to 0\.5 at the end of the ramp"),
        (f"{SOURCE}share = 1.5", r"sources\[0\].share: expected less than or equal to 1, got 1.5"),
        (
            f"{SOURCE}share_end = -1",
            r"sources\[0\].share_end: expected greater than or equal to 0",
        ),
        (f"{SOURCE}share = 0.0", "share 0 is never sampled"),
        (f"{SOURCE}share = 'all'", r"sources\[0\].share: expected a valid number, got 'all'"),
        (f"{SOURCE}shares = 1", r"sources\[0\]: unknown setting 'shares'.*'share'"),
    ],
)
def test_a_ramp_that_leads_nowhere_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "ramp.toml"
    file.write_text(text)
    with pytest.raises(SettingError, match=message):
        resolve(["offline", "--config", str(file)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pendulum"], "unknown recipe 'pendulum'.*'pendulum_stitch'"),
        (["offline", "--agent.gamma", "0.9"], "'--agent.gamma'.*'agent.losses.gamma'"),
        (["offline", "--updats", "9"], "'--updats'.*'updates'"),
        (["offline", "--sources", "9"], "--sources: expected a valid dictionary"),
        (["offline", "--sources", "{"], "--sources: expected tables in JSON, got '{'"),
        (["offline", "--config", "/nowhere.toml"], "no file /nowhere.toml"),
        (["offline", "--config"], "expected a file"),
    ],
)
def test_what_nobody_consumes_is_named(words, message):
    with pytest.raises(SettingError, match=message):
        resolve(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch = 3", "'batch'.*'data.batch'"),
        ("[data]\nbatches = 3", "'data.batches'.*'data.batch'"),
        ("updates = 'many'", "updates: expected a valid integer, got 'many'"),
        ("updates = true", "updates: expected a valid integer, got True"),
        ("data = 3", "data: expected a table"),
        ("[data]\npadding = 'up'", "data.padding: expected 'none', 'both'"),
        ("[[sources]]\nshare = 1.0", r"sources\[0\].select: expected a value"),
        ("a = [", "not TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(SettingError, match=message):
        resolve(["offline", "--config", str(file)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"batch": 0}}, "data.batch: expected greater than or equal to 1"),
        ({"data": {"epochs": True, "draw": "steps"}}, "data.epochs.*data.draw"),
        ({"data": {"epochs": True, "refresh_every": 5}}, "data.epochs.*data.refresh_every"),
        ({"optimizer": {"learning_rate": 0.0}}, "optimizer.learning_rate"),
        ({"run": "../evil"}, "run: expected letters"),
        ({"dataset": "a", "snapshot": "b"}, "dataset: dataset and snapshot are both set"),
        ({"snapshot": "b", "where": "true"}, "where: only applies to `dataset`"),
        (
            {"snapshot": "b", "data": {"refresh_every": 5}},
            "data.refresh_every: has no effect with snapshot",
        ),
        (
            {"snapshot": "b", "data": {"include_eval": True}},
            "data.include_eval: has no effect with snapshot",
        ),
        (
            {"snapshot": "b", "data": {"wait_for_data": 3.0, "include_eval": True}},
            "data.include_eval: has no effect with snapshot",
        ),
        (
            {
                "data": {"critic_mask": "chosen"},
                "agent": {
                    "critic": False,
                    "losses": {"filter.kind": "behavior_cloning", "dpg_weight": 0.0},
                },
            },
            "data.critic_mask: 'chosen', but there is no critic",
        ),
    ],
)
def test_contradictions_are_refused_by_field(changes, message):
    with pytest.raises(SettingError, match=message):
        override(TrainConfig(), changes)


def test_a_plugin_is_imported_from_where_one_stands_or_refused_by_name(tmp_path, monkeypatch):
    """Its registrations can then be named by the agent's settings."""
    (tmp_path / "my_own_filter.py").write_text(
        "from amago_model import register\n"
        "@register('filter', 'test_options_soft')\n"
        "def soft(advantage):\n    return advantage.sigmoid()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    words = ["--plugin", "my_own_filter", "--agent.custom.filter", "test_options_soft"]
    config = resolve(["offline", *words, "--dataset", "d"]).config
    assert config.plugin == ("my_own_filter",)
    import_plugins(config.plugin, SettingError)
    assert config.agent.custom.filter == "test_options_soft"
    assert registered("filter", "test_options_soft").__module__ == "my_own_filter"
    for text, message in (
        ("def soft(:\n", r"--plugin my_slip_0: SyntaxError: .*my_slip_0\.py, line 1"),
        ("x = 1\nx / 0\n", r"--plugin my_slip_1: ZeroDivisionError: .*my_slip_1\.py, line 2\)"),
        ("import absent_package\n", "--plugin my_slip_2: No module named 'absent_package'"),
    ):
        name = re.findall("my_slip_[0-9]", message)[0]
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(SettingError, match=message):
            import_plugins((name,), SettingError)
    for name, message in (
        ("no_such_module", "no_such_module"),
        ("my_slip.py", "--plugin my_slip$"),
    ):
        with pytest.raises(SettingError, match=message):
            import_plugins((name,), SettingError)


def test_a_recipe_is_chosen_by_the_first_word_alone(tmp_path: Path) -> None:
    """A flag or a file that only renamed it would run the defaults under another's name."""
    with pytest.raises(SettingError, match="first word"):
        resolve(["--recipe", "offline"])
    file = tmp_path / "run.toml"
    file.write_text('recipe = "offline"\n')
    with pytest.raises(SettingError, match="first word"):
        resolve(["offline", "--config", str(file)])


def test_a_batch_that_the_processes_cannot_share_is_refused_before_any_starts() -> None:
    """Once launched, every process would say it, and the launcher would add a traceback."""
    with pytest.raises(SettingError, match="data.batch: 32 windows are not divisible by 3"):
        resolve(["offline", "--processes", "3", "--data.batch", "32"])


def test_critic_settings_named_for_an_agent_without_critics_are_reported(tmp_path: Path) -> None:
    """Those of a file or flag, by name; a recipe's own ones are silent."""
    file = tmp_path / "mine.toml"
    file.write_text("[agent.losses]\nn_step = 3\nbc_weight = 2.0\n")
    words = ["--config", str(file), "--agent.losses.tau", "0.1"]
    assert without_effect(resolve(["bc", *words])) == ["agent.losses.n_step", "agent.losses.tau"]
    assert without_effect(resolve(["bc"])) == without_effect(resolve(["offline", *words])) == []


def test_every_loss_setting_is_the_critics_or_the_actors() -> None:
    """A new setting of the losses is put on one of the two sides."""
    actor = {"bc_weight", "dpg_weight", "dpg_normalization", "dpg_detach_state", "filter"}
    actor |= {"n_actions_in_actor_loss"}
    assert set(LossConfig.model_fields) == actor | set(CRITIC_SETTINGS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused_by_name(device: str) -> None:
    config = resolve(["offline", "--device", device]).config
    with pytest.raises(SettingError, match=f"device: {device}: .*expected a device"):
        make_accelerator(config)
    with pytest.raises(SettingError, match="CUDA_VISIBLE_DEVICES"):
        make_accelerator(config.replace(processes=2))
    with pytest.raises(SettingError, match="device"):
        resolve(["offline", "--device", "cuda:x"])
