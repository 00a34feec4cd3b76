"""Every setting has a sentence, a flag and a line in a file, and comes back from a policy file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from amago_model import AgentConfig, CustomConfig, load_policy, save_policy
from amago_model.acting import ActingPolicy
from amago_model.config.spaces import ActionSpace, ObsSpace, Spaces
from amago_model.errors import AmagoError
from stepwell._settings import options, override
from tests.amago_model.settings import changed, leaves, others
from trainer import config as settings
from trainer.config import TrainConfig
from trainer.errors import SettingError
from trainer.main import main
from trainer.options import resolve

# The recipe is the first word of a command line, and a mixture, with the ramp that it alone has use
# for, comes from files; these have their tests in test_options.py.
NOT_FLAGS = {"recipe", "sources", "data.ramp_updates"}

SMALL = {
    "agent.timestep_encoder.d_hidden": 16,
    "agent.timestep_encoder.d_output": 8,
    "agent.trajectory_encoder.kind": "identity",
    "dataset": "pendulum",
}
MEMORY = "agent.trajectory_encoder"
TRANSFORMER = {
    f"{MEMORY}.kind": "transformer",
    f"{MEMORY}.d_model": 16,
    f"{MEMORY}.n_heads": 2,
    f"{MEMORY}.d_ff": 16,
}
# The kinds and switches under which settings can be set, each a config of its own.
BASES: list[dict[str, Any]] = [
    {},
    {
        "snapshot": "s_0",
        "dataset": "",
        f"{MEMORY}.kind": "feed_forward",
        f"{MEMORY}.d_model": 16,
        "agent.actor.continuous.kind": "beta",
        "agent.critic.kind": "hlgauss",
        "agent.critic.popart": False,
        "agent.losses.filter.kind": "exp",
        "data.validation": 0.25,
        "schedule.validate_every": 100,
    },
    {
        f"{MEMORY}.kind": "gru",
        f"{MEMORY}.d_hidden": 8,
        "agent.actor.continuous.kind": "gmm",
        "agent.losses.dpg_weight": 0.0,
        "agent.losses.filter.kind": "leaky_relu",
        "agent.losses.td_lambda": 0.5,
        "agent.timestep_encoder.input_norm": False,
    },
    {
        f"{MEMORY}.kind": "mamba",
        f"{MEMORY}.d_model": 8,
        "agent.actor.kind": "residual",
        "agent.actor.continuous.kind": "gaussian",
        "agent.timestep_encoder.kind": "image",
        "agent.timestep_encoder.images.kind": "impala",
        "agent.timestep_encoder.images.augment": True,
        "agent.timestep_encoder.images.augment.share": 0.5,
        "agent.timestep_encoder.images.keys": ("map",),
    },
    TRANSFORMER
    | {
        f"{MEMORY}.n_sinks": 2,
        f"{MEMORY}.attention": "math",
        "agent.losses.dpg_weight": 0.0,
        "agent.losses.filter.kind": "behavior_cloning",
        "agent.critic": False,
        "agent.return_conditioning": True,
    },
    {
        "agent.actor.continuous.kind": "deterministic",
        "dataset": "growing",
        "data.refresh_every": 5,
        "data.ratio": True,
        "data.ratio.samples_per_insert": 0.5,
    },
    {
        "dataset": "growing",
        "data.refresh_every": 5,
        "data.ratio": True,
        "data.ratio.updates_per_step": 0.1,
        "data.ratio.min_updates_per_step": 0.05,
        "data.ratio.buffer": 500.0,
    },
    TRANSFORMER | {f"{MEMORY}.position.kind": "learnable", f"{MEMORY}.position.max_time": 9},
]
SPACES = Spaces(
    observations={
        "goals": ObsSpace(shape=(2, 2), dtype="float32"),
        "image": ObsSpace(shape=(8, 8, 5), dtype="uint8"),
        "letters": ObsSpace(shape=(4,), dtype="int64"),
        "map": ObsSpace(shape=(5, 5), dtype="float32"),
        "observation": ObsSpace(shape=(3,), dtype="float32"),
        "words": ObsSpace(shape=(2,), dtype="int64", n=200),
    },
    action=ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
)


@cache
def configs() -> list[tuple[TrainConfig, dict[str, Any]]]:
    """Configs that together set every setting to something else than its default."""
    plain = TrainConfig()
    waiting = {n: option for n, option in options(TrainConfig).items() if n not in NOT_FLAGS}
    made = []
    for base in BASES:
        values = SMALL | base
        config = override(plain, values)
        for name in [name for name in waiting if name in values or name in leaves(config)]:
            option = waiting[name]
            tried = [] if name in values else others(option, option.default)
            for value in tried:
                try:
                    config = changed(config, name, value)
                except (AmagoError, SettingError):
                    continue
                values = values | {name: value}
                break
            if name in values:
                del waiting[name]
        made.append((config, {name: v for name, v in values.items() if v != ""}))
    assert not waiting, f"add a config under which these can be set: {sorted(waiting)}"
    return made


def flags(values: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            head, _, leaf = name.rpartition(".")
            negative = f"{head}.no-{leaf}" if head else f"no-{leaf}"
            words.append(f"--{name if value else negative}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    return words


@pytest.mark.parametrize("index", range(len(BASES)))
def test_settings_come_from_flags_and_files_and_back_from_json(index: int, tmp_path: Path) -> None:
    config, values = configs()[index]
    got = resolve(["default", *flags(values)])
    assert got.config.replace(recipe="default", updates=config.updates) == config
    assert {got.origins[name] for name in values if name in got.origins} == {"command line"}
    # In TOML a table cannot be a switch as well.
    tables = {name for name in values if any(other.startswith(f"{name}.") for other in values)}
    lines = [f"{n} = {json.dumps(v, default=str)}" for n, v in values.items() if n not in tables]
    (tmp_path / "all.toml").write_text("\n".join(lines))
    filed = resolve(["default", "--config", str(tmp_path / "all.toml")])
    assert filed.config.replace(updates=config.updates) == config
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("index", range(len(BASES)))
def test_settings_come_back_from_a_policy_file(index: int) -> None:
    agent = configs()[index][0].agent
    # Names of one's own parts have their test in tests/amago_model/test_custom_modules.py.
    agent = agent.replace(custom=CustomConfig())
    encoder = agent.timestep_encoder.replace(auto_scale=False)
    try:
        policy = ActingPolicy(agent := agent.replace(timestep_encoder=encoder), SPACES)
    except AmagoError:  # what these observations cannot be
        agent = agent.replace(timestep_encoder=TrainConfig().agent.timestep_encoder)
        policy = ActingPolicy(agent, SPACES)
    rebuilt = load_policy(save_policy(policy))
    assert rebuilt.config == agent
    assert AgentConfig.from_dict(json.loads(json.dumps(agent.to_dict()))) == agent


def test_every_setting_has_a_sentence_under_it() -> None:
    assert not [name for name, option in options(TrainConfig).items() if not option.help]
    assert all(field.description for field in settings.SourceConfig.model_fields.values())


def helped(word: str, capsys: pytest.CaptureFixture[str], recipe: str = "default") -> str:
    with pytest.raises(SystemExit):
        resolve([recipe, word])
    return capsys.readouterr().out


def test_every_setting_and_its_sentence_is_in_the_whole_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = helped("--help-all", capsys)
    said = " ".join(text.split())
    for option in options(TrainConfig).values():
        assert f"  {option.flag} " in text, option.name
        assert option.help in said, option.name


def test_the_short_help_fits_two_screens(capsys: pytest.CaptureFixture[str]) -> None:
    lines = helped("--help", capsys).splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120
    assert "--help-all" in lines[-1]
    assert '"return > 50"' in " ".join(lines), "a sentence does not end within an abbreviation"
    assert any(line.startswith("  --memory auto (or none, transformer, gru)") for line in lines)
    assert not [line for line in lines if line.endswith((" e.g", " i.e"))]


def test_the_short_help_has_the_values_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("default", "pendulum_stitch"):
        config, text = resolve([name]).config, helped("--help", capsys, name)
        assert f"  --updates {config.updates} " in text and f"the recipe {name};" in text
        assert f"  --agent.losses.gamma {config.agent.losses.gamma:g} " in text
        gammas = " ".join(map(str, config.agent.losses.auxiliary_gammas))
        assert f"  --agent.losses.auxiliary-gammas {gammas} ".rstrip() in text


def test_the_schema_has_every_setting_and_loads_no_torch() -> None:
    code = (
        "import sys, trainer.options, contextlib\n"
        "with contextlib.suppress(SystemExit): trainer.options.resolve(['--schema'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    properties = json.loads(done.stdout)["properties"]
    assert properties.keys() == options(TrainConfig).keys()
    assert properties["agent.losses.gamma"]["type"] == "number"
    assert properties["data.relabel"]["type"] == "array"
    assert properties["agent.trajectory_encoder.kind"]["enum"][-1] == "transformer"


# The code that puts a config together, checks it and writes it down reads all of it.
OF_THE_CONFIG = {"config.py", "options.py", "recipes.py"}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What the trainer's own code reads of its config from now on: (class, setting)."""
    folder, seen = str(Path(settings.__file__).parent), set()

    def look(self: Any, name: str) -> Any:
        reader = Path(sys._getframe(1).f_code.co_filename)
        if str(reader).startswith(folder) and reader.name not in OF_THE_CONFIG:
            seen.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    for cls in (*OURS, settings.SourceConfig):
        monkeypatch.setattr(cls, "__getattribute__", look)
    return seen


