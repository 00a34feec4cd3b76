"""Command lines and TOML files to one settings model; every value remembers where it came from.

    PROGRAM --config A.toml --config B.toml --agent.losses.gamma 0.98 --data.epochs --no-sample

Any setting is a flag by its dotted name: `--x.y v`, `--x.y=v`, several words for a list, `--x.flag`
and `--x.no-flag` for a switch. Later files win, flags win over files. A section with several kinds
is a union of models with a field `kind`. A change of kind keeps settings that all kinds share and
those set by a file or flag; the others get the defaults of the new kind. `--x.no-section` switches
off a section that can be None; in a file, `section = false`.

For pydantic models that have `from_dict`, `to_dict` and `error`, the class to raise; for instance
the settings of trainer and collector.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from stepwell._compat import tomllib

S = TypeVar("S")
COMMAND_LINE = "command line"
FIRST_SENTENCE = re.compile(r"(?<!\be\.g)[.;] ")
"""Where the first sentence of a help text ends."""


@dataclass(frozen=True)
class Option:
    """One setting of a program."""

    name: str
    """Dotted, with underscores."""
    hint: Any
    """Type of its value; bool for a section that can be switched off."""
    default: Any
    help: str
    kinds: tuple[str, ...] = ()
    """The kinds that have it, where its section has others, too."""
    section: bool = False
    """It switches a whole section."""
    required: bool = False
    limits: tuple[Any, ...] = ()
    """Bounds of its value, as pydantic notes them."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) is tuple

    @property
    def is_tables(self) -> bool:
        """A list of tables: each word is one, in JSON."""
        return self.is_list and bool(_models_in(get_args(self.hint)[0]))

    @property
    def must_be_given(self) -> bool:
        """Whatever else is set; others are required by one kind of their section."""
        return self.required and not self.kinds

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.hint) if get_origin(self.hint) is Literal else ()


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """A complete config, and for each dotted key the origin of its value."""

    config: S
    origins: dict[str, str]

    def lines(self) -> list[str]:
        """Return readable lines of the values that differ from the defaults, with their origins."""
        values = flatten(self.config.to_dict())  # type: ignore[attr-defined]
        changed = {k: v for k, v in sorted(self.origins.items()) if v != "default"}
        return [f"{key} = {values[key]!r}    ({origin})" for key, origin in changed.items()]


def read(
    model: type[S],
    argv: Sequence[str],
    *,
    prog: str,
    about: str,
    common: Sequence[str] | None = None,
    base: S | None = None,
    origin: str = "default",
    more_schema: Callable[[], Mapping[str, Any]] | None = None,
) -> Resolved[S]:
    """Return the config of a command line; --help, --help-all and --schema print and exit.

    Args:
        common: names of the settings that --help shows; None shows all.
        base: the config before files and flags are applied; --help shows its values.
        origin: the origin of values in `base` that differ from the defaults.
        more_schema: further keys of the document that --schema prints.

    Raises:
        model.error: an unknown setting, named with the nearest known one, or a wrong value.
    """
    error: type[Exception] = model.error  # type: ignore[attr-defined]
    known = options(model)  # type: ignore[arg-type] # a class can be hashed
    if asked := {"-h", "--help", "--help-all", "--schema"} & set(argv):
        if "--schema" in asked:
            document = {**json_schema(model, prog), "common": list(common or known)}
            print(json.dumps({**document, **(more_schema() if more_schema else {})}, indent=2))
        elif "--help-all" in asked:
            print(long_help(prog, about, known))
        else:
            print(short_help(prog, about, _with_values_of(base, known), common))
        raise SystemExit(0)
    given: dict[str, tuple[Any, str]] = {}
    try:
        files, flags = _words(argv, known)
        for file in files:
            for name, value in flatten(_toml(file)).items():
                found = _option(name, known)
                given[found.name] = (value, f"file {file}")
        for name, value in flags.items():
            given[name] = (value, COMMAND_LINE)
        tree = {} if base is None else base.to_dict()  # type: ignore[attr-defined]
        _apply(tree, {name: value for name, (value, _) in given.items()}, known)
        missing = [o.flag for o in known.values() if o.must_be_given and o.name not in tree]
        if missing:
            raise _WrongWords(f"missing {', '.join(missing)}; see {prog} --help")
    except _WrongWords as problem:
        raise error(str(problem)) from None
    config: S = model.from_dict(tree)  # type: ignore[attr-defined]
    return Resolved(config, _origins(config, given, known, origin))


