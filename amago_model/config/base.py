"""The base class of all settings models: frozen, strict, no unknown keys, readable errors.

The docstring under a field is its help text. A section with several kinds is a union of models,
selected by their field `kind`; an optional section may be None.
"""

from __future__ import annotations

import difflib
import json
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import Self

from amago_model.errors import ConfigError

MAX_LAYERS, MAX_WIDTH = 256, 65_536
"""Limits of sizes: a size may come from an untrusted policy file."""


class Settings(BaseModel):
    """A group of settings, validated on construction and convertible to JSON and back."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    error: ClassVar[type[Exception]] = ConfigError
    """Raised for an unknown setting, a wrong type, or a contradiction between settings."""
    root: ClassVar[bool] = False
    """Whether error messages omit the class name before the path of a setting."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as problem:
            raise self.error(explain(problem, type(self))) from None

    # This marks __init__ as pydantic's own, so pydantic validates nested sections without calling
    # their __init__, and each error is reported once, with its full path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """A validated copy with these fields changed."""
        return type(self)(**{**self.__dict__, **changes})

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON types; `from_dict` restores an equal object."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Rebuild from the output of `to_dict`. Missing settings get their defaults.

        Raises:
            cls.error: a setting is unknown (the message suggests the nearest known one), or a value
                is wrong.
        """
        try:
            return cls.model_validate_json(json.dumps(data, default=str))
        except ValidationError as problem:
            raise cls.error(explain(problem, cls)) from None


def explain(problem: ValidationError, cls: type[Settings]) -> str:
    """The errors as text: for each the path, the expected value and the actual value."""
    errors = problem.errors(include_url=False)
    return "; also ".join(dict.fromkeys(_sentence(error, cls) for error in errors))


def _sentence(error: ErrorDetails, cls: type[Settings]) -> str:
    path, section, members = _walk(error["loc"], cls)
    if not cls.root:
        path = [cls.__name__, *path]
    where, message = ".".join(path), error["msg"]
    match error["type"]:
        case "extra_forbidden":
            *parents, name = path
            others = [m for m in members if name in m.model_fields]
            if others:
                kinds = ", ".join(repr(kind) for m in others for kind in kinds_of_section(m))
                return (
                    f"{where}: the chosen kind has no such setting; it is one of kind {kinds}: set "
                    f"{'.'.join([*parents, 'kind'])}, too"
                )
            near = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.0)
            hint = f"; the nearest known one is {near[0]!r}" if near else ""
            return f"{'.'.join(parents) or cls.__name__}: unknown setting {name!r}{hint}"
        case "missing":
            return f"{where}: expected a value, got none"
        case "union_tag_not_found":
            kinds = ", ".join(repr(kind) for m in members for kind in kinds_of_section(m))
            return f"{where}.kind: expected one of {kinds}, got none"
        case "value_error":
            message = str(error["ctx"]["error"])
            of_section = not error["loc"] or isinstance(error["input"], dict | Settings)
            # A validator of a whole section starts its message with the name of the field.
            separator = "." if of_section else ": "
            return f"{where}{separator}{message}" if where else message
        case "union_tag_invalid":
            got = error["ctx"]["tag"]
            return f"{where}.kind: expected one of {error['ctx']['expected_tags']}, got {got!r}"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = "expected a table of settings"
    message = message.replace("Input should be", "expected")
    return f"{where}: {message[0].lower()}{message[1:]}, got {error['input']!r}"


def _walk(
    loc: tuple[int | str, ...], cls: type[Settings]
) -> tuple[list[str], type[Settings], list[type[Settings]]]:
    """(path without pydantic's union tags, section at its end, all models of that section)."""
    path: list[str] = []
    members, section, chosen = [cls], cls, True
    for part in loc:
        if isinstance(part, int):
            path[-1] += f"[{part}]"
        elif part in section.model_fields:
            path.append(part)
            inside = models_in(section.model_fields[part].annotation)
            if inside:
                members, section, chosen = inside, inside[0], len(inside) == 1
        elif not chosen and any(part in kinds_of_section(m) for m in members):
            section = next(m for m in members if part in kinds_of_section(m))
            chosen = True
        else:
            path.append(part)
    return path, section, members


def models_in(hint: Any) -> list[type[Settings]]:
    """The settings models in an annotation; several if it is a union of kinds."""
    # With Python 3.10 list[int] is a type, but no class.
    if get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, Settings):
        return [hint]
    if get_origin(hint) in (Annotated, Union, UnionType, tuple):
        return [model for part in get_args(hint) for model in models_in(part)]
    return []


def kinds_of_section(model: type[Settings]) -> tuple[str, ...]:
    """The values of a model's field `kind`; empty if it has no such field."""
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field else ()
