"""Which column of a table is what: `columns=observation=x,y action=act …`, or guessed by name.

    observation, next_observation, action    one or more columns; several make one vector; with
                                             /NAME one of several named arrays; * matches columns
    info/NAME                                stored with the observation of the same row
    reward, episode, step                    one column
    terminated, truncated, done              flags; done says not which of the two
    success                                  of the episode, in its last row

A role that is given empty (`reward=`) has no column. Untrusted: runs only in the sandbox.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from server.imports.raw_file import ImportRefused
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION

Columns = tuple[str, ...]
NAMED = {"observation": DEFAULT_OBSERVATION, "next_observation": DEFAULT_OBSERVATION}
NAMED |= {"action": DEFAULT_ACTION, "info": ""}
"""Roles of arrays, and the key of one without a name."""
USUAL = {
    "observation": ("observation", "observations", "obs", "state", "states"),
    "next_observation": (
        *("next_observation", "next_observations", "next_obs", "next_state", "next_states"),
    ),
    "action": ("action", "actions", "act", "acts"),
    "reward": ("reward", "rewards", "rew", "r", "next.reward"),
    "episode": (
        *("episode", "episode_id", "episode_index", "episode_idx", "episode_number", "ep"),
        *("trajectory", "trajectory_id", "trajectory_index", "traj", "traj_id", "traj_idx"),
    ),
    "step": (
        *("step", "step_id", "step_index", "step_idx", "t", "timestep", "time_step"),
        *("frame_index", "episode_step"),
    ),
    "terminated": ("terminated", "terminal", "terminals", "termination", "terminations"),
    "truncated": ("truncated", "truncation", "truncations", "timeout", "timeouts"),
    "done": ("done", "dones", "next.done", "is_last"),
    "success": ("success", "is_success", "next.success"),
}
"""Names by which a column is recognised, in lower case, the first that there is."""
MOST_SHOWN = 60


@dataclass(slots=True)
class ColumnMap:
    """Role → columns."""

    arrays: dict[str, dict[str, Columns]] = field(
        default_factory=lambda: {role: {} for role in NAMED}
    )
    """observation, next_observation, action, info: key → columns."""
    single: dict[str, str] = field(default_factory=dict)
    """The other roles that have a column."""
    guessed: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    """Roles that somebody named."""

    def one(self, role: str) -> str | None:
        return self.single.get(role)


def column_map(
    columns: Sequence[str], given: Iterable[str], preset: ColumnMap | None = None
) -> ColumnMap:
    """The roles of `columns`: those given, those of `preset`, or those with a usual name.

    Raises `ImportRefused` for a role or column that does not exist.
    """
    found = ColumnMap()
    asked = found.given
    for text in given:
        role, equals, value = text.partition("=")
        kind, slash, key = role.partition("/")
        if not equals or kind not in USUAL.keys() | NAMED.keys() or (slash and kind not in NAMED):
            raise ImportRefused(
                "columns has an unknown role",
                expected=", ".join([*USUAL, "observation/NAME", "action/NAME", "info/NAME"]),
                got=text[:80],
            )
        asked.add(kind)
        chosen = [name for part in value.split(",") if part for name in _named(part, columns, role)]
        if kind in NAMED:
            if kind == "info" and not slash:
                raise ImportRefused("columns: an info has a name", expected="info/NAME=column")
            if chosen:
                found.arrays[kind][array_key(key) or NAMED[kind]] = tuple(chosen)
        elif len(chosen) > 1:
            raise ImportRefused(f"columns: {role} is one column", expected="one name", got=value)
        elif chosen:
            found.single[kind] = chosen[0]
    if preset is not None:
        _fill(found, preset, asked)
    else:
        _guess(found, columns, asked)
    return found


def shown(columns: Sequence[str]) -> str:
    more = f" and {len(columns) - MOST_SHOWN} more" if len(columns) > MOST_SHOWN else ""
    return (", ".join(name[:80] for name in columns[:MOST_SHOWN]) or "none") + more


def _named(part: str, columns: Sequence[str], role: str) -> list[str]:
    if part in columns:
        return [part]
    if matching := [name for name in columns if fnmatch.fnmatchcase(name, part)]:
        return matching
    raise ImportRefused(
        f"columns: {role} names a column that does not exist",
        expected=f"one of {shown(columns)}",
        got=part[:80],
    )


def _fill(found: ColumnMap, preset: ColumnMap, asked: set[str]) -> None:
    for kind, arrays in preset.arrays.items():
        if kind not in asked:
            found.arrays[kind] = arrays
    for role, name in preset.single.items():
        if role not in asked:
            found.single[role] = name


def _guess(found: ColumnMap, columns: Sequence[str], asked: set[str]) -> None:
    used = {name for arrays in found.arrays.values() for cs in arrays.values() for name in cs}
    used |= set(found.single.values())
    free = [name for name in columns if name not in used]
    lower = {name.lower(): name for name in reversed(free)}
    for role in [role for role in (*USUAL, "info") if role not in asked]:
        usual = USUAL.get(role, ())
        exact = next((lower[name] for name in usual if name in lower), None)
        if role not in NAMED:
            if exact is not None:
                found.single[role] = exact
                found.guessed.append(f"{role}={exact}")
            continue
        arrays = {NAMED[role]: (exact,)} if exact else _family(free, usual or ("info", "infos"))
        if role == "info":
            arrays.pop("", None)
        found.arrays[role] = {key or NAMED[role]: names for key, names in arrays.items()}
        for key, names in found.arrays[role].items():
            named = role if key == NAMED[role] else f"{role}/{key}"
            found.guessed.append(f"{named}={','.join(names)}")


def _family(columns: Sequence[str], stems: Iterable[str]) -> dict[str, Columns]:
    """obs_0, obs_1, … are one vector (key ""), obs.arm and obs.hand two named arrays."""
    for stem in stems:
        numbered = re.compile(rf"{re.escape(stem)}[._\[]?(\d+)\]?", re.IGNORECASE)
        numbers = {name: int(m[1]) for name in columns if (m := numbered.fullmatch(name))}
        if len(numbers) > 1 or 0 in numbers.values():
            return {"": tuple(sorted(numbers, key=lambda name: numbers[name]))}
        part = re.compile(rf"{re.escape(stem)}[./](.+)", re.IGNORECASE)
        parts: dict[str, Columns] = {
            array_key(m[1]): (name,) for name in columns if (m := part.fullmatch(name))
        }
        if len(parts) == 1 and stem not in ("info", "infos"):
            return {"": next(iter(parts.values()))}
        if parts:
            return parts
    return {}


def array_key(name: str) -> str:
    """A name that a spec allows."""
    parts = [re.sub(r"[^A-Za-z0-9_]", "_", part)[:64] for part in re.split(r"[./]", name) if part]
    if parts and not re.match(r"[A-Za-z_]", parts[0]):
        parts[0] = f"_{parts[0]}"[:64]
    return "/".join(parts[:5])