def override(config: S, changes: Mapping[str, Any]) -> S:
    """A copy of a config with changes by dotted name (or nested), as a file would make them."""
    kind: Any = type(config)
    known = options(kind)
    tree = config.to_dict()  # type: ignore[attr-defined]
    try:
        found = {_option(name, known).name: v for name, v in flatten(dict(changes)).items()}
        _apply(tree, found, known)
    except _WrongWords as problem:
        raise kind.error(str(problem)) from None
    return kind.from_dict(tree)  # type: ignore[no-any-return]


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"agent": {"losses": {"gamma": .9}}} to {"agent.losses.gamma": .9}, without empty tables."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


class _WrongWords(Exception):  # noqa: N818 - never leaves this module
    """What is wrong with the words of a command line or file."""


# ------------------------------------------------------------------------------- what can be set


@cache
def options(model: Any, prefix: str = "") -> dict[str, Option]:
    """Every setting of a model by its dotted name, those of all kinds of a section together."""
    found: dict[str, Option] = {}
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] != "kind"):
        path, default = prefix + name, field.get_default(call_default_factory=True)
        help_text = " ".join((field.description or "").split())
        sections = _models_in(field.annotation)
        if not sections or get_origin(field.annotation) is tuple:
            required = default is PydanticUndefined
            default = None if required else default
            limits = tuple(field.metadata)
            found[path] = Option(
                path, field.annotation, default, help_text, required=required, limits=limits
            )
            continue
        if NoneType in get_args(field.annotation):
            found[path] = Option(path, bool, default is not None, help_text, section=True)
        inside = [options(section, f"{path}.") for section in sections]
        _merge(found, inside, [_kinds(section) for section in sections])
        for inner in dict.fromkeys(name for one in inside for name in one):
            found[inner] = _with_default(found[inner], default, inner.removeprefix(f"{path}."))
    return found


def _merge(found: dict[str, Option], sections: list[dict[str, Option]], kinds: list[Any]) -> None:
    """Add the options of all kinds of a section."""
    for name in dict.fromkeys(name for section in sections for name in section):
        having = [(s[name], kind) for s, kind in zip(sections, kinds, strict=True) if name in s]
        merged = having[0][0]
        for option, _ in having[1:]:
            if option.hint != merged.hint:
                merged = replace(merged, hint=_either(merged.hint, option.hint), limits=())
            elif option.limits != merged.limits:
                merged = replace(merged, limits=())
            if option.help != merged.help and name.endswith(".kind"):
                merged = replace(merged, help=f"{merged.help.rstrip('.')}; {option.help}")
        if len(having) < len(sections):
            merged = replace(merged, kinds=tuple(k for _, own in having for k in own))
        found[name] = merged


def _with_default(option: Option, section: Any, path: str) -> Option:
    """With the default that it has in this section, where the section has it."""
    for name in path.split("."):
        if not hasattr(section, name):
            return option
        section = getattr(section, name)
    return option if option.section else replace(option, default=section, required=False)


def _either(a: Any, b: Any) -> Any:
    if get_origin(a) is get_origin(b) is Literal:
        return Literal[tuple(dict.fromkeys((*get_args(a), *get_args(b))))]
    return Union[a, b]  # noqa: UP007 - of types that are values here


def _models_in(hint: Any) -> list[type[BaseModel]]:
    # With Python 3.10 list[int] is a type, but no class.
    if get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    if get_origin(hint) in (Annotated, Union, UnionType, tuple):
        return [model for part in get_args(hint) for model in _models_in(part)]
    return []


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def _option(name: str, known: Mapping[str, Option], written: str = "") -> Option:
    """The setting of this name. Raises `_WrongWords` with the nearest known one."""
    path = name.removeprefix("--").replace("-", "_")
    if path in known:
        return known[path]
    if any(other.startswith(f"{path}.") for other in known):
        raise _WrongWords(f"{written or name}: expected a table of settings")
    leaf = path.rsplit(".", 1)[-1]
    same = [other for other in known if other.rsplit(".", 1)[-1] == leaf]
    near = difflib.get_close_matches(path, same or known, n=1, cutoff=0.0)[0]
    raise _WrongWords(f"unknown setting {written or name!r}; the nearest known one is {near!r}")


# ------------------------------------------------------------------------------ words and files


