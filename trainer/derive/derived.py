"""Settings that a dataset suggests, and how they join the config of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amago_model.errors import AmagoError
from stepwell._settings import flatten, override
from trainer.config import TrainConfig
from trainer.errors import SettingError


@dataclass(frozen=True, slots=True)
class Derived:
    """One derived setting."""

    key: str
    """Dotted name of the setting."""
    value: Any
    reason: str


def is_free(key: str, origins: Mapping[str, str]) -> bool:
    """Whether neither a file nor a flag sets a setting."""
    return origins.get(key, "default").startswith(("default", "recipe "))


def apply_settings(
    config: TrainConfig,
    origins: Mapping[str, str],
    own: Collection[str],
    derived: Iterable[Derived],
    say: Callable[[str], None] = lambda _: None,
) -> tuple[TrainConfig, list[Derived]]:
    """Add derived settings to a config.

    Args:
        config: the config of recipe, files and flags.
        origins: where its values come from.
        own: the settings that the recipe itself sets, without those of its base.
        derived: settings from `derive_settings`.
        say: called with a line about each that contradicts what a file or flag sets.

    Returns:
        The new config, and the settings that are in it: no file, flag or `own` decides them, they
        contradict none of these, and they exist for the chosen kinds of encoder, actor and critic.
    """
    free = [d for d in derived if d.key not in own and is_free(d.key, origins)]
    used = []
    for d in sorted(free, key=lambda d: not d.key.endswith(".kind")):  # kinds first, they decide
        if d.key not in flatten(config.to_dict()):
            continue
        try:
            config = override(config, {d.key: d.value})
        except (AmagoError, SettingError) as error:
            say(f"warning: {d.key}={d.value!r} ({d.reason}) is left out: {error}")
            continue
        used.append(d)
    return config, used
