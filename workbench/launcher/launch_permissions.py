"""The settings that a launch may change, and the command lines built from a launch.

    {role: train, recipe: offline, args: {run: x, seed: 1}, count: 2}
        →  stepwell train offline --run=x-1 --seed=1 --output=DATA/runs …
           stepwell train offline --run=x-2 --seed=2 --output=DATA/runs …

A launch is untrusted input. The schema of the command defines its settings and their types.
Numbers, switches and enumerated words cannot name a file, service, module or token, so a launch may
set every setting that accepts only these, unless it is in WITHHELD. Text is allowed only for the
settings in TEXT, each with a pattern; a new text setting of a command is refused until it is added
there. A setting that accepts a path is never allowed. Every value is passed as one argument,
`--option=value`, so that a value that looks like an option remains a value. The parser of the
command checks the type of the value.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.errors import InvalidData
from stepwell.messages import VERSIONED, Launch

STEPWELL = [sys.executable, "-m", "stepwell.cli"]
SCHEMA_SECONDS = 120.0
LONGEST_VALUE = 16_384

Schema = Mapping[str, Mapping[str, Any]]
"""JSON schema of each setting of a command, by its dotted name with underscores."""

WITHHELD = frozenset(
    "data.cache_gb outbox_bytes heartbeat_every poll_every drain_timeout progress upload".split()
)
"""Settings that no launch may change: machine limits, and how processes report to the service."""

_WORD = (re.compile(r"[A-Za-z0-9_.][^\s]*"), "a word")
_POLICY = (re.compile(r"[A-Za-z0-9][\w.-]*([:/][A-Za-z0-9][\w.-]*)?", re.A), "RUN[:VERSION]")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# For a list setting, the pattern applies to each item.
TEXT: dict[str, tuple[re.Pattern[str], str]] = {
    "run": (RUN, "letters, digits, '.', '_', '-', beginning with a letter or digit"),
    "dataset": (re.compile(VERSIONED), "the name of a dataset"),
    "policy": _POLICY,
    "against": _POLICY,
    "snapshot": (re.compile(r"[A-Za-z0-9][\w-]*", re.A), "the id of a snapshot"),
    "where": (re.compile(r".*", re.S), "a condition in SQL"),
    "device": (re.compile(r"[a-z]+(:\d+)?", re.A), "like cpu or cuda:1"),
    # gymnasium imports the module named before a colon.
    "env": (
        re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.A),
        "a registered id like Pendulum-v1, without `module:` (the operator gives --plugin)",
    ),
    # Numbers and words only, since an argument may name a file to read (MuJoCo's xml_file; XLand's
    # benchmark is a pickle).
    "env_args": (
        re.compile(
            r"(?!benchmark=)[A-Za-z_]\w*=(-?\d+(\.\d+)?([eE][+-]?\d+)?|[A-Za-z_][\w-]*)", re.A
        ),
        "NAME=NUMBER or NAME=WORD",
    ),
    # Names of arrays, labels, and objects registered by the operator's plug-ins.
    **dict.fromkeys(
        [
            *("roles", "infos", "tags", "data.relabel", "data.actor_mask", "data.critic_mask"),
            *(f"agent.timestep_encoder.{keys}" for keys in ("keys", "vector_keys", "hide_keys")),
            *(f"agent.timestep_encoder.{kind}.keys" for kind in ("images", "tokens", "goals")),
            *("agent.custom.agent", "agent.custom.actor", "agent.custom.critic"),
            *("agent.custom.timestep_encoder", "agent.custom.trajectory_encoder"),
            *("agent.custom.filter", "agent.custom.losses", "agent.custom.settings"),
            *("epsilon.name", "epsilon.settings"),
        ],
        _WORD,
    ),
}

_OURS = "the launcher keeps what it writes below its own --data"
_FILES = "a launch cannot name files of this machine"
_SERVICE = "the launcher uses its own service and its own token"
REASONS = {
    **dict.fromkeys(("output", "outbox", "data.cache"), _OURS),
    **dict.fromkeys(("config", "file"), _FILES),
    **dict.fromkeys(("url", "token"), _SERVICE),
}


_asking = threading.Lock()


class Refused(InvalidData):  # noqa: N818 - reads as what happened to the launch
    """A launch contains an option that is not allowed; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class LauncherFolder:
    """The folders for records, logs and output of the processes that a launcher starts."""

    data: Path

    @property
    def launches(self) -> Path:
        return self.data / "launches"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def outboxes(self) -> Path:
        return self.data / "outbox"

    def make(self) -> None:
        for folder in (self.launches, self.logs, self.outboxes):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """One process to start."""

    run: str
    words: list[str]
    """Arguments after `stepwell`: role, recipe, options."""


