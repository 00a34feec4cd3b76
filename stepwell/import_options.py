"""Options of an import, by format: `--option` of the command, parameters of the route, fields of
the dashboard's form. All three are made from these tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# No message is imported: the parser's process, which reads this, starts for every file.
Kind = Literal["text", "count", "switch"]
FORMATS = ("d4rl", "npz", "minari", "amago", "rlds", "lerobot", "parquet")


@dataclass(frozen=True, slots=True)
class ImportOption:
    """An option that some formats have."""

    about: str
    kind: Kind = "text"
    formats: tuple[str, ...] = FORMATS
    example: str = ""


SPACE = "box or discrete:N, where the data is ambiguous"
BOUND = "of actions: numbers with commas between, one for all or one for each"
OPTIONS: dict[str, ImportOption] = {
    "observation": ImportOption(SPACE, example="discrete:64"),
    "action": ImportOption(SPACE + "; discrete:N:START from START on", example="discrete:6"),
    "action_low": ImportOption(f"lower bound {BOUND}", example="-2"),
    "action_high": ImportOption(f"upper bound {BOUND}", example="2"),
    "max_steps": ImportOption(
        "without timeouts: cut episodes after this many steps", "count", ("d4rl", "npz"), "1000"
    ),
    "split": ImportOption("of a folder with several", "text", ("parquet",), "train"),
    "videos": ImportOption(
        "no: leave videos out; 96x96: scale their frames to this width and height",
        "text", ("lerobot",), "96x96",
    ),
    "keep_last_step": ImportOption(
        "of RLDS: action and reward of an episode's last step count, too", "switch", ("rlds",),
        "true",
    ),
    "drop_infos": ImportOption(
        "infos to drop, with commas between; * for all", example="mission,seed"
    ),
}  # fmt: skip
TABLES = ("parquet", "lerobot", "npz", "d4rl")
"""Formats whose columns or arrays have roles, so that they take `columns`."""
ARRAY_ROLES = ("observation", "action", "next_observation")
"""Roles of one or more columns; with /NAME one of several arrays. `info/NAME` is another."""
COLUMN_ROLES = (
    *("reward", "episode", "step", "terminated", "truncated", "done"),
    *("not_terminated", "not_done", "first", "success"),
)
"""Roles of one column; of `episode` several can be one id together."""
LANDMARKS = {
    r"(.*/)?main_data\.hdf5": "minari",
    r"(.*/)?\d+/part-\d+\.(arrow|parquet)": "minari",
    r".*\.(npz|traj)": "amago",
    r".*\.tfrecord-\d+-of-\d+": "rlds",
    r"(.*/)?meta/info\.json": "lerobot",
    r".*\.(parquet|arrow)": "parquet",
}
"""Names that only folders of one format have; the first that is there decides."""


def options_of(formats: Iterable[str]) -> dict[str, ImportOption]:
    """The options that at least one of these formats has."""
    wanted = set(formats)
    return {name: option for name, option in OPTIONS.items() if wanted & set(option.formats)}


def format_of_names(names: Iterable[str]) -> str | None:
    """The format of a folder with these files, None for an unknown one."""
    known = list(names)
    for pattern, format_ in LANDMARKS.items():
        if any(re.fullmatch(pattern, name) for name in known):
            return format_
    return None
