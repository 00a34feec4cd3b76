"""The command line of `stepwell run`: its own options, those of its parts, and files of both."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell import terminal
from stepwell._compat import tomllib
from stepwell._settings import flatten
from stepwell.errors import InvalidData

SECTIONS = ("train", "collect", "evaluate")
DEFAULT_PORT = 8000

ABOUT = """\
Collect episodes in an environment, learn from them and evaluate the policies, with progress of all
of it on one screen. It starts a service (unless --url or STEPWELL_URL names one), collectors, a
trainer and an evaluator, and ends with the last update.

The trainer makes --updates-per-step updates for each collected step: the faster side waits. Ctrl-C
stops everything (twice: at once); the same command continues. What breaks is started again.

After these options, any setting of a part is a flag after its name: --train.X, --collect.X,
--evaluate.X, as in `stepwell train --help`; or a table of FILE.toml, of which later ones win:

  recipe = "online"
  updates_per_step = 0.25
  [train]
  agent.losses.gamma = 0.98
  [collect]
  epsilon.kind = "greedy\""""
EXAMPLES = """\
  stepwell run Pendulum-v1
  stepwell run stepwell/TMazePassive-v0 --env-args corridor_length=20 --train.updates 1500
  stepwell run examples/00_meta_frozen_lake.toml
  stepwell run examples/00_meta_frozen_lake.toml --help               what this file is about
  stepwell run examples/00_meta_frozen_lake.toml examples/tiny.toml   in a minute: see it work
  stepwell run my_envs:Robot-v0 robot.toml --envs 16 --collectors 2 --data ./robot
  stepwell run Pendulum-v1 --url http://10.0.0.5:8000 --no-train    only collect and evaluate"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """The options of the command, and the words of each part. Raises `InvalidData` for a wrong
    file, SystemExit for a wrong option."""
    words, sections = _split(argv)
    parser = _parser()
    asks_for_help = bool({"-h", "--help"} & {*words})
    words = [word for word in words if word not in ("-h", "--help")]
    args = parser.parse_intermixed_args(words)
    files = [Path(word) for word in args.env if word.endswith(".toml")]
    known = {name: parser.get_default(name) for name in vars(args)} | {"env": ""}
    given = _read_files(files, known, sections)
    in_files = [env] if (env := given.pop("env", "")) else []
    named = [word for word in args.env if not word.endswith(".toml")] or in_files
    env_args, plugins = given.pop("env_args", []), given.pop("plugin", [])
    parser.set_defaults(**given)
    if asks_for_help:
        parser.description = "\n\n".join([*map(_head, files), ABOUT])
        parser.print_help()
        raise SystemExit(0)
    args = parser.parse_intermixed_args(words)
    if len(named) != 1:
        parser.error(
            f"expected one ENV, or FILE.toml with env = …, got {' '.join(named) or 'none'}"
        )
    args.env = named[0]
    args.env_args = [
        *{pair.partition("=")[0]: pair for pair in [*env_args, *args.env_args]}.values()
    ]
    args.plugin = [*dict.fromkeys([*plugins, *args.plugin])]
    for name, least in (("envs", 1), ("collectors", 0), ("episodes", 1), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    if not (args.train or args.evaluate or args.collectors):
        parser.error("nothing to do: --no-train, --no-evaluate and --collectors 0")
    args.run = args.run or _slug(args.env)
    return args, sections


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of this command, and those of each part without the part's name."""
    own: list[str] = []
    sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
    target = own
    for word in argv:
        if word.startswith("--"):
            section, dot, rest = word.removeprefix("--").partition(".")
            inside = dot and section in sections
            target = sections[section] if inside else own
            word = f"--{rest}" if inside else word
        target.append(word)
    return own, sections


def _read_files(
    paths: Sequence[Path], known: Mapping[str, Any], sections: dict[str, list[str]]
) -> dict[str, Any]:
    """The settings of this command in TOML files, of which later ones win; those of the parts go
    before their words. Lists of later files are added to those of earlier ones."""
    found: dict[str, Any] = {}
    of_parts: dict[str, list[str]] = {name: [] for name in sections}
    for path in paths:
        for key, value in _read_file(path, known, of_parts).items():
            found[key] = [*found.get(key, []), *value] if isinstance(value, list) else value
    for name, words in of_parts.items():
        sections[name][:0] = words
    return found