def schema_of(role: str) -> Schema:
    """The settings of `stepwell ROLE`. Raises `Refused` if the command cannot run here."""
    found: Schema = document_of(role)["properties"]
    return found


def document_of(role: str) -> Mapping[str, Any]:
    """Output of `stepwell ROLE --schema`. Raises `Refused` if the command cannot run here."""
    with _asking:  # a command that takes seconds runs once
        return _ask(role)


@functools.cache
def _ask(role: str) -> Mapping[str, Any]:
    try:
        done = subprocess.run(
            [*STEPWELL, role, "--schema"],
            capture_output=True,
            text=True,
            timeout=SCHEMA_SECONDS,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        found["properties"].items()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"stepwell {role} --schema cannot run on this machine: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        why = done.stderr.strip()[-2000:] or "it printed no schema"
        raise Refused(f"stepwell {role} --schema failed on this machine: {why}") from None
    return found


def may_set(name: str, setting: Mapping[str, Any]) -> bool:
    """Whether a launch may set `name`, whose JSON schema is `setting`."""
    if name in WITHHELD or _mentions_path(setting):
        return False
    return name in TEXT or _is_closed(setting)


def _is_closed(setting: Mapping[str, Any]) -> bool:
    """Whether all values are numbers, switches or enumerated words. False for a schema of an
    unknown form."""
    if "anyOf" in setting:
        return all(_is_closed(part) for part in setting["anyOf"])
    if setting.get("type") == "array":
        return "prefixItems" not in setting and _is_closed(setting.get("items", {}))
    return "enum" in setting or setting.get("type") in ("number", "integer", "boolean", "null")


def _mentions_path(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "path" in str(schema.get("format", "")) or any(map(_mentions_path, schema.values()))
    return isinstance(schema, list) and any(map(_mentions_path, schema))


def command_lines(
    launch: Launch, schema: Schema, folder: LauncherFolder, plugins: Sequence[str] = ()
) -> list[CommandLine]:
    """Return one `CommandLine` for each of `launch.count` processes. Raises `Refused`."""
    recipe = _recipe(launch)
    wanted = dict(launch.args)
    chosen = _plugins(wanted.pop("plugin", None), plugins)
    args = _checked(launch.role, schema, wanted)
    base = str(args.pop("run", "")) or _run_name(launch, args)
    found = []
    for index in range(launch.count):
        run = base if launch.count == 1 else f"{base}-{index + 1}"
        if not RUN.fullmatch(run):
            raise Refused("option 'run'", expected=f"{TEXT['run'][1]}, in all 128", got=run)
        values = {"run": run, **args, **_seed(schema, args, index)}
        words = [launch.role, *recipe]
        for name, value in values.items():
            words += _words(schema[name], name, value)
        if chosen:
            words += ["--plugin", *chosen]
        if launch.role == "train":
            words += [f"--output={folder.data / 'runs'}", f"--data.cache={folder.data / 'cache'}"]
        else:
            words.append(f"--outbox={folder.outboxes / run}")
        found.append(CommandLine(run, words))
    return found


def slots(launch: Launch) -> int:
    """Return the number of slots that each process of a launch uses."""
    try:
        return max(1, int(launch.args.get("processes", 1))) if launch.role == "train" else 1
    except (TypeError, ValueError):
        return 1  # not a number; the parser of the trainer reports the error


def _plugins(wanted: Any, allowed: Sequence[str]) -> list[str]:
    """Return the modules to load: all that the operator allows, or the subset a launch names.

    A module is executable code, so its name is only compared with the list of the operator.
    """
    if wanted is None:
        return list(allowed)
    names = wanted.split() if isinstance(wanted, str) else [repr(wanted)]
    for name in names:
        if name not in allowed:
            none = "none: this launcher has no --plugin"
            raise Refused(
                "option 'plugin': the launcher's operator chooses the code that runs, with "
                "stepwell launcher --plugin my.module",
                expected=f"of {', '.join(allowed)}" if allowed else none,
                got=name[:200],
            )
    return names


def _recipe(launch: Launch) -> list[str]:
    if launch.role != "train":
        if launch.recipe:
            raise Refused(f"a launch to {launch.role} has no recipe", got=repr(launch.recipe))
        return []
    # The first word of a command line must never be an option.
    if launch.recipe and not re.fullmatch(r"[a-z][a-z0-9_]*", launch.recipe):
        raise Refused("unknown recipe", expected="its name", got=repr(launch.recipe))
    return [launch.recipe or "default"]


def _checked(role: str, schema: Schema, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with underscores in their names. Refuses unknown and repeated options."""
    values: dict[str, Any] = {}
    for given, value in args.items():
        name = given.replace("-", "_")
        if given.startswith("-") or name not in schema or not may_set(name, schema[name]):
            raise _not_allowed(role, schema, given)
        if name in values:
            raise Refused(f"option {given!r} is given twice")
        if not isinstance(value, str | int | float):
            raise Refused(f"option {given!r}", expected="text, a number, true or false", got=value)
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"option {given!r}", expected="a finite number", got=str(value))
        if isinstance(value, str) and (len(value) > LONGEST_VALUE or "\0" in value):
            raise Refused(f"option {given!r}", expected=f"at most {LONGEST_VALUE} characters")
        values[name] = value
    return values


def _not_allowed(role: str, schema: Schema, given: str) -> Refused:
    name = given.replace("-", "_")
    reason = REASONS.get(name)
    if reason is None and name in schema:
        reason = "that is for the operator of the machine"
    if reason is None:
        near = difflib.get_close_matches(name, [n for n in schema if may_set(n, schema[n])], n=1)
        reason = f"did you mean {near[0]!r}?" if near else f"see stepwell {role} --help-all"
    return Refused(f"a launch to {role} cannot set the option {given!r}: {reason}")


def _words(setting: Mapping[str, Any], name: str, value: Any) -> list[str]:
    """Return one option as command-line arguments."""
    flag = "--" + name.replace("_", "-")
    is_list = setting.get("type") == "array"
    items = str(value).split() if is_list else [str(value)]
    if isinstance(value, bool):
        items = [str(value).lower()]
    pattern, expected = TEXT.get(name, _WORD if is_list else (re.compile(r".*", re.S), ""))
    for item in items:
        if not pattern.fullmatch(item):
            raise Refused(f"option {name!r}", expected=expected, got=repr(item)[:200])
    return [flag, *items] if is_list else [f"{flag}={items[0]}"]


def _seed(schema: Schema, args: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the seed options of process `index`. Seeds that are not numbers are not changed."""

    def value(name: str) -> Any:
        return args.get(name, schema[name].get("default"))

    if index and "seeds" in schema:
        episodes, first = value("episodes"), value("seeds")
        return {"seeds": first + index * episodes} if _whole(episodes) and _whole(first) else {}
    return {"seed": value("seed") + index} if index and _whole(value("seed")) else {}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _run_name(launch: Launch, args: Mapping[str, Any]) -> str:
    """Return a descriptive run name, which is the same for the same launch."""
    what = {
        "train": launch.recipe or "default",
        "collect": f"collect-{args.get('env', '')}",
        "evaluate": f"eval-{args.get('policy', 'random')}",
    }[launch.role]
    text = re.sub(r"[^a-z0-9._]+", "-", what.lower()).strip("-._")[:80]
    return f"{text or launch.role}-{launch.id[-6:]}"
