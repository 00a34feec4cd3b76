"""The arrays of a flat file (HDF5, npz) by name, with their roles: those of D4RL's names, of other
usual ones, or as the option `columns` gives them (column_map.py). Untrusted: runs only in the
sandbox. Nothing here opens a file; hdf5.py and npz.py do.

    observations [N, …] …             one array for all episodes
    observations_0 [T, …] …           one for each episode, as d3rlpy 2 writes them
    obs [N+E, …], indices [E-1] …     as imitation writes its trajectories
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from server.imports.column_map import USUAL, ColumnMap, column_map
from server.imports.ends import (
    LISTS,
    check_rlds,
    cure_of_step_type,
    read_flags,
    split_by_flags,
    warn_of_final_rows,
)
from server.imports.episode_ids import SOURCE, factorized, split_by_ids
from server.imports.raw_file import (
    Array,
    ImportRefused,
    check_dtype,
    check_size,
    plain,
)
from stepwell._wording import pluralize, shown

ENDS, SPEC = "metadata/episode_ends", "metadata/stepwell_spec"
"""Arrays that `stepwell export` adds (workbench/export/flat.py): the last row of each trajectory,
and the env spec as JSON in UTF-8."""
D4RL = {
    "observation=observations",
    "action=actions",
    "reward=rewards",
    "terminated=terminals",
    "truncated=timeouts",
    "next_observation=next_observations",
}
"""Names that go without saying."""
NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}
"""D4RL's names of what every file has."""
PIECE = re.compile(r"(.+)_(\d{1,9})")
POSITION, FILLED = ("ptr", "pos", "position", "_index"), ("size", "_size", "full")
"""Names in replay buffers of the row that is written next, and of how many rows are."""
MOST_UNREAD = 20


