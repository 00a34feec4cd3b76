"""What a launch may ask of a launcher's machine, and the command lines that it becomes. Pure.

    {role: train, recipe: offline, args: {run: x, seed: 1}, count: 2}
        →  stepwell train offline --run=x-1 --seed=1 --output=DATA/runs …
           stepwell train offline --run=x-2 --seed=2 --output=DATA/runs …

A launch is a stranger's text. Only options on the lists below pass: none of them names a file, a
service or a token; `plugin` chooses among the modules that the launcher's operator allows. A value
travels as one word, `--option=value`, so that a value that looks like an option stays a value.
Types are the business of the command's own parser.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.errors import InvalidData
from stepwell.messages import NAME, Launch

OPTION = re.compile(r"[a-z][a-z0-9_.-]*")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LONGEST_VALUE = 16_384
EVALUATION_EPISODES = 30


class Refused(InvalidData):  # noqa: N818 - reads as what happened to the launch
    """A launch asks for what no launch may ask for; the message says which option, and why."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a launch of one role may set. Option names are written with underscores."""

    options: frozenset[str]
    sections: tuple[str, ...] = ()
    """Every option below these is allowed as well: "agent." for agent.losses.gamma."""
    lists: frozenset[str] = frozenset()
    """Options that take several words; in a launch they are one text with blanks."""
    recipe: bool = False


_ENVIRONMENT = "env env_args envs roles keep_float64 device threads dataset run"
ROLES: dict[str, Role] = {
    "train": Role(
        frozenset(
            "run dataset where snapshot seed updates resume processes threads device precision "
            "compile data.relabel "
            "data.batch data.window data.padding data.draw data.epochs data.refresh_every "
            "data.include_eval data.prefetch data.wait_for_data "
            "data.actor_mask data.critic_mask data.mask_row".split()
        ),
        sections=("agent.", "optimizer.", "schedule."),
        lists=frozenset(
            ["agent.losses.auxiliary_gammas", "data.relabel"]
            + [f"agent.custom.{name}" for name in ("losses", "loss_weights", "settings")]
            + [
                f"agent.timestep_encoder.{name}"
                for name in (
                    "keys vector_keys hide_keys images.keys images.block_depths tokens.keys "
                    "goals.keys".split()
                )
            ]
        ),
        recipe=True,
    ),
    "collect": Role(
        frozenset(
            f"{_ENVIRONMENT} policy random wait_for_policy episodes steps sample partition create "
            "capacity_trajectories capacity_steps seed tags infos max_steps".split()
        ),
        sections=("epsilon.",),
        lists=frozenset(["env_args", "infos", "roles", "tags"]),
    ),
    "evaluate": Role(
        frozenset(f"{_ENVIRONMENT} policy random episodes seeds sample keep".split()),
        lists=frozenset(["env_args", "roles"]),
    ),
}

_THE_LAUNCHERS = "the launcher keeps what it writes below its own --data"
_FILES = "a launch cannot name files of this machine"
_SERVICE = "the launcher talks with its own service, with its own token"
REASONS = {
    "output": _THE_LAUNCHERS,
    "outbox": _THE_LAUNCHERS,
    "data.cache": _THE_LAUNCHERS,
    "config": _FILES,
    "file": _FILES,
    "url": _SERVICE,
    "token": _SERVICE,
}

# Values that the commands use for more than a number: parts of addresses, names of folders.
VALUES: dict[str, tuple[re.Pattern[str], str]] = {
    "run": (RUN, "letters, digits, '.', '_', '-', beginning with a letter or digit"),
    "dataset": (re.compile(NAME), "the name of a dataset"),
    "policy": (re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.A), "RUN[/VERSION]"),
    "snapshot": (re.compile(r"[A-Za-z0-9][\w-]*", re.A), "the id of a snapshot"),
    "device": (re.compile(r"[a-z]+(:\d+)?", re.A), "like cpu or cuda:1"),
    # gymnasium imports what stands before a colon.
    "env": (
        re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.A),
        "a registered id like Pendulum-v1, without `module:` (the operator gives --plugin)",
    ),
}
_WORD = re.compile(r"[A-Za-z0-9_.][^\s]*")
# An environment may read a file that an argument names (MuJoCo's xml_file): numbers and words only.
_ENV_ARG = re.compile(r"[A-Za-z_]\w*=(-?\d+(\.\d+)?([eE][+-]?\d+)?|[A-Za-z_]\w*)", re.A)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a launcher keeps what the processes that it starts write."""

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
class Start:
    """One process to start."""

    run: str
    words: list[str]
    """After `stepwell`: role, recipe, options."""


def starts(launch: Launch, places: Places, plugins: Sequence[str] = ()) -> list[Start]:
    """One `Start` for each of `launch.count` processes. Raises `Refused`."""
    role = ROLES.get(launch.role)
    if role is None:
        raise Refused("unknown role", expected=", ".join(ROLES), got=repr(launch.role))
    recipe = _recipe(launch, role)
    wanted = dict(launch.args)
    chosen = _plugins(wanted.pop("plugin", None), plugins)
    args = _checked(launch.role, role, wanted)
    base = str(args.pop("run", "")) or _run_name(launch, args)
    found = []
    for index in range(launch.count):
        run = base if launch.count == 1 else f"{base}-{index + 1}"
        if not RUN.fullmatch(run):
            raise Refused("option 'run'", expected=f"{VALUES['run'][1]}, in all 128", got=run)
        values = {"run": run, **args, **_seed(launch, args, index)}
        words = [launch.role, *([recipe] if recipe else [])]
        for name, value in values.items():
            words += _words(role, name, value)
        if chosen:
            words += ["--plugin", *chosen]
        if launch.role == "train":
            words += [f"--output={places.data / 'runs'}", f"--data.cache={places.data / 'cache'}"]
        if launch.role in ("collect", "evaluate"):
            words.append(f"--outbox={places.outboxes / run}")
        found.append(Start(run, words))
    return found


def slots(launch: Launch) -> int:
    """How many of a launcher's slots each process of a launch takes."""
    try:
        return max(1, int(launch.args.get("processes", 1))) if launch.role == "train" else 1
    except (TypeError, ValueError):
        return 1  # no number: the trainer's own parser will say so


