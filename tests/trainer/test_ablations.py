"""Ablations are their base but for what they name, they train, and docs/method.md says the same."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from amago_model import make_agent
from benchmarks.recipes import made_up, spaces_for
from trainer.ablations import ABLATIONS, Ablation, ablated
from trainer.config import SettingError, flatten, to_json
from trainer.distributed import make_accelerator
from trainer.learner import Learner
from trainer.options import resolve
from trainer.recipes import RECIPES, recipe

PAGE = Path(__file__).parents[2] / "docs" / "method.md"


def values(name: str) -> dict:
    return flatten(to_json(recipe(name)))


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_differs_from_its_base_in_what_it_names_and_nothing_else(name):
    ablation = ABLATIONS[name]
    base, ours = values(ablation.base), values(name)
    differs = {key: value for key, value in ours.items() if value != base[key]}
    assert differs.pop("recipe") == name
    assert differs == to_json_values(ablation.changes)


def to_json_values(changes) -> dict:
    return {path: to_json(value) for path, value in changes.items()}


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
    assert (config.agent.critic.popart, config.agent.losses.tau) == (False, 0.5)
    assert config.recipe == "ablation_no_popart"
    with pytest.raises(SettingError, match="'ablation_no_popart'"):
        recipe("ablation_nopopart")


def test_an_ablation_of_a_setting_that_is_not_there_is_refused():
    wrong = Ablation(name="x", base="tmaze", changes={"agent.losses.taw": 1.0}, about="")
    with pytest.raises(SettingError, match=r"agent\.losses\.taw.*agent\.losses\.tau"):
        ablated(recipe("tmaze"), wrong)


def test_every_name_is_taken_once():
    assert not set(ABLATIONS) & set(RECIPES)
    assert {row.base for row in ABLATIONS.values()} <= set(RECIPES)


# --- docs/method.md ---------------------------------------------------------------------------


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
            to_json_values(ABLATIONS[name].changes),
        ), name


def test_every_setting_that_the_page_names_exists():
    known = set(flatten(to_json(replace(recipe("default"), sources=()))))
    named = re.findall(r"`((?:agent|data|optimizer)\.[a-z_.0-9]+)", PAGE.read_text())
    assert len(named) > 30
    assert not {path for path in named if path not in known}