def _words(argv: Sequence[str], known: Mapping[str, Option]) -> tuple[list[str], dict[str, Any]]:
    """The config files of a command line, and the value of each of its flags, by name."""
    files: list[str] = []
    flags: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise _WrongWords(f"unexpected word {word!r}; a setting is --NAME VALUE")
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
        if flag == "--config":
            if not values and (not rest or rest[0].startswith("--")):
                raise _WrongWords("--config: expected a file after it")
            files += values or [rest.pop(0)]
            continue
        path = flag.removeprefix("--").replace("-", "_")
        parent, _, last = path.rpartition(".")
        positive = f"{parent}.{last[3:]}".lstrip(".") if last.startswith("no_") else ""
        if path not in known and positive in known and known[positive].hint is bool:
            if values:
                raise _WrongWords(f"{flag}: expected no value after it, got {value!r}")
            flags[positive] = False
            continue
        option = _option(flag, known, repr(flag)[1:-1])
        if option.hint is bool and not equals and rest[:1] not in (["true"], ["false"]):
            flags[option.name] = True
            continue
        if not equals:
            while rest and not rest[0].startswith("--") and (option.is_list or not values):
                values.append(rest.pop(0))
            if not values and not option.is_list:
                raise _WrongWords(f"{flag}: expected a value after it")
        flags[option.name] = _value(option, values)
    return files, flags


def _value(option: Option, words: list[str]) -> Any:
    """Words as a JSON value of the setting's type."""
    adapter: TypeAdapter[Any] = TypeAdapter(option.hint)
    given: Any = words
    if option.is_tables:
        given = [_json(option.flag, word) for word in words]
    elif option.is_list:
        given = words if words != [""] else []
    else:
        given = words[0]
        if given.lower() == "none" and NoneType in get_args(option.hint):
            return None
    try:
        return adapter.dump_python(adapter.validate_python(given, strict=False), mode="json")
    except ValidationError as problem:
        expected = problem.errors()[0]["msg"].replace("Input should be", "expected")
        expected = expected.split(", unable")[0]
        raise _WrongWords(f"{option.flag}: {expected}, got {' '.join(words)!r}") from None


