"""Every setting that docs/reference/from_amago.md names exists, and every default is as it says."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from amago_model.config.base import models_in
from collector.config import CollectConfig, EvaluateConfig
from stepwell._settings import options, override
from stepwell.cli import COMMANDS
from trainer.config import SourceConfig, TrainConfig
from trainer.options import resolve

DOCS = Path(__file__).parents[1] / "docs" / "reference"
PAGE = (DOCS / "from_amago.md").read_text()
METRICS = set(re.findall(r"`([a-z]+/[a-z_]+)`", (DOCS / "training.md").read_text()))
SETTINGS = options(TrainConfig)
SECTIONS = {path.rpartition(".")[0] for path in SETTINGS}
MIXTURES = {f"sources.{name}" for name in SourceConfig.model_fields}
COLLECT, EVALUATE = options(CollectConfig), options(EvaluateConfig)
FLAGS = {"collect": COLLECT, "evaluate": EVALUATE, "train": SETTINGS | {"config": None}}


def defaults(model: Any, prefix: str = "") -> dict[str, list[Any]]:
    """The defaults of every setting, one for each kind that has it."""
    found: dict[str, list[Any]] = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        inside = models_in(field.annotation)
        if not inside or name == "sources":
            found[prefix + name] = [default]
        else:
            found[prefix + name] = [default is not None]
        for section in inside if name != "sources" else ():
            for path, values in defaults(section, f"{prefix}{name}.").items():
                found.setdefault(path, []).extend(values)
            if hasattr(default, "kind"):
                found[f"{prefix}{name}.kind"] = [default.kind]
    return found


DEFAULTS = defaults(TrainConfig)

ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| AMAGO |")
]


def words(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def outside_code() -> str:
    return re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_page_has_rows_of_three_cells() -> None:
    assert len(ROWS) > 150
    assert {len(row) for row in ROWS} == {3}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_each_row_leads_to_one_thing_of_ours_or_says_why_not(row: tuple[str, str, str]) -> None:
    _, here, why = row
    if here == "none":
        assert why
        return
    named = words(here)
    assert named and not re.sub(r"`[^`]+`|, ", "", here), "one or more names and nothing else"
    for word in named:
        check(word)


def check(word: str) -> None:
    """A setting, with or without a value; a metric; a command, with or without an option;
    something to import."""
    if word.startswith("stepwell "):
        _, command, *options = shlex.split(word)
        assert command in COMMANDS
        for option in (o for o in options if o.startswith("--")):
            assert option[2:].replace("-", "_") in FLAGS[command], option
    elif word.startswith("amago_model."):
        module, *names = word.split(".")
        thing: Any = importlib.import_module(module)
        for name in names:
            thing = getattr(thing, name)
    elif re.fullmatch("[a-z]+/[a-z_]+", word):
        assert word in METRICS | {f"popart/{x}" for x in ("mean", "sigma", "w", "b")}
    elif word not in MIXTURES:
        path, _, value = word.partition(" = ")
        assert path in SETTINGS, path
        if value:
            accept(path, tomllib.loads(f"x = {value}")["x"])


def accept(path: str, value: object) -> None:
    """Raises `SettingError` unless the value is one that the setting can have."""
    changed: dict[str, object] = {path: value}
    if path.startswith("agent.critic.") and SETTINGS[path].kinds:
        changed["agent.critic.kind"] = SETTINGS[path].kinds[-1]
    if path.endswith(".position.kind"):
        changed["agent.trajectory_encoder.position.max_time"] = 9
    override(TrainConfig(), changed)


def test_every_setting_that_the_text_names_is_one() -> None:
    for word in words(outside_code()):
        if word.split(".")[0] in ("agent", "data", "optimizer", "schedule", "sources"):
            path = word.partition(" = ")[0]
            if path not in SECTIONS:
                check(word)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_a_default_is_the_same_or_said_to_be_another(row: tuple[str, str, str]) -> None:
    """Where AMAGO's is given, and the row leads to one setting."""
    theirs, here, note = row
    values = [value for word in words(theirs) if (value := word.partition(" = ")[2])]
    ours = default_of(words(here))
    if ours is None:
        return
    for value in map(ast.literal_eval, values):
        if value in ours:
            assert "**default**" not in note, "the same, yet said to differ"
        else:
            said = re.search(r"\*\*default\*\* (\"[^\"]*\"|\[[^\]]*\]|[\w.-]+)", note)
            assert said, f"here it is {ours[0]!r}"
            assert ast.literal_eval(said[1]) in [
                list(x) if isinstance(x, tuple) else x for x in ours
            ]


def default_of(named: list[str]) -> list[Any] | None:
    """The defaults of the one setting or flag that is named; None where there is none."""
    if len(named) != 1 or " = " in named[0]:
        return None
    command, _, option = named[0].removeprefix("stepwell ").partition(" --")
    if option:
        table, path = FLAGS[command], option.replace("-", "_")
        return [table[path].default] if table.get(path) else None
    ours = DEFAULTS.get(named[0])
    return ours and [list(x) if isinstance(x, tuple) else x for x in ours]


def test_the_example_is_a_config_file(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "popgym.toml").write_text(block)
    for recipe in ("published_v3", "default"):
        config = resolve([recipe, "--config", str(tmp_path / "popgym.toml")]).config
        assert config.agent.losses.gammas[-1] == 0.999 and len(config.agent.losses.gammas) == 18
        context = config.agent.trajectory_encoder.context
        assert context == config.data.window + 1
