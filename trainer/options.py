"""Recipe, files and flags become one config, and every value remembers where it came from.

    stepwell train RECIPE --config A.toml --config B.toml --agent.losses.gamma 0.98 --run mine

Later wins: the recipe, then files in their order, then flags. A key nobody consumes is an error
that names the nearest one somebody does. What the recipe set, and a file or flag leaves no use for,
returns to its default: see unused.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from amago_model.checked import unfinished
from stepwell._failure import mistakes_in_one_line
from stepwell._plugins import import_plugins
from trainer.ablations import ABLATIONS
from trainer.config import (
    TrainConfig,
    flatten,
    replace,
    to_json,
    unknown_setting,
)
from trainer.errors import SettingError
from trainer.recipes import RECIPES, draft
from trainer.unused import checked

DESCRIPTION = """Train an agent on a dataset of the service; it sees no environment.

RECIPE comes first, one of: {recipes};
or, to see what a part of the method buys, one of: {ablations}.
--config FILE.toml may be given several times; later ones win, and flags win over files.

  stepwell train pendulum_stitch --dataset pendulum --run first --updates 500
  accelerate launch -m trainer.main offline --dataset hopper --run big"""


@dataclass(frozen=True)
class Resolved:
    """A complete config, and for each dotted key the origin of its value."""

    config: TrainConfig
    origins: dict[str, str]

    def describe(self) -> dict[str, Any]:
        """As JSON for the run's row: every value, and where it came from."""
        return {"config": to_json(self.config), "origins": self.origins}

    def lines(self) -> list[str]:
        """For people: what differs from the plain defaults, each with its origin."""
        values = flatten(to_json(self.config))
        return [
            f"{key} = {values[key]!r}    ({origin})"
            for key, origin in sorted(self.origins.items())
            if origin != "default"
        ]


def resolve(argv: Sequence[str]) -> Resolved:
    """The config that a command line asks for. Raises `SettingError`; --help exits."""
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "default"
    files = _take_all(rest, "--config")
    config = draft(name)
    plain, values = flatten(to_json(TrainConfig())), flatten(to_json(config))
    origins = {
        key: "default" if value == plain.get(key) else f"recipe {name}"
        for key, value in values.items()
    }
    for file in files:
        data = _read(Path(file))
        if "recipe" in data:
            raise SettingError(f"--config {file}: {RECIPE_FIRST}")
        chosen = {key.replace("-", "_"): value for key, value in flatten(data).items()}
        with unfinished():
            config = replace(config, data)
        origins |= dict.fromkeys(chosen, f"file {file}")
    if not {"-h", "--help"} & set(rest):
        given = _flags(rest)
        if "recipe" in given:
            raise SettingError(f"--recipe: {RECIPE_FIRST}")
        origins |= dict.fromkeys(given, "command line")
    with mistakes_in_one_line("stepwell train"), unfinished():
        config = tyro.cli(
            TrainConfig,
            prog="stepwell train RECIPE",
            description=DESCRIPTION.format(
                recipes=", ".join(RECIPES), ablations=", ".join(ABLATIONS)
            ),
            default=config,
            args=rest,
        )
    # Before the checks: a part of somebody's own may read what nothing else does.
    import_plugins(config.plugin, SettingError)
    config = checked(config, origins)
    values = flatten(to_json(config))
    for key, origin in origins.items():
        if origin.startswith("recipe ") and values[key] == plain[key]:
            origins[key] = "default"
    return Resolved(config, origins)


def _flags(words: Sequence[str]) -> list[str]:
    """The dotted keys of the flags."""
    return [_known(word) for word in words if word.startswith("--")]


# Under a recipe's name, but with another's settings, a run would lie about itself.
RECIPE_FIRST = "the recipe is chosen by the first word, as in: stepwell train offline --run my-run"


def _take_all(argv: list[str], flag: str) -> list[str]:
    """Remove every `flag VALUE` and `flag=VALUE` from argv; the values."""
    values: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise SettingError(f"{flag}: expected a file after it")
            values.append(value)
        elif word.startswith(f"{flag}="):
            values.append(word.removeprefix(f"{flag}="))
        else:
            rest.append(word)
    argv[:] = rest
    return values


def _known(flag: str) -> str:
    """The dotted key of a flag; --x.no-y is the flag of x.y."""
    path = flag.removeprefix("--").split("=", 1)[0].replace("-", "_")
    known = flatten(to_json(TrainConfig()))
    parts = path.rsplit(".", 1)
    positive = ".".join([*parts[:-1], parts[-1].removeprefix("no_")])
    for key in (path, positive):
        if key in known and key != "sources":
            return key
    raise unknown_setting(flag)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingError(f"--config: there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--config {path}: not TOML: {error}") from None
