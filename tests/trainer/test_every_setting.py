"""Every setting has a sentence, a flag and a line in a file, and comes back from a policy file."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from amago_model import AgentConfig, CustomConfig, load_policy, save_policy
from amago_model.acting import ActingPolicy
from amago_model.config.spaces import ActionSpace, ObsSpace, Spaces
from amago_model.errors import AmagoError
from tests.amago_model.settings import changed, documented, leaves, others, value_at
from trainer import config as settings
from trainer.config import SettingError, TrainConfig, to_json
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
    f"{MEMORY}.transformer.d_model": 16,
    f"{MEMORY}.transformer.n_heads": 2,
    f"{MEMORY}.transformer.d_ff": 16,
}
# The switches under which settings can be set, each a config of its own.
BASES: list[dict[str, Any]] = [
    {},
    {
        "snapshot": "s_0",
        "dataset": "",
        f"{MEMORY}.kind": "feedforward",
        f"{MEMORY}.feedforward.d_model": 16,
        "agent.actor.continuous": "beta",
        "agent.critic.kind": "hlgauss",
        "agent.losses.filter": "exp",
    },
    {
        f"{MEMORY}.kind": "gru",
        f"{MEMORY}.gru.d_hidden": 8,
        "agent.actor.continuous": "gmm",
        "agent.losses.dpg_weight": 0.0,
        "agent.losses.filter": "leaky_relu",
        "agent.losses.td_lambda": 0.5,
    },
    {
        f"{MEMORY}.kind": "mamba",
        f"{MEMORY}.mamba.d_model": 8,
        "agent.actor.kind": "residual",
        "agent.timestep_encoder.images.kind": "impala",
        "agent.timestep_encoder.images.augment": 0.5,
        "agent.timestep_encoder.images.keys": ("map",),
    },
    TRANSFORMER
    | {
        f"{MEMORY}.transformer.n_sinks": 2,
        f"{MEMORY}.transformer.attention": "math",
        "agent.losses.dpg_weight": 0.0,
        "agent.losses.behavior_cloning": True,
    },
    TRANSFORMER
    | {f"{MEMORY}.transformer.max_time": 9, f"{MEMORY}.transformer.position": "learnable"},
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


ANY_ROWS = {"kind": "any", "previous_features": 12}


def with_all(config: Any, values: dict[str, Any]) -> Any:
    """Several settings at once, where one alone would contradict another."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            nested[head] = value
    new = {
        head: with_all(getattr(config, head), value) if isinstance(value, dict) else value
        for head, value in nested.items()
    }
    return replace(config, **new)


@cache
def configs() -> list[tuple[TrainConfig, dict[str, Any]]]:
    """Configs that together set every setting to something else than its default."""
    plain = TrainConfig()
    waiting = {name: hint for name, hint in leaves(plain).items() if name not in NOT_FLAGS}
    made = []
    for base in BASES:
        values = SMALL | base
        config = with_all(plain, values)
        for name, hint in list(waiting.items()):
            if name in values:
                del waiting[name]
                continue
            for value in others(name.removeprefix("agent."), hint, value_at(plain, name)):
                try:
                    config = changed(config, name, value)
                except (AmagoError, SettingError):
                    continue
                values = values | {name: value}
                del waiting[name]
                break
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
    assert replace(got.config, recipe="default", updates=config.updates) == config
    assert all(got.origins[name] == "command line" for name in values)
    lines = [f"{name} = {json.dumps(to_json(value))}" for name, value in values.items()]
    (tmp_path / "all.toml").write_text("\n".join(lines))
    filed = resolve(["default", "--config", str(tmp_path / "all.toml")])
    assert replace(filed.config, updates=config.updates) == config
    assert settings.replace(TrainConfig(), json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("index", range(len(BASES)))
def test_settings_come_back_from_a_policy_file(index: int) -> None:
    agent = configs()[index][0].agent
    # Names of one's own parts have their test in tests/amago_model/test_custom_parts.py.
    agent = replace(agent, custom=CustomConfig())
    try:
        policy = ActingPolicy(agent, SPACES)
    except AmagoError:
        # What these observations or actions have no use for goes back to its default.
        agent = replace(agent, timestep_encoder=with_all(agent.timestep_encoder, ANY_ROWS))
    try:
        policy = ActingPolicy(agent, SPACES)
    except AmagoError:
        agent = replace(agent, timestep_encoder=TrainConfig().agent.timestep_encoder)
        policy = ActingPolicy(agent, SPACES)
    rebuilt = load_policy(save_policy(policy))
    assert rebuilt.config == agent
    assert AgentConfig.from_dict(json.loads(json.dumps(agent.to_dict()))) == agent


def _sections(cls: type) -> list[type]:
    parts = [type(v) for v in vars(cls()).values() if dataclasses.is_dataclass(v)]
    return [cls, *[deeper for part in parts for deeper in _sections(part)]]


def test_every_setting_has_a_sentence_under_it() -> None:
    for cls in [*_sections(TrainConfig), settings.SourceConfig]:
        assert {f.name for f in dataclasses.fields(cls)} == documented(cls)


def test_every_setting_and_its_sentence_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolve(["default", "--help"])
    text = capsys.readouterr().out.replace("-", "_")
    missing = {name for name in leaves(TrainConfig()) if f"__{name}" not in text}
    assert missing - {f"{name}" for name in NOT_FLAGS} == set()


# The code that puts a config together, checks it and writes it down reads all of it.
OF_THE_CONFIG = {"config.py", "options.py", "unused.py", "recipes.py", "ablations.py"}


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
    assert main(["offline", *TINY, *folders, *grown]) == 0
    assert main(["offline", *TINY, *folders, "--run=mixed", "--config", str(mixture)]) == 0
    wanted = {(cls.__name__, f.name) for cls in OURS for f in dataclasses.fields(cls)}
    wanted |= {("SourceConfig", f.name) for f in dataclasses.fields(settings.SourceConfig)}
    assert wanted - reads == SEEN_ELSEWHERE


SEEN_ELSEWHERE = {
    # What the trainer asks for is last_share: share_end, or share.
    ("SourceConfig", "share_end"),
    # Where gradients are not finite: test_learner.py.
    ("OptimizerConfig", "max_bad_updates"),
}