class Member(Protocol):
    """An array in the file, not yet read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, *, texts: bool = False) -> Array:
        """Raises `ImportRefused`; only with `texts` are texts allowed."""


@dataclass(slots=True)
class RawFile:
    """The content of one file (episode_ids.py: Rows)."""

    arrays: dict[str, Array] = field(default_factory=dict)
    """By their names in the file."""
    map: ColumnMap = field(default_factory=ColumnMap)
    """Which of them is what."""
    names: list[str] = field(default_factory=list)
    """Names of all arrays in the file except infos and metadata."""
    ends: NDArray[np.int64] | None = None
    """The last row of each episode, where the layout says it."""
    infos: dict[str, Array] = field(default_factory=dict)
    """infos/<name>, each [N, …]."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Infos in the file that are dropped: name → reason."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """metadata/<name>: scalars and short texts; for arrays only the shape."""
    warnings: list[str] = field(default_factory=list)
    rows: int = 0

    # --- what episode_ids.py asks for -------------------------------------------------------------

    @property
    def file_rows(self) -> list[int]:
        return [self.rows]

    @property
    def columns(self) -> list[str]:
        return self.names

    def numbers_of(self, name: str) -> Array:
        """[N], of an array [N] or [N, 1]."""
        array = self.arrays[name]
        check_dtype(name, array.dtype)
        if array.shape not in ((self.rows,), (self.rows, 1)):
            raise self._wrong_length(name, array)
        return native(array.reshape(self.rows))

    def ids(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        array = self.arrays[name]
        if array.dtype.kind not in "USO":
            array = self.numbers_of(name)
        elif array.shape != (self.rows,):
            raise self._wrong_length(name, array)
        return factorized(name, array)

    def is_scalar(self, name: str) -> bool:
        array = self.arrays.get(name)
        return array is not None and array.shape in ((self.rows,), (self.rows, 1))

    # --- refusals ---------------------------------------------------------------------------------

    def _wrong_length(self, name: str, array: Array) -> ImportRefused:
        return ImportRefused(
            f"{name[:100]} has the wrong length",
            expected=f"[{self.rows}] or [{self.rows}, 1], as observations has "
            f"{pluralize(self.rows, 'row')}{self._cure_of_length(array)}",
            got=f"shape {array.shape}",
        )

    def _cure_of_length(self, array: Array) -> str:
        """What to do where this array has other rows than the observations; "" if nobody knows."""
        rows, shape = self.rows, array.shape
        observations = [
            self.arrays[name].shape
            for names in self.map.arrays["observation"].values()
            for name in names
        ]
        second = {known[1] if len(known) > 1 else 0 for known in observations}
        if len(shape) > 1 and shape[0] == rows and second in ({shape[1]}, {shape[1] + 1}):
            steps = rows * shape[1]
            final = second == {shape[1] + 1}
            return (
                f"; if the axes are [episodes, steps, …]: a.reshape({steps}, *a.shape[2:]) of each "
                f"array and episode_ids = numpy.repeat(numpy.arange({rows}), {shape[1]})"
                + (
                    ", with observations[:, :-1], and [:, 1:] as next_observations"
                    if final
                    else f"; if they are [steps, envs, …]: a.swapaxes(0, 1).reshape({steps}, "
                    "*a.shape[2:]) of each array, and of episode_ids = d.cumsum(0) - d + "
                    f"numpy.arange({shape[1]}) * {rows + 1}, where d is 1 where an episode ends"
                )
            )
        if shape and 0 < (more := rows - shape[0]):
            return (
                f": {more} more; if {'it is' if more == 1 else 'they are'} final, one for each "
                "episode: observations[:-1] of each, and observations[1:] as next_observations"
            )
        return ""


def info_name(name: str) -> str | None:
    """infos/a/b → a/b; None if it is not an info."""
    return name.removeprefix("infos/") if name.split("/")[0] == "infos" else None


def read_arrays(
    source: RawFile,
    members: Mapping[str, Member],
    given: Sequence[str],
    size: int,
    memory: int,
) -> None:
    """Put the arrays that have a role into `source`, and those that may tell episodes apart; a
    warning lists the others. Raises `ImportRefused`."""
    flags = {name for name in members if name.lower() in USUAL["truncated"]}
    named = ((info_name(name), member) for name, member in members.items() if name not in flags)
    infos = {info: member for info, member in named if info is not None}
    own = {name: members[name] for name in (ENDS, SPEC) if name in members}
    arrays = {
        k: m for k, m in members.items() if k in flags or (info_name(k) is None and k not in own)
    }
    source.names = [name for name in arrays if not name.startswith("metadata/")]
    pieces = _pieces(source.names)
    source.map = column_map([*pieces] or source.names, given)
    used, episode = source.map.used() & arrays.keys(), {*source.map.episode}
    episode |= {*source.map.rivals.get("episode", ())}
    rivals = {name for names in source.map.rivals.values() for name in names}
    lists = {name for name in source.names if name.lower() in LISTS or name == "indices"}
    wanted = {name: arrays[name] for name in sorted(used | rivals | lists)}
    parts = {name: arrays[name] for names in pieces.values() for name in names.values()}
    every = (*wanted.values(), *parts.values(), *infos.values(), *own.values())
    check_size(sum(member.nbytes for member in every), size, memory)
    for name, member in wanted.items():
        try:
            source.arrays[name] = member.read(texts=name in episode)
        except ImportRefused:
            if name in used:
                raise
    readable = source.arrays.keys()
    for role, names in source.map.rivals.items():
        source.map.rivals[role] = tuple(name for name in names if name in readable or pieces)
    source.arrays |= {name: member.read() for name, member in own.items()}
    source.infos = {info: member.read() for info, member in infos.items()}
    for key, columns in source.map.arrays["info"].items():
        if len(columns) > 1:
            raise ImportRefused(
                f"columns: info/{key} is one array", expected="one name", got=shown(columns)
            )
        source.infos[key] = source.arrays[columns[0]]
    if pieces:
        _join(source, pieces, {name: member.read() for name, member in parts.items()})
    first = next(iter(source.map.arrays["observation"].values()), ("",))[0]
    first_array = source.arrays.get(first)
    source.rows = 0 if first_array is None or not first_array.ndim else len(first_array)
    _check_filled(source, arrays)
    _from_imitation(source)
    _from_rlds(source)
    unread = sorted(name for name in arrays if name not in {*source.arrays, *parts})
    marks = _glance(source, {name: arrays[name] for name in unread})
    if unread:
        more = ""
        if marks and not {"done", "not_done", "not_terminated"} & source.map.given:
            name = marks[0]
            role = "not_done" if 2 * source.arrays[name].sum() > source.rows else "done"
            more = f"; if {name[:80]} says where episodes end: columns={role}={name[:80]}"
        source.warnings.append(f"not read: {shown(unread, MOST_UNREAD)}{more}")


def _check_filled(source: RawFile, members: Mapping[str, Member]) -> None:
    """Refuse a replay buffer with rows that are not written, or that does not begin in its first
    row; warn where rows at the end look as if nobody had written them."""
    rows = source.rows
    marks = {
        name.lower(): int(member.read().reshape(-1)[0])
        for name, member in members.items()
        if name.lower() in POSITION + FILLED
        and member.shape in ((), (1,))
        and member.dtype.kind in "biu"
    }
    position, filled = (
        next(((name, marks[name]) for name in names if name in marks), ("", -1))
        for names in (POSITION, FILLED)
    )
    at, count = position[1], filled[1]
    if filled[0] == "full":
        count = rows if count else at
    if 0 <= at <= rows and 0 < count <= rows and (count < rows or at % rows):
        ordered = f"f[k][:{count}]" if count < rows else f"numpy.roll(f[k], -{at}, axis=0)"
        raise ImportRefused(
            f"{position[0]} and {filled[0]} say that this is a replay buffer "
            + (
                f"of which {count} rows are written" if count < rows else f"that begins in row {at}"
            ),
            expected="the rows in their order: f = numpy.load(FILE), or h5py.File(FILE); "
            f"numpy.savez(NEW, **{{k: {ordered} for k in f if f[k].shape[:1] == ({rows},)}}); or "
            f"a file without {position[0]} and {filled[0]}, if they say something else",
            got=f"{rows} rows, {position[0]} = {position[1]}, {filled[0]} = {filled[1]}",
        )
    roles = [*source.map.arrays["observation"].values(), *source.map.arrays["action"].values()]
    used = [source.arrays.get(name) for names in roles for name in names]
    used.append(source.arrays.get(source.map.one("reward") or ""))
    written = np.zeros(rows, np.bool_)
    for array in used:
        if array is not None and array.shape[:1] == (rows,):
            written |= (array != 0).any(axis=tuple(range(1, array.ndim)))
    if written.any() and (zeros := int(written[::-1].argmax())) > 1:
        source.warnings.append(
            f"the last {zeros} rows are 0 in observations, actions and rewards: if nobody has "
            f"written them, leave them out (a[:-{zeros}] of each array)"
        )


def native(array: Array) -> Array:
    """In the machine's byte order; uint64 as int64 where that holds all values."""
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max(initial=0)) < 2**63:
        return array.astype(np.int64)
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def missing(role: str, source: RawFile) -> ImportRefused:
    name = NAMES.get(role, "terminals")
    none = "; columns=reward= if there is none" if role == "reward" else ""
    if role == "terminated":
        none = "; columns=terminated= if no episode was terminated"
        none += cure_of_step_type(source.names)
    return ImportRefused(
        f"{name} is missing",
        expected=f"{', '.join(NAMES.values())}, terminals; or columns={role}=NAME, of the arrays "
        f"of the file{none}",
        got=shown(source.names),
    )


