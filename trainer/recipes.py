"""Named run configurations. Most are defined in tables: recipes.toml and ablations.toml."""

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
    """A configuration that changes settings of another recipe."""

    name: str
    base: str
    """The recipe that it changes; empty for the defaults."""
    about: str
    """Its purpose, in one sentence; for an ablation, what it removes or adds."""
    changes: dict[str, Any]
    """The changed settings: dotted name → value, as in a config file."""


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
        "AMAGO v3.3.0's formula wherever the two differ; docs/reference/parity.md lists them.",
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
"""Ablations. Each removes one part of the method from a small recipe, or adds one."""


def recipe(name: str) -> TrainConfig:
    """The config of a recipe or an ablation. Raises `SettingError` naming the nearest one."""
    known = RECIPES | ABLATIONS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise SettingError(
            f"unknown recipe {name!r}; the nearest known one is {near!r} (of {', '.join(RECIPES)}, "
            "and the ablations of docs/reference/method.md)"
        )
    found = known[name]
    base = recipe(found.base) if found.base else TrainConfig()
    return override(base, found.changes | {"recipe": name})


def speeds() -> dict[str, dict[str, float]]:
    """By recipe, `updates` of a typical run and `updates_per_second` of one thread of a CPU, as
    `benchmarks.recipes` measured them on the machine of docs/reference/training.md."""
    return dict(tomllib.loads((Path(__file__).parent / "recipe_speeds.toml").read_text()))


def own_settings(name: str) -> frozenset[str]:
    """The settings that a recipe chooses itself, so that none is derived in their place: its own
    and those of its bases, up to the one that begins to derive."""
    known, own, found = RECIPES | ABLATIONS, frozenset[str](), frozenset[str]()
    while name in known:
        own |= known[name].changes.keys()
        if not found or "derive" in known[name].changes:
            found = own
        name = known[name].base
    return found
