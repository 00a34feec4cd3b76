"""What makes a frozen dataclass a setting: types checked at birth, JSON there and back.

No setting is defined here; see config/.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple, Self, TypeVar, Union

from amago_model.errors import ConfigError, UnusedError

T = TypeVar("T")


# Looked up anew at every construction they would take longer than all checks together.
_hints = cache(typing.get_type_hints)


def _matches(value: Any, hint: Any) -> bool:
    """Whether `value` is of the annotated type; an int is welcome where a float is asked for."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (Union, types.UnionType):
        return any(_matches(value, arg) for arg in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_matches(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_matches, value, args))
    if origin is dict:
        return isinstance(value, dict) and all(_matches(v, args[1]) for v in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _readable(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return str(hint.__name__ if isinstance(hint, type) else hint).replace("typing.", "")


def _from_json(hint: Any, value: Any, where: str) -> Any:
    """Rebuild dataclasses and tuples from what JSON made of them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_from_json(args[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {k: _from_json(args[1], v, f"{where}.{k}") for k, v in value.items()}
    return value


def _build(cls: type[T], data: Any, where: str) -> T:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, got {type(data).__name__}")
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ConfigError(
                f"{where}: unknown setting {key!r}; the nearest known one is {near[0]!r}. "
                f"Known settings: {', '.join(sorted(known))}"
            )
    hints = _hints(cls)  # type: ignore[arg-type]
    values = {k: _from_json(hints[k], v, f"{where}.{k}") for k, v in data.items()}
    try:
        return cls(**values)
    except TypeError as error:  # a field without default is missing
        raise ConfigError(f"{where}: {error}") from error


class Checked:
    """Type and Literal checks for every field, and the JSON round trip."""

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if not _matches(value, hints[f.name]):
                raise ConfigError(
                    f"{type(self).__name__}.{f.name}: expected {_readable(hints[f.name])}, "
                    f"got {value!r}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only; `from_dict` gives back an equal object."""
        values: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return values

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Rebuild from `to_dict` output (tuples may be lists). Absent settings take their default.

        Raises:
            ConfigError: an unknown setting (named, with the nearest known one) or a wrong value.
        """
        return _build(cls, data, cls.__name__)

    def require(self, name: str, ok: bool, what: str) -> None:
        if not ok:
            raise ConfigError(
                f"{type(self).__name__}.{name}: expected {what}, got {getattr(self, name)!r}"
            )

    def require_sizes(self, **limits: int) -> None:
        """Positive and not absurd: a size may come from a file that a stranger wrote."""
        for name, limit in limits.items():
            self.require(name, 1 <= getattr(self, name) <= limit, f"a number from 1 to {limit}")

    def require_fractions(self, *names: str) -> None:
        for name in names:
            self.require(name, 0 <= getattr(self, name) < 1, "a number in [0, 1)")

    def setting_names(self) -> list[str]:
        """The names of all settings."""
        return [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]


def made_anew(config: T) -> T:
    """The same config (any dataclass) with all of its parts, their checks made again."""
    values = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))  # type: ignore[arg-type]
    parts = {name: made_anew(part) for name, part in values if dataclasses.is_dataclass(part)}
    return dataclasses.replace(config, **parts)  # type: ignore[type-var]


class Unused(NamedTuple):
    """Settings that nothing would read, though they are not at their defaults."""

    settings: tuple[str, ...]
    """Their names, with that of their class: "LossConfig.n_step"."""
    sentence: str
    """What to say of them."""


def unused(why: str, *parts: tuple[Checked, Iterable[str]], instead: str = "") -> list[Unused]:
    """What to say of settings that are not at their defaults, though nothing would read them.

    Args:
        why: nothing would, as in "set, but ...".
        parts: configs, and the names of settings in each.
        instead: what else could be done, as in "set x=1 or ".

    Returns:
        One for all of them, for `refuse`; none if all are at their defaults.
    """
    defaults: dict[str, str] = {}
    spared = read_elsewhere() if (chosen := _read_by_chosen.get()) is None else chosen
    for config, names in parts:
        for name in names:
            default = setting_default(type(config), name)
            if getattr(config, name) != default and f"{type(config).__name__}.{name}" not in spared:
                nested = dataclasses.is_dataclass(default)
                shown = f"{name} as it comes" if nested else f"{name}={default!r}"
                defaults[f"{type(config).__name__}.{name}"] = shown
    if not defaults:
        return []
    kept = ", ".join(defaults.values())
    sentence = f"{', '.join(defaults)}: set, but {why}; {instead}leave the default: {kept}"
    return [Unused(tuple(defaults), sentence)]


def of_other_choices(
    config: Checked, setting: str, choices: Mapping[str, Iterable[str]]
) -> list[Unused]:
    """`unused` for what belongs to other choices of a setting than the one that was made."""
    chosen = getattr(config, setting)
    return [
        sentence
        for choice, names in choices.items()
        if choice != chosen
        for sentence in unused(
            f"{setting}={chosen!r} would not use it",
            (config, names),
            instead=f"set {setting}={choice!r} or ",
        )
    ]


def either_or(config: Checked, one: str, other: str, why: str) -> list[Unused]:
    """What to say of two settings of which one alone may differ from its default, if both do."""
    names = (one, other)
    if any(getattr(config, name) == setting_default(type(config), name) for name in names):
        return []
    cls = type(config).__name__
    first, second = (f"{name}={getattr(config, name)!r}" for name in names)
    sentence = f"{cls}.{one}: {first} beside {second}, but {why}; leave one of them at its default"
    return [Unused(tuple(f"{cls}.{name}" for name in names), sentence)]


_declared: dict[str, frozenset[str]] = {}
_read_by_chosen: ContextVar[frozenset[str] | None] = ContextVar("read_by_chosen", default=None)


def declare_read(part: str, settings: frozenset[str]) -> None:
    """A part of somebody's own reads these settings, named as "LossConfig.n_step"."""
    _declared[part] = settings


def read_elsewhere(parts: Iterable[str] | None = None) -> frozenset[str]:
    """What these parts of somebody's own read, or any that has been declared."""
    found = _declared.values() if parts is None else (_declared.get(x, frozenset()) for x in parts)
    return frozenset().union(*found)


@contextmanager
def parts_read(settings: frozenset[str]) -> Iterator[None]:
    """Inside, these settings are read, though nothing that is built in may read them.

    Outside, where it is not known which parts of somebody's own are chosen, all that any of them
    reads is; so a whole config makes its sections anew inside.
    """
    token = _read_by_chosen.set(settings)
    try:
        yield
    finally:
        _read_by_chosen.reset(token)


_unfinished: ContextVar[bool] = ContextVar("unfinished", default=False)


@contextmanager
def unfinished() -> Iterator[None]:
    """Inside, settings that nothing would read are let through: for a config still being put
    together from several sources, or one that a file brings and nobody can change.

    Made anew outside, it is checked.
    """
    token = _unfinished.set(True)
    try:
        yield
    finally:
        _unfinished.reset(token)


def refuse(found: list[Unused]) -> None:
    """Raise `UnusedError` with all that was found of settings that nothing would read, if any."""
    if found and not _unfinished.get():
        names = tuple(name for one in found for name in one.settings)
        raise UnusedError("; also ".join(one.sentence for one in found), names)


def setting_default(cls: type, name: str) -> Any:
    """What a setting of this config class is, unless told."""
    (found,) = (f for f in dataclasses.fields(cls) if f.name == name)
    factory = found.default_factory
    return found.default if factory is dataclasses.MISSING else factory()