def _glance(source: RawFile, members: Mapping[str, Member]) -> list[str]:
    """Read further arrays of one number a row: they may be a part of an id, times or a mask. What
    cannot be read is left. Returns those that are 0 and 1."""
    flags = []
    for name, member in members.items():
        try:
            fits = source.rows and member.shape in ((source.rows,), (source.rows, 1))
            if not fits or name.startswith("metadata/"):
                continue
            texts = not plain(member.dtype)
            source.arrays[name] = array = member.read(texts=texts)
        except (ImportRefused, OSError, RuntimeError, ValueError, TypeError, KeyError):
            continue
        if SOURCE.fullmatch(name) or name.lower() in USUAL["episode"]:
            continue
        if not texts and bool(((array == 0) | (array == 1)).all()) and 0 < array.sum() < len(array):
            flags.append(name)
    return flags


# --- one set of arrays for each episode -----------------------------------------------------------


def _pieces(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Usual name → number of the episode → its array; {} for a file of another layout."""
    found: dict[str, dict[int, str]] = {}
    roles = {usual: role for role, known in USUAL.items() for usual in known}
    for name in names:
        match = PIECE.fullmatch(name)
        if match and match[1].lower() in roles:
            found.setdefault(match[1], {})[int(match[2])] = name
    have = {roles[base.lower()] for base in found}
    whole = {roles.get(name.lower()) for name in names}
    if not {"observation", "action", "reward"} <= have or "reward" in whole:
        return {}
    return found


def _join(source: RawFile, pieces: dict[str, dict[int, str]], parts: dict[str, Array]) -> None:
    """One array of each kind, and where episodes end."""
    reward = source.map.one("reward") or ""
    every = sorted(pieces.get(reward, ()))
    numbers = [n for n in every if parts[pieces[reward][n]].size]
    lengths = [len(parts[pieces[reward][n]]) for n in numbers]
    if not numbers:
        raise ImportRefused("no episode has a step", got=pluralize(len(every), "episode"))
    observations = {n for names in source.map.arrays["observation"].values() for n in names}
    for base, known in pieces.items():
        if sorted(known) != every:
            raise ImportRefused(
                f"{base}_… are not there for every episode",
                expected=f"{base}_{every[0]} … {base}_{every[-1]}",
                got=pluralize(len(known), "array"),
            )
        arrays = [parts[known[number]] for number in numbers]
        extra = [len(a) - n if a.ndim else 0 for a, n in zip(arrays, lengths, strict=True)]
        final = base in observations and set(extra) == {1}
        if any(extra) and not final:
            at = next(place for place, more in enumerate(extra) if more)
            raise ImportRefused(
                f"{known[numbers[at]][:100]} has the wrong length",
                expected=f"{lengths[at]}, as {pieces[reward][numbers[at]][:100]} has"
                + (", or one more in every episode" if base in observations else ""),
                got=lengths[at] + extra[at],
            )
        if final:
            source.arrays["next_observations"] = np.concatenate([a[1:] for a in arrays])
            key = next(k for k, names in source.map.arrays["observation"].items() if base in names)
            source.map.arrays["next_observation"] = {key: ("next_observations",)}
            arrays = [a[:-1] for a in arrays]
        arrays = [
            np.where(np.arange(n) == n - 1, a, a.dtype.type(0)) if a.ndim == 0 else a
            for a, n in zip(arrays, lengths, strict=True)
        ]
        source.arrays[base] = np.concatenate(arrays)
    source.ends = np.cumsum(lengths) - 1
    if skipped := len(every) - len(numbers):
        source.warnings.append(f"{pluralize(skipped, 'episode')} without a step left out")
    source.warnings.append(f"one set of arrays for each of {pluralize(len(numbers), 'episode')}")


def _from_rlds(source: RawFile) -> None:
    """RLDS's steps in flat arrays: the last row of an episode is its final observation."""
    if not source.map.is_rlds or source.ends is not None or not source.rows:
        return
    flags = read_flags(source.map, source.numbers_of)
    last = split_by_flags(flags, source, source.map, source.warnings)
    finals = np.flatnonzero(last)
    firsts = np.concatenate([[0], finals[:-1] + 1])
    if source.map.episode:
        ids = split_by_ids(source, source.map, source.warnings, lengths=False)
        if ids.order is not None or not np.array_equal(ids.ends, finals):
            raise ImportRefused(
                f"{source.map.episode[0][:100]} and is_last tell other episodes apart",
                expected="rows of one episode together, is_last at the last of them; or "
                "columns=episode= or columns=done= (not to use one of them)",
                got=f"{len(ids.ends)} and {len(finals)}",
            )
    reward = source.map.one("reward")
    rewards = None if reward is None else source.numbers_of(reward)
    acted = [source.arrays[n] for names in source.map.arrays["action"].values() for n in names]
    acted = [array for array in acted if array.shape[:1] == (source.rows,)]
    every = acted if rewards is None else [*acted, rewards]
    check_rlds((array[firsts] for array in every), (array[finals] for array in acted))
    warn_of_final_rows(flags, rewards, finals, source.warnings)
    observations = {n for names in source.map.arrays["observation"].values() for n in names}
    for name in [n for n, a in source.arrays.items() if a.ndim and len(a) == source.rows]:
        whole = source.arrays[name]
        source.arrays[name] = np.delete(whole, finals, axis=0)
        if name in observations:
            source.arrays[f"next {name}"] = np.delete(whole, firsts, axis=0)
    for name, info in source.infos.items():
        if info.ndim and len(info) == source.rows:
            source.infos[name] = np.delete(info, finals, axis=0)
    for key, names in source.map.arrays["observation"].items():
        source.map.arrays["next_observation"][key] = tuple(f"next {name}" for name in names)
    lengths = finals - firsts
    source.rows, source.ends = int(lengths.sum()), np.cumsum(lengths[lengths > 0]) - 1
    terminated = np.zeros(source.rows, np.bool_)
    terminated[source.ends] = flags["terminated"][finals][lengths > 0]
    source.arrays[source.map.single["terminated"]] = terminated
    for role in ("first", "done"):
        del source.map.single[role]


def _from_imitation(source: RawFile) -> None:
    """imitation's trajectories: T+1 observations each, `indices` where actions of the next one
    begin, `terminal` for each."""
    indices, terminal = source.arrays.get("indices"), source.arrays.get("terminal")
    actions = next(iter(source.map.arrays["action"].values()), ("",))
    if indices is None or terminal is None or len(actions) != 1 or actions[0] not in source.arrays:
        return
    count, steps = terminal.size, len(source.arrays[actions[0]])
    if indices.shape != (count - 1,) or source.rows != steps + count:
        return
    ends = np.append(indices.astype(np.int64), steps) - 1
    if ends[0] < 0 or bool((np.diff(ends) < 1).any()):
        raise ImportRefused(
            "indices do not count up",
            expected="the first step of each trajectory but the first",
            got=f"{indices[:5].tolist()}",
        )
    finals = ends + 1 + np.arange(count)
    firsts = np.concatenate([[0], finals[:-1] + 1])
    for key, (name, *_) in source.map.arrays["observation"].items():
        whole = source.arrays[name]
        source.arrays[name] = np.delete(whole, finals, axis=0)
        source.arrays[f"next {name}"] = np.delete(whole, firsts, axis=0)
        source.map.arrays["next_observation"][key] = (f"next {name}",)
    source.arrays["terminal"] = np.zeros(steps, np.bool_)
    source.arrays["terminal"][ends] = terminal.reshape(-1)
    source.rows, source.ends = steps, ends
    source.warnings.append(f"{pluralize(count, 'trajectory', 'trajectories')} of imitation")
