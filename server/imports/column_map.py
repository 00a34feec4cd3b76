"""Which column of a table is what: `columns=observation=x,y action=act …`, or guessed by name.

    observation, next_observation, action    one or more columns; several make one vector; with
                                             /NAME one of several named arrays; * matches columns
    info/NAME                                stored with the observation of the same row
    reward, step                             one column
    episode                                  one column, or several that are one id together
    terminated, truncated, done              flags; done says not which of the two
    not_terminated, not_done                 the same flags, 0 where an episode ends
    first                                    a flag at the first row of each episode
    success                                  of the episode, in its last row

A role that is given empty (`reward=`) has no column. Columns that * matches are in the order of
their numbers (f_2 before f_10), whatever the order of the file. The names are those of columns of
tables and of arrays in HDF5 and npz files. Untrusted: runs only in the sandbox.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from server.imports.raw_file import ImportRefused, same_name
from stepwell._wording import shown
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION

Columns = tuple[str, ...]
NAMED = {"observation": DEFAULT_OBSERVATION, "next_observation": DEFAULT_OBSERVATION}
NAMED |= {"action": DEFAULT_ACTION, "info": ""}
"""Roles of arrays, and the key of one without a name."""
USUAL = {
    "observation": ("observation", "observations", "obs", "state", "states"),
    "next_observation": (
        *("next_observation", "next_observations", "next_obs", "new_obs", "next_state"),
        *("next_states", "obs_next", "s_next"),
    ),
    "action": ("action", "actions", "act", "acts"),
    "reward": ("reward", "rewards", "rew", "rews", "r", "next.reward"),
    "episode": (
        *("episode", "episode_id", "episode_index", "episode_idx", "episode_number", "ep"),
        *("trajectory", "trajectory_id", "trajectory_index", "traj", "traj_id", "traj_idx"),
        *("episodes", "episode_ids", "episode_indices", "episode_nums", "ep_id", "ep_ids"),
        *("ep_idx", "eps_id", "eps_ids", "trajectory_ids", "traj_ids", "trajectories"),
    ),
    "step": (
        *("step", "step_id", "step_index", "step_idx", "t", "timestep", "time_step"),
        *("frame_index", "episode_step", "timesteps", "time_steps", "step_ids", "episode_steps"),
    ),
    "terminated": (
        *("terminated", "terminal", "terminals", "termination", "terminations", "terminateds"),
        *("is_terminal", "is_terminated", "next.terminated"),
    ),
    "truncated": (
        *("truncated", "truncation", "truncations", "timeout", "timeouts", "truncateds"),
        *("is_truncated", "is_timeout", "time_out", "time_outs", "time_limit", "time_limits"),
        *("timelimit.truncated", "next.truncated", "infos/timelimit.truncated"),
    ),
    "done": (
        *("done", "dones", "next.done", "is_last", "is_done", "done_flags", "dones_float"),
        *("ends", "is_end", "episode_end", "episode_ends", "episode_done", "episode_dones"),
        *("episode_terminal", "episode_terminals", "end_of_episode"),
    ),
    "not_terminated": (
        *("not_terminated", "not_terminal", "not_terminals", "nonterminal", "nonterminals"),
        *("non_terminal", "non_terminals"),
    ),
    "not_done": ("not_done", "not_dones", "notdone", "notdones", "nondone", "nondones"),
    "first": (
        *("first", "is_first", "episode_start", "episode_starts", "is_start", "is_init"),
        "starts",
    ),
    "success": ("success", "is_success", "next.success"),
}
"""Names by which a column is recognised, in lower case, the first that there is."""
RLDS = {"first": "is_first", "done": "is_last", "terminated": "is_terminal"}
PADDING = "_is_pad"
"""End of the names of flags that say which numbers are no data: no observations or actions."""
FILE = "file"
"""In `episode`, where no column has this name: which file of the folder a row is in."""


@dataclass(slots=True)
class ColumnMap:
    """Role → columns."""

    arrays: dict[str, dict[str, Columns]] = field(
        default_factory=lambda: {role: {} for role in NAMED}
    )
    """observation, next_observation, action, info: key → columns."""
    single: dict[str, str] = field(default_factory=dict)
    """The other roles that have a column."""
    keys: Columns = ()
    """The columns of `episode`, if it has several."""
    rivals: dict[str, Columns] = field(default_factory=dict)
    """Further columns with a usual name of a guessed role that tells episodes apart."""
    guessed: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    """Roles that somebody named."""
    matched: dict[str, Columns] = field(default_factory=dict)
    """What * has matched: "observation", "observation/arm", … → its columns."""
    element_names: dict[str, Columns] = field(default_factory=dict)
    """Names of the elements of a column that is a vector, where the file has them."""

    def one(self, role: str) -> str | None:
        return self.single.get(role)

    def flag(self, role: str) -> str | None:
        """The column of a flag, or of its negation."""
        return self.one(role) or self.one(f"not_{role}")

    @property
    def episode(self) -> Columns:
        alone = self.single.get("episode")
        return self.keys or (() if alone is None else (alone,))

    @property
    def is_rlds(self) -> bool:
        """Whether the flags are those of RLDS, where the row that is_last marks has no action."""
        names = {role: self.single.get(role, "").lower() for role in RLDS}
        return names == RLDS and not self.given & RLDS.keys()

    def used(self) -> set[str]:
        """Every column that has a role."""
        arrays = (
            c for group in self.arrays.values() for columns in group.values() for c in columns
        )
        return {*arrays, *self.single.values(), *self.keys}

    def named_elements(self, role: str, key: str) -> bool:
        """Whether the columns are the names of a vector's elements."""
        columns = self.arrays[role].get(key, ())
        return len(columns) > 1 or _said(role, key) in self.matched

    def taken(self) -> list[str]:
        """What was guessed, and what * matched, for people."""
        found = ["columns by their names: " + " ".join(self.guessed)] if self.guessed else []
        return found + [f"columns: {role}={shown(names)}" for role, names in self.matched.items()]


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
        parts = [part for part in value.split(",") if part]
        chosen = [name for part in parts for name in _named(part, columns, role)]
        if doubled := sorted({name for name in chosen if chosen.count(name) > 1}):
            raise ImportRefused(
                f"columns: {role} has a column twice", expected="each once", got=shown(doubled)
            )
        if kind in NAMED:
            if kind == "info" and not slash:
                raise ImportRefused("columns: an info has a name", expected="info/NAME=column")
            if chosen:
                name = array_key(key) or NAMED[kind]
                put(found.arrays[kind], kind, name, tuple(chosen))
                if any(part not in columns for part in parts):
                    found.matched[_said(kind, name)] = tuple(chosen)
        elif kind == "episode" and len(chosen) > 1:
            found.keys = tuple(chosen)
        elif len(chosen) > 1:
            raise ImportRefused(f"columns: {role} is one column", expected="one name", got=value)
        elif chosen:
            found.single[kind] = chosen[0]
    if preset is not None:
        _fill(found, preset, asked)
    else:
        _guess(found, columns, asked)
    _match_next(found)
    return found


