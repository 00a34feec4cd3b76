"""Programs that a launcher can start: defaults, checks and command lines, from their own schema.

A launcher publishes the schema (`stepwell.messages.Program`), so neither the programs nor torch
need to be installed where the dashboard runs.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
import referencing

from stepwell.messages import Program
from stepwell.terminal import value_of

Args = dict[str, str | int | float | bool]
Kind = Literal["switch", "choice", "integer", "number", "text", "list"]
NONE = "none"
EMPTY = (None, "")
UNSAFE_INTEGER = 2**53
"""Beyond it, a browser rounds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a program, as its schema describes it."""

    name: str
    schema: Mapping[str, Any]
    default: Any

    @property
    def help(self) -> str:
        return str(self.schema.get("description", ""))

    @property
    def choices(self) -> list[str]:
        return [str(choice) for choice in self.schema.get("enum", ())]

    @property
    def nullable(self) -> bool:
        return any(part.get("type") == "null" for part in self.schema.get("anyOf", ()))

    @property
    def kind(self) -> Kind:
        types = {p.get("type") for p in self.schema.get("anyOf", (self.schema,))} - {"null"}
        if "enum" in self.schema:
            return "choice"
        if types == {"boolean"}:
            return "switch"
        if types == {"integer"}:
            return "integer"
        if types and types <= {"integer", "number"}:
            return "number"
        return "list" if types == {"array"} else "text"

    def bound(self, which: Literal["minimum", "maximum"]) -> Any:
        """The bound of a number, where a browser can hold it."""
        found = self.schema.get(which)
        return found if found is not None and abs(found) < UNSAFE_INTEGER else None


def settings_of(program: Program, recipe: str) -> dict[str, Setting]:
    """Every setting, with the recipe's value as its default."""
    found = program.recipes.get(recipe)
    values = {} if found is None else found.values
    return {
        name: Setting(name, schema, values.get(name, schema.get("default")))
        for name, schema in program.settings.items()
    }


def as_text(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(as_text(item) for item in value)
    return NONE if value is None else str(value)


def as_arg(value: Any) -> str | int | float | bool:
    """A value as an argument of a launch."""
    return value if isinstance(value, str | int | float | bool) else as_text(value)


def changed(settings: Mapping[str, Setting], given: Mapping[str, Any]) -> Args:
    """The values that differ from the defaults; what was left empty does not."""
    return {
        name: as_arg(value)
        for name, value in given.items()
        if name not in settings
        or value != settings[name].default
        and not (value in EMPTY and settings[name].default in EMPTY)
    }


# --- checks ---------------------------------------------------------------------------------------


def missing(role: str, program: Program, args: Mapping[str, Any]) -> list[str]:
    """What has to be chosen before the program can start, as words."""
    found = [name for name in program.required if args.get(name) in EMPTY]
    if role == "train":
        return found + ["dataset"] * (not (args.get("dataset") or args.get("snapshot")))
    return found + ["policy or random"] * (not (args.get("policy") or args.get("random")))


def problems(role: str, settings: Mapping[str, Setting], args: Mapping[str, Any]) -> list[str]:
    """What the program would refuse of what was chosen, as far as its schema says so."""
    found = []
    for name, value in args.items():
        if name == "plugin":
            continue  # compared with the list of the launcher's operator
        if name not in settings:
            near = _nearest(name, settings)
            found.append(
                f"{name}: there is no such setting{f'; did you mean {near}?' * bool(near)}"
            )
            continue
        if why := _wrong(settings[name], value) or _other_kind(name, settings, args):
            found.append(f"{name}: {why}")
    return found + _contradictions(role, args)


def _nearest(name: str, settings: Mapping[str, Setting]) -> str:
    leaf = name.rpartition(".")[2]
    same = [other for other in settings if other.rpartition(".")[2] == leaf]
    return next(iter(difflib.get_close_matches(name, same or settings, n=1, cutoff=0.4)), "")


def _wrong(setting: Setting, value: Any) -> str:
    try:
        # Without a registry, a "$ref" of the schema would be fetched from where it points.
        check = jsonschema.Draft202012Validator(setting.schema, registry=referencing.Registry())
        error = jsonschema.exceptions.best_match(check.iter_errors(_typed(setting, value)))
    except (jsonschema.exceptions.SchemaError, referencing.exceptions.Unresolvable) as trouble:
        return f"its schema cannot be read: {trouble}"
    if error is None:
        return ""
    if error.validator == "pattern" and isinstance(error.schema, Mapping):
        expected = error.schema.get("expected", error.schema["pattern"])
        return f"expected {expected}, got {error.instance!r}"
    return str(error.message)


def _typed(setting: Setting, value: Any) -> Any:
    """An argument of a launch as a value of its schema."""
    if setting.kind == "list":
        items = setting.schema.get("items", {})
        words = value.split() if isinstance(value, str) else [value]
        return [w if items.get("type") == "string" else value_of(str(w)) for w in words]
    if setting.kind in ("text", "choice"):
        return as_text(value)
    typed = value_of(value) if isinstance(value, str) else value
    return None if typed == NONE and setting.nullable else typed


def _other_kind(name: str, settings: Mapping[str, Setting], args: Mapping[str, Any]) -> str:
    """Why a setting has no effect: its section has another kind, or is switched off."""
    parts = name.split(".")
    kinds = settings[name].schema.get("kinds", ())
    for depth in range(len(parts) - 1, 0, -1):
        section = ".".join(parts[:depth])
        if section in settings and _value(section, settings, args) is False:
            return f"{section} is switched off"
        which = f"{section}.kind"
        if kinds and which in settings and set(kinds) <= set(settings[which].choices):
            now = _value(which, settings, args)
            return "" if now in kinds else f"only with {which} {' or '.join(kinds)}, not {now}"
    return ""


def _value(name: str, settings: Mapping[str, Setting], args: Mapping[str, Any]) -> Any:
    return args.get(name, settings[name].default)


def _contradictions(role: str, args: Mapping[str, Any]) -> list[str]:
    """Rules between settings, which no schema of one setting says."""
    if role != "train" and args.get("policy") and args.get("random"):
        return ["policy: a policy, or random actions, not both"]
    return []


# --- command lines and copies ---------------------------------------------------------------------


def command_line(role: str, recipe: str, args: Mapping[str, Any], lists: Sequence[str] = ()) -> str:
    """The same as a command. `lists`: the names of the settings that take several words."""
    words = ["stepwell", role, *([recipe or "default"] if role == "train" else [])]
    for name, value in args.items():
        flag, text = "--" + name.replace("_", "-"), as_text(value)
        words += [flag, *text.split()] if name in lists else [f"{flag}={text}"]
    return shlex.join(words)


def args_of_run(config: Mapping[str, Any], settings: Mapping[str, Setting]) -> Args:
    """What was given to start a run, from its config with one key per setting: of a trainer what
    came from its command line or a file, of others what differs from the defaults."""
    given = {n: v for n, v in config.items() if n in settings and n != "run" and v is not None}
    prefix = "origins."
    if any(name.startswith(prefix) for name in config):
        ours = {
            name
            for name in given
            if str(config.get(prefix + name, "")).startswith(("command line", "file "))
        }
        return {name: as_arg(value) for name, value in given.items() if name in ours}
    return changed(settings, given)