def _plugins(asked: Any, allowed: Sequence[str]) -> list[str]:
    """The modules to load: all that the operator allows, or those of them that a launch asks for.

    A module is code. Its name is compared with the operator's list, and goes nowhere else.
    """
    if asked is None:
        return list(allowed)
    names = asked.split() if isinstance(asked, str) else [repr(asked)]
    for name in names:
        if name not in allowed:
            expected = (
                f"of {', '.join(allowed)}" if allowed else "none: this launcher has no --plugin"
            )
            raise Refused(
                "option 'plugin': the launcher's operator chooses the code that runs, with "
                "stepwell launcher --plugin my.module",
                expected=expected,
                got=name[:200],
            )
    return names


def _recipe(launch: Launch, role: Role) -> str:
    if not role.recipe:
        if launch.recipe:
            raise Refused(f"a launch to {launch.role} has no recipe", got=repr(launch.recipe))
        return ""
    # The first word of a command line must never be an option.
    if launch.recipe and not re.fullmatch(r"[a-z][a-z0-9_]*", launch.recipe):
        raise Refused("unknown recipe", expected="its name", got=repr(launch.recipe))
    return launch.recipe or "default"


def _checked(role_name: str, role: Role, args: Mapping[str, Any]) -> dict[str, Any]:
    """The options with underscores in their names, each allowed and each once."""
    values: dict[str, Any] = {}
    for given, value in args.items():
        name = given.replace("-", "_")
        if not OPTION.fullmatch(given) or not _allowed(role, name):
            raise _not_allowed(role_name, role, given)
        if name in values:
            raise Refused(f"option {given!r} is given twice")
        if not isinstance(value, str | int | float):
            raise Refused(f"option {given!r}", expected="text, a number, true or false", got=value)
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"option {given!r}", expected="a finite number", got=str(value))
        if isinstance(value, str) and (len(value) > LONGEST_VALUE or "\0" in value):
            raise Refused(f"option {given!r}", expected=f"at most {LONGEST_VALUE} characters")
        if name in VALUES and not VALUES[name][0].fullmatch(str(value)):
            raise Refused(f"option {given!r}", expected=VALUES[name][1], got=repr(value)[:200])
        values[name] = value
    return values


def _allowed(role: Role, name: str) -> bool:
    return name in role.options or any(
        name.startswith(section) and len(name) > len(section) for section in role.sections
    )


def _not_allowed(role_name: str, role: Role, given: str) -> Refused:
    name = given.replace("-", "_")
    reason = REASONS.get(name)
    if reason is None:
        near = difflib.get_close_matches(name, role.options, n=1)
        allowed = ", ".join([*sorted(role.options), *(f"{s}*" for s in role.sections)])
        reason = f"did you mean {near[0]!r}?" if near else f"allowed are {allowed}"
    return Refused(f"a launch to {role_name} cannot set the option {given!r}: {reason}")


def _words(role: Role, name: str, value: Any) -> list[str]:
    """One option as words of a command line."""
    flag = "--" + name.replace("_", "-")
    if name in role.lists:
        items = str(value).split()
        for item in items:
            wanted = _ENV_ARG if name == "env_args" else _WORD
            if not wanted.fullmatch(item):
                expected = "NAME=NUMBER or NAME=WORD" if name == "env_args" else "words"
                raise Refused(f"option {name!r}", expected=f"{expected}, with blanks", got=item)
        return [flag, *items]
    if isinstance(value, bool):
        parent, _, last = flag.removeprefix("--").rpartition(".")
        off = f"--{parent}.no-{last}" if parent else f"--no-{last}"
        return [flag if value else off]
    return [f"{flag}={value}"]


def _seed(launch: Launch, args: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What makes process `index` differ from its siblings. Seeds that are no numbers stay."""
    if launch.role == "evaluate":
        episodes = args.get("episodes", EVALUATION_EPISODES)
        first = args.get("seeds", 0)
        if index and _whole(episodes) and _whole(first):
            return {"seeds": first + index * episodes}
    elif index and _whole(seed := args.get("seed", 0 if launch.role == "train" else None)):
        return {"seed": seed + index}
    return {}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _run_name(launch: Launch, args: Mapping[str, Any]) -> str:
    """A name for the run that says what it is; the same for the same launch."""
    what = {
        "train": launch.recipe or "default",
        "collect": f"collect-{args.get('env', '')}",
        "evaluate": f"eval-{args.get('policy', 'random')}",
    }[launch.role]
    text = re.sub(r"[^a-z0-9._]+", "-", what.lower()).strip("-._")[:80]
    return f"{text or launch.role}-{launch.id[-6:]}"
