"""Ablations are their base but for what they name, they train, and method.md says the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from amago_model import make_agent
from benchmarks.recipes import made_up, spaces_for
from stepwell._settings import flatten, options, override
from trainer.config import TrainConfig
from trainer.errors import SettingError
from trainer.learner import Learner, make_accelerator
from trainer.options import resolve
from trainer.recipes import ABLATIONS, RECIPES, recipe

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "method.md"


def values(name: str) -> dict:
    return flatten(recipe(name).to_dict())


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_differs_from_its_base_in_what_it_names_and_nothing_else(name):
    """But where it names another kind: there stands what this kind has, at its defaults."""
    ablation, known = ABLATIONS[name], options(TrainConfig)
    base, ours = values(ablation.base), values(name)
    differs = {key for key in base.keys() & ours.keys() if base[key] != ours[key]} - {"recipe"}
    named = {
        key: None if known[key].section and value is False else value
        for key, value in ablation.changes.items()
    }
    assert {key: ours[key] for key in named} == named
    kinds = {key.removesuffix("kind") for key in differs if key.endswith(".kind")}
    assert not {key for key in differs - named.keys() if not key.startswith(tuple(kinds))}
    assert differs | (ours.keys() - base.keys()) >= named.keys()


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_trains(name):
    """Two updates on windows of its base's shape: a finite gradient, and weights that move."""
    config = recipe(name)
    torch.manual_seed(0)
    spaces = spaces_for(ABLATIONS[name].base)
    agent = make_agent(config.agent, spaces)
    learner = Learner(
        agent, config.optimizer, make_accelerator(config), seed=0, updates=config.updates
    )
    before = [p.detach().clone() for p in agent.policy.actor.parameters()]
    for update in range(2):
        assert not learner.update(update, made_up(spaces, windows=2, length=6)).skipped
    assert not any(map(torch.equal, before, agent.policy.actor.parameters()))


def test_an_ablation_is_a_recipe_on_the_command_line():
    config = resolve(["ablation_no_popart", "--dataset", "d", "--agent.losses.tau", "0.5"]).config
    assert (config.agent.critic.popart, config.agent.losses.tau) == (None, 0.5)
    assert config.recipe == "ablation_no_popart"
    with pytest.raises(SettingError, match="'ablation_no_popart'"):
        recipe("ablation_nopopart")


def test_a_recipe_of_a_setting_that_is_not_there_is_refused():
    with pytest.raises(SettingError, match=r"agent\.losses\.taw.*agent\.losses\.tau"):
        override(recipe("tmaze"), {"agent.losses.taw": 1.0})


def test_every_name_is_taken_once():
    assert not set(ABLATIONS) & set(RECIPES)
    assert {row.base for row in ABLATIONS.values()} <= set(RECIPES)


# --- docs/reference/method.md -----------------------------------------------------------------


def rows() -> dict[str, tuple[str, str]]:
    """Recipe -> (base of its section, setting), of every row with an ablation recipe."""
    found, base = {}, ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("Base: "):
            base = line.split("`")[1]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 5 and cells[3].startswith("`ablation_"):
            found[cells[3].strip("`")] = (base, cells[2])
    return found


def test_the_table_of_the_docs_and_the_code_agree():
    documented = rows()
    assert set(documented) == set(ABLATIONS)
    for name, (base, settings) in documented.items():
        changes = flatten(tomllib.loads("\n".join(re.findall(r"`([^`]+)`", settings))))
        assert (base, changes) == (
            ABLATIONS[name].base,
            ABLATIONS[name].changes,
        ), name


def test_every_setting_that_the_page_names_exists():
    known = set(options(TrainConfig))
    named = re.findall(r"`((?:agent|data|optimizer)\.[a-z_.0-9]+)", PAGE.read_text())
    assert len(named) > 30
    assert not {path for path in named if path not in known}