def _read_file(
    path: Path, known: Mapping[str, Any], sections: dict[str, list[str]]
) -> dict[str, Any]:
    """The settings of this command in a TOML file; those of the parts are added to their words."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidData(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidData(f"{path}: not TOML: {error}") from None
    for name, words in sections.items():
        if isinstance(tree.get(name), dict):
            table = flatten(tree.pop(name))
            words += [word for key, value in table.items() for word in _words(key, value)]
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = key.replace("-", "_")
        own = known.get(name)
        if name not in known:
            near = difflib.get_close_matches(name, sorted({*known, *SECTIONS}), n=1, cutoff=0.0)[0]
            raise InvalidData(f"{path}: unknown setting {key!r}; the nearest known one is {near!r}")
        kinds = (list,) if isinstance(own, list) else (bool,) if own is True else (str, int, float)
        if not isinstance(value, kinds) or (isinstance(value, bool) and own is not True):
            expected = {list: "a list", bool: "true or false"}.get(kinds[0], "a number or a text")
            raise InvalidData(f"{path}: {key}", expected=expected, got=repr(value))
        # argparse converts and checks defaults that are text.
        found[name] = value if kinds[0] in (list, bool) else str(value)
    return found


def _words(key: str, value: Any) -> list[str]:
    """A setting of a file as words of a command line; the tables of a list as JSON."""
    if isinstance(value, list):
        return [f"--{key}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in value)]
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}"]


def _head(path: Path) -> str:
    """The comment at the head of a file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = terminal.parser("run", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("env", metavar="ENV | FILE.toml", nargs="*",
        help="gymnasium id, as Pendulum-v1 or my_envs:Robot-v0; none if a file has env = \"…\". "
        "Files of settings: later ones win, flags win over files")  # fmt: skip
    add("--recipe", default="online", help="training recipe (default: %(default)s)")
    add("--run", default="", help="its name; a stopped run of this name goes on (default: ENV's)")
    add("--dataset", default="", help="for the episodes (default: the run's name)")
    add("--data", type=Path, default=Path("stepwell-run"), help="folder (default: %(default)s)")
    add("--env-args", nargs="+", default=[], metavar="KEY=VALUE",
        help="of the environment; they are added to those of files, or replace them by KEY"
    )  # fmt: skip
    add("--plugin", nargs="+", default=[], metavar="MODULE", help="modules that register parts")
    add("--envs", type=int, default=8, help="environments per collector (default: %(default)s)")
    add("--collectors", type=int, default=1,
        help="collector processes (default: %(default)s). 0: learn from the dataset as it is; "
        "with --updates-per-step: as collectors elsewhere add to it")  # fmt: skip
    add("--episodes", type=int, default=20, help="per evaluation (default: %(default)s)")
    add("--seed", type=int, default=0, help="of training and collecting (default: %(default)s)")
    add("--updates-per-step", type=float, metavar="X",
        help="updates per collected step (default: the recipe's, or 0.1)")  # fmt: skip
    add("--min-size", type=int, metavar="N",
        help="steps in the dataset before the first update (default: the recipe's)")  # fmt: skip
    add("--warm-up-steps", type=int, metavar="N",
        help="random steps before the first policy acts (default: 1,000; 2,000 for other recipes "
        "that derive settings from data, 0 for those that do not)")  # fmt: skip
    add("--no-train", dest="train", action="store_false", help="the trainer runs elsewhere")
    add("--no-evaluate", dest="evaluate", action="store_false", help="score no policies")
    add("--url", help="of a service that runs (default: STEPWELL_URL; else it starts one)")
    add("--port", type=int, default=DEFAULT_PORT,
        help="of the service that it starts, if free; 0: any (default: %(default)s)")  # fmt: skip
    add("--token", help="default: STEPWELL_TOKEN")
    return parser


def _slug(env: str) -> str:
    name = env.rpartition(":")[2].rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]+", "-", name).strip("._-")[:80] or "run"
