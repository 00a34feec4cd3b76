"""Ready-made runs by name. Those that are data are tables: recipes.toml, ablations.toml."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amago_model import presets
from stepwell._settings import flatten, override
from trainer.config import TrainConfig
from trainer.errors import SettingError


@dataclass(frozen=True)
class Recipe:
    """A run that starts from another recipe."""

    name: str
    base: str
    """The recipe that it starts from; empty: the plain defaults."""
    about: str
    """What it is for; of an ablation, what is missing or added. One sentence."""
    changes: dict[str, Any]
    """What differs: dotted name of a setting to its value, as in a config file."""


def _table(file: str) -> dict[str, Recipe]:
    rows = tomllib.loads((Path(__file__).parent / file).read_text())
    return {
        name: Recipe(name, row.pop("base"), row.pop("about"), flatten(row))
        for name, row in rows.items()
    }


RECIPES = {
    "default": Recipe(
        "default",
        "",
        "AMAGO's defaults: Transformer of context 256, seven discounts, four critics.",
        {"updates": 100_000},
    ),
    "published_v3": Recipe(
        "published_v3",
        "default",
        "AMAGO v3.3.0's formula wherever the two differ; docs/parity.md lists all differences.",
        {"agent": presets.published_v3().to_dict()},
    ),
    "multitask": Recipe(
        "multitask",
        "default",
        "AMAGO-2's agent: rewards of very different scales, no DPG, classifying critics.",
        {"agent": presets.multitask().to_dict()},
    ),
    **_table("recipes.toml"),
}
ABLATIONS = _table("ablations.toml")
"""Each takes one part of the method out of a small recipe, or puts one in."""


def recipe(name: str) -> TrainConfig:
    """The config of a recipe or an ablation. Raises `SettingError` naming the nearest one."""
    known = RECIPES | ABLATIONS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise SettingError(
            f"unknown recipe {name!r}; the nearest known one is {near!r} (of {', '.join(RECIPES)}, "
            "and the ablations of docs/method.md)"
        )
    found = known[name]
    base = recipe(found.base) if found.base else TrainConfig()
    return override(base, found.changes | {"recipe": name})
