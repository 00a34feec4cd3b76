"""Relabelers by name: those built in, and those that a plugin registers.

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

    Its result may depend on nothing else: no counter, no clock, no global generator. Then sample k
    is the same for any number of processes, in any order, and after any restart.
    """

    registered_as: ClassVar[str] = ""
    """Its NAME."""

    @abstractmethod
    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        """The episode to learn from: 1 to len(episode) transitions, every array of the same dtype
        and shape. The given arrays are read-only."""

    def check(self, spec: EnvSpec) -> None:  # noqa: B027 - most need nothing in particular
        """Raise `DataError` unless a dataset of this spec can be relabeled so."""

    def fit(self, episodes: Iterable[Episode]) -> Relabeler:  # noqa: ARG002
        """The relabeler to use on a snapshot of these episodes, as recorded: for statistics over
        all of them. Called once per snapshot; by default it returns itself."""
        return self


Kind = TypeVar("Kind", bound=type[Relabeler])
_registered: dict[str, type[Relabeler]] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """A decorator. Raises `SettingError` for a name that is taken or cannot be written."""
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
    """All relabelers there are, by name."""
    return dict(sorted(_registered.items()))


def make_relabelers(words: Sequence[str]) -> tuple[Relabeler, ...]:
    """What data.relabel asks for, in its order: each word is NAME or NAME:FIELD=VALUE,FIELD=VALUE.

    Raises `SettingError` naming the nearest known relabeler or parameter.
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
    """Raise `DataError` unless the dataset has observations of these names, used or of role
    `relabel`: others are not fetched."""
    usable = [key for key in spec.observations if spec.role(key) != "log"]
    for key in keys:
        if key not in usable:
            raise DataError(
                f"data.relabel: {relabeler} needs an observation {key!r}; the dataset's are "
                f"{sorted(usable)}. Name the right one with {relabeler}:FIELD=NAME"
            )


def require_one_dtype(spec: EnvSpec, relabeler: str, *, achieved: str, goal: str) -> None:
    """Raise `DataError` unless achieved goals can be written where goals are shown: fractions
    among whole numbers would lose theirs."""
    came, shown = (np.dtype(spec.observations[key].dtype) for key in (achieved, goal))
    if not np.can_cast(came, shown, "same_kind"):
        raise DataError(
            f"data.relabel: {relabeler} writes achieved goals, {achieved!r} ({came}), among goals, "
            f"{goal!r} ({shown}); store both in one dtype"
        )