def _match_next(found: ColumnMap) -> None:
    """Columns of the next observation are in the order of those of the observation. Raises
    `ImportRefused` where somebody gave them in another order."""
    for key, following in found.arrays["next_observation"].items():
        columns = found.arrays["observation"].get(key, ())
        by_part = dict(zip(_parts(following), following, strict=True))
        ordered = tuple(by_part.get(part, "") for part in _parts(columns))
        if len(columns) < 2 or "" in ordered or len(following) != len(columns):
            continue
        role = _said("next_observation", key)
        if role in found.matched:
            found.arrays["next_observation"][key] = found.matched[role] = ordered
        elif ordered != following:
            raise ImportRefused(
                f"columns: {role} is in another order than the observation",
                expected=shown(ordered),
                got=shown(following),
            )


def _parts(names: Columns) -> list[str]:
    """What tells columns of one vector apart: names without their common beginning."""
    common = len(os.path.commonprefix(names)) if len(names) > 1 else 0
    return [name[common:] for name in names]


def element_names(columns: Columns, widths: Sequence[int]) -> Columns:
    """One name for each element of the vector that columns of these widths make."""
    return tuple(
        name if width == 1 else f"{name}[{place}]"
        for name, width in zip(columns, widths, strict=True)
        for place in range(width)
    )