OURS = (TrainConfig, settings.DataConfig, settings.OptimizerConfig, settings.ScheduleConfig)
TINY = [
    *("--agent.trajectory-encoder.kind", "identity", "--agent.timestep-encoder.d-hidden", "8"),
    *("--agent.critic.d-hidden", "8", "--agent.actor.d-hidden", "8", "--device", "cpu"),
    *(
        "--data.batch",
        "2",
        "--data.window",
        "4",
        "--updates",
        "2",
        "--schedule.drain-timeout",
        "0.1",
    ),
]


def test_every_setting_of_a_run_is_read_by_the_trainer(
    fake: Callable[..., Any],
    tmp_path: Path,
    reads: set[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """... of these very configs, in a run of a dataset that grows and one of a mixture.

    Those of the agent have a test of their own: tests/amago_model/test_settings_are_used.py.
    """
    service = fake(lengths=[[5, 6], [7]])
    service.dataset = lambda _: None  # it is there
    monkeypatch.setattr("trainer.main.Client", lambda **_: nullcontext(service))
    folders = [f"--output={tmp_path}", f"--data.cache={tmp_path / 'cache'}"]
    mixture = tmp_path / "mixture.toml"
    source = '[[sources]]\nselect = "SELECT id FROM trajectories"\n'
    mixture.write_text(
        f"data.ramp_updates = 2\n{source}share = 1.0\nshare_end = 0.5\n"
        f"{source}share = 0.0\nshare_end = 0.5\n"
    )
    grown = ["--dataset=fake", "--data.refresh-every=1"]
    assert main(["offline", "--derive=off", *TINY, *folders, *grown]) == 0
    assert main(["offline", *TINY, *folders, "--run=mixed", "--config", str(mixture)]) == 0
    wanted = {(cls.__name__, name) for cls in OURS for name in cls.model_fields}
    wanted |= {("SourceConfig", name) for name in settings.SourceConfig.model_fields}
    assert wanted - reads == SEEN_ELSEWHERE


SEEN_ELSEWHERE = {
    # What the trainer asks for is last_share: share_end, or share.
    ("SourceConfig", "share_end"),
    # In settings derived from a dataset: test_derived_settings.py.
    ("TrainConfig", "memory"),
    # With best_share: test_derived_settings.py.
    ("DataConfig", "best_fraction"),
    # Where gradients are not finite: test_learner.py.
    ("OptimizerConfig", "max_bad_updates"),
}