def _json(flag: str, word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        raise _WrongWords(f"{flag}: expected tables in JSON, got {word!r}") from None


def _toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise _WrongWords(f"--config: there is no file {path}") from None
    except OSError as error:
        raise _WrongWords(f"--config {path}: {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _WrongWords(f"--config {path}: not TOML: {error}") from None


# ---------------------------------------------------------------------------------- to one tree


def _apply(tree: dict[str, Any], given: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    """Set values by dotted name in the nested tree: switches and kinds of sections first."""
    off = {name for name, value in given.items() if known[name].section and value is False}

    def order(name: str) -> tuple[bool, int]:
        return (not (known[name].section or name.endswith(".kind")), name.count("."))

    for name in sorted(given, key=order):
        *sections, leaf = name.split(".")
        node, path, value = tree, "", given[name]
        for section in sections:
            path = f"{path}.{section}".lstrip(".")
            if path in off:
                raise _WrongWords(f"{name}: set, but {path} is switched off; leave out one of them")
            if node.get(section) is None:
                node[section] = {}
                if f"{path}.kind" in known:
                    node[section]["kind"] = known[f"{path}.kind"].default
            node = node[section]
        if known[name].section:
            if isinstance(value, bool):
                value = (node.get(leaf) or _first(f"{name}.", known)) if value else None
            node[leaf] = value
        elif leaf == "kind" and value != node.get("kind"):
            section = name.removesuffix(".kind")
            shared = {key: node[key] for key in node if _in_all_kinds(f"{section}.{key}", known)}
            node.clear()
            node |= shared | {"kind": value}
        else:
            node[leaf] = value


def _in_all_kinds(path: str, known: Mapping[str, Option]) -> bool:
    """Whether every kind of the section that this is in has it."""
    kinds = set(known[f"{path.rpartition('.')[0]}.kind"].choices)
    inside = (o for name, o in known.items() if name == path or name.startswith(f"{path}."))
    return not any(kinds & {*option.kinds} for option in inside)


def _first(prefix: str, known: Mapping[str, Option]) -> dict[str, Any]:
    """A section that is switched on: its defaults."""
    kind = known.get(f"{prefix}kind")
    return {} if kind is None else {"kind": kind.default}


def _origins(
    config: Any, given: Mapping[str, tuple[Any, str]], known: Mapping[str, Option], origin: str
) -> dict[str, str]:
    """Return the origin of each value: the file, the command line, `origin`, or "default"."""
    plain = _defaults(config)
    found: dict[str, str] = {}
    for name, value in flatten(config.to_dict()).items():
        default = known[name].default if name.endswith(".kind") else plain.get(name, value)
        switch = given.get(name) or next(
            (given[s] for s in _sections(name) if s in given and known[s].section), None
        )
        if name in given:
            found[name] = given[name][1]
        elif value == default:
            found[name] = "default"
        else:
            found[name] = switch[1] if switch else origin
    return found


def _sections(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def _defaults(config: Any, prefix: str = "") -> dict[str, Any]:
    """By dotted name, the default of every setting that this config has, of the kinds it has."""
    found: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            found |= _defaults(value, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = "on"  # a section that is switched off
        if default is not PydanticUndefined:
            found[prefix + name] = TypeAdapter(Any).dump_python(default, mode="json")
    return found


# ----------------------------------------------------------------------------- help and schema


def json_schema(model: Any, title: str) -> dict[str, Any]:
    """Every setting by its dotted name, as one flat JSON schema."""
    properties: dict[str, Any] = {}
    required = []
    for option in options(model).values():
        hint: Any = Annotated[(option.hint, *option.limits)] if option.limits else option.hint
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        found: dict[str, Any] = adapter.json_schema() | {"description": option.help}
        if option.must_be_given:
            required.append(option.name)
        else:
            found["default"] = TypeAdapter(Any).dump_python(option.default, mode="json")
        if option.kinds and not option.name.endswith(".kind"):
            found["kinds"] = list(dict.fromkeys(option.kinds))
        properties[option.name] = found
    return {
        "title": title,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def differences(config: Any) -> dict[str, Any]:
    """The settings of a config that differ from the defaults, by dotted name, as JSON; a section
    that is switched on or off as a boolean."""
    values, found = flatten(config.to_dict()), {}
    model: Any = type(config)
    for name, option in options(model).items():
        if option.section:
            value = values.get(name, True) is not None
        elif name in values:
            value = values[name]
        else:
            continue  # of another kind
        if option.required or value != TypeAdapter(Any).dump_python(option.default, mode="json"):
            found[name] = value
    return found


def _with_values_of(base: Any, known: Mapping[str, Option]) -> dict[str, Option]:
    """The settings with the values of a config as defaults, where it has them."""
    values = {} if base is None else flatten(base.to_dict())
    return {
        name: replace(
            option,
            default=tuple(v) if isinstance(v := values.get(name, option.default), list) else v,
        )
        for name, option in known.items()
    }


def short_help(
    prog: str, about: str, known: Mapping[str, Option], common: Sequence[str] | None = None
) -> str:
    """Name, default and first sentence of the common settings; None takes all."""
    shown = [known[name] for name in (known if common is None else common)]
    lines = [f"usage: {prog} [--config FILE.toml ...] [--NAME VALUE ...]", "", about.strip(), ""]
    for option in shown:
        left = f"  {option.flag} {_shown(option)}".rstrip()
        # The choices of a kind say enough.
        sentence = "" if option.name.endswith(".kind") else FIRST_SENTENCE.split(option.help)[0]
        lines += textwrap.wrap(
            sentence.rstrip("."), 100, initial_indent=f"{left:<38}  ", subsequent_indent=" " * 40
        ) or [left]
    if len(shown) < len(known):
        lines += ["", f"{len(known)} settings in all: --help-all; as JSON: --schema"]
    return "\n".join(lines)


def long_help(prog: str, about: str, known: Mapping[str, Option]) -> str:
    """Every setting with its type, default, kinds and whole description."""
    lines = [f"usage: {prog} [--config FILE.toml ...] [--NAME VALUE ...]", "", about.strip(), ""]
    for option in known.values():
        kinds = f"  (kind {', '.join(dict.fromkeys(option.kinds))})" if option.kinds else ""
        kinds = "" if option.name.endswith(".kind") else kinds
        lines.append(f"  {option.flag} {_type(option.hint)} = {_value_shown(option)}{kinds}")
        lines += textwrap.wrap(
            option.help,
            94,
            initial_indent="      ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _shown(option: Option) -> str:
    """The default, and the other choices if there are some."""
    others = ", ".join(str(c) for c in option.choices if c != option.default)
    return f"{_value_shown(option)} (or {others})" if others else _value_shown(option)


def _value_shown(option: Option) -> str:
    if option.required:
        return "(required)"
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if isinstance(option.default, tuple):
        return " ".join(map(str, option.default))
    if isinstance(option.default, float):
        return f"{option.default:g}"
    return "" if option.default is None else str(option.default)


def _type(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"{'JSON' if _models_in(args[0]) else _type(args[0])} ..."
    if origin is Annotated:
        return _type(args[0])
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(_type(arg) for arg in args))
    return "none" if hint is NoneType else str(getattr(hint, "__name__", hint))
