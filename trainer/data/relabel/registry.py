"""Registry of relabelers by name: built-in relabelers and those of plugins.

from trainer.data.relabel import Episode, Relabeler, register

@register("scale_reward")
class ScaleReward(Relabeler):
    factor: float = 0.5

    def __call__(self, episode, rng):
        return episode.replace(reward=episode.reward * np.float32(self.factor))

stepwell train offline --plugin my_module --data.relabel scale_reward:factor=0.25 --dataset hopper
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

import numpy as np
from pydantic import ValidationError

from amago_model.config.base import explain
from stepwell import EnvSpec
from trainer.config import RunSettings
from trainer.data.relabel.episode import Episode
from trainer.data.snapshot import DataError
from trainer.errors import SettingError


class Relabeler(RunSettings):
    """A pure function of (whole trajectory, generator). The fields of a subclass are its
    parameters, set by NAME:FIELD=VALUE,…

    Its result must not depend on anything else, such as counters, clocks or global generators. Then
    sample k is the same for any number of processes, in any order, and after any restart.
    """

    registered_as: ClassVar[str] = ""
    """Its NAME."""

    @abstractmethod
    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        """Return the episode to learn from: 1 to len(episode) transitions, with all arrays of the
        same dtypes and shapes as before. The input arrays are read-only."""

    def check(self, spec: EnvSpec) -> None:  # noqa: B027 - most need nothing in particular
        """Raise `DataError` unless this relabeler supports datasets with this spec."""

    def fit(self, episodes: Iterable[Episode]) -> Relabeler:  # noqa: ARG002
        """Return the relabeler for a snapshot of these recorded episodes, for example with
        statistics over all of them. Called once per snapshot; returns self by default."""
        return self


Kind = TypeVar("Kind", bound=type[Relabeler])
_registered: dict[str, type[Relabeler]] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Register a relabeler class (decorator). Raises `SettingError` if the name is already taken or
    invalid."""
    if not name or set(name) & set(":,= "):
        raise SettingError(f"register: {name!r} has no place in NAME:FIELD=VALUE; give another")

    def decorate(made: Kind) -> Kind:
        known = _registered.get(name, made)
        if (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
            raise SettingError(
                f"register: relabeler {name!r} is {known.__module__}.{known.__qualname__} already; "
                f"{made.__module__}.{made.__qualname__} needs another name"
            )
        _registered[name], made.registered_as = made, name
        return made

    return decorate


def registered() -> dict[str, type[Relabeler]]:
    """All registered relabelers by name."""
    return dict(sorted(_registered.items()))


def make_relabelers(words: Sequence[str]) -> tuple[Relabeler, ...]:
    """Create the relabelers of data.relabel, in order. A word is NAME or NAME:FIELD=VALUE,….

    Raises `SettingError`, which suggests the closest known relabeler or parameter.
    """
    return tuple(_make(word) for word in words)


def _make(word: str) -> Relabeler:
    name, _, rest = word.partition(":")
    if name not in _registered:
        near = difflib.get_close_matches(name, _registered, n=1, cutoff=0.0)[0]
        raise SettingError(
            f"data.relabel: unknown relabeler {name!r}; the nearest known one is {near!r} (of "
            f"{', '.join(registered())}). A custom one needs --plugin MODULE"
        )
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals or key in values:
            raise SettingError(f"data.relabel: {name}: expected FIELD=VALUE once, got {part!r}")
        values[key] = text
    try:
        return _registered[name].model_validate_strings(values)
    except ValidationError as error:
        raise SettingError(f"data.relabel: {explain(error, _registered[name])}") from None


def require_observations(spec: EnvSpec, relabeler: str, *keys: str) -> None:
    """Raise `DataError` unless the dataset has observations with these names that are used or of
    role `relabel`: others are not fetched."""
    usable = [key for key in spec.observations if spec.role(key) != "log"]
    for key in keys:
        if key not in usable:
            raise DataError(
                f"data.relabel: {relabeler} needs an observation {key!r}; the dataset's are "
                f"{sorted(usable)}. Name the right one with {relabeler}:FIELD=NAME"
            )


def require_one_dtype(spec: EnvSpec, relabeler: str, *, achieved: str, goal: str) -> None:
    """Raise `DataError` unless achieved goals can be stored in the goal observation without loss: a
    float would be truncated in an integer array."""
    came, shown = (np.dtype(spec.observations[key].dtype) for key in (achieved, goal))
    if not np.can_cast(came, shown, "same_kind"):
        raise DataError(
            f"data.relabel: {relabeler} writes achieved goals, {achieved!r} ({came}), among goals, "
            f"{goal!r} ({shown}); store both in one dtype"
        )
