"""What a recipe set, and nothing would read, falls away; what a person set so is refused.

A recipe suits its own kinds of memory, actor, filter and actions. Where a file, a flag or the data
chooses another, nobody asked for what the recipe said of the old one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from amago_model.checked import made_anew, unfinished
from amago_model.config import Spaces
from amago_model.errors import UnusedError
from amago_model.unused import refuse_unused
from trainer.config import TrainConfig, flatten, replace, to_json

D = TypeVar("D")


def checked(config: TrainConfig, origins: dict[str, str]) -> TrainConfig:
    """A config that was put together `unfinished`, without what of its recipe nothing would read.

    `origins` says of each dotted key where it is from; what falls away is from "default" then.
    Raises `UnusedError` for what somebody else set and nothing would read, `ConfigError` and
    `SettingError` for other contradictions.
    """
    return _settled(config, origins, made_anew)


def for_spaces(config: TrainConfig, origins: dict[str, str], spaces: Spaces) -> TrainConfig:
    """A config without what of its recipe an agent of these spaces would not read.

    Raises `UnusedError` for what somebody else set and it would not read.
    """
    config = _settled(config, origins, lambda now: refuse_unused(now.agent, spaces))
    return checked(config, origins)


def _settled(
    config: TrainConfig, origins: dict[str, str], check: Callable[[TrainConfig], object]
) -> TrainConfig:
    while True:
        try:
            check(config)
            return config
        except UnusedError as error:
            changes = _falling_away(config, origins, error.settings)
            if not changes:
                raise
            with unfinished():
                config = replace(config, _nested(changes))


def _falling_away(
    config: TrainConfig, origins: dict[str, str], settings: Iterable[str]
) -> dict[str, Any]:
    """By dotted key, defaults of those of these settings that the recipe set."""
    plain, values = flatten(to_json(TrainConfig())), flatten(to_json(config))
    changes: dict[str, Any] = {}
    for path in (path for name in settings for path in _paths(config, name)):
        origin = origins.get(path, "default")
        if origin.startswith("recipe ") and values[path] != plain[path]:
            changes[path] = plain[path]
            origins[path] = "default"
    return changes


def _paths(config: Any, name: str, prefix: str = "") -> list[str]:
    """Dotted keys of all values of a setting "LossConfig.leaky_filter" in this config."""
    cls, _, setting = name.partition(".")
    found: list[str] = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if type(config).__name__ == cls and f.name == setting:
            inside = to_json(value)
            nested = isinstance(inside, dict) and dataclasses.is_dataclass(value)
            found += flatten(inside, f"{prefix}{f.name}.") if nested else [prefix + f.name]
        elif dataclasses.is_dataclass(value):
            found += _paths(value, name, f"{prefix}{f.name}.")
    return found


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """{"agent.losses.gamma": .9} to {"agent": {"losses": {"gamma": .9}}}."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, leaf = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[leaf] = value
    return tree