def _named(part: str, columns: Sequence[str], role: str) -> list[str]:
    if part in columns or (role == "episode" and part == FILE):
        return [part]
    if matching := [name for name in columns if fnmatch.fnmatchcase(name, part)]:
        return sorted(matching, key=natural)
    raise ImportRefused(
        f"columns: {role} names a column that does not exist",
        expected=f"one of {shown(columns)}",
        got=part[:80],
    )


def natural(name: str) -> tuple[list[str | int], str]:
    """Sorts numbers in names by their value."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


def _said(role: str, key: str) -> str:
    """Return an array's name in the form of the option `columns`."""
    return role if key == NAMED[role] else f"{role}/{key}"


def _fill(found: ColumnMap, preset: ColumnMap, asked: set[str]) -> None:
    for kind, arrays in preset.arrays.items():
        if kind not in asked:
            found.arrays[kind] = arrays
    for role, name in preset.single.items():
        if role not in asked:
            found.single[role] = name
    found.element_names = preset.element_names


def _guess(found: ColumnMap, columns: Sequence[str], asked: set[str]) -> None:
    infos = {name for names in found.arrays["info"].values() for name in names}
    used = found.used() - infos  # an info can have another role, too
    free = [name for name in columns if name not in used and not name.endswith(PADDING)]
    lower = {name.lower(): name for name in reversed(free)}
    for role in [role for role in (*USUAL, "info") if role not in asked]:
        usual = USUAL.get(role, ())
        known = [lower[name] for name in usual if name in lower]
        exact = known[0] if known else None
        if role not in NAMED:
            if exact is not None:
                if role not in ("reward", "step", "success"):
                    found.rivals[role] = tuple(known[1:])
                found.single[role] = exact
                found.guessed.append(f"{role}={exact}")
            continue
        left = [name for name in free if name not in found.single.values()]
        arrays = {NAMED[role]: (exact,)} if exact else _family(role, left)
        if role == "info":
            arrays.pop("", None)
        found.arrays[role] = {key or NAMED[role]: names for key, names in arrays.items()}
        for key, names in found.arrays[role].items():
            found.guessed.append(f"{_said(role, key)}={','.join(names)}")


def _family(role: str, columns: Sequence[str]) -> dict[str, Columns]:
    """obs_0, obs_1, … are one vector (key ""), obs.arm and obs.hand two named arrays."""
    for stem in USUAL.get(role, ("info", "infos")):
        numbered = re.compile(rf"{re.escape(stem)}[._\[]?(\d+)\]?", re.IGNORECASE)
        numbers = {name: int(m[1]) for name in columns if (m := numbered.fullmatch(name))}
        if len(numbers) > 1 or 0 in numbers.values():
            return {"": tuple(sorted(numbers, key=lambda name: numbers[name]))}
        part = re.compile(rf"{re.escape(stem)}[./](.+)", re.IGNORECASE)
        parts: dict[str, Columns] = {}
        for name in columns:
            if m := part.fullmatch(name):
                put(parts, role, array_key(m[1]), (name,))
        if len(parts) == 1 and stem not in ("info", "infos"):
            return {"": next(iter(parts.values()))}
        if parts:
            return parts
    return {}


def put(arrays: dict[str, Columns], role: str, key: str, columns: Columns) -> None:
    """Raises `ImportRefused` if another array of the role has this name."""
    if key in arrays:
        cure = f"names that differ, by columns={role}/NAME=COLUMN for each"
        raise same_name(_said(role, key), ",".join(arrays[key]), ",".join(columns), cure)
    arrays[key] = columns


def array_key(name: str) -> str:
    """A name that a spec allows."""
    parts = [re.sub(r"[^A-Za-z0-9_]", "_", part)[:64] for part in re.split(r"[./]", name) if part]
    if parts and not re.match(r"[A-Za-z_]", parts[0]):
        parts[0] = f"_{parts[0]}"[:64]
    return "/".join(parts[:5])
